"""The picture of a run: what it logged over its steps, and how it compares with its base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_ext.files import replacing

# Panel title -> label of each curve -> metric name in the run's metrics.
_PANELS = {
    "Loss": {"train": "loss", "held out": "eval_loss"},
    "Reward margin": {"train": "rewards/margins", "held out": "eval_rewards/margins"},
    "Preference accuracy": {"train": "rewards/accuracies", "held out": "eval_rewards/accuracies"},
    "KL to the base (nats per response)": {"sampled responses": "kl"},
    "Response length (tokens)": {"policy": "completions/mean_length"},
}


def plot_run(metrics: Sequence[dict[str, Any]], results: dict[str, Any], path: str | Path) -> None:
    """Draw loss, margins, accuracy, KL and length over steps, and the win rates with their intervals, into a PNG.

    Args:
        metrics: rows of a run's `metrics.jsonl`.
        results: its `results.json`.
        path: where to write; replaced atomically.

    Raises:
        ImportError: matplotlib is missing; the message names the extra to install.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'trl_ext[report]'") from error
    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flatten()
    for axis, (title, curves) in zip(axes, _PANELS.items(), strict=False):
        _draw_curves(axis, title, curves, metrics)
    _draw_win_rates(axes[len(_PANELS)], results.get("win_rate"))
    run = results.get("run", {})
    figure.suptitle(f"{run.get('objective', '')}, model {run.get('model', '')}, data {run.get('dataset', '')}")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _draw_curves(axis, title: str, curves: dict[str, str], metrics: Sequence[dict[str, Any]]) -> None:
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
    axis.set_xlim(-0.5, len(rules) - 0.2)
    axis.set_ylim(0, 1)
