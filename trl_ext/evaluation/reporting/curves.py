"""The report's curves: the metrics in metrics.jsonl over optimizer steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
    learned = sorted({name for run in runs for row in run.metrics for name in _learned(row)})
    titles = {**HELD_OUT_TITLES, "score": runs[0].score_name if runs else ""}
    titles |= {f"rewards/{name}/mean": f"reward, {name}" for name in learned}
    found = [Panel(title, HELD_OUT, _curves(runs, partial(_held_out, key)), {}) for key, title in titles.items()]
    for key, title in TRAINING_TITLES.items():
        scales: dict[str, list[Run]] = {}
        for run in runs:
            if any(key in row or f"eval_{key}" in row for row in run.metrics):
                scales.setdefault(_scale(run, key), []).append(run)
        for scale, own in scales.items():
            training = _curves(own, lambda row, key=key: None if is_of_held_out_prompts(row) else row.get(key))
            held_out = _curves(own, lambda row, key=key: row.get(f"eval_{key}"))
            found.append(Panel(f"{title}, {scale}" if len(scales) > 1 else title, "training", training, held_out))
    return [one for one in found if any(len(c) > 1 for c in (*one.curves.values(), *one.held_out.values()))]


def _learned(row: Row, prefix: str = "(?:eval_)?") -> list[str]:
    """The reward functions whose mean a row holds, in training or, with a prefix, on held-out prompts."""
    names = (re.fullmatch(f"{prefix}rewards/(.*)/mean", name) for name in row)
    return [found[1] for found in names if found]


def _scale(run: Run, key: str) -> str:
    """What a training metric's values depend on: runs with another scale have another panel."""
    if key in OF_A_METHOD:
        return run.method
    return " + ".join(sorted({name for row in run.metrics for name in _learned(row, "")})) if key == "reward" else ""


def _curves(runs: Sequence[Run], value: Callable[[Row], float | None]) -> dict[str, list[Point]]:
    """The points of the rows that have the value, by run; a run without any is left out."""
    curves = {run.label: [(row["step"], value(row)) for row in run.metrics if value(row) is not None] for run in runs}
    return {label: points for label, points in curves.items() if points}


def _held_out(key: str, row: Row) -> float | None:
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
