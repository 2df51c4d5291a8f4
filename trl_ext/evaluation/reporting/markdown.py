"""The report as Markdown, for the appendix of a paper: its tables, without charts and generations."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trl_ext.evaluation.reporting import tables
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import Row, by_task
from trl_ext.evaluation.reporting.tables import Table

# Whatever could start markup, an image among it, which a viewer would fetch from wherever a model's text says.
MARKUP = re.compile(r"([\\`*_{}\[\]<>()#!|~$:@])")
# Everything that any reader takes for the end of a line, and control characters.
BREAKS = re.compile("[\\s\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def render_markdown(runs: Sequence[Run], summary: dict[str, list[Row]], stages: Sequence[Table] = ()) -> str:
    """The Markdown of the report; further tables come first, then those of each task."""
    parts = [f"# Report of {len(runs)} run{'s' if len(runs) > 1 else ''}", *map(render_table, stages)]
    for task in by_task(summary, runs):
        found = [
            tables.policy_table(task.summary["policies"]),
            tables.settings_table("policies", task.summary["policies"]),
            tables.method_table(task.summary["methods"]),
            tables.trade_off_table(task.summary["policies"]),
            tables.diversity_table(task.policies),
            tables.kind_table(task.policies),
            tables.held_out_table(task.policies),
            tables.reward_model_table(task.summary["reward_models"]),
            tables.settings_table("reward-models", task.summary["reward_models"]),
            tables.reliability_table(task.reward_models),
            tables.mistake_table(task.reward_models),
        ]
        parts += [f"## {escape(task.title)}"] * bool(task.end)
        parts += [render_table(table, 3 if task.end else 2) for table in found]
    parts += [render_table(table) for table in tables.faults(summary)]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_table(table: Table, level: int = 2) -> str:
    """A table under its heading; nothing where it has no rows."""
    if not table.rows:
        return ""
    rows = [[escape(cell.text) for cell in row] for row in table.rows]
    head = [escape(name) for name in table.columns]
    numbers = [any(row[index].value is not None for row in table.rows) for index in range(len(head))]
    rule = ["--:" if number else ":--" for number in numbers]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]
    return "\n".join([f"{'#' * level} {table.title}", "", escape(table.note), "", *lines])


def escape(text: str) -> str:
    """Text that stays itself in a cell of a Markdown table: no markup, no HTML, on one line."""
    return MARKUP.sub(r"\\\1", BREAKS.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;"))
