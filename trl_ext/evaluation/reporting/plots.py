"""Plots of runs: metrics over steps, and the win rate of a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trl_ext.evaluation.statistics.intervals import Estimate
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
    "True score, held-out prompts": {"policy": "eval_score"},
    "KL to the base (nats per response)": {"held-out prompts": "eval_kl"},
    "Entropy (nats per token)": {"rollouts": "entropy"},
    "Response length (tokens)": {"rollouts": "completions/mean_length", "held out": "eval_completions/mean_length"},
    "Shares of the rollouts": {
        "truncated": "completions/clipped_ratio",
        "groups without signal": "frac_reward_zero_std",
        "tokens clipped": "clip_ratio/region_mean",
    },
    "Gradient norm": {"train": "grad_norm"},
    "Disagreement of the ensemble (std)": {"rollouts": "ensemble_std"},
}
REWARD_PANELS = {
    "Loss": {"train": "loss", "held out": "eval_loss"},
    "Accuracy": {"train": "accuracy", "held out": "eval_accuracy"},
    "Margin (chosen minus rejected)": {"train": "margin", "held out": "eval_margin"},
}


def plot_run(
    metrics: Sequence[dict[str, Any]],
    results: dict[str, Any],
    path: str | Path,
    panels: dict[str, dict[str, str]] = PREFERENCE_PANELS,
) -> None:
    """Draw the panels' metrics over steps, and the win rates with their intervals, as a PNG.

    A panel without a curve of two points is omitted. Without any panel, no file is written.

    Args:
        metrics: rows of a run's `metrics.jsonl`.
        results: its `results.json`, of which the win rates are drawn.
        path: output file; replaced atomically.
        panels: title -> label of each curve -> metric name.
    """
    logged = Counter(name for row in metrics for name, value in row.items() if value is not None)
    drawn = [
        partial(_draw_curves, title=title, curves=curves, metrics=metrics)
        for title, curves in panels.items()
        if any(logged[name] > 1 for name in curves.values())
    ]
    if results.get("win_rate"):
        drawn.append(partial(_draw_win_rates, results["win_rate"]))
    if not drawn:
        return
    rows = 1 if len(drawn) < 4 else 2
    figure, axes = new_figure(rows, -(-len(drawn) // rows))
    for axis, draw in zip(axes, drawn, strict=False):
        draw(axis=axis)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    save_figure(figure, path, run_title(results.get("run", {})))


def run_title(run: Mapping[str, Any]) -> str:
    """A description of the run; a dataset's path is reduced to its last part."""
    objective, model, data = (str(run.get(name, "")) for name in ("objective", "model", "dataset"))
    return f"{objective}, model {model}, data {Path(data).name if Path(data).is_absolute() else data}"


def new_figure(rows: int, columns: int):
    """A figure that does not need a display, and a list of its axes."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'trl_ext[report]'") from error
    figure = Figure(figsize=(4.4 * columns, 3.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())


def share_legend(figure, axes, **placed: Any) -> None:
    """Give a figure one legend, which names the curves of all axes once."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, frameon=False, **placed)


def save_figure(figure, path: str | Path, title: str = "") -> None:
    """Write a figure with a title as a PNG, atomically."""
    figure.suptitle(title, wrap=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


def distances(estimate: Estimate) -> list[list[float]] | None:
    """How far an interval extends below and above the value, as for matplotlib's error bars; None without one."""
    if estimate.low is None or estimate.high is None:
        return None
    return [[max(estimate.value - estimate.low, 0)], [max(estimate.high - estimate.value, 0)]]


def _draw_curves(axis, title: str, curves: Mapping[str, str], metrics: Sequence[Mapping[str, Any]]) -> None:
    """Draw metrics over steps into one panel."""
    axis.set(title=title, xlabel="optimizer step")
    for index, (label, name) in enumerate(curves.items()):
        # Curves keep their colours where another has no points.
        points, color = [(row["step"], row[name]) for row in metrics if row.get(name) is not None], f"C{index}"
        if points:
            axis.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None, label=label, color=color)
    axis.locator_params(axis="x", nbins=8, integer=True)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)


def _draw_win_rates(win_rate: dict[str, Any], axis) -> None:
    rules = {"ties count as half": "half", "ties dropped": "agreed"}
    for position, rule in enumerate(rules.values()):
        rate, n = Estimate(*(win_rate[rule][name] for name in ("rate", "low", "high"))), win_rate[rule]["n"]
        if n:
            axis.errorbar(position, rate.value, yerr=distances(rate), fmt="o", capsize=6)
        text = f"  {rate.value:.3f} (n = {n})" if n else "every comparison is a tie"
        axis.annotate(text, (position, rate.value if n else 0.5), va="bottom")
    axis.set_xticks(range(len(rules)), list(rules))
    axis.axhline(0.5, color="grey", linestyle="--", linewidth=1)
    axis.set(title="Win rate against the base, 95% interval", xlim=(-0.5, len(rules)), ylim=(0, 1))
