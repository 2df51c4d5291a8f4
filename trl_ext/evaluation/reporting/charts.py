"""The report's charts as inline SVG: curves over steps, and reward against KL.

Every mark of a run is in an element with its number in `data-run`, which the page's script uses to show and hide it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from trl_ext.evaluation.reporting.curves import Panel
from trl_ext.evaluation.reporting.summary import Row, Task, trade_offs

COLORS, DASHES = 10, 5
WIDTH, HEIGHT = 320, 230
LEFT, RIGHT, TOP, BOTTOM = 46, WIDTH - 10, 8, HEIGHT - 34


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
        return f"c{self.color} d{self.dash % DASHES}"

    def group(self, title: str, *marks: str) -> str:
        """Marks with a tooltip."""
        return f'<g class="{self.style}" data-run="{self.number}"><title>{escape(title)}</title>{"".join(marks)}</g>'


def looks(tasks: Sequence[Task]) -> dict[str, Look]:
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


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Iterable[float | None], start: float, end: float) -> Axis:
        """An axis that covers all values, with a margin on both sides."""
        known = [value for value in values if value is not None]
        low, high = min(known), max(known)
        margin = (high - low) * 0.05 or abs(high) * 0.1 or 0.5
        return cls(low - margin, high + margin, start, end)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, least_step: float = 0) -> list[float]:
        """About five round values."""
        rough = max((self.high - self.low) / 5, least_step)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def shown(value: float) -> str:
    """A number with four significant digits, or more before the decimal point."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def with_interval(value: Mapping[str, float | None]) -> str:
    """A figure and its interval, if it has one."""
    low, high = value.get("low"), value.get("high")
    interval = "" if low is None or high is None else f" [{shown(low)}, {shown(high)}]"
    return shown(value["value"]) + interval


def curve_chart(panel: Panel, of: Mapping[str, Look]) -> str:
    """One metric over optimizer steps; points of held-out rows are circles on a thin line."""
    curves = [(of[label], points, "curve") for label, points in panel.curves.items()]
    curves += [(of[label], points, "beside") for label, points in panel.held_out.items()]
    places = [point for _, points, _ in curves for point in points]
    x, y = Axis.over((step for step, _ in places), LEFT, RIGHT), Axis.over((value for _, value in places), BOTTOM, TOP)
    marks = []
    for look, points, kind in curves:
        name = look.label if kind == "curve" else f"{look.label}, held out"
        at = [(x(step), y(value)) for step, value in points]
        line = f'<polyline class="{kind}" points="{" ".join(f"{px:g},{py:g}" for px, py in at)}"/>'
        dots = at if kind == "beside" or len(at) == 1 else []
        circles = (_circle(*one, "circle" if kind == "beside" else "dot") for one in dots)
        marks.append(look.group(f"{name}: {shown(points[-1][1])} at step {points[-1][0]}", line, *circles))
    return _plane(panel.title, x, y, "steps", marks, least_step=1)


def trade_off_charts(policies: Sequence[Row], of: Mapping[str, Look]) -> list[str]:
    """Reward against KL, with the intervals of both; filled points may be on the Pareto front."""
    rows = {row["run"]: row for row in policies}
    charts = []
    for title, points in trade_offs(policies).items():
        kls, rewards = (
            [point[name].get(key) for point in points for key in ("value", "low", "high")] for name in ("kl", "reward")
        )
        x, y = Axis.over(kls, LEFT, RIGHT), Axis.over(rewards, BOTTOM, TOP)
        marks = []
        for point in points:
            look, kl, reward = of[point["run"]], point["kl"], point["reward"]
            at, may = (x(kl["value"]), y(reward["value"])), title in rows[point["run"]]["on_front"]
            ends = [(x(kl["low"]), at[1], x(kl["high"]), at[1])] if kl["low"] is not None else []
            ends += [(at[0], y(reward["low"]), at[0], y(reward["high"]))] if reward["low"] is not None else []
            whiskers = ('<line class="whisker" x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}"/>'.format(*one) for one in ends)
            says = f"{look.label}: {with_interval(reward)} at KL {with_interval(kl)}"
            # The name points to the middle, where there is room for it.
            side, anchor = (-8, "y name") if at[0] > WIDTH / 2 else (8, "name")
            name = f'<text class="{anchor}" x="{at[0] + side:g}" y="{at[1] - 6:g}">{escape(look.label[-20:])}</text>'
            dot = _circle(*at, "dot" if may else "dominated")
            title_of_run = f"{says}, {'may be on the front' if may else 'not on the front'}"
            marks.append(look.group(title_of_run, *whiskers, name, dot))
        charts.append(_plane(title, x, y, "KL to the base (nats per response)", marks))
    return charts


def _plane(title: str, x: Axis, y: Axis, x_label: str, marks: Sequence[str], least_step: float = 0) -> str:
    """Marks on a grid with labelled axes."""
    across, along = y.ticks(), x.ticks(least_step)
    lines = [f"M{LEFT} {y(tick):g}H{RIGHT}" for tick in across] + [f"M{x(tick):g} {BOTTOM}v4" for tick in along]
    parts = [f'<path class="grid" d="{"".join(lines)}"/>']
    parts += [f'<text class="y" x="{LEFT - 5}" y="{y(tick) + 4:g}">{shown(tick)}</text>' for tick in across]
    parts += [f'<text class="x" x="{x(tick):g}" y="{BOTTOM + 16}">{shown(tick)}</text>' for tick in along]
    parts.append(f'<text class="y" x="{RIGHT}" y="{HEIGHT - 4}">{x_label}</text>')
    title, inner = escape(title), "".join([*parts, *marks])
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{inner}</svg>'
    return f"<figure><figcaption>{title}</figcaption>{svg}</figure>"


def _circle(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="4"/>'
