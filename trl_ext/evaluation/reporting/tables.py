"""The tables of the report, shared by HTML and Markdown, the report as Markdown, and the results of a model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.evaluation.reporting.results import Results
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import KL, Row, Task, by_task, estimate, figures, fronts_by_run, task_figures
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.files import markdown_line

NOT_EVALUATED = "These runs have no figures of held-out rows: their data has no held-out split, or none was asked for."
# Decimals of figures that do not have three; whole numbers have none.
DECIMALS = {KL: 2, "KL to SFT (nats per response)": 2, "tokens": 1}
DECIMALS |= {"training (s)": 1, "in all (s)": 1}


@dataclass(frozen=True)
class Table:
    """A table with a link name, a title, a note on how to read it, and rows of values by column."""

    name: str
    title: str
    note: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def columns(self) -> list[str]:
        """The columns in which some row has a value."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in names if any(shown(row.get(name)) != "-" for row in self.rows)]

    def texts(self) -> list[list[str]]:
        """The text of each row's cells."""
        return [[shown(row.get(name), name) for name in self.columns] for row in self.rows]


def shown(value: Estimate | float | str | None, column: str = "") -> str:
    """The text of a value in a column; a dash if there is none."""
    if isinstance(value, str):
        return value or "-"
    digits = 0 if isinstance(value, int) else DECIMALS.get(column, 3)
    return format(value if isinstance(value, Estimate) else Estimate(value), f".{digits}f")


def task_tables(task: Task) -> dict[str, Table]:
    """The tables of a task by name, in their order in the Markdown; those without rows are empty."""
    found = [
        _tasks(task.policies),
        _of_runs(
            "policies",
            "Policies",
            "Of the responses to held-out prompts, against each run's base; brackets hold 95% intervals. Tokens are "
            "the mean length. A win rate with ties dropped is over the prompts on which both orders prefer the same "
            "model.",
            task.policies,
        ),
        _of_runs(
            "reward-models",
            "Reward models",
            "On held-out pairs. Brackets hold 95% intervals, Wilson's. The true order is by a known quality of the "
            "responses; the labels' share of it is what a model that reproduces the labels reaches.",
            task.reward_models,
        ),
        _settings([*task.policies, *task.reward_models]),
    ]
    return {table.name: table for table in found}


def faults(incomplete: Sequence[Row], runs: Sequence[Run]) -> list[Table]:
    """Runs whose results are damaged, and other damaged files; they do not belong to a task."""
    left_out = [{"run": row["run"], "why": row["reason"]} for row in incomplete]
    problems = [{"run": run.label, **problem} for run in runs for problem in run.problems]
    return [
        Table("incomplete", "Incomplete", "These folders have no figures.", left_out),
        Table("problems", "Problems", "What cannot be read of the runs' files, and is not shown.", problems),
    ]


def _tasks(runs: Sequence[Run]) -> Table:
    """One row per task, metric and run of `trl-ext evaluate`."""
    rows = [
        {
            "metric": f"{task}: {name}",
            "run": run.label,
            "model": run.results.run.model,
            "figure": one,
            "n": one and one.n,
        }
        for run in runs
        for task, own in task_figures(run).items()
        for name, one in own.items()
    ]
    places = list(dict.fromkeys(row["metric"] for row in rows))
    rows.sort(key=lambda row: places.index(row["metric"]))
    return Table("tasks", "Tasks", "Evaluations on tasks. Brackets hold 95% intervals.", rows)


def _of_runs(name: str, title: str, note: str, runs: Sequence[Run]) -> Table:
    """The figures of each run; empty if no run has any."""
    fronts = fronts_by_run(runs)
    found = [figures(run, fronts) for run in runs]
    if all(shown(value) == "-" for own in found for value in own.values()):
        return Table(name, title, note, [])
    about = [{"run": run.label, "method": run.method, "seed": run.results.run.seed} for run in runs]
    return Table(name, title, note, [one | own for one, own in zip(about, found, strict=True)])


def _settings(runs: Sequence[Run]) -> Table:
    """The settings and duration of each run."""
    columns = {"data": "dataset", "steps": "optimizer_steps"}
    columns |= {"training (s)": "training_seconds", "in all (s)": "total_seconds"}
    names = ("objective", "model", "data", "weights", "steps", "seed", "device", "processes")
    rows = [
        {"run": run.label}
        | {name: getattr(run.results.run, columns.get(name, name)) for name in (*names, "training (s)", "in all (s)")}
        for run in runs
    ]
    note = "Steps are the optimizer's; times are of the wall clock."
    return Table("settings", "Settings and times", note, rows)


# ---- Markdown ----


def render_markdown(runs: Sequence[Run], incomplete: Sequence[Row], stages: Sequence[Table] = ()) -> str:
    """The Markdown of the report; additional tables come first, followed by those of each task."""
    parts = [f"# Report of {len(runs)} run{'s' if len(runs) > 1 else ''}", *map(render_table, stages)]
    for task in by_task(runs):
        parts += [f"## {markdown_line(task.title)}"] * bool(task.end)
        parts += [render_table(table, 3 if task.end else 2) for table in task_tables(task).values()]
    parts += map(render_table, faults(incomplete, runs))
    return "\n\n".join(part for part in parts if part) + "\n"


def render_table(table: Table, level: int = 2) -> str:
    """A table under its heading; empty if it has no rows."""
    if not table.rows:
        return ""
    text = [name for name in table.columns if any(isinstance(row.get(name), str) for row in table.rows)]
    rule = [":--" if name in text else "--:" for name in table.columns]
    rows = [table.columns, rule, *table.texts()]
    lines = ["| " + " | ".join(cells if cells is rule else map(markdown_line, cells)) + " |" for cells in rows]
    return "\n".join([f"{'#' * level} {table.title}", "", markdown_line(table.note), "", *lines])


def results_section(content: dict[str, Any]) -> str:
    """The figures of a run's `results.json` content as Markdown; empty if there are none."""
    run = Run("", Path(), Results.model_validate(content))
    found, reasoning = figures(run), run.results.reasoning
    if reasoning:
        # The section has these before and after training, by decoding.
        found = {name: value for name, value in found.items() if not name.startswith("accuracy, ")}
        found["gain in accuracy, sampled"] = found.pop("gain in accuracy")
        for when in ("before", "after"):
            for decoding, one in getattr(reasoning, when).items():
                found[f"accuracy {when}, {decoding}"] = estimate(one.accuracy)
    texts = {name: shown(value, name) for name, value in found.items()}
    rows = [{"figure": name, "value": text} for name, text in texts.items() if text != "-"]
    compared = "" if run.trains_reward_model else "; comparisons are with the base model"
    note = f"Measured on held-out data{compared}. Brackets hold 95% intervals."
    return render_table(Table("results", "Results", note, rows))
