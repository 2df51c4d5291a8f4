"""The report's charts as inline SVG: curves, figures with intervals, and reward against KL.

Every mark of a run is in an element with its number in `data-run`, which the page's script uses to show and hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trl_ext.evaluation.reporting.curves import HELD_OUT, Panel
from trl_ext.evaluation.reporting.summary import Row, Task, trade_offs

COLORS, DASHES = 10, 5
WIDTH, HEIGHT, ROW_HEIGHT = 320, 230, 20
LEFT, RIGHT, TOP, BOTTOM = 46, WIDTH - 10, 8, HEIGHT - 34
# Approximate width of a letter in an SVG, used to shorten names.
LETTER = 6.2
# With more runs than this, the page initially shows one run of each method, and curves name only these.
MANY_RUNS = 12
# Width of the column of names beside curves and points.
NAMES = 104
UNITS = ((7200, 3600, "hours"), (180, 60, "minutes"), (0, 1, "seconds"))


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

    def group(self, *marks: str) -> str:
        return f'<g class="{self.style}" data-run="{self.number}">{"".join(marks)}</g>'


Looks = Mapping[str, Look]


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
        if low == high == 0:
            return cls(-0.05, 1, start, end)
        margin = (high - low) * 0.05 or abs(high) * 0.1
        return cls(low - margin, high + margin, start, end)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int, least_step: float = 0) -> list[float]:
        """Round values, at most about `most` of them."""
        rough = max((self.high - self.low) / most, least_step)
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


def shortened(name: str, letters: int) -> str:
    """A name without its middle, because runs often differ in their first and last words."""
    return name if len(name) <= letters else f"{name[: letters // 2]}\u2026{name[1 - letters // 2 :]}"


def curve_chart(panel: Panel, of: Looks, *, timed: bool) -> str:
    """One metric over steps or over seconds; empty if no point has a time."""
    place = 1 if timed else 0
    curves = [
        (of[label], [(point[place], point[2]) for point in points if point[place] is not None], held_out)
        for found, held_out in ((panel.curves, False), (panel.held_out, True))
        for label, points in found.items()
    ]
    points = [point for _, found, _ in curves for point in found]
    if not points:
        return ""
    last = max(points)[0]
    scale, unit = next((scale, unit) for least, scale, unit in UNITS if last >= least) if timed else (1, "steps")
    curves = [curve for curve in curves if curve[1]]
    named = [curve for curve in curves if len(of) <= MANY_RUNS or curve[0].is_first]
    height = max(HEIGHT, 13 * len(named) + 50)
    x = Axis.over((at / scale for at, _ in points), LEFT, RIGHT - NAMES - 6)
    y = Axis.over((value for _, value in points), height - 34, TOP)
    named.sort(key=lambda curve: y(curve[1][-1][1]))
    places = _spaced([y(found[-1][1]) for _, found, _ in named], height - 40)
    name_at = {(look.label, held_out): at for (look, _, held_out), at in zip(named, places, strict=True)}
    marks = []
    for look, found, held_out in curves:
        n = panel.n.get(look.label) if held_out or panel.group == HELD_OUT else None
        rows = f", n {n}" if n else ""
        name = f"{look.label}, held out" if held_out else look.label
        title = _title(f"{name}: {shown(found[-1][1])} at {shown(found[-1][0] / scale)} {unit}{rows}")
        at = [(x(at / scale), y(value)) for at, value in found]
        parts = [title, _line(at, "beside" if held_out else "curve")]
        if held_out:
            parts += [_circle(*one, "circle", 3) for one in at]
        elif len(at) == 1:
            parts.append(_circle(*at[0], "dot", 4))
        if (look.label, held_out) in name_at:
            beside = shortened(look.label, int(NAMES / LETTER) - len(rows)) + rows
            parts.append(_name(*at[-1], RIGHT - NAMES, name_at[look.label, held_out], beside))
        marks.append(look.group(*parts))
    return _plane(panel.title, x, y, unit, marks, whole=not timed, height=height)


def dot_chart(title: str, values: Mapping[str, Mapping[str, Any] | None], of: Looks, reference: float | None) -> str:
    """One row per run: a dot with its interval, and a hollow dot for the base.

    Each row is a separate SVG, so that hidden runs leave no gap.
    """
    known = [(of[label], value) for label, value in values.items() if value is not None]
    if not known:
        return ""
    left, middle = 116, ROW_HEIGHT // 2
    covered = [value.get(name) for _, value in known for name in ("value", "low", "high", "base")]
    x = Axis.over([*covered, reference], left + 8, WIDTH - 12)
    # Keep ticks away from the reference, so that their labels do not overlap.
    ticks = [tick for tick in x.ticks(5) if reference is None or abs(x(tick) - x(reference)) > 28]
    grid = _path("grid", (f"M{x(tick):g} 0v{ROW_HEIGHT}" for tick in ticks))
    if reference is not None:
        grid += _path("reference", [f"M{x(reference):g} 0v{ROW_HEIGHT}"])
        ticks.append(reference)
    drawn = []
    for look, value in known:
        base = value.get("base")
        says = f"{look.label}: {with_interval(value)}" + ("" if base is None else f", base {shown(base)}")
        name = escape(shortened(look.label, int(left / LETTER)))
        parts = [_title(says), f'<text class="name y" x="{left}" y="{middle + 4}">{name}</text>']
        parts.append(_whisker(value, lambda end: (x(end), middle)))
        if base is not None:
            parts.append(_circle(x(base), middle, "hollow", 4))
        parts.append(_circle(x(value["value"]), middle, "dot", 5))
        drawn.append(
            f'<svg viewBox="0 0 {WIDTH} {ROW_HEIGHT}" role="img" aria-label="{escape(says)}" data-run="{look.number}">'
            f"{grid}{look.group(*parts)}</svg>"
        )
    labels = "".join(f'<text class="x" x="{x(tick):g}" y="13">{shown(tick)}</text>' for tick in ticks)
    axis = f'<svg class="axis-labels" viewBox="0 0 {WIDTH} 18" aria-hidden="true">{labels}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(drawn)}{axis}</figure>"


def dot_charts(task: Task, of: Looks) -> dict[str, str]:
    """The charts of single figures per run, by section."""
    rows, models = task.summary["policies"], task.summary["reward_models"]

    def chart(title: str, rows: Sequence[Row], *keys: str, reference: float | None = None) -> str:
        found = {row["run"]: row[keys[0]][keys[1]] if len(keys) > 1 else row[keys[0]] for row in rows}
        return dot_chart(title, found, of, reference)

    def beside_base(title: str, name: str) -> str:
        found = {}
        for run in task.policies:
            own, base = (getattr((run.results.generations or {}).get(key), name, None) for key in ("policy", "base"))
            found[run.label] = None if own is None else {"value": own, "base": base}
        return dot_chart(f"{title}, hollow: the base", found, of, None)

    score = rows[0]["score_name"] if rows else ""
    return {
        "summary": chart("Win rate against the base, ties as half", rows, "win_rate", "half", reference=0.5)
        + chart("Win rate against the base, ties dropped", rows, "win_rate", "agreed", reference=0.5)
        + chart("Accuracy, sampled", rows, "accuracy", "sampled")
        + chart(f"Gain in {score}", rows, "score_gain", reference=0.0),
        "length": beside_base("Response length (tokens)", "mean_tokens")
        + beside_base("Distinct-2", "distinct_2")
        + beside_base("Repeated 4-grams", "repetition"),
        "rewards": chart("Accuracy on held-out pairs", models, "accuracy", reference=0.5)
        + chart("Accuracy, true order", models, "true_accuracy", reference=0.5),
    }


def trade_off_charts(policies: Sequence[Row], of: Looks) -> str:
    """Reward against KL: filled points may be on the front; a line joins the front of the point estimates."""
    rows = {row["run"]: row for row in policies}
    return "".join(_trade_off(title, points, rows, of) for title, points in trade_offs(policies).items())


def _trade_off(title: str, points: Sequence[Row], rows: Mapping[str, Row], of: Looks) -> str:
    names_at = RIGHT - NAMES
    height = max(HEIGHT, 13 * len(points) + 50)
    kls, rewards = (
        [point[name].get(key) for point in points for key in ("value", "low", "high")] for name in ("kl", "reward")
    )
    x, y = Axis.over(kls, LEFT, names_at - 6), Axis.over(rewards, height - 34, TOP)
    marks = []
    for setting in dict.fromkeys(point["setting"] for point in points):
        front = [
            (x(point["kl"]["value"]), y(point["reward"]["value"]))
            for point in points
            if point["setting"] == setting and title in rows[point["run"]]["on_point_front"]
        ]
        marks.append(_line(sorted(front), "front"))
    # Names are in a separate column, spaced and in the order of the points, so that they cover nothing.
    ordered = sorted(points, key=lambda point: point["reward"]["value"], reverse=True)
    places = _spaced([y(point["reward"]["value"]) for point in ordered], height - 40)
    for point, name_y in zip(ordered, places, strict=True):
        look, kl, reward = of[point["run"]], point["kl"], point["reward"]
        px, py = x(kl["value"]), y(reward["value"])
        may = title in rows[point["run"]]["on_front"]
        says = f"{look.label}: {with_interval(reward)} at KL {with_interval(kl)}"
        marks.append(
            look.group(
                _title(f"{says}, {'may be on the front' if may else 'not on the front'}"),
                _whisker(kl, lambda end, py=py: (x(end), py)),
                _whisker(reward, lambda end, px=px: (px, y(end))),
                _name(px, py, names_at, name_y, shortened(look.label, int(NAMES / LETTER))),
                _circle(px, py, "dot" if may else "dominated", 4),
            )
        )
    return _plane(title, x, y, "KL to the base (nats per response)", marks, height=height)


def _spaced(places: Sequence[float], bottom: float) -> list[float]:
    """Heights near these ascending ones that are 13 pixels apart, and of which the last is not below `bottom`."""
    found = [0.0]
    for below, place in enumerate(places, start=1 - len(places)):
        found.append(round(min(max(found[-1] + 13, place), bottom + 13 * below), 1))
    return found[1:]


def _name(x: float, y: float, at_x: float, at_y: float, text: str) -> str:
    """The name of a mark in a column beside it, with a line from the mark."""
    line = f'<line class="leader" x1="{x:g}" y1="{y:g}" x2="{at_x:g}" y2="{at_y:g}"/>'
    return f'{line}<text class="name" x="{at_x + 2:g}" y="{at_y + 4:g}">{escape(text)}</text>'


def _plane(
    title: str, x: Axis, y: Axis, x_label: str, marks: Sequence[str], *, whole: bool = False, height: int = HEIGHT
) -> str:
    """Marks on a grid with labelled axes."""
    across, along = y.ticks(5), x.ticks(5, 1 if whole else 0)
    bottom = height - 34
    lines = [f"M{x.start} {y(tick):g}H{x.end}" for tick in across] + [f"M{x(tick):g} {bottom}v4" for tick in along]
    parts = [_path("grid", lines)]
    parts += [f'<text class="y" x="{x.start - 5}" y="{y(tick) + 4:g}">{shown(tick)}</text>' for tick in across]
    parts += [f'<text class="x" x="{x(tick):g}" y="{bottom + 16}">{shown(tick)}</text>' for tick in along]
    parts.append(f'<text class="y" x="{x.end}" y="{height - 4}">{x_label}</text>')
    title, inner = escape(title), "".join([*parts, *marks])
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">{inner}</svg>'
    return f"<figure><figcaption>{title}</figcaption>{svg}</figure>"


def _title(text: str) -> str:
    """The browser's tooltip."""
    return f"<title>{escape(text)}</title>"


def _line(points: Iterable[tuple[float, float]], kind: str) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>'


def _path(kind: str, parts: Iterable[str]) -> str:
    return f'<path class="{kind}" d="{"".join(parts)}"/>'


def _circle(x: float, y: float, kind: str, radius: float) -> str:
    return f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>'


def _whisker(value: Mapping[str, float | None], at: Callable[[float], tuple[float, float]]) -> str:
    """A line over the interval of a figure, if it has one; `at` gives the place of an end."""
    if value.get("low") is None or value.get("high") is None:
        return ""
    (x1, y1), (x2, y2) = at(value["low"]), at(value["high"])
    return f'<line class="whisker" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'
