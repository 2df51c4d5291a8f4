"""The report's charts as inline SVG, drawn by matplotlib: curves over steps, and reward against KL.

Every mark of a run is in a group with its number in `data-run`, which the page's script uses to show and hide it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from trl_ext.evaluation.reporting.curves import Panel
from trl_ext.evaluation.reporting.plots import distances, new_figure
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import Task, fronts_by_run, trade_offs

COLORS = 10
DASHES = ("-", "--", ":", "-.", (0, (4, 2, 1, 2, 1, 2)))


@dataclass(frozen=True)
class Look:
    """How a run is drawn: its number on the page, its colour by method, its dash within the method."""

    number: int
    label: str
    task: str
    color: int
    dash: int

    @property
    def is_first(self) -> bool:
        """Whether this is the first run of its method."""
        return self.dash == 0

    @property
    def style(self) -> str:
        """The classes of the run's swatch."""
        return f"c{self.color} d{self.dash % len(DASHES)}"

    @property
    def marks(self) -> dict[str, Any]:
        """What matplotlib needs to draw the run's marks."""
        return {"color": f"C{self.color}", "gid": f"run-{self.number}"}


def looks_of(tasks: Sequence[Task]) -> dict[str, Look]:
    """How each run is drawn, by its label."""
    found: dict[str, Look] = {}
    for task in tasks:
        methods: dict[tuple[str, bool], list[str]] = {}
        for run in task.policies + task.reward_models:
            key = run.method, run.trains_reward_model
            methods.setdefault(key, []).append(run.label)
            color, dash = list(methods).index(key) % COLORS, len(methods[key]) - 1
            found[run.label] = Look(len(found), run.label, task.end, color, dash)
    return found


def curve_chart(panel: Panel, of: Mapping[str, Look]) -> Markup:
    """One metric over optimizer steps; points of held-out rows are circles on a thin line."""
    figure, axis = _plane("steps")
    for label, points in panel.curves.items():
        dash, marker = DASHES[of[label].dash % len(DASHES)], "o" if len(points) == 1 else None
        axis.plot(*zip(*points, strict=True), linestyle=dash, marker=marker, **of[label].marks)
    for label, points in panel.held_out.items():
        axis.plot(*zip(*points, strict=True), "o-", linewidth=0.8, fillstyle="none", **of[label].marks)
    axis.locator_params(axis="x", integer=True)
    return _inline(figure, panel.title, of[label])


def trade_off_charts(policies: Sequence[Run], of: Mapping[str, Look]) -> Markup:
    """Reward against KL, with the intervals of both; filled points may be on the Pareto front."""
    fronts, charts = fronts_by_run(policies), []
    for title, points in trade_offs(policies).items():
        figure, axis = _plane("KL to the base (nats per response)")
        for point in points:
            kl, reward, look = point["kl"], point["reward"], of[point["run"]]
            errors = {"xerr": distances(kl), "yerr": distances(reward)}
            fill = "full" if title in fronts.get(point["run"], ()) else "none"
            drawn = axis.errorbar(kl.value, reward.value, **errors, fmt="o", fillstyle=fill, color=look.marks["color"])
            # A name is text, not mathematics, whatever signs it has.
            place = {"xytext": (4, 4), "textcoords": "offset points", "parse_math": False}
            name = axis.annotate(look.label[-20:], (kl.value, reward.value), **place)
            for mark in (*drawn.get_children(), name):
                mark.set_gid(look.marks["gid"])
        axis.margins(x=0.15)
        charts.append(_inline(figure, title, look))
    return Markup("").join(charts)


def _plane(x_label: str):
    figure, (axis,) = new_figure(1, 1)
    axis.set_xlabel(x_label)
    axis.grid(alpha=0.3)
    return figure, axis


def _inline(figure, title: str, look: Look) -> Markup:
    """A figure as an element of the page, whose policy forbids inline styles: they become attributes.

    Black, the colour of text and axes, becomes the page's own, which depends on the reader's colour scheme.
    """
    from matplotlib import rc_context

    target, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # Identifiers of elements are those of this figure alone.
    salt = f"{title}, {figure.axes[0].get_xlabel()}, {look.number}"
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(target, format="svg", metadata=nothing, transparent=True)
    svg = target.getvalue()
    svg = re.sub(r"<style.*?</style>|font-family: [^;]*; ", "", svg[svg.index("<svg") :])
    svg = re.sub(r' id="run-(\d+)"', r' data-run="\1"', svg)
    svg = re.sub(r' id="[a-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r' style="([^"]*)"', lambda found: re.sub(r"([\w-]+): ([^;]*);? ?", r' \1="\2"', found[1]), svg)
    svg = svg.replace("#000000", "currentColor").replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    return Markup(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>")
