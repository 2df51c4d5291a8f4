"""The tables of the report, shared by HTML, Markdown and the terminal, and the report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trl_ext.evaluation.reporting.results import Scores
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import Row, Task, by_task
from trl_ext.files import markdown_line

MISTAKES_SHOWN = 10
NOTHING = "-"
NOT_EVALUATED = "These runs have no figures of held-out rows: their data has no held-out split, or none was asked for."
# Column -> diagnostic and its decimals.
_OF_RESPONSES = {
    "tokens": ("mean_tokens", 1),
    "distinct-1": ("distinct_1", 3),
    "distinct-2": ("distinct_2", 3),
    "unique tokens": ("unique_token_ratio", 3),
    "dominant token": ("dominant_token_fraction", 3),
    "repeated 4-grams": ("repetition", 3),
    "compression": ("compression_ratio", 2),
    "empty": ("empty_fraction", 3),
    "cut at the limit": ("truncated_fraction", 3),
}


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and the number by which its column sorts; None to sort by the text.

    `prose` marks text of models and datasets, whose line breaks are kept.
    """

    text: str
    value: float | None = None
    prose: bool = False


@dataclass(frozen=True)
class Table:
    """A table with a link name, a title, a note on how to read it, and its cells."""

    name: str
    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def figure(value: float | None, digits: int = 3) -> Cell:
    """A number with a fixed number of decimals."""
    return Cell(NOTHING) if value is None else Cell(f"{value:z.{digits}f}", value)


def count(value: float | None) -> Cell:
    """A whole number."""
    return figure(value, 0)


def estimate(value: Mapping[str, float | None] | None, digits: int = 3, *, name: str = "value") -> Cell:
    """A figure and its interval, if it has one."""
    if value is None:
        return Cell(NOTHING)
    low, high = value["low"], value["high"]
    interval = "" if low is None or high is None else f" [{low:z.{digits}f}, {high:z.{digits}f}]"
    return Cell(f"{value[name]:z.{digits}f}{interval}", value[name])


def task_tables(task: Task) -> dict[str, Table]:
    """The tables of a task by name, in their order in the Markdown; those without rows are empty."""
    policies, models = task.summary["policies"], task.summary["reward_models"]
    found = [
        _tasks(policies),
        _policies(policies),
        _settings("policies", policies),
        _diversity(task.policies),
        _kinds(task.policies),
        _reward_models(models),
        _settings("reward-models", models),
        _mistakes(task.reward_models),
    ]
    return {table.name: table for table in found}


def faults(summary: Mapping[str, Sequence[Row]]) -> list[Table]:
    """Folders without results, and damaged files; they do not belong to a task."""
    incomplete = [{"run": _text(row["run"]), "why": _text(row["reason"])} for row in summary["incomplete"]]
    problems = [{name: _text(row[name]) for name in ("run", "file", "problem")} for row in summary["problems"]]
    says = "What cannot be read of the runs' files, and is not shown."
    return [
        _table("incomplete", "Incomplete", "These folders have no figures.", incomplete),
        _table("problems", "Problems", says, problems),
    ]


