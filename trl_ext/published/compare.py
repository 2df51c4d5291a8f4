"""Place a run among the published runs of its method: `trl-ext compare-with-published RUN`.

For the gain in score, the win rate, the KL and the length, it says whether the run lies inside the band, the 95%
prediction interval of one further run, and names the settings that differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from trl_ext import published
from trl_ext.evaluation.command_line import CommandParser, format_interval, format_table, one_line_errors, print_json
from trl_ext.evaluation.methods.runs import PROMPTS_NAME, WITHOUT_EFFECT
from trl_ext.evaluation.reporting.runs import Run, find_runs
from trl_ext.evaluation.reporting.summary import policy_row
from trl_ext.evaluation.statistics.intervals import prediction_interval
from trl_ext.files import read_yaml
from trl_ext.published.keep import clean
from trl_ext.registry import nearest

DIGITS = {"gain in score": 3, "win rate, ties as half": 3, "KL (nats)": 3, "tokens": 1}
# The lowest and highest possible values, at which bands end.
LIMITS = {"gain in score": (-1, 1), "win rate, ties as half": (0, 1), "KL (nats)": (0, None), "tokens": (0, None)}
# Settings of a seed, of logging and saving, and of the machine, which do not make another experiment of a run.
NOT_COMPARED = (
    *("seed", "data_seed", "reward_model", "log", "eval_", "disable_tqdm", "generation_eval_", "do_", "local_rank"),
    *("dataloader_", "per_device_eval", "use_cpu", "skip_memory", "include_", "ddp_", *WITHOUT_EFFECT),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. It exits with code 2 and one line if there is nothing to compare the run with."""
    with one_line_errors():
        parser = CommandParser(prog="python -m trl_ext.published.compare", description=__doc__)
        parser.add_argument("run", metavar="RUN", help="folder of a finished run")
        parser.add_argument("--study", help="published study; default: the first that has the run's method and data")
        parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
        given = parser.parse_args(arguments)
        found = compare_with_published(given.run, given.study)
        if given.json:
            print_json(found)
        else:
            print(render(found))


def compare_with_published(folder: str | Path, study: str | None = None) -> dict[str, Any]:
    """A run beside the published runs of its method, as JSON-ready figures.

    Returns:
        `study`, `method`, `seeds`; `figures` by name, each with the run's `value`, the `published` values by seed,
        their `mean`, the band `low` to `high` and the `place` of the run, `inside`, `above`, `below` or `no band`;
        `differences`, by setting, as (the run's, the published runs'); `same_prompts`; and
        `same_seed`, whether a published run has the run's seed.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: it holds no finished run or several, or no published run is of its method and data.
    """
    runs, _ = find_runs([folder])
    if len(runs) > 1:
        raise ValueError(f"{folder} holds {len(runs)} runs: name one, such as {runs[0].folder}")
    run = runs[0]
    found = {name: published_runs(name) for name in ([study] if study else published.studies())}
    if not found:
        raise ValueError("no study is published yet")
    alike = {
        (name, method): own
        for name, methods in found.items()
        for method, own in methods.items()
        if own[0].method == run.method and own[0].results.run.dataset == run.results.run.dataset
    }
    if not alike:
        raise ValueError(_unknown(run, found))
    # Several methods of a study may share an objective. The one with the nearest settings is meant.
    study = study or next(iter(alike))[0]
    differing = {key: differences(run, own[0]) for key, own in alike.items() if key[0] == study}
    key = min(differing, key=lambda key: len(differing[key]))
    same = _row_ids(run) == _row_ids(alike[key][0])
    return {
        "run": str(folder),
        "study": key[0],
        "method": key[1],
        "seeds": sorted(one.results.run.seed for one in alike[key]),
        "figures": compare_figures(run, alike[key], same_prompts=same),
        "differences": differing[key],
        "same_prompts": same,
        "same_seed": run.results.run.seed in {one.results.run.seed for one in alike[key]},
    }


def published_runs(study: str) -> dict[str, list[Run]]:
    """The runs of a study by the method in their folders' names."""
    methods: dict[str, list[Run]] = {}
    for run in find_runs([published.study_folder(study)])[0]:
        if not run.trains_reward_model:
            methods.setdefault(published.method_and_seed(run.folder)[0], []).append(run)
    return methods


def _unknown(run: Run, found: Mapping[str, Mapping[str, Sequence[Run]]]) -> str:
    data = run.results.run.dataset
    known = [(name, own[0]) for name, methods in found.items() for own in methods.values()]
    of_data = sorted({one.method for _, one in known if one.results.run.dataset == data})
    if not of_data:
        told = "; ".join(sorted({f"{name} is on {one.results.run.dataset}" for name, one in known}))
        return f"no published run on the data {data!r}: {told}"
    return (
        f"no published run of {run.method!r} on {data}{nearest(run.method, of_data)} Published: {', '.join(of_data)}"
    )


# ---- Figures ----


