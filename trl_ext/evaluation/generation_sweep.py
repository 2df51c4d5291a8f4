"""A sweep over how responses are generated: the figures of each setting with intervals, as a table and a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from trl_ext.evaluation.comparison import mean_with_interval
from trl_ext.evaluation.diagnostics import diagnose_generations
from trl_ext.evaluation.plots import new_figure
from trl_ext.files import replacing

# What is shown of a setting's diagnostics, and under which heading.
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
        samples: for each prompt its responses, rows of `trl_ext.rollouts.best_of_n` with `reward` and, where it is
            known, `score`.
        token_ids: of all responses, prompts in order, for the diagnostics; None for words between whitespace.
        compared: further figures to keep beside these, such as a win rate.

    Returns:
        JSON-ready: `n_prompts`, `n_samples` of each; `reward` and `score`, each with `mean`, its 95% interval `low`
        and `high` over prompts, and `n`, the prompts that have one, or None where none has;
        `diagnostics` over all responses; and what was compared.
    """
    rows = [row for group in samples for row in group]
    texts, finished = [row["response_text"] for row in rows], [row["finished"] for row in rows]
    diagnostics = diagnose_generations(texts, token_ids=token_ids, finished=finished).to_dict()
    # A text may be written in other tokens than those that were sampled.
    diagnostics["mean_tokens"] = sum(row["generated_num_tokens"] for row in rows) / len(rows)
    return {
        "n_prompts": len(samples),
        "n_samples": len(samples[0]),
        "reward": _mean_over_prompts(samples, "reward"),
        "score": _mean_over_prompts(samples, "score"),
        "diagnostics": diagnostics,
        **compared,
    }


def paired_gain(
    own: Sequence[Sequence[Mapping[str, Any]]], other: Sequence[Sequence[Mapping[str, Any]]], name: str
) -> dict[str, Any] | None:
    """Mean of `name` minus that of another setting on the same prompts, with its paired 95% interval.

    Prompts that lack it on one side are left out; None where that leaves none.
    """
    pairs = zip(_by_prompt(own, name), _by_prompt(other, name), strict=True)
    return _estimate([one - two for one, two in pairs if one is not None and two is not None], gains=True)


def _mean_over_prompts(samples: Sequence[Sequence[Mapping[str, Any]]], name: str) -> dict[str, Any] | None:
    return _estimate([value for value in _by_prompt(samples, name) if value is not None])


def _by_prompt(samples: Sequence[Sequence[Mapping[str, Any]]], name: str) -> list[float | None]:
    known = [[row[name] for row in group if row.get(name) is not None] for group in samples]
    return [sum(values) / len(values) if values else None for values in known]


def _estimate(values: list[float], *, gains: bool = False) -> dict[str, Any] | None:
    return {**mean_with_interval(values, gains=gains), "n": len(values)} if values else None


def figure_of(result: Mapping[str, Any], metric: str) -> float | None:
    """A setting's figure by its name: `score`, `reward`, `win_rate`, or one of its diagnostics."""
    if metric == "win_rate":
        return result["win_rate"]["half"]["rate"] if result.get("win_rate") else None
    if metric in ("score", "reward"):
        return result[metric]["mean"] if result[metric] else None
    return result["diagnostics"][metric]


def heat_map_cells(
    results: Sequence[Mapping[str, Any]], axes: tuple[str, str], metric: str
) -> tuple[list[Any], list[Any], list[list[float | None]]]:
    """Values of the two axes in order of appearance, and a metric in each cell, rows by the first axis.

    A cell is the mean over the settings that share both values; None where no setting has it, or none a figure.

    Args:
        results: with `setting`, a mapping of every axis to its value, beside the figures.
        axes: names of axes: of the rows, and of the columns.
        metric: see `figure_of`.
    """
    rows, columns = (list(dict.fromkeys(result["setting"][axis] for result in results)) for axis in axes)
    cells: dict[tuple, list[float]] = {}
    for result in results:
        value = figure_of(result, metric)
        if value is not None:
            cells.setdefault(tuple(result["setting"][axis] for axis in axes), []).append(value)
    table = [[_mean(cells.get((row, column))) for column in columns] for row in rows]
    return rows, columns, table


def plot_heat_map(
    results: Sequence[Mapping[str, Any]], axes: tuple[str, str], metric: str, path: str | Path, *, title: str = ""
) -> None:
    """Draw `heat_map_cells` into a PNG, replaced atomically.

    Raises:
        ImportError: matplotlib is missing; the message names the extra to install.
    """
    rows, columns, table = heat_map_cells(results, axes, metric)
    figure, (axis,) = new_figure(1, 1)
    values = numpy.array([[numpy.nan if value is None else value for value in row] for row in table])
    image = axis.imshow(values, aspect="auto", cmap="viridis")
    middle = (numpy.nanmin(values) + numpy.nanmax(values)) / 2 if numpy.isfinite(values).any() else 0
    for row, column in numpy.ndindex(values.shape):
        value = values[row, column]
        text = "-" if numpy.isnan(value) else f"{value:.3f}"
        axis.text(column, row, text, ha="center", va="center", color="white" if value < middle else "black")
    axis.set_yticks(range(len(rows)), [str(value) for value in rows])
    axis.set_xticks(range(len(columns)), [str(value) for value in columns])
    axis.set_ylabel(axes[0])
    axis.set_xlabel(axes[1])
    figure.colorbar(image, ax=axis)
    axis.set_title(title)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None