def run_figures(row: Row) -> dict[str, Cell]:
    """The figures of a policy, or of a reward model, by their titles."""
    if "score_gain" not in row:
        return {
            "accuracy": estimate(row["accuracy"]),
            "n": count((row["accuracy"] or {}).get("n")),
            "accuracy, true order": estimate(row["true_accuracy"]),
            "labels, true order": figure(row["label_agreement"]),
            "mean margin": figure(row["margin"]),
            "NLL (nats)": figure(row["nll"]),
            "Brier": figure(row["brier"]),
            "ECE": figure(row["ece"]),
        }
    half, agreed = row["win_rate"]["half"], row["win_rate"]["agreed"]
    counts = (half, *row["accuracy"].values(), row["score_gain"], *row["rewards"].values(), row["kl"])
    n = next((one["n"] for one in counts if one and one.get("n")), None)
    of_kl = (row["kl"] or {}).get("n")
    learned = {name: estimate(gain) for name, gain in row["rewards"].items() if gain is not None}
    told = "; ".join(f"{name} {cell.text}" for name, cell in learned.items())
    return {
        "accuracy, sampled": estimate(row["accuracy"]["sampled"]),
        "accuracy, greedy": estimate(row["accuracy"]["greedy"]),
        "win rate, ties as half": estimate(half),
        "n": count(n),
        "win rate, ties dropped": estimate(agreed),
        "n without ties": count((agreed or {}).get("n")),
        "judge errors": count(row["judge_errors"] or None),
        f"gain in {row['score_name']}": estimate(row["score_gain"]),
        "gain in learned reward": Cell(told, next(iter(learned.values())).value) if learned else Cell(NOTHING),
        "KL to the base (nats per response)": estimate(row["kl"], 2),
        "n of the KL": count(of_kl if of_kl != n else None),
        "accuracy on held-out pairs": estimate(row["pair_accuracy"]),
        "n pairs": count((row["pair_accuracy"] or {}).get("n")),
        "tokens": figure(row["tokens"]["policy"], 1),
        "may be on the Pareto front": _text("; ".join(row["on_front"]), prose=True),
    }


def _tasks(rows: Sequence[Row]) -> Table:
    """One row per task, metric and run of `trl-ext evaluate` or lm-evaluation-harness."""
    metrics = dict.fromkeys((task, name) for row in rows for task, own in row["tasks"].items() for name in own)
    cells = [
        {
            "metric": _text(f"{task}: {name}"),
            "run": _text(row["run"]),
            "model": _text(row["model"]),
            "figure": estimate(row["tasks"][task][name]),
            "n": count((row["tasks"][task][name] or {}).get("n")),
        }
        for task, name in metrics
        for row in rows
        if name in row["tasks"].get(task, {})
    ]
    return _table("tasks", "Tasks", "Evaluations on tasks. Brackets hold 95% intervals.", cells)


def _policies(rows: Sequence[Row]) -> Table:
    """One row per policy, with the figures for comparing policies; empty if no policy has any."""
    note = "Of the responses to held-out prompts, against each run's base; brackets hold 95% intervals. "
    note += "Tokens are the mean length."
    if any(row["win_rate"]["agreed"] for row in rows):
        note += " The win rate with ties dropped is over the prompts on which both orders prefer the same model."
    for row in rows:
        if row["identical"]:
            note += f" All {row['identical']} responses of {row['run']} are identical to its base's."
    return _of_runs("policies", "Policies", note, rows)


def _reward_models(rows: Sequence[Row]) -> Table:
    """One row per reward model."""
    note = (
        "On held-out pairs. Brackets hold 95% intervals, Wilson's. The true order is by a known quality of the "
        "responses; the labels' share of it is what a model that reproduces the labels reaches."
    )
    return _of_runs("reward-models", "Reward models", note, rows)


def _of_runs(name: str, title: str, note: str, rows: Sequence[Row]) -> Table:
    """The figures of each run; empty if no run has any."""
    figures = [run_figures(row) for row in rows]
    if all(cell.text == NOTHING for cells in figures for cell in cells.values()):
        return _table(name, "", "", [])
    about = [{**{key: _text(row[key]) for key in ("run", "method")}, "seed": count(row["seed"])} for row in rows]
    return _table(name, title, note, [one | cells for one, cells in zip(about, figures, strict=True)])


def _settings(name: str, rows: Sequence[Row]) -> Table:
    """The settings and duration of each run."""
    cells = [
        {
            "run": _text(row["run"]),
            "objective": _text(row["objective"], prose=True),
            **{key: _text(row.get(key)) for key in ("model", "data", "weights")},
            "steps": count(row["steps"]),
            "seed": count(row["seed"]),
            "device": _text(row["device"]),
            "processes": count(row["processes"]),
            "training (s)": figure(row["training_seconds"], 1),
            "in all (s)": figure(row["total_seconds"], 1),
        }
        for row in rows
    ]
    note = "Steps are the optimizer's; times are of the wall clock."
    return _table(f"{name}-settings", f"Settings and times of the {name.replace('-', ' ')}", note, cells)


