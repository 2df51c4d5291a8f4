"""The report's curves: the metrics of metrics.jsonl over steps and over the seconds of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.values import number

Row = dict[str, Any]
Point = tuple[float, float | None, float]
MAX_POINTS = 300
MAX_HELD_OUT_ROWS = 12

# Metric of the responses to held-out prompts -> its title.
HELD_OUT_COLUMNS = {
    "win_rate": "win rate, ties as half",
    "score": "true score",
    "kl": "KL to the base (nats per response)",
    "completions/mean_length": "response length (tokens)",
    "distinct_2": "distinct-2",
}
# Metrics of training and of held-out pairs, in the order in which they are shown.
TRAINING_TITLES = {
    "loss": "loss",
    "eval_loss": "loss, held out",
    "reward": "reward of the rollouts",
    "rewards/accuracies": "preference accuracy",
    "eval_rewards/accuracies": "preference accuracy, held out",
    "rewards/margins": "reward margin",
    "eval_rewards/margins": "reward margin, held out",
    "accuracy": "accuracy",
    "eval_accuracy": "accuracy, held out",
    "selection/accuracy": "accuracy, selection split",
    "selection/nll": "negative log-likelihood, selection split (nats)",
    "selection/ece": "ECE, selection split",
    "entropy": "entropy (nats per token)",
    "completions/clipped_ratio": "share of rollouts cut at the limit",
    "frac_reward_zero_std": "share of groups without signal",
    "clip_ratio/region_mean": "share of tokens clipped",
    "grad_norm": "gradient norm",
}


@dataclass(frozen=True)
class Panel:
    """One metric of several runs: the points of each as (step, seconds or None, value), by the run's label."""

    title: str
    group: str
    curves: dict[str, list[Point]]


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels that have a curve; held-out responses first, then learned rewards, then training."""
    learned = sorted({name for run in runs for row in run.metrics for name in map(_learned_reward, row) if name})
    specifications: list[tuple[str, str, Callable[[Row], float | None]]] = [
        *((title, "held-out prompts", _held_out(key)) for key, title in HELD_OUT_COLUMNS.items()),
        *((f"reward, {name}", "held-out prompts", _held_out(f"rewards/{name}/mean")) for name in learned),
        *(
            (
                title,
                "training and held-out pairs",
                lambda row, key=key: number(row, key) if _trains(row, key) else None,
            )
            for key, title in TRAINING_TITLES.items()
        ),
    ]
    found = []
    for title, group, value in specifications:
        curves = {run.label: thin(curve(run.metrics, value)) for run in runs}
        curves = {label: points for label, points in curves.items() if points}
        if curves:
            found.append(Panel(title, group, curves))
    return found


def curve(metrics: Sequence[Row], value: Callable[[Row], float | None]) -> list[Point]:
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


def untimed(runs: Sequence[Run]) -> list[str]:
    """The runs that logged, but without the seconds of training."""
    return [run.label for run in runs if run.metrics and not any("seconds" in row for row in run.metrics)]


def _held_out(key: str) -> Callable[[Row], float | None]:
    """The metric of held-out responses, under another name where the trainer logs its own of that name.

    Policy trainers have `eval_` before each name; KTO, whose own `kl` and `eval_kl` are estimates of its loss, has
    `sampled_kl`.
    """

    def value(row: Row) -> float | None:
        if f"eval_{key}" in row and "eval_loss" not in row:
            return number(row, f"eval_{key}")
        if not _is_evaluation(row):
            return None
        sampled = f"sampled_{key}"
        return number(row, sampled if sampled in row else key)

    return value


def _is_evaluation(row: Row) -> bool:
    """Whether a row is of held-out responses alone: training on rollouts logs `collapsed` as well, beside a loss."""
    return "collapsed" in row and "loss" not in row


def _trains(row: Row, key: str) -> bool:
    return key.startswith(("eval_", "selection/")) or not _is_evaluation(row)


def _learned_reward(name: str) -> str | None:
    """The reward function of which a metric is the mean over held-out responses."""
    for start in ("eval_rewards/", "rewards/"):
        if name.startswith(start) and name.endswith("/mean"):
            return name.removeprefix(start).removesuffix("/mean")
    return None
