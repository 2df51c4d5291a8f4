"""A sweep over generation settings: the figures of each setting with intervals, as a table and a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from trl_ext.evaluation.reporting.plots import new_figure, save_figure
from trl_ext.evaluation.statistics.intervals import mean_with_interval
from trl_ext.rollouts.diagnostics import diagnose_generations

# The diagnostics that are shown, and their headings.
DIAGNOSTICS = {
    "mean_tokens": "tokens",
    "distinct_2": "distinct-2",
    "repetition": "repeated 4-grams",
    "truncated_fraction": "cut",
    "empty_fraction": "empty",
}


def summarize_setting(
    samples: Sequence[Sequence[Mapping[str, Any]]], token_ids: Sequence[Sequence[int]] | None = None, **compared: Any
) -> dict[str, Any]:
    """The figures of one setting.

    Args:
        samples: for each prompt its responses, rows of `trl_ext.rollouts.best_of_n` with `reward` and, if known,
            `score`.
        token_ids: token ids of all responses, in the order of the prompts, for the diagnostics; None to use
            whitespace-separated words.
        compared: additional figures to include, such as a win rate.

    Returns:
        JSON-ready: `n_prompts`; `n_samples` per prompt; `reward` and `score`, each with `mean`, its 95% interval over
        prompts `low` and `high`, and `n`, the number of prompts that have one (None if no prompt has one);
        `diagnostics` over all responses; and the entries of `compared`.
    """
    rows = [row for group in samples for row in group]
    texts, finished = [row["response_text"] for row in rows], [row["finished"] for row in rows]
    diagnostics = diagnose_generations(texts, token_ids=token_ids, finished=finished).to_dict()
    # A text may tokenize differently from the tokens that were sampled.
    diagnostics["mean_tokens"] = sum(row["generated_num_tokens"] for row in rows) / len(rows)
    return {
        "n_prompts": len(samples),
        "n_samples": len(samples[0]),
        "reward": _estimate(_by_prompt(samples, "reward")),
        "score": _estimate(_by_prompt(samples, "score")),
        "diagnostics": diagnostics,
        **compared,
    }


def paired_gain(
    own: Sequence[Sequence[Mapping[str, Any]]], other: Sequence[Sequence[Mapping[str, Any]]], name: str
) -> dict[str, Any] | None:
    """Mean of `name` minus that of another setting on the same prompts, with its paired 95% interval.

    Prompts without a value in both settings are left out; returns None if none remains.
    """
    return _estimate(_by_prompt(own, name) - _by_prompt(other, name), gains=True)


def _by_prompt(samples: Sequence[Sequence[Mapping[str, Any]]], name: str) -> numpy.ndarray:
    """The mean over each prompt's responses that have the value; NaN if none has."""
    known = [[row[name] for row in group if row.get(name) is not None] for group in samples]
    return numpy.array([numpy.mean(values) if values else numpy.nan for values in known])


def _estimate(values: numpy.ndarray, *, gains: bool = False) -> dict[str, Any] | None:
    values = values[~numpy.isnan(values)]
    return {**mean_with_interval(values, gains=gains), "n": len(values)} if len(values) else None


def figure_of(result: Mapping[str, Any], metric: str) -> float | None:
    """A figure of a setting by name: `score`, `reward`, `win_rate`, or one of its diagnostics."""
    if metric == "win_rate":
        return result["win_rate"]["half"]["rate"] if result.get("win_rate") else None
    if metric in ("score", "reward"):
        return result[metric]["mean"] if result[metric] else None
    return result["diagnostics"][metric]


def heat_map_cells(
    results: Sequence[Mapping[str, Any]], axes: tuple[str, str], metric: str
) -> tuple[list[Any], list[Any], numpy.ndarray]:
    """Values of both axes in order of appearance, and the metric of each cell, with the first axis as rows.

    A cell is the mean over the settings with both values; NaN if there are none or none has the metric.

    Args:
        results: mappings with `setting`, from every axis to its value, in addition to the figures.
        axes: names of the row axis and the column axis.
        metric: see `figure_of`.
    """
    rows, columns = (list(dict.fromkeys(result["setting"][axis] for result in results)) for axis in axes)
    cells: list[list[list[float]]] = [[[] for _ in columns] for _ in rows]
    for result in results:
        row, column = (result["setting"][axis] for axis in axes)
        value = figure_of(result, metric)
        if value is not None:
            cells[rows.index(row)][columns.index(column)].append(value)
    return (
        rows,
        columns,
        numpy.array([[numpy.mean(values) if values else numpy.nan for values in row] for row in cells]),
    )


def plot_heat_map(
    results: Sequence[Mapping[str, Any]], axes: tuple[str, str], metric: str, path: str | Path, *, title: str = ""
) -> None:
    """Draw `heat_map_cells` as a PNG, replaced atomically.

    Raises:
        ImportError: matplotlib is missing; the message names the extra to install.
    """
    rows, columns, values = heat_map_cells(results, axes, metric)
    figure, (axis,) = new_figure(1, 1)
    image = axis.imshow(values, aspect="auto", cmap="viridis")
    middle = (numpy.nanmin(values) + numpy.nanmax(values)) / 2 if numpy.isfinite(values).any() else 0
    for (row, column), value in numpy.ndenumerate(values):
        text = "-" if numpy.isnan(value) else f"{value:.3f}"
        axis.text(column, row, text, ha="center", va="center", color="white" if value < middle else "black")
    axis.set_yticks(range(len(rows)), [str(value) for value in rows])
    axis.set_xticks(range(len(columns)), [str(value) for value in columns])
    axis.set_ylabel(axes[0])
    axis.set_xlabel(axes[1])
    figure.colorbar(image, ax=axis)
    save_figure(figure, path, title)
