"""What the report's charts show, as plain values: the page's script draws them and computes no figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from trl_ext.evaluation.reporting.curves import is_timed, panels
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import Row, Task, trade_offs
from trl_ext.evaluation.reporting.tables import reliability_bins
from trl_ext.evaluation.reporting.values import number, pick

COLORS, DASHES = 10, 5
# Beyond this many runs the page opens with one run of each method shown.
MANY_RUNS = 12


def chart_data(tasks: Sequence[Task]) -> dict[str, Any]:
    """How each run is drawn, and the points of every chart, by the runs' labels.

    Returns:
        `tasks`, the titles by the tasks' `end`; `runs`, each with its `color` by method, its `dash` within the method
        and whether it is `timed`; `panels` of curves; `dots`, charts of one figure per run; `trade_offs`, reward
        against KL; and `reliability`, calibration bins as (confidence, accuracy, pairs, interval of the accuracy).
        All but the first have the `task` that they are of.
    """
    data: dict[str, Any] = {"tasks": {task.end: task.title for task in tasks}}
    many = sum(len(task.policies + task.reward_models) for task in tasks) > MANY_RUNS
    for task in tasks:
        runs = task.policies + task.reward_models
        charts = {
            "runs": _appearance(runs, many),
            "panels": [dataclasses.asdict(panel) for panel in panels(runs)],
            "dots": _dots(task),
            "trade_offs": _trade_off_charts(task.summary["policies"]),
            "reliability": _reliability(task.reward_models),
        }
        for name, found in charts.items():
            data.setdefault(name, []).extend({"task": task.end, **one} for one in found)
    return data


def _appearance(runs: Sequence[Run], many: bool) -> list[dict[str, Any]]:
    """Each run's colour, by its method, and its line, by its place among the runs of the method."""
    methods: dict[tuple[str, bool], list[Run]] = {}
    for run in runs:
        methods.setdefault((run.method, run.trains_reward_model), []).append(run)
    return [
        {
            "label": run.label,
            "method": run.method,
            "color": list(methods).index((run.method, run.trains_reward_model)) % COLORS,
            "dash": methods[run.method, run.trains_reward_model].index(run) % DASHES,
            "first": methods[run.method, run.trains_reward_model][0] is run,
            "shown": not many or methods[run.method, run.trains_reward_model][0] is run,
            "timed": is_timed(run),
        }
        for run in runs
    ]


def _dots(task: Task) -> list[dict[str, Any]]:
    """Charts of one figure per run with its interval, and the base's figure where it has one."""
    rows, models = task.summary["policies"], task.summary["reward_models"]

    def chart(place: str, title: str, points: list[tuple[str, Any]], reference: float | None = None) -> dict[str, Any]:
        rows = [{"run": label, **value} for label, value in points if value is not None]
        return {"place": place, "title": title, "reference": reference, "rows": rows}

    def of(rows: Sequence[Row], *keys: str) -> list[tuple[str, Any]]:
        return [(row["run"], pick(row, *keys)) for row in rows]

    def beside_base(name: str) -> list[tuple[str, Any]]:
        figures = [
            (run.label, *(number(run.results, "generations", source, name) for source in ("policy", "base")))
            for run in task.policies
        ]
        return [(label, None if own is None else {"value": own, "base": base}) for label, own, base in figures]

    score = next((row["score_name"] for row in rows), "")
    charts = [
        chart("dots-result", "Win rate against the base, ties as half", of(rows, "win_rate", "half"), 0.5),
        chart("dots-result", "Win rate against the base, ties dropped", of(rows, "win_rate", "agreed"), 0.5),
        chart("dots-result", "Accuracy, sampled", of(rows, "accuracy", "sampled")),
        chart("dots-result", f"Gain in {score}", of(rows, "score_gain"), 0.0),
        chart("dots-length", "Response length (tokens), hollow: the base", beside_base("mean_tokens")),
        chart("dots-length", "Distinct-2, hollow: the base", beside_base("distinct_2")),
        chart("dots-length", "Repeated 4-grams, hollow: the base", beside_base("repetition")),
        chart("dots-reward", "Accuracy on held-out pairs", of(models, "accuracy"), 0.5),
        chart("dots-reward", "Accuracy, true order", of(models, "true_accuracy"), 0.5),
    ]
    return [chart for chart in charts if chart["rows"]]


def _trade_off_charts(policies: Sequence[Row]) -> list[dict[str, Any]]:
    fronts = {row["run"]: {"front": row["on_front"], "best": row["on_point_front"]} for row in policies}
    return [
        {
            "title": title,
            "points": [
                {**point, **{key: title in names for key, names in fronts[point["run"]].items()}} for point in points
            ],
        }
        for title, points in trade_offs(policies).items()
    ]


def _reliability(reward_models: Sequence[Run]) -> list[dict[str, Any]]:
    charts = []
    for run in reward_models:
        bins = [
            [number(row, "confidence"), *(row["share"][name] for name in ("value", "n", "low", "high"))]
            for row in reliability_bins([run])
            if row["share"] and number(row, "confidence") is not None
        ]
        if bins:
            charts.append({"run": run.label, "ece": number(run.results, "pairs", "ece"), "bins": bins})
    return charts
