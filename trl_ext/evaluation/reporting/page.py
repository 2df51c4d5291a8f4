"""The report as one self-contained HTML file: its sections, the browser of responses, and a strict security policy.

Everything that comes from a run is untrusted. It enters the page only through `escape` or `embed`. Only the script
whose hash is in the page's Content-Security-Policy can run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from trl_ext.evaluation.reporting import charts
from trl_ext.evaluation.reporting.charts import MANY_RUNS, Looks
from trl_ext.evaluation.reporting.curves import panels
from trl_ext.evaluation.reporting.generations import generations
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import Row, Task, by_task
from trl_ext.evaluation.reporting.tables import FRONT_RULE, NOT_EVALUATED, Cell, Table, faults, task_tables

FRONT_NOTE = (
    "Crosses are 95% intervals. Filled: may be on the front; hollow: is not. The line joins the front of the figures "
    f"of all runs, shown or not. {FRONT_RULE}"
)
CURVES_NOTE = (
    "Each curve ends in the name of its run and, if known, the number n of held-out prompts or pairs of its last "
    "point. It may be smaller than the n of the table: during training, runs are evaluated on some of their prompts. "
    "Circles are of held-out rows. Methods do not share the scale of a loss, of its gradient and of implicit rewards, "
    "so each has a panel. Of a curve with more than 300 points the lowest and the highest of each stretch are drawn."
)
# Intervals appear on a line below their figures.
INTERVAL = re.compile(r"\[-?[\d.]+, -?[\d.]+\]")


def render_page(
    runs: Sequence[Run],
    summary: dict[str, list[Row]],
    *,
    max_prompts: int,
    stages: Sequence[Table] = (),
    pictures: Mapping[str, bytes] | None = None,
) -> str:
    """The HTML of the report; additional tables, and PNG pictures by title, come first."""
    tasks = by_task(summary, runs)
    looks = charts.looks(tasks)
    data = {
        "tasks": {task.end: task.title for task in tasks},
        "runs": [{"label": look.label, "task": look.task, "color": look.color} for look in looks.values()],
        "generations": generations([run for task in tasks for run in task.policies], max_prompts=max_prompts),
    }
    of_tasks = [_of_task(task, looks) for task in tasks]
    first = _section("stages", "Stages", *map(_table, stages), *map(_picture, (pictures or {}).items()))
    incomplete, problems = (_table(table, heading=0) for table in faults(summary))
    last = _section("generations", "Generations", _asset("browser.html") if data["generations"]["prompts"] else "")
    last += _section("left-out", "Left out", incomplete) + _section("problems", "Problems", problems)
    # With several tasks, each has a line in the index: its title and its sections.
    links = [f"<p>{_links(body)}{_links(body, 3)}</p>" if len(tasks) > 1 else _links(body) for body in of_tasks]
    return _fill(
        _asset("report.html"),
        data=embed(data),
        style=_asset("report.css"),
        script=_asset("report.js"),
        # No network, frames or forms; the page's own script and style are allowed by their hashes.
        policy=f"default-src 'none'; script-src {_digest('report.js')}; style-src {_digest('report.css')}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        title=f"Report of {_counted(len(runs), 'run')}",
        body="".join([first, *of_tasks, last]),
        navigation="".join([_links(first), *links, _links(last)]),
        warning=_warning(summary["problems"]),
        toggles=_toggles(tasks, looks),
    )


def _of_task(task: Task, looks: Looks) -> str:
    """A task's sections. If there are several tasks, they have a title, and names that end in the task's number."""
    end, tables, dots = task.end, task_tables(task), charts.dot_charts(task, looks)
    level = 3 if end else 2

    def table(name: str, heading: int = 0) -> str:
        return _table(tables[name], end=end, heading=heading)

    def folded(name: str) -> str:
        title = escape(tables[name].title)
        return f"<details><summary>{title}</summary>{table(name)}</details>" if tables[name].rows else ""

    compared = table("policies", level + 1) + _charts(dots["summary"]) + folded("policies-settings")
    if tables["policies-settings"].rows and not tables["policies"].rows and not tables["tasks"].rows:
        compared = f'{table("policies-settings", level + 1)}<p class="note">{NOT_EVALUATED}</p>'
    trade_offs = f'<p class="note">{FRONT_NOTE}</p>{_charts(charts.trade_off_charts(task.summary["policies"], looks))}'
    sections = {
        ("tasks", "Tasks"): table("tasks"),
        ("summary", "Summary"): compared,
        ("over-seeds", "Methods over seeds"): table("methods"),
        ("curves", "Curves"): _curves(task.policies + task.reward_models, end, level, looks),
        ("pareto", "Reward against KL"): trade_offs + folded("trade-offs") if tables["trade-offs"].rows else "",
        ("length", "Length and diversity"): _charts(dots["length"]) + folded("diversity") + folded("kinds"),
        ("rewards", "Reward models"): table("reward-models")
        + _charts(dots["rewards"])
        + folded("reward-models-settings")
        + folded("mistakes"),
    }
    body = "".join(_section(name + end, title, part, level=level) for (name, title), part in sections.items())
    return f'<div class="task">{_section(f"task{end}", task.title, body)}</div>' if end else body


def _curves(runs: Sequence[Run], end: str, level: int, looks: Looks) -> str:
    """The panels over steps and, if times were logged, over time; the style shows the selected ones."""
    found = panels(runs)
    if not found:
        return ""
    views = {}
    for timed in (False, True):
        groups: dict[str, str] = {}
        for panel in found:
            groups[panel.group] = groups.get(panel.group, "") + charts.curve_chart(panel, looks, timed=timed)
        views[timed] = "".join(
            f"<h{level + 1}>{name}</h{level + 1}>{_charts(body)}" for name, body in groups.items() if body
        )
    note = f'<p class="note">{CURVES_NOTE}</p>'
    if not views[True]:
        return note + views[False]
    untimed = [run.label for run in runs if run.metrics and not any("seconds" in row for row in run.metrics)]
    names = escape(", ".join(untimed))
    said = f'<p class="note">Logged without the time, so not drawn: {names}.</p>' if untimed else ""
    return (
        f"{_fill(_asset('axis.html'), end=end)}{note}"
        f'<div class="over-steps">{views[False]}</div><div class="over-seconds">{said}{views[True]}</div>'
    )


def embed(value: Any) -> str:
    """JSON for a script element, escaped so that it cannot end the element, open a comment or break a line."""
    source = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", source)


def _fill(template: str, **values: str) -> str:
    # Replace in a single pass: a placeholder inside a value is a model's text, and must stay.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def _asset(name: str) -> str:
    return (files("trl_ext.evaluation") / "reporting" / "assets" / name).read_text(encoding="utf-8")


def _digest(name: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()}'"


def _section(name: str, title: str, *parts: str, level: int = 2) -> str:
    """A section, or an empty string if all its parts are empty."""
    if not any(parts):
        return ""
    heading = f'<h{level} id="{name}-title">{escape(title)}</h{level}>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{"".join(parts)}</section>\n'


def _links(body: str, level: int = 2) -> str:
    titles = re.findall(rf'<h{level} id="([\w-]+)-title">(.*?)</h{level}>', body)
    return "".join(f'<a href="#{name}">{title}</a>' for name, title in titles)


def _warning(problems: Sequence[Row]) -> str:
    if not problems:
        return ""
    runs = _counted(len({row["run"] for row in problems}), "run")
    says = f"{_counted(len(problems), 'problem')} in the files of {runs}"
    return f'<p class="warning"><a href="#problems">{says}</a>: what is damaged is not shown.</p>'


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _charts(body: str) -> str:
    return f'<div class="charts">{body}</div>' if body else ""


def _table(table: Table, *, end: str = "", heading: int = 3) -> str:
    """A table in its own scrolling frame; its heading has this level, 0 for none."""
    if not table.rows:
        return ""
    title = f"<h{heading}>{escape(table.title)}</h{heading}>" if heading else ""
    head = "".join(f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in table.columns)
    body = "".join(f"<tr>{''.join(_cell(cell, index) for index, cell in enumerate(row))}</tr>" for row in table.rows)
    return (
        f'{title}<p class="note">{escape(table.note)}</p>'
        f'<div class="scroll" role="region" aria-label="{escape(table.title)}" tabindex="0">'
        f'<table id="table-{table.name}{end}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _picture(titled: tuple[str, bytes]) -> str:
    title, png = titled
    source = base64.b64encode(png).decode()
    return f'<h3>{escape(title)}</h3><figure><img alt="{escape(title)}" src="data:image/png;base64,{source}"></figure>'


def _cell(cell: Cell, index: int) -> str:
    tag, scope = ("th", ' scope="row"') if index == 0 else ("td", "")
    text, kind = escape(cell.text), ' class="prose" dir="auto"' if cell.prose else ""
    if cell.value is not None:
        text = INTERVAL.sub(r'<span class="interval">\g<0></span>', text)
        kind = f' class="number" data-value="{cell.value!r}"'
    return f"<{tag}{scope}{kind}>{text}</{tag}>"


def _toggles(tasks: Sequence[Task], looks: Looks) -> str:
    """A checkbox for each run, after the title of its task if there are several."""
    boxes = {task.end: f"<b>{escape(task.title)}</b>" if len(tasks) > 1 else "" for task in tasks}
    for look in looks.values():
        checked = " checked" if look.is_first or len(looks) <= MANY_RUNS else ""
        first = " data-first" if look.is_first else ""
        boxes[look.task] += (
            f'<label class="run {look.style}"><input type="checkbox" value="{look.number}"{checked}{first}>'
            '<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><line x1="0" y1="4" x2="24" y2="4"/></svg>'
            f"<bdi>{escape(look.label)}</bdi></label>"
        )
    return "".join(f'<div class="toggles">{inner}</div>' for inner in boxes.values())
