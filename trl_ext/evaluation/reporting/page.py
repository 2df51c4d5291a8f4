"""The report as one HTML file that needs no network: its sections, its data, and the policy that keeps it closed.

Whatever comes from a run is untrusted. It reaches the page through `escape` or `embed`, and no script runs but the one
whose hash the page's Content-Security-Policy names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from trl_ext.evaluation.reporting import tables
from trl_ext.evaluation.reporting.charts import chart_data
from trl_ext.evaluation.reporting.generations import generations
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import Row, Task, by_task
from trl_ext.evaluation.reporting.tables import Table

FRONT_NOTE = (
    "Crosses are 95% intervals. Filled: may be on the front; hollow: is not. The line joins the front of the figures "
    f"of all runs, shown or not. {tables.FRONT_RULE}"
)
# The intervals in a cell stand below their figures.
INTERVAL = re.compile(r"\[-?[\d.]+, -?[\d.]+\]")
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def render_page(
    runs: Sequence[Run],
    summary: dict[str, list[Row]],
    *,
    max_prompts: int,
    stages: Sequence[Table] = (),
    pictures: Mapping[str, bytes] | None = None,
) -> str:
    """The HTML of the report; further tables, and PNG pictures by title, come first."""
    tasks = by_task(summary, runs)
    policies = [run for run in runs if not run.trains_reward_model]
    data = {**chart_data(tasks), "generations": generations(policies, max_prompts=max_prompts)}
    of_tasks = [_of_task(task, {panel["task"] for panel in data["panels"]}) for task in tasks]
    first = _section("stages", "Stages", *map(_table, stages), *map(_picture, (pictures or {}).items()))
    last = _section("generations", "Generations", _asset("browser.html") if data["generations"]["prompts"] else "")
    for name, title, table in zip(
        ("left-out", "problems"), ("Left out", "Problems"), tables.faults(summary), strict=True
    ):
        last += _section(name, title, _table(table, heading=False))
    return _fill(
        _asset("report.html"),
        title=f"Report of {_counted(len(runs), 'run')}",
        body="".join([first, *of_tasks, last]),
        navigation="".join(
            [_links(first), *(_index(body) if len(tasks) > 1 else _links(body) for body in of_tasks), _links(last)]
        ),
        warning=_warning(summary["problems"]),
        toggles=_toggles(data),
        data=embed(data),
        style=_asset("report.css"),
        script=_asset("report.js"),
        policy=_policy(),
    )


def _of_task(task: Task, with_curves: Collection[str]) -> str:
    """A task's sections; where there are several tasks, below its title and with names that end in its number."""
    policies, summary = task.policies, task.summary
    compared, trade_offs = tables.policy_table(summary["policies"]), tables.trade_off_table(summary["policies"])
    settings, diversity = tables.settings_table("policies", summary["policies"]), tables.diversity_table(policies)
    sections = [
        _section(
            "summary",
            "Summary",
            _table(compared),
            _charts("dots-result") + _folded(settings) if compared.rows else _table(settings),
            f'<p class="note">{tables.NOT_EVALUATED}</p>' if settings.rows and not compared.rows else "",
        ),
        _section("over-seeds", "Methods over seeds", _table(tables.method_table(summary["methods"]), heading=False)),
        _section(
            "curves",
            "Curves",
            _asset("curves.html") if task.end in with_curves else "",
            _folded(tables.held_out_table(policies)),
        ),
        _section(
            "pareto",
            "Reward against KL",
            f'<p class="note">{FRONT_NOTE}</p>{_charts("trade-offs")}' if trade_offs.rows else "",
            _folded(trade_offs),
        ),
        _section(
            "length",
            "Length and diversity",
            _charts("dots-length") if diversity.rows else "",
            _folded(diversity),
            _folded(tables.kind_table(policies)),
        ),
        _section(
            "rewards",
            "Reward models",
            _table(tables.reward_model_table(summary["reward_models"]), heading=False),
            _charts("dots-reward", "reliability") if task.reward_models else "",
            _folded(tables.settings_table("reward-models", summary["reward_models"])),
            _folded(tables.reliability_table(task.reward_models)),
            _folded(tables.mistake_table(task.reward_models)),
        ),
    ]
    body = "".join(sections)
    if not task.end:
        return body
    # Text of runs is escaped, so that neither a tag nor a quote of it can be meant here.
    body = re.sub(r'( (?:id|aria-labelledby|name)="[\w-]+)"', rf'\1{task.end}"', body)
    body = re.sub(r"(</?h)([23])", lambda found: f"{found[1]}{int(found[2]) + 1}", body)
    return f'<div class="task">{_section(f"task{task.end}", task.title, body)}</div>'


