"""The report as one self-contained HTML file: its sections, the browser of responses, and a strict security policy.

Everything that comes from a run is untrusted. The template escapes it, and JSON for the script goes through `embed`.
Only the script whose hash is in the page's Content-Security-Policy can run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup, escape

from trl_ext.evaluation.reporting.charts import Look, curve_chart, looks_of, trade_off_charts
from trl_ext.evaluation.reporting.curves import panels
from trl_ext.evaluation.reporting.generations import generations
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import Row, Task, by_task
from trl_ext.evaluation.reporting.tables import NOT_EVALUATED, Table, faults, shown, task_tables

# With more runs than this, the page initially shows one run of each method.
MANY_RUNS = 12
# Intervals appear on a line below their figures.
INTERVAL = re.compile(r"\[-?[\d.]+, -?[\d.]+\]")


def render_page(
    runs: Sequence[Run],
    incomplete: Sequence[Row],
    *,
    max_prompts: int,
    stages: Sequence[Table] = (),
) -> str:
    """The HTML of the report; additional tables come first."""
    tasks = by_task(runs)
    looks = looks_of(tasks)
    browsed = generations([run for task in tasks for run in task.policies], max_prompts=max_prompts)
    data = {
        "tasks": {task.end: task.title for task in tasks},
        "runs": [{"label": look.label, "task": look.task, "color": look.color} for look in looks.values()],
        "generations": browsed,
    }
    environment = Environment(loader=FunctionLoader(_asset), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"interval": _interval, "shown": shown}
    body = environment.get_template("body.html").render(
        tasks=[(task, task_tables(task), *_charts(task, looks)) for task in tasks],
        has_charts=find_spec("matplotlib") is not None,
        stages=stages,
        faults=faults(incomplete, runs),
        has_generations=bool(browsed["prompts"]),
        not_evaluated=NOT_EVALUATED,
    )
    return environment.get_template("report.html").render(
        # No network, frames or forms; the page's own script and style are allowed by their hashes.
        policy=f"default-src 'none'; script-src {_digest('report.js')}; style-src {_digest('report.css')}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        style=Markup(_asset("report.css")),
        script=Markup(_asset("report.js")),
        data=Markup(embed(data)),
        body=Markup(body),
        index=_index(body),
        runs=runs,
        tasks=tasks,
        looks=list(looks.values()),
        many=len(looks) > MANY_RUNS,
        problems=[problem for run in runs for problem in run.problems],
        damaged=[run for run in runs if run.problems],
    )


def embed(value: Any) -> str:
    """JSON for a script element, escaped so that it cannot end the element, open a comment or break a line."""
    source = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", source)


def _charts(task: Task, looks: Mapping[str, Look]) -> tuple[dict[str, Markup], Markup]:
    """The curves of a task by group, and its charts of reward against KL; none if matplotlib is not installed."""
    groups: dict[str, Markup] = {}
    if find_spec("matplotlib") is None:
        return groups, Markup()
    for panel in panels(task.policies + task.reward_models):
        groups[panel.group] = groups.get(panel.group, Markup()) + curve_chart(panel, looks)
    return groups, trade_off_charts(task.policies, looks)


def _index(body: str) -> list[list[tuple[str, Markup]]]:
    """The names and titles of the sections. With several tasks, those of a task form a group, which begins with it."""
    groups = (re.findall(r'<h[23] id="([\w-]+)-title">(.*?)</h', part) for part in re.split("(?=<h2 id=)", body))
    return [[(name, Markup(title)) for name, title in group] for group in groups if group]


def _interval(text: str) -> Markup:
    return Markup(INTERVAL.sub(r'<span class="interval">\g<0></span>', str(escape(text))))


def _asset(name: str) -> str:
    return (files("trl_ext.evaluation") / "reporting" / "assets" / name).read_text(encoding="utf-8")


def _digest(name: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()}'"
