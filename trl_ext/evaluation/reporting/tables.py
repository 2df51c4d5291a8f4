"""The tables of the report, shared by HTML and Markdown, and the report as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trl_ext.evaluation.reporting.results import Scores
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import DECIMALS, Row, by_task, trade_offs
from trl_ext.evaluation.statistics.intervals import wilson_interval
from trl_ext.files import markdown_line

MISTAKES_SHOWN = 10
NOTHING = "-"
NOT_EVALUATED = "These runs have no figures of held-out rows: their data has no held-out split, or none was asked for."
FRONT_RULE = (
    "A run may be on the Pareto front unless the intervals of another run of the same model and data dominate its "
    "own: the other's 95% interval of the reward lies entirely at or above the run's, and its interval of the KL "
    "entirely at or below. The front of the figures ignores the intervals. Both compare figures as the table prints "
    "them."
)
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


@dataclass(frozen=True)
class Column:
    """A column that is omitted if all its cells are empty."""

    title: str
    cell: Callable[[Any], Cell]


def figure(value: float | None, digits: int = 3) -> Cell:
    """A number with a fixed number of decimals."""
    return Cell(NOTHING) if value is None else Cell(f"{value:.{digits}f}", value)


def estimate(value: Mapping[str, float | None] | None, digits: int = 3, *, name: str = "value") -> Cell:
    """A figure and its interval, if it has one."""
    if value is None:
        return Cell(NOTHING)
    low, high = value["low"], value["high"]
    interval = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return Cell(f"{value[name]:.{digits}f}{interval}", value[name])


def count(value: float | None) -> Cell:
    """A whole number."""
    return figure(value, 0)


def _text(title: str, name: str, *, prose: bool = False) -> Column:
    return Column(title, lambda row: Cell(row.get(name) or NOTHING, prose=prose))


def _number(title: str, name: str, digits: int = 3) -> Column:
    return Column(title, lambda row: figure(row[name], digits))


def _estimate(title: str, name: str, digits: int = 3, *, of: str = "value") -> Column:
    return Column(title, lambda row: estimate(row[name], digits, name=of))


def _n(title: str, value: Callable[[Row], Mapping[str, float | None] | None]) -> Column:
    return Column(title, lambda row: count((value(row) or {}).get("n")))


def policy_table(rows: Sequence[Row]) -> Table:
    """One row per policy, with the figures for comparing policies; empty if no policy has any."""
    known, shared = _identity(rows)
    columns = [
        Column("accuracy, sampled", lambda row: estimate(row["accuracy"]["sampled"])),
        Column("accuracy, greedy", lambda row: estimate(row["accuracy"]["greedy"])),
        Column("win rate, ties as half", lambda row: estimate(row["win_rate"]["half"])),
        _n("n", lambda row: row["win_rate"]["half"]),
        Column("win rate, ties dropped", lambda row: estimate(row["win_rate"]["agreed"])),
        _n("n without ties", lambda row: row["win_rate"]["agreed"]),
        Column("judge errors", lambda row: count(row["judge_errors"] or None)),
        _estimate(f"gain in {_score_name(rows)}", "score_gain"),
        Column("gain in learned reward", _learned),
        _estimate("KL to the base (nats)", "kl", 2),
        _estimate("accuracy on held-out pairs", "pair_accuracy"),
        Column("tokens", lambda row: figure(row["tokens"]["policy"], 1)),
    ]
    note = "Of the responses to held-out prompts, against each run's base; brackets hold 95% intervals. "
    if any(row["kl"] for row in rows):
        note += "KL is per response. "
    note += "Tokens are the mean length."
    if any(row["win_rate"]["agreed"] for row in rows):
        note += " The win rate with ties dropped is over the prompts on which both orders prefer the same model."
    found = _table("policies", "Policies", note + shared, [*known, *columns], rows)
    return found if set(found.columns) & {column.title for column in columns} else replace(found, rows=())


def reward_model_table(rows: Sequence[Row]) -> Table:
    """One row per reward model."""
    columns, shared = _identity(rows)
    columns += [
        _estimate("accuracy", "accuracy"),
        _n("n", lambda row: row["accuracy"]),
        _estimate("accuracy, true order", "true_accuracy"),
        _number("labels, true order", "label_agreement"),
        _number("mean margin", "margin"),
        _number("NLL (nats)", "nll"),
        _number("Brier", "brier"),
        _number("ECE", "ece"),
    ]
    note = (
        "On held-out pairs. Brackets hold 95% intervals, Wilson's. The true order is by a known quality of the "
        f"responses; the labels' share of it is what a model that reproduces the labels reaches.{shared}"
    )
    return _table("reward-models", "Reward models", note, columns, rows)


def settings_table(name: str, rows: Sequence[Row]) -> Table:
    """The settings and duration of each run."""
    columns = [
        _text("run", "run"),
        _text("objective", "objective", prose=True),
        *(_text(title, title) for title in ("model", "data", "weights")),
        _number("steps", "steps", 0),
        _number("seed", "seed", 0),
        _text("device", "device"),
        _number("processes", "processes", 0),
        _number("training (s)", "training_seconds", 1),
        _number("in all (s)", "total_seconds", 1),
    ]
    note = "Steps are the optimizer's; times are of the wall clock."
    return _table(f"{name}-settings", f"Settings and times of the {name.replace('-', ' ')}", note, columns, rows)


def method_table(rows: Sequence[Row]) -> Table:
    """One row per method that was run with several seeds."""
    columns = [
        *(_text(title, title) for title in ("method", "model", "data")),
        _number("steps", "steps", 0),
        Column("seeds", lambda row: count(len(row["runs"]))),
        _estimate("win rate, ties as half", "win_rate_half", of="mean"),
        _estimate("win rate, ties dropped", "win_rate_agreed", of="mean"),
        _estimate(f"gain in {_score_name(rows)}", "score_gain", of="mean"),
        _estimate("KL to the base (nats)", "kl", 2, of="mean"),
        _estimate("tokens", "tokens", 1, of="mean"),
        _estimate("training (s)", "training_seconds", 1, of="mean"),
    ]
    note = "Runs that differ only in their seed. The mean over seeds; brackets hold the lowest and the highest."
    return _table("methods", "Methods over seeds", note, columns, rows)


def trade_off_table(policies: Sequence[Row]) -> Table:
    """Reward against KL, one row per run and kind of reward, and whether it is on the Pareto front."""
    fronts = {row["run"]: row for row in policies}
    rows = [
        {"what": name, **point, **{key: name in fronts[point["run"]][key] for key in ("on_front", "on_point_front")}}
        for name, points in trade_offs(policies).items()
        for point in sorted(points, key=lambda point: point["kl"]["value"])
    ]
    columns = [
        _text("reward", "what"),
        _text("run", "run"),
        _estimate("KL to the base (nats)", "kl", DECIMALS["kl"]),
        _estimate("figure", "reward", DECIMALS["reward"]),
        Column("may be on the Pareto front", lambda row: _yes(row["on_front"])),
        Column("front of the figures", lambda row: _yes(row["on_point_front"])),
    ]
    return _table("trade-offs", "Reward against KL", FRONT_RULE, columns, rows)


def diversity_table(runs: Iterable[Run]) -> Table:
    """Length and diversity of each policy's responses and of its base's."""
    rows = [
        {"run": run.label, "source": source, **dict(run.results.generations[source])}
        for run in runs
        for source in ("policy", "base")
        if source in (run.results.generations or {})
    ]
    columns = [
        _text("run", "run"),
        _text("responses of", "source"),
        *(_number(title, name, digits) for title, (name, digits) in _OF_RESPONSES.items()),
        Column("collapsed", lambda row: Cell("yes" if row["collapsed"] else "no")),
    ]
    note = "All but the last three change with length: compare at a common token limit."
    return _table("diversity", "Length and diversity of the responses", note, columns, rows)


def kind_table(runs: Iterable[Run]) -> Table:
    """The true score of each policy, over all prompts and by kind of prompt."""
    scored = [run for run in runs if run.results.score is not None]
    kinds = sorted({kind for run in scored for kind in run.results.score.by_kind})

    def cell(scores: Scores | None) -> Cell:
        if scores is None or scores.policy is None:
            return Cell(NOTHING)
        gain = "" if scores.base is None else f" ({scores.policy - scores.base:+.3f})"
        return Cell(f"{scores.policy:.3f}{gain}", scores.policy)

    columns = [
        Column("run", lambda run: Cell(run.label)),
        Column("all prompts", lambda run: cell(run.results.score)),
        *(Column(f"kind: {kind}", lambda run, kind=kind: cell(run.results.score.by_kind.get(kind))) for kind in kinds),
    ]
    note = "In parentheses the gain over the base."
    name = scored[0].score_name.capitalize() if kinds else ""
    return _table("kinds", f"{name} by kind of prompt", note, columns, scored if kinds else ())


def reliability_bins(run: Run) -> list[Row]:
    """The calibration bins that contain pairs, each with its accuracy as an estimate."""
    rows = []
    for one in run.results.pairs.calibration if run.results.pairs else ():
        if one.n and one.accuracy is not None and one.confidence is not None:
            low, high = wilson_interval(one.accuracy * one.n, one.n)
            accuracy = {"value": one.accuracy, "low": low, "high": high, "n": one.n}
            rows.append({**dict(one), "accuracy": accuracy})
    return rows


def mistake_table(runs: Iterable[Run]) -> Table:
    """The held-out pairs that each reward model ranks most clearly against their label."""
    rows = [
        {"run": run.label, **dict(row)}
        for run in runs
        for row in sorted(run.mistakes, key=lambda row: row.margin)[:MISTAKES_SHOWN]
    ]
    columns = [
        _text("run", "run"),
        _number("margin", "margin", 2),
        _text("prompt", "prompt_text", prose=True),
        _text("chosen", "chosen_text", prose=True),
        _number("score of chosen", "chosen_score", 2),
        _text("rejected", "rejected_text", prose=True),
        _number("score of rejected", "rejected_score", 2),
    ]
    note = f"Held-out pairs ranked against their label, the {MISTAKES_SHOWN} worst of each reward model."
    return _table("mistakes", "Worst mistakes of the reward models", note, columns, rows)


def faults(summary: Mapping[str, Sequence[Row]]) -> list[Table]:
    """Folders without results, and damaged files; they do not belong to a task."""
    incomplete = [_text("run", "run"), _text("why", "reason")]
    problems = [_text(name, name) for name in ("run", "file", "problem")]
    says = "What cannot be read of the runs' files, and is not shown."
    return [
        _table("incomplete", "Incomplete", "These folders have no figures.", incomplete, summary["incomplete"]),
        _table("problems", "Problems", says, problems, summary["problems"]),
    ]


def _table(name: str, title: str, note: str, columns: Sequence[Column], rows: Sequence[Any]) -> Table:
    cells = [[column.cell(row) for row in rows] for column in columns]
    # A figure that no run has would give a column of dashes.
    filled = [index for index, column in enumerate(cells) if any(cell.text != NOTHING for cell in column)]
    titles = [columns[index].title for index in filled]
    return Table(name, title, note, titles, [[cells[index][row] for index in filled] for row in range(len(rows))])


def _identity(rows: Sequence[Row]) -> tuple[list[Column], str]:
    """The columns that distinguish the runs, and sentences on what they share, in place of constant columns."""
    names = ("model", "data")
    shared = [name for name in names if rows and len({row[name] for row in rows}) == 1]
    own = [name for name in names if name not in shared]
    columns = [*(_text(name, name) for name in ("run", "method", *own)), _number("seed", "seed", 0)]
    return columns, "".join(f" The {name} is {rows[0][name]}." for name in shared if rows[0][name])


def _score_name(rows: Sequence[Row]) -> str:
    return rows[0]["score_name"] if rows else ""


def _yes(value: bool) -> Cell:
    return Cell("yes" if value else "no", float(value))


def _learned(row: Row) -> Cell:
    gains = {name: estimate(gain) for name, gain in row["rewards"].items() if gain is not None}
    if not gains:
        return Cell(NOTHING)
    return Cell("; ".join(f"{name} {cell.text}" for name, cell in gains.items()), next(iter(gains.values())).value)


# ---- Markdown ----


def render_markdown(runs: Sequence[Run], summary: dict[str, list[Row]], stages: Sequence[Table] = ()) -> str:
    """The Markdown of the report; additional tables come first, followed by those of each task."""
    parts = [f"# Report of {len(runs)} run{'s' if len(runs) > 1 else ''}", *map(render_table, stages)]
    for task in by_task(summary, runs):
        found = [
            policy_table(task.summary["policies"]),
            settings_table("policies", task.summary["policies"]),
            method_table(task.summary["methods"]),
            trade_off_table(task.summary["policies"]),
            diversity_table(task.policies),
            kind_table(task.policies),
            reward_model_table(task.summary["reward_models"]),
            settings_table("reward-models", task.summary["reward_models"]),
            mistake_table(task.reward_models),
        ]
        parts += [f"## {markdown_line(task.title)}"] * bool(task.end)
        parts += [render_table(table, 3 if task.end else 2) for table in found]
    parts += [render_table(table) for table in faults(summary)]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_table(table: Table, level: int = 2) -> str:
    """A table under its heading; empty if it has no rows."""
    if not table.rows:
        return ""
    rows = [[markdown_line(cell.text) for cell in row] for row in table.rows]
    head = [markdown_line(name) for name in table.columns]
    numbers = [any(row[index].value is not None for row in table.rows) for index in range(len(head))]
    rule = ["--:" if number else ":--" for number in numbers]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]
    return "\n".join([f"{'#' * level} {table.title}", "", markdown_line(table.note), "", *lines])
