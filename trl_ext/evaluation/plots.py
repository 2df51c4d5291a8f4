"""The picture of a run: what it logged over its steps, and how it compares with its base."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_ext.files import replacing

# Panel title -> label of each curve -> metric name in the run's metrics.
PREFERENCE_PANELS = {
    "Loss": {"train": "loss", "held out": "eval_loss"},
    "Reward margin": {"train": "rewards/margins", "held out": "eval_rewards/margins"},
    "Preference accuracy": {"train": "rewards/accuracies", "held out": "eval_rewards/accuracies"},
    "KL to the base (nats per response)": {"sampled responses": "kl"},
    "Response length (tokens)": {"policy": "completions/mean_length"},
}
KTO_PANELS = {
    **PREFERENCE_PANELS,
    "KL to the base (nats per response)": {"sampled responses": "sampled_kl", "the loss's estimate": "kl"},
}
del KTO_PANELS["Preference accuracy"]
ONLINE_PANELS = {
    "Reward of the rollouts": {"mean": "reward", "lowest": "reward_min", "highest": "reward_max"},
    "KL to the base (nats per response)": {"held-out prompts": "eval_kl"},
    "Entropy (nats per token)": {"rollouts": "entropy"},
    "Response length (tokens)": {"rollouts": "completions/mean_length", "held out": "eval_completions/mean_length"},
    "Shares of the rollouts": {
        "cut at the limit": "completions/clipped_ratio",
        "groups without signal": "frac_reward_zero_std",
        "tokens clipped": "clip_ratio/region_mean",
    },
    "Gradient norm": {"train": "grad_norm"},
}
# Drawn where an ensemble logs it.
_ENSEMBLE_PANEL = {"Disagreement of the ensemble (std)": {"rollouts": "ensemble_std"}}


def plot_run(
    metrics: Sequence[dict[str, Any]],
    results: dict[str, Any],
    path: str | Path,
    panels: dict[str, dict[str, str]] = PREFERENCE_PANELS,
) -> None:
    """Draw the panels' metrics over steps, and the win rates with their intervals, into a PNG.

    Where the run evaluated reward functions on held-out prompts, a first panel shows them beside the known score, so
    that a learned reward which rises while the score falls is seen.

    Args:
        metrics: rows of a run's `metrics.jsonl`.
        results: its `results.json`.
        path: where to write; replaced atomically.
        panels: title -> label of each curve -> metric name.

    Raises:
        ImportError: matplotlib is missing; the message names the extra to install.
    """
    if any("ensemble_std" in row for row in metrics):
        panels = {**panels, **_ENSEMBLE_PANEL}
    learned = sorted({name for row in metrics for name in row if _is_held_out_reward(name)})
    count = len(panels) + 1 + bool(learned)
    columns = (count + 1) // 2
    figure, axes = new_figure(2, columns)
    if learned:
        _draw_overoptimization(axes[0], learned, metrics)
    for axis, (title, curves) in zip(axes[bool(learned) :], panels.items(), strict=False):
        draw_curves(axis, title, curves, metrics)
    _draw_win_rates(axes[count - 1], results.get("win_rate"))
    for axis in axes[count:]:
        axis.set_axis_off()
    run = results.get("run", {})
    title = f"{run.get('objective', '')}, model {run.get('model', '')}, data {run.get('dataset', '')}"
    figure.suptitle(textwrap.fill(title, 35 * columns))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


def new_figure(rows: int, columns: int):
    """A figure that needs no display, and its axes in one list.

    Raises:
        ImportError: matplotlib is missing; the message names the extra to install.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'trl_ext[report]'") from error
    figure = Figure(figsize=(4.4 * columns, 3.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())


def _is_held_out_reward(name: str) -> bool:
    return name.startswith("eval_rewards/") and name.endswith("/mean")


def _draw_overoptimization(axis, learned: Sequence[str], metrics: Sequence[dict[str, Any]]) -> None:
    """Held-out rewards on the left axis and the known score on the right one."""
    curves = {name.removeprefix("eval_rewards/").removesuffix("/mean"): name for name in learned}
    draw_curves(axis, "Learned reward and true score, held-out prompts", curves, metrics)
    axis.set_ylabel("reward")
    scores = [(row["step"], row["eval_score"]) for row in metrics if row.get("eval_score") is not None]
    if scores:
        right = axis.twinx()
        right.plot(*zip(*scores, strict=True), color="black", linestyle="--", marker=".", label="true score")
        right.set_ylabel("true score (dashed)")


def draw_curves(axis, title: str, curves: dict[str, str], metrics: Sequence[dict[str, Any]]) -> None:
    """Draw metrics over steps into one panel; a metric that was not logged is left out."""
    axis.set_title(title)
    axis.set_xlabel("optimizer step")
    for label, name in curves.items():
        points = [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None, label=label)
    if axis.lines:
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    else:
        axis.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axis.transAxes, color="grey")


def _draw_win_rates(axis, win_rate: dict[str, Any] | None) -> None:
    axis.set_title("Win rate against the base, 95% interval")
    if win_rate is None:
        axis.text(0.5, 0.5, "no judge", ha="center", va="center", transform=axis.transAxes, color="grey")
        axis.set_axis_off()
        return
    rules = {"ties count as half": "half", "ties dropped": "agreed"}
    for position, rule in enumerate(rules.values()):
        interval = win_rate[rule]
        below, above = interval["rate"] - interval["low"], interval["high"] - interval["rate"]
        axis.errorbar(position, interval["rate"], yerr=[[max(below, 0)], [max(above, 0)]], fmt="o", capsize=6)
        axis.annotate(
            f"{interval['rate']:.3f} (n = {interval['n']})",
            (position, interval["rate"]),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
        )
    axis.set_xticks(range(len(rules)), list(rules))
    axis.axhline(0.5, color="grey", linestyle="--", linewidth=1)
    axis.set_xlim(-0.5, len(rules))
    axis.set_ylim(0, 1)
