"""The picture of a run: its curves over steps."""

from __future__ import annotations

import math
from pathlib import Path

from trl_ext.evaluation.reporting.curves import panels
from trl_ext.evaluation.reporting.runs import read_run
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.files import replacing


def plot_run(folder: str | Path, path: str | Path) -> None:
    """Draw the report's curves of one run as a PNG; without any, no file is written.

    Args:
        folder: a finished run.
        path: output file; replaced atomically.
    """
    run = read_run("training", Path(folder))
    drawn = panels([run])
    if not drawn:
        return
    rows = math.ceil(len(drawn) / 4)
    figure, axes = new_figure(rows, math.ceil(len(drawn) / rows))
    for axis, panel in zip(axes, drawn, strict=False):
        axis.set(title=panel.title, xlabel="optimizer step")
        for label, curves in ((panel.group, panel.curves), ("held out", panel.held_out)):
            for points in curves.values():
                axis.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None, label=label)
        axis.locator_params(axis="x", nbins=8, integer=True)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    about = run.results.run
    figure.suptitle(f"{about.objective}, model {about.model}, data {Path(about.dataset or '').name}", wrap=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


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


def distances(estimate: Estimate) -> list[list[float]] | None:
    """How far an interval extends below and above the value, as for matplotlib's error bars; None without one."""
    if estimate.low is None or estimate.high is None:
        return None
    return [[max(estimate.value - estimate.low, 0)], [max(estimate.high - estimate.value, 0)]]
