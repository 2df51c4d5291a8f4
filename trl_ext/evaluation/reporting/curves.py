"""The report's curves: the metrics in metrics.jsonl over steps and over seconds of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.reporting.runs import Run

Row = dict[str, Any]
Point = tuple[float, float | None, float]
Value = Callable[[Row], float | None]
MAX_POINTS = 300

# Metric of the responses to held-out prompts -> its title.
HELD_OUT_TITLES = {
    "win_rate": "win rate, ties as half",
    "score": "true score",
    "rewards/format": "in the form asked for",
    "kl": "KL to the base (nats per response)",
    "completions/mean_length": "response length (tokens)",
    "distinct_2": "distinct-2",
}
# Training metrics in display order, each drawn with its held-out counterpart, which has the prefix `eval_`.
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


@dataclass(frozen=True)
class Panel:
    """One metric of several runs: the points of each as (step, seconds or None, value), by the run's label.

    `held_out` contains the points of the same metric on held-out rows.
    """

    title: str
    group: str
    curves: dict[str, list[Point]]
    held_out: dict[str, list[Point]]


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels with at least one curve of two points: held-out responses, then learned rewards, then training.

    Losses have one panel per method, since methods do not share a scale.
    """
    learned = sorted({name for run in runs for row in run.metrics for name in map(_learned_reward, row) if name})
    titles = {**HELD_OUT_TITLES, "score": runs[0].score_name if runs else ""}
    titles |= {f"rewards/{name}/mean": f"reward, {name}" for name in learned}
    found = [_panel(title, runs, _held_out(key)) for key, title in titles.items()]
    methods = list(dict.fromkeys(run.method for run in runs))
    for key, title in TRAINING_TITLES.items():
        alike = {title: runs}
        if key == "loss" and len(methods) > 1:
            alike = {f"{title}, {method}": [run for run in runs if run.method == method] for method in methods}
        found += [_panel(name, of, _training(key), f"eval_{key}") for name, of in alike.items()]
    return [one for one in found if any(len(c) > 1 for c in (*one.curves.values(), *one.held_out.values()))]


def _panel(title: str, runs: Sequence[Run], value: Value, held_out: str | None = None) -> Panel:
    curves, beside = (
        {run.label: points for run in runs if (points := thin(curve(run.metrics, of)))}
        for of in (value, lambda row: row.get(held_out))
    )
    return Panel(title, "training" if held_out else "held-out prompts", curves, beside)


def curve(metrics: Sequence[Row], value: Value) -> list[Point]:
    """The points of the rows that have the value."""
    points = ((row["step"], row.get("seconds"), value(row)) for row in metrics)
    return [(step, seconds, found) for step, seconds, found in points if found is not None]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` (even, 4 or more) of the points: the first, the last, and the extremes of each segment."""
    if len(points) <= limit:
        return list(points)
    inner, stretches = points[1:-1], limit // 2 - 1
    kept = [points[0]]
    for index in range(stretches):
        part = range(len(inner) * index // stretches, len(inner) * (index + 1) // stretches)
        ends = {min(part, key=lambda i: inner[i][2]), max(part, key=lambda i: inner[i][2])}
        kept += [inner[i] for i in sorted(ends)]
    return [*kept, points[-1]]


def is_timed(run: Run) -> bool:
    """Whether the run logged the seconds of training, or did not log anything."""
    return not run.metrics or any("seconds" in row for row in run.metrics)


def _held_out(key: str) -> Value:
    """The metric of held-out responses, under another name if the trainer logs its own metric of that name.

    Policy trainers prefix each name with `eval_`. KTO's own `kl` and `eval_kl` are estimates of its loss, so it uses
    `sampled_kl`.
    """

    def value(row: Row) -> float | None:
        if f"eval_{key}" in row and "eval_loss" not in row:
            return row[f"eval_{key}"]
        if not _is_of_held_out_prompts(row):
            return None
        sampled = f"sampled_{key}"
        return row.get(sampled if sampled in row else key)

    return value


def _training(key: str) -> Value:
    return lambda row: None if _is_of_held_out_prompts(row) else row.get(key)


def _is_of_held_out_prompts(row: Row) -> bool:
    """Whether names without `eval_` refer to responses to held-out prompts.

    Trainers on pairs log these apart from their own metrics. Policy trainers also log `collapsed` for each rollout,
    the last time in a row without a loss, but always together with the rollout's `reward`.
    """
    return "collapsed" in row and "reward" not in row


def _learned_reward(name: str) -> str | None:
    """The reward function whose mean over held-out responses the metric is."""
    for start in ("eval_rewards/", "rewards/"):
        if name.startswith(start) and name.endswith("/mean"):
            return name.removeprefix(start).removesuffix("/mean")
    return None
