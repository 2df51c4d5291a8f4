"""The picture of a reward model's training: its loss and held-out ranking over steps, its calibration, its margins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trl_ext.evaluation.intervals import wilson_interval
from trl_ext.evaluation.plots import curve_panels, save_panels

# Panel title -> label of each curve -> metric name in the run's metrics.
_PANELS = {
    "Loss": {"train": "loss", "held out": "eval_loss"},
    "Accuracy": {"train": "accuracy", "held out": "eval_accuracy", "selection split": "selection/accuracy"},
    "Margin (chosen minus rejected)": {
        "train": "margin",
        "held out": "eval_margin",
        "selection split": "selection/margin",
    },
    "Negative log-likelihood (nats)": {"selection split": "selection/nll"},
}


def plot_reward_run(
    metrics: Sequence[dict[str, Any]],
    pairs: dict[str, Any] | None,
    margins: Sequence[float],
    path: str | Path,
    *,
    title: str = "",
) -> None:
    """Draw a run of a reward model into a PNG; what has no data is left out.

    Args:
        metrics: rows of the run's `metrics.jsonl`.
        pairs: `reward_metrics` of the held-out pairs; None if there are none.
        margins: chosen minus rejected score of each held-out pair.
        path: where to write; replaced atomically.
        title: above the panels.

    Raises:
        ImportError: matplotlib is missing; the message names the extra to install.
    """
    drawn = curve_panels(_PANELS, metrics)
    if pairs is not None:
        drawn.append(partial(_draw_reliability, pairs=pairs))
    if len(margins):
        drawn.append(partial(_draw_margins, margins=margins))
    save_panels(drawn, path, title)


def _draw_reliability(axis, pairs: dict[str, Any]) -> None:
    """Accuracy of the pairs in each bin against their mean confidence, with its Wilson 95% interval.

    The area of a point is its number of pairs.
    """
    axis.set_title("Reliability, held-out pairs")
    axis.plot([0.5, 1], [0.5, 1], color="grey", linestyle="--", linewidth=1)
    filled = [row for row in pairs["calibration"] if row["n"]]
    confidence, accuracy = ([row[name] for row in filled] for name in ("confidence", "accuracy"))
    for x, y, row in zip(confidence, accuracy, filled, strict=True):
        axis.vlines(x, *wilson_interval(y * row["n"], row["n"]), linewidth=1, alpha=0.6)
    axis.scatter(confidence, accuracy, s=[10 + 600 * row["n"] / pairs["n"] for row in filled], alpha=0.6)
    says = (
        f"accuracy {pairs['accuracy']:.3f} [{pairs['low']:.3f}, {pairs['high']:.3f}], n = {pairs['n']}\n"
        f"ECE {pairs['ece']:.3f}, {len(pairs['calibration'])} bins; lines: 95% intervals"
    )
    # In a corner that is empty for a calibrated model, whose points lie above one half.
    axis.text(0.52, 0.08, says, va="center")
    axis.set_xlabel("confidence, max(p, 1 - p)")
    axis.set_ylabel("share ranked as labelled")
    axis.set_xlim(0.5, 1)
    axis.set_ylim(0, 1.03)
    axis.grid(alpha=0.3)


def _draw_margins(axis, margins: Sequence[float]) -> None:
    axis.set_title("Margins, held-out pairs")
    axis.set_xlabel("chosen minus rejected score")
    axis.axvline(0, color="grey", linestyle="--", linewidth=1)
    axis.hist([float(margin) for margin in margins], bins=30, alpha=0.7)
    axis.set_ylabel("pairs")