def _diversity(runs: Sequence[Run]) -> Table:
    """Length and diversity of each policy's responses and of its base's."""
    cells = [
        {
            "run": _text(run.label),
            "responses of": _text(source),
            **{title: figure(getattr(found, key), digits) for title, (key, digits) in _OF_RESPONSES.items()},
            "collapsed": _text("yes" if found.collapsed else "no"),
        }
        for run in runs
        for source in ("policy", "base")
        if (found := (run.results.generations or {}).get(source))
    ]
    note = "All but the last three change with length: compare at a common token limit."
    return _table("diversity", "Length and diversity of the responses", note, cells)


def _kinds(runs: Sequence[Run]) -> Table:
    """The true score of each policy, over all prompts and by kind of prompt."""
    scored = [(run, run.results.score) for run in runs if run.results.score is not None]
    kinds = sorted({kind for _, score in scored for kind in score.by_kind})

    def cell(scores: Scores | None) -> Cell:
        if scores is None or scores.policy is None:
            return Cell(NOTHING)
        gain = "" if scores.base is None else f" ({scores.policy - scores.base:+.3f})"
        return Cell(f"{scores.policy:.3f}{gain}", scores.policy)

    cells = [
        {"run": _text(run.label), "all prompts": cell(score)}
        | {f"kind: {kind}": cell(score.by_kind.get(kind)) for kind in kinds}
        for run, score in scored
        if kinds
    ]
    title = f"{runs[0].score_name.capitalize() if runs else ''} by kind of prompt"
    return _table("kinds", title, "In parentheses the gain over the base.", cells)


def _mistakes(runs: Sequence[Run]) -> Table:
    """The held-out pairs that each reward model ranks most clearly against their label."""
    cells = [
        {
            "run": _text(run.label),
            "margin": figure(row.margin, 2),
            "prompt": _text(row.prompt_text, prose=True),
            "chosen": _text(row.chosen_text, prose=True),
            "score of chosen": figure(row.chosen_score, 2),
            "rejected": _text(row.rejected_text, prose=True),
            "score of rejected": figure(row.rejected_score, 2),
        }
        for run in runs
        for row in sorted(run.mistakes, key=lambda row: row.margin)[:MISTAKES_SHOWN]
    ]
    note = f"Held-out pairs ranked against their label, the {MISTAKES_SHOWN} worst of each reward model."
    return _table("mistakes", "Worst mistakes of the reward models", note, cells)


def _text(text: str | None, *, prose: bool = False) -> Cell:
    return Cell(text or NOTHING, prose=prose)


def _table(name: str, title: str, note: str, rows: Sequence[Mapping[str, Cell]]) -> Table:
    """A table of rows of cells by column; a figure that no run has would give a column of dashes, and is left out."""
    columns = [column for column in (rows[0] if rows else ()) if any(row[column].text != NOTHING for row in rows)]
    return Table(name, title, note, columns, [[row[column] for column in columns] for row in rows])


# ---- Markdown ----


def render_markdown(runs: Sequence[Run], summary: dict[str, list[Row]], stages: Sequence[Table] = ()) -> str:
    """The Markdown of the report; additional tables come first, followed by those of each task."""
    parts = [f"# Report of {len(runs)} run{'s' if len(runs) > 1 else ''}", *map(render_table, stages)]
    for task in by_task(summary, runs):
        parts += [f"## {markdown_line(task.title)}"] * bool(task.end)
        parts += [render_table(table, 3 if task.end else 2) for table in task_tables(task).values()]
    parts += [render_table(table) for table in faults(summary)]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_table(table: Table, level: int = 2) -> str:
    """A table under its heading; empty if it has no rows."""
    if not table.rows:
        return ""
    rows = [[markdown_line(cell.text) for cell in row] for row in table.rows]
    head = [markdown_line(name) for name in table.columns]
    columns = zip(*table.rows, strict=True)
    rule = ["--:" if any(cell.value is not None for cell in column) else ":--" for column in columns]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]
    return "\n".join([f"{'#' * level} {table.title}", "", markdown_line(table.note), "", *lines])
