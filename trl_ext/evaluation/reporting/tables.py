"""The tables of the report, shared by HTML, Markdown and the terminal, and the report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import Row, Task, by_task
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.files import markdown_line

MISTAKES_SHOWN = 10
NOT_EVALUATED = "These runs have no figures of held-out rows: their data has no held-out split, or none was asked for."
KL = "KL to the base (nats per response)"
# Decimals of figures that do not have three; whole numbers have none.
DECIMALS = {KL: 2, "KL to SFT (nats per response)": 2, "tokens": 1, "compression": 2, "margin": 2}
DECIMALS |= dict.fromkeys(("training (s)", "in all (s)"), 1)
# Column -> diagnostic.
DIAGNOSTICS = {
    "tokens": "mean_tokens",
    "distinct-1": "distinct_1",
    "distinct-2": "distinct_2",
    "unique tokens": "unique_token_ratio",
    "dominant token": "dominant_token_fraction",
    "repeated 4-grams": "repetition",
    "compression": "compression_ratio",
    "empty": "empty_fraction",
    "truncated": "truncated_fraction",
}


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
    policies, models = task.summary["policies"], task.summary["reward_models"]
    found = [
        _tasks(policies),
        _policies(policies),
        _reward_models(models),
        _settings([*policies, *models]),
        _diversity(task.policies),
        _kinds(task.policies),
        _mistakes(task.reward_models),
    ]
    return {table.name: table for table in found}


def faults(summary: Mapping[str, Sequence[Row]]) -> list[Table]:
    """Folders without results, and damaged files; they do not belong to a task."""
    incomplete = [{"run": row["run"], "why": row["reason"]} for row in summary["incomplete"]]
    says = "What cannot be read of the runs' files, and is not shown."
    return [
        Table("incomplete", "Incomplete", "These folders have no figures.", incomplete),
        Table("problems", "Problems", says, summary["problems"]),
    ]


def run_figures(row: Row) -> dict[str, Any]:
    """The figures of a policy, or of a reward model, by their titles."""
    if "score_gain" not in row:
        return {
            "accuracy": row["accuracy"],
            "n": row["accuracy"] and row["accuracy"].n,
            "accuracy, true order": row["true_accuracy"],
            "labels, true order": row["label_agreement"],
            "mean margin": row["margin"],
            "NLL (nats)": row["nll"],
            "Brier": row["brier"],
            "ECE": row["ece"],
        }
    half, agreed, kl = row["win_rate"]["half"], row["win_rate"]["agreed"], row["kl"]
    counted = (half, *row["accuracy"].values(), row["score_gain"], *row["rewards"].values(), kl)
    n = next((one.n for one in counted if one and one.n), None)
    return {
        "accuracy, sampled": row["accuracy"]["sampled"],
        "accuracy, greedy": row["accuracy"]["greedy"],
        "win rate, ties as half": half,
        "n": n,
        "win rate, ties dropped": agreed,
        "n without ties": agreed and agreed.n,
        "judge errors": row["judge_errors"] or None,
        f"gain in {row['score_name']}": row["score_gain"],
        KL: kl,
        "n of the KL": kl.n if kl and kl.n != n else None,
        "accuracy on held-out pairs": row["pair_accuracy"],
        "n pairs": row["pair_accuracy"] and row["pair_accuracy"].n,
        "tokens": row["tokens"]["policy"],
        "may be on the Pareto front": "; ".join(row["on_front"]),
        **{f"gain in {name}": gain for name, gain in row["rewards"].items()},
    }


def _tasks(rows: Sequence[Row]) -> Table:
    """One row per task, metric and run of `trl-ext evaluate` or lm-evaluation-harness."""
    metrics = dict.fromkeys((task, name) for row in rows for task, own in row["tasks"].items() for name in own)
    found = [
        {"metric": f"{task}: {name}", "run": row["run"], "model": row["model"], "figure": one, "n": one and one.n}
        for task, name in metrics
        for row in rows
        if name in row["tasks"].get(task, {})
        for one in [row["tasks"][task][name]]
    ]
    return Table("tasks", "Tasks", "Evaluations on tasks. Brackets hold 95% intervals.", found)


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
    if all(shown(value) == "-" for own in figures for value in own.values()):
        return Table(name, title, note, [])
    about = [{key: row[key] for key in ("run", "method", "seed")} for row in rows]
    return Table(name, title, note, [one | own for one, own in zip(about, figures, strict=True)])


def _settings(rows: Sequence[Row]) -> Table:
    """The settings and duration of each run."""
    names = ("run", "objective", "model", "data", "weights", "steps", "seed", "device", "processes")
    found = [
        {name: row[name] for name in names}
        | {"training (s)": row["training_seconds"], "in all (s)": row["total_seconds"]}
        for row in rows
    ]
    note = "Steps are the optimizer's; times are of the wall clock."
    return Table("settings", "Settings and times", note, found)


def _diversity(runs: Sequence[Run]) -> Table:
    """Length and diversity of each policy's responses and of its base's."""
    found = [
        {"run": run.label, "responses of": source}
        | {title: getattr(texts, name) for title, name in DIAGNOSTICS.items()}
        | {"collapsed": "yes" if texts.collapsed else "no"}
        for run in runs
        for source in ("policy", "base")
        if (texts := (run.results.generations or {}).get(source))
    ]
    note = "All but the last three change with length: compare at a common token limit."
    return Table("diversity", "Length and diversity of the responses", note, found)


def _kinds(runs: Sequence[Run]) -> Table:
    """The true score of each policy, over all prompts and by kind of prompt."""
    found = []
    for run in runs:
        score = run.results.score
        for kind, scores in ({"all prompts": score} | score.by_kind if score and score.by_kind else {}).items():
            about = {"run": run.label, "kind": kind}
            found.append({**about, "policy": scores.policy, "base": scores.base})
    title = f"{runs[0].score_name.capitalize() if runs else ''} by kind of prompt"
    return Table("kinds", title, "Means over the prompts of each kind.", found)


def _mistakes(runs: Sequence[Run]) -> Table:
    """The held-out pairs that each reward model ranks most clearly against their label."""
    found = [
        {
            "run": run.label,
            "margin": row.margin,
            "prompt": row.prompt_text,
            "chosen": row.chosen_text,
            "score of chosen": row.chosen_score,
            "rejected": row.rejected_text,
            "score of rejected": row.rejected_score,
        }
        for run in runs
        for row in sorted(run.mistakes, key=lambda row: row.margin)[:MISTAKES_SHOWN]
    ]
    note = f"Held-out pairs ranked against their label, the {MISTAKES_SHOWN} worst of each reward model."
    return Table("mistakes", "Worst mistakes of the reward models", note, found)


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
    text = [name for name in table.columns if any(isinstance(row.get(name), str) for row in table.rows)]
    rule = [":--" if name in text else "--:" for name in table.columns]
    rows = [table.columns, rule, *table.texts()]
    lines = ["| " + " | ".join(cells if cells is rule else map(markdown_line, cells)) + " |" for cells in rows]
    return "\n".join([f"{'#' * level} {table.title}", "", markdown_line(table.note), "", *lines])