def compare_figures(run: Run, others: Sequence[Run], *, same_prompts: bool) -> dict[str, dict[str, Any]]:
    """Each figure that the run and the published runs have, with its band.

    The band is the prediction interval of one further run. All runs answer the same prompts, so it covers the error of
    the seeds and not that of the prompts. For a run on other prompts, half the width of its own interval and of the
    published ones, on average, are added as the root of the sum of squares. Lengths have no interval to add.
    """
    own, known = _figures(run), [_figures(one) for one in others]
    compared = {}
    for name, figure in own.items():
        values = [one[name] for one in known if one[name] is not None]
        if figure is None or not values:
            continue
        band = prediction_interval([one["value"] for one in values])
        mean = math.fsum(one["value"] for one in values) / len(values)
        if band is not None and not same_prompts:
            widths = [_half_width(one) for one in values]
            half = math.hypot((band[1] - band[0]) / 2, _half_width(figure), math.fsum(widths) / len(widths))
            band = (mean - half, mean + half)
        # An estimate of a KL may lie just below 0, so the place is that in the whole band.
        place = _place(figure["value"], band)
        if band is not None:
            band = tuple(float(end) for end in numpy.clip(band, *LIMITS[name]))
        compared[name] = {
            **{key: figure.get(key) for key in ("value", "low", "high")},
            "published": [one["value"] for one in values],
            "mean": mean,
            "band": band,
            "place": place,
        }
    if not compared:
        raise ValueError(f"{run.folder} has none of the published figures: {', '.join(own)}")
    return compared


def _figures(run: Run) -> dict[str, dict[str, float | None] | None]:
    row = policy_row(run)
    tokens = row["tokens"]["policy"]
    found = (row["score_gain"], row["win_rate"]["half"], row["kl"], None if tokens is None else {"value": tokens})
    return dict(zip(DIGITS, found, strict=True))


def _half_width(figure: Mapping[str, float | None]) -> float:
    low, high = figure.get("low"), figure.get("high")
    return 0.0 if low is None or high is None else (high - low) / 2


def _place(value: float, band: tuple[float, float] | None) -> str:
    if band is None:
        return "no band"
    return "inside" if band[0] <= value <= band[1] else "below" if value < band[0] else "above"


def _row_ids(run: Run) -> set[str | None]:
    """The prompts that a run, or a published run, answered."""
    kept = run.folder / PROMPTS_NAME
    if kept.is_file():
        return {json.loads(line)["row_id"] for line in kept.read_text(encoding="utf-8").splitlines()}
    return {row.row_id for row in run.generations}


# ---- Settings ----


def differences(run: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Settings in which two runs differ: name -> (the run's, the other's); of config.yaml, if both have one."""
    own, others = _settings(run), _settings(other)
    told = {
        name: (getattr(run.results.run, name), getattr(other.results.run, name)) for name in ("model", "processes")
    }
    told["optimizer steps"] = run.results.run.optimizer_steps, other.results.run.optimizer_steps
    told["held-out prompts"] = len(_row_ids(run)), len(_row_ids(other))
    if own and others:
        names = [name for name in sorted({*own, *others}) if not name.startswith(NOT_COMPARED)]
        told |= {name: (own.get(name), others.get(name)) for name in names if name != "model_name_or_path"}
    return {name: both for name, both in told.items() if both[0] != both[1]}


def _settings(run: Run) -> dict[str, Any]:
    path = run.folder / "config.yaml"
    return clean(read_yaml(path)) if path.is_file() else {}


# ---- As text ----


def render(found: Mapping[str, Any]) -> str:
    """The comparison as a table with sentences."""
    seeds = found["seeds"]
    rows = []
    for name, one in found["figures"].items():
        digits = DIGITS[name]
        value, mean = f"{one['value']:.{digits}f}", f"{one['mean']:.{digits}f}"
        if one["low"] is not None and one["high"] is not None:
            value = format_interval(one["value"], one["low"], one["high"], digits)
        band = "-" if one["band"] is None else "{:.{d}f} to {:.{d}f}".format(*one["band"], d=digits)
        rows.append([name, value, mean, band, one["place"]])
    said = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    lines = [f"{found['run']} beside {found['method']} of {found['study']}, {said}", ""]
    lines += [format_table(["", "this run", "published mean", "band", "this run is"], rows), ""]
    if len(seeds) < 2:
        lines.append("One published seed does not show how much seeds differ, so there is no band.")
    else:
        lines.append(f"The band is a 95% prediction interval for one further run, from {len(seeds)} seeds.")
    if not found["same_prompts"]:
        lines.append("The run answered other prompts: its sampling error, and that of the published runs, is added.")
    if found["same_seed"]:
        lines.append("A published run has this seed, so with the same settings this run only repeats it.")
    told = [f"{name} {own!s} (published: {other!s})" for name, (own, other) in found["differences"].items()]
    lines.append(f"Different settings: {'; '.join(told)}." if told else "No settings differ.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