def embed(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element, opens a comment or ends a line."""
    source = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", source)


def _fill(template: str, **values: str) -> str:
    # In one pass: a placeholder inside a value is a model's text, and stays.
    return PLACEHOLDER.sub(lambda found: values[found[1]], template)


def _asset(name: str) -> str:
    return (files("trl_ext.evaluation") / "reporting" / "assets" / name).read_text(encoding="utf-8")


def _policy() -> str:
    """No network, no frames, no forms; this page's own script and style by their hashes."""

    def digest(name: str) -> str:
        return base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest('report.js')}'; style-src 'sha256-{digest('report.css')}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _section(name: str, title: str, *parts: str) -> str:
    """A section, or nothing where all its parts are empty."""
    if not any(parts):
        return ""
    heading = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{"".join(parts)}</section>\n'


def _links(body: str, level: int = 2) -> str:
    titles = re.findall(rf'<h{level} id="([\w-]+?)-title(-\d+)?">(.*?)</h{level}>', body)
    return "".join(f'<a href="#{name}{end}">{title}</a>' for name, end, title in titles)


def _index(body: str) -> str:
    """A task's entry in the index: its title and its sections."""
    return f"<p>{_links(body)}{_links(body, 3)}</p>"


def _warning(problems: Sequence[Row]) -> str:
    if not problems:
        return ""
    many, runs = len(problems), len({row["run"] for row in problems})
    says = f"{_counted(many, 'problem')} in the files of {_counted(runs, 'run')}"
    return f'<p class="warning"><a href="#problems">{says}</a>: what is damaged is not shown.</p>'


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _charts(*names: str) -> str:
    return "".join(f'<div class="charts" id="{name}"></div>' for name in names)


def _table(table: Table, *, heading: bool = True) -> str:
    """A table in a frame of its own that scrolls, so that the page does not."""
    if not table.rows:
        return ""
    title = f"<h3>{escape(table.title)}</h3>" if heading else ""
    head = "".join(f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in table.columns)
    body = "".join(f"<tr>{''.join(_cell(cell, index) for index, cell in enumerate(row))}</tr>" for row in table.rows)
    return (
        f'{title}<p class="note">{escape(table.note)}</p>'
        f'<div class="scroll" role="region" aria-label="{escape(table.title)}" tabindex="0">'
        f'<table id="table-{table.name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _picture(titled: tuple[str, bytes]) -> str:
    title, png = titled
    source = base64.b64encode(png).decode()
    return f'<h3>{escape(title)}</h3><figure><img alt="{escape(title)}" src="data:image/png;base64,{source}"></figure>'


def _cell(cell: tables.Cell, index: int) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    kind = ' class="prose" dir="auto"' if cell.prose else (' class="number"' if cell.value is not None else "")
    tag, scope = ("th", ' scope="row"') if index == 0 else ("td", "")
    text = escape(cell.text)
    if cell.value is not None:
        text = INTERVAL.sub(r'<span class="interval">\g<0></span>', text)
    return f"<{tag}{scope}{kind}{value}>{text}</{tag}>"


def _folded(table: Table) -> str:
    if not table.rows:
        return ""
    return f"<details><summary>{escape(table.title)}</summary>{_table(table, heading=False)}</details>"


def _toggles(data: Mapping[str, Any]) -> str:
    """A box for each run, behind the title of its task where there are several."""
    boxes: dict[str, str] = {}
    for index, run in enumerate(data["runs"]):
        boxes[run["task"]] = boxes.get(run["task"], "") + (
            f'<label class="run c{run["color"]} d{run["dash"]}"><input type="checkbox" value="{index}"'
            f'{" checked" if run["shown"] else ""}><svg class="swatch" viewBox="0 0 24 8" aria-hidden="true">'
            f'<line x1="0" y1="4" x2="24" y2="4"/></svg><bdi>{escape(run["label"])}</bdi></label>'
        )
    titles = {task: f"<b>{escape(title)}</b>" if len(boxes) > 1 else "" for task, title in data["tasks"].items()}
    return "".join(f'<div class="toggles">{titles[task]}{found}</div>' for task, found in boxes.items())
