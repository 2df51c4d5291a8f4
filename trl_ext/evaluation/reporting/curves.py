"""The report's curves: the metrics in metrics.jsonl over optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.reporting.runs import Run

Row = dict[str, Any]
Point = tuple[int, float]
HELD_OUT = "held-out prompts"

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
    "rewards/chosen": "reward of chosen responses",
    "rewards/rejected": "reward of rejected responses",
    "accuracy": "accuracy",
    "entropy": "entropy (nats per token)",
    "completions/clipped_ratio": "share of responses truncated",
    "frac_reward_zero_std": "share of groups without signal",
    "clip_ratio/region_mean": "share of tokens clipped",
    "grad_norm": "gradient norm",
}
# Methods do not share the scale of these: implicit rewards depend on the method's beta and normalization.
OF_A_METHOD = ("loss", "grad_norm", "rewards/margins", "rewards/chosen", "rewards/rejected")


@dataclass(frozen=True)
class Panel:
    """One metric of several runs: the points of each as (step, value), by the run's label.

    `held_out` contains the points of a training metric on held-out rows.
    """

    title: str
    group: str
    curves: dict[str, list[Point]]
    held_out: dict[str, list[Point]]


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels with at least one curve of two points: held-out responses, then learned rewards, then training."""
    learned = {name.removeprefix("eval_") for run in runs for row in run.metrics for name in row}
    learned = sorted(name for name in learned if name.startswith("rewards/") and name.endswith("/mean"))
    titles = {**HELD_OUT_TITLES, "score": runs[0].score_name if runs else ""}
    titles |= {name: f"reward, {name.removeprefix('rewards/').removesuffix('/mean')}" for name in learned}
    found = [
        Panel(title, HELD_OUT, _curves(runs, lambda row, key=key: _held_out(row, key)), {})
        for key, title in titles.items()
    ]
    for key, title in TRAINING_TITLES.items():
        alike: dict[str, list[Run]] = {}
        for run in runs:
            if any(key in row or f"eval_{key}" in row for row in run.metrics):
                alike.setdefault(_scale(run, key), []).append(run)
        for scale, own in alike.items():
            training = _curves(own, lambda row, key=key: None if is_of_held_out_prompts(row) else row.get(key))
            held_out = _curves(own, lambda row, key=key: row.get(f"eval_{key}"))
            title_of_scale = f"{title}, {scale}" if len(alike) > 1 else title
            found.append(Panel(title_of_scale, "training", training, held_out))
    return [one for one in found if any(len(c) > 1 for c in (*one.curves.values(), *one.held_out.values()))]


def _scale(run: Run, key: str) -> str:
    """What a training metric's values depend on: runs with another scale have another panel."""
    if key in OF_A_METHOD:
        return run.method
    if key != "reward":
        return ""
    logged = {name for row in run.metrics for name in row if name.startswith("rewards/") and name.endswith("/mean")}
    return " + ".join(sorted(name.removeprefix("rewards/").removesuffix("/mean") for name in logged))


def _curves(runs: Sequence[Run], value: Callable[[Row], float | None]) -> dict[str, list[Point]]:
    """The points of the rows that have the value, by run; a run without any is left out."""
    curves = {}
    for run in runs:
        points = ((row["step"], value(row)) for row in run.metrics)
        if found := [point for point in points if point[1] is not None]:
            curves[run.label] = found
    return curves


def _held_out(row: Row, key: str) -> float | None:
    """The metric of held-out responses, under another name if the trainer logs its own metric of that name.

    Policy trainers prefix each name with `eval_`. KTO's own `kl` and `eval_kl` are estimates of its loss, so it uses
    `sampled_kl`.
    """
    if f"eval_{key}" in row and "eval_loss" not in row:
        return row[f"eval_{key}"]
    return row.get(f"sampled_{key}", row.get(key)) if is_of_held_out_prompts(row) else None


def is_of_held_out_prompts(row: Row) -> bool:
    """Whether names without `eval_` refer to responses to held-out prompts.

    Trainers on pairs log these apart from their own metrics. Policy trainers also log `collapsed` for each rollout,
    the last time in a row without a loss, but always together with the rollout's `reward`.
    """
    return "collapsed" in row and "reward" not in row
