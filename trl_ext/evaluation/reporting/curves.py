"""The report's curves: the metrics of metrics.jsonl over steps and over the seconds of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.values import number

Row = dict[str, Any]
Point = tuple[float, float | None, float]
Value = Callable[[Row], float | None]
MAX_POINTS = 300
MAX_HELD_OUT_ROWS = 12

# Metric of the responses to held-out prompts -> its title.
HELD_OUT_COLUMNS = {
    "win_rate": "win rate, ties as half",
    "score": "true score",
    "rewards/format": "in the form asked for",
    "kl": "KL to the base (nats per response)",
    "completions/mean_length": "response length (tokens)",
    "distinct_2": "distinct-2",
}
# Metrics of training in the order in which they are shown, each beside the same of held-out rows, with `eval_`.
TRAINING_TITLES = {
    "loss": "loss",
    "reward": "reward of the rollouts",
    "rewards/accuracies": "preference accuracy",
    "rewards/margins": "reward margin",
    "accuracy": "accuracy",
    "selection/accuracy": "accuracy, selection split",
    "selection/nll": "negative log-likelihood, selection split (nats)",
    "selection/ece": "ECE, selection split",
    "entropy": "entropy (nats per token)",
    "completions/clipped_ratio": "share of responses cut at the limit",
    "frac_reward_zero_std": "share of groups without signal",
    "clip_ratio/region_mean": "share of tokens clipped",
    "grad_norm": "gradient norm",
}
# A gradient norm whose highest value is this many times its lowest is drawn on a logarithmic axis.
LOG_RATIO = 20


@dataclass(frozen=True)
class Panel:
    """One metric of several runs: the points of each as (step, seconds or None, value), by the run's label.

    `held_out` has the points of the same metric of held-out rows; `log` asks for a logarithmic axis.
    """

    title: str
    group: str
    curves: dict[str, list[Point]]
    held_out: dict[str, list[Point]]
    log: bool


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels in which some curve has two points: held-out responses, then learned rewards, then training.

    Losses have a panel for each method, since methods do not share a scale.
    """
    learned = sorted({name for run in runs for row in run.metrics for name in map(_learned_reward, row) if name})
    titles = {key: titled(key, runs) for key in HELD_OUT_COLUMNS}
    titles |= {f"rewards/{name}/mean": f"reward, {name}" for name in learned}
    found = [_panel(title, runs, _held_out(key)) for key, title in titles.items()]
    methods = list(dict.fromkeys(run.method for run in runs))
    for key, title in TRAINING_TITLES.items():
        alike = {title: runs}
        if key == "loss" and len(methods) > 1:
            alike = {f"{title}, {method}": [run for run in runs if run.method == method] for method in methods}
        found += [_panel(name, of, _training(key), f"eval_{key}") for name, of in alike.items()]
    return [one for one in found if any(len(c) > 1 for c in (*one.curves.values(), *one.held_out.values()))]


def titled(key: str, runs: Sequence[Run]) -> str:
    """The title of a metric of held-out responses, in which a score has the name that it has in the runs' task."""
    return runs[0].score_name if key == "score" and runs else HELD_OUT_COLUMNS[key]


def _panel(title: str, runs: Sequence[Run], value: Value, held_out: str | None = None) -> Panel:
    curves, beside = (
        {run.label: points for run in runs if (points := thin(curve(run.metrics, of)))}
        for of in (value, lambda row: number(row, held_out) if held_out else None)
    )
    values = [point[2] for points in curves.values() for point in points]
    log = title == TRAINING_TITLES["grad_norm"] and bool(values) and 0 < min(values) * LOG_RATIO <= max(values)
    group = "training" if held_out else "held-out prompts"
    return Panel(f"{title}, log scale" if log else title, group, curves, beside, log)


def curve(metrics: Sequence[Row], value: Value) -> list[Point]:
    """The points of the rows that have a value."""
    points = ((row["step"], number(row, "seconds"), value(row)) for row in metrics)
    return [(step, seconds, found) for step, seconds, found in points if found is not None]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` (even, 4 or more) of the points: the first, the last, and each stretch's lowest and highest."""
    if len(points) <= limit:
        return list(points)
    inner, stretches = points[1:-1], limit // 2 - 1
    kept = [points[0]]
    for index in range(stretches):
        part = range(len(inner) * index // stretches, len(inner) * (index + 1) // stretches)
        ends = {min(part, key=lambda i: inner[i][2]), max(part, key=lambda i: inner[i][2])}
        kept += [inner[i] for i in sorted(ends)]
    return [*kept, points[-1]]


def held_out_rows(metrics: Sequence[Row]) -> list[Row]:
    """Step, seconds and the figures of `HELD_OUT_COLUMNS` of each evaluation on held-out prompts, a few of many."""
    rows = []
    for row in metrics:
        figures = {key: _held_out(key)(row) for key in HELD_OUT_COLUMNS}
        if any(value is not None for value in figures.values()):
            rows.append({"step": row["step"], "seconds": number(row, "seconds"), **figures})
    if len(rows) <= MAX_HELD_OUT_ROWS:
        return rows
    return [rows[(len(rows) - 1) * index // (MAX_HELD_OUT_ROWS - 1)] for index in range(MAX_HELD_OUT_ROWS)]


def is_timed(run: Run) -> bool:
    """Whether it logged the seconds of training, if it logged anything."""
    return not run.metrics or any("seconds" in row for row in run.metrics)


def _held_out(key: str) -> Value:
    """The metric of held-out responses, under another name where the trainer logs its own of that name.

    Policy trainers have `eval_` before each name; KTO, whose own `kl` and `eval_kl` are estimates of its loss, has
    `sampled_kl`.
    """

    def value(row: Row) -> float | None:
        if f"eval_{key}" in row and "eval_loss" not in row:
            return number(row, f"eval_{key}")
        if not _is_of_held_out_prompts(row):
            return None
        sampled = f"sampled_{key}"
        return number(row, sampled if sampled in row else key)

    return value


def _training(key: str) -> Value:
    return lambda row: None if _is_of_held_out_prompts(row) else number(row, key)


def _is_of_held_out_prompts(row: Row) -> bool:
    """Whether names without `eval_` are of responses to held-out prompts.

    Trainers on pairs log these apart from their own metrics. Policy trainers log `collapsed` of each rollout as well,
    the last time in a row without a loss, but always beside the rollout's `reward`.
    """
    return "collapsed" in row and "reward" not in row


def _learned_reward(name: str) -> str | None:
    """The reward function of which a metric is the mean over held-out responses."""
    for start in ("eval_rewards/", "rewards/"):
        if name.startswith(start) and name.endswith("/mean"):
            return name.removeprefix(start).removesuffix("/mean")
    return None
