"""The report's tables, which its HTML and its Markdown share: columns, cells as text, and the numbers they sort by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trl_ext.evaluation.reporting.curves import HELD_OUT_COLUMNS, held_out_rows, titled
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import DECIMALS, Row, trade_offs, with_wilson_interval
from trl_ext.evaluation.reporting.values import number, pick

MISTAKES_SHOWN = 10
NOTHING = "-"
NOT_EVALUATED = "These runs have no figures of held-out rows: their data has no held-out split, or none was asked for."
FRONT_RULE = (
    "A run may be on the Pareto front unless the intervals of another of the same model and data dominate its own: "
    "all of the other's 95% interval of the reward lies at or above the run's, and all of its interval of the KL at "
    "or below. The front of the figures takes the figures without their intervals. Both take figures as they are "
    "printed in the table: what is equal there is equal."
)


@dataclass(frozen=True)
class Cell:
    """What a cell says, and the number its column sorts by; None where it sorts by its text.

    `prose` marks text of models and data sets, which keeps its line breaks.
    """

    text: str
    value: float | None = None
    prose: bool = False


@dataclass(frozen=True)
class Table:
    """A table with a name for links, a title, a note on how to read it, and its cells."""

    name: str
    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Column:
    """A column that is left out where no row has anything in it."""

    title: str
    cell: Callable[[Row], Cell]


def figure(value: float | None, digits: int = 3) -> Cell:
    """A number with fixed decimals."""
    return Cell(NOTHING) if value is None else Cell(f"{value:.{digits}f}", value)


def estimate(value: Mapping[str, float | None] | None, digits: int = 3, *, name: str = "value") -> Cell:
    """A figure and, where it has one, its interval."""
    if value is None:
        return Cell(NOTHING)
    low, high = value["low"], value["high"]
    interval = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return Cell(f"{value[name]:.{digits}f}{interval}", value[name])


def count(value: float | None) -> Cell:
    """A whole number."""
    return Cell(NOTHING) if value is None else Cell(f"{value:.0f}", value)


def policy_table(rows: Sequence[Row]) -> Table:
    """One row per policy, with the figures by which policies are compared; no row where no policy has any."""
    known, shared = _identity(rows)
    columns = [
        Column("accuracy, sampled", lambda row: estimate(row["accuracy"]["sampled"])),
        Column("accuracy, greedy", lambda row: estimate(row["accuracy"]["greedy"])),
        Column("win rate, ties as half", lambda row: estimate(row["win_rate"]["half"])),
        Column("n", lambda row: count(_n(row["win_rate"]["half"]))),
        Column("win rate, ties dropped", lambda row: estimate(row["win_rate"]["agreed"])),
        Column("n without ties", lambda row: count(_n(row["win_rate"]["agreed"]))),
        Column("judge errors", lambda row: count(row["judge_errors"] or None)),
        Column(f"gain in {_score_name(rows)}", lambda row: estimate(row["score_gain"])),
        Column("gain in learned reward", _learned),
        Column("KL to the base (nats)", lambda row: estimate(row["kl"], 2)),
        Column("accuracy on held-out pairs", lambda row: estimate(row["pair_accuracy"])),
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
        Column("accuracy", lambda row: estimate(row["accuracy"])),
        Column("n", lambda row: count(_n(row["accuracy"]))),
        Column("accuracy, true order", lambda row: estimate(row["true_accuracy"])),
        Column("labels, true order", lambda row: figure(row["label_agreement"])),
        Column("mean margin", lambda row: figure(row["margin"])),
        Column("NLL (nats)", lambda row: figure(row["nll"])),
        Column("Brier", lambda row: figure(row["brier"])),
        Column("ECE", lambda row: figure(row["ece"])),
    ]
    note = (
        "On held-out pairs. Brackets hold 95% intervals, Wilson's. The true order is by a known quality of the "
        f"responses; the labels' share of it is what a model that reproduces the labels reaches.{shared}"
    )
    return _table("reward-models", "Reward models", note, columns, rows)


def settings_table(name: str, rows: Sequence[Row]) -> Table:
    """What was run, and how long it took."""
    columns = [
        Column("run", lambda row: Cell(row["run"])),
        Column("objective", lambda row: Cell(row["objective"] or NOTHING, prose=True)),
        Column("model", lambda row: Cell(row["model"] or NOTHING)),
        Column("data", lambda row: Cell(row["data"] or NOTHING)),
        Column("weights", lambda row: Cell(row.get("weights") or NOTHING)),
        Column("steps", lambda row: count(row["steps"])),
        Column("seed", lambda row: count(row["seed"])),
        Column("device", lambda row: Cell(row["device"] or NOTHING)),
        Column("processes", lambda row: count(row["processes"])),
        Column("training (s)", lambda row: figure(row["training_seconds"], 1)),
        Column("in all (s)", lambda row: figure(row["total_seconds"], 1)),
    ]
    note = "Steps are the optimizer's; times are of the wall clock."
    return _table(f"{name}-settings", f"Settings and times of the {name.replace('-', ' ')}", note, columns, rows)


def method_table(rows: Sequence[Row]) -> Table:
    """One row per method that was run with several seeds."""

    def spread(name: str, digits: int = 3) -> Callable[[Row], Cell]:
        return lambda row: estimate(row[name], digits, name="mean")

    columns = [
        Column("method", lambda row: Cell(row["method"])),
        Column("model", lambda row: Cell(row["model"] or NOTHING)),
        Column("data", lambda row: Cell(row["data"] or NOTHING)),
        Column("steps", lambda row: count(row["steps"])),
        Column("seeds", lambda row: count(len(row["runs"]))),
        Column("win rate, ties as half", spread("win_rate_half")),
        Column("win rate, ties dropped", spread("win_rate_agreed")),
        Column(f"gain in {_score_name(rows)}", spread("score_gain")),
        Column("KL to the base (nats)", spread("kl", 2)),
        Column("tokens", spread("tokens", 1)),
        Column("training (s)", spread("training_seconds", 1)),
    ]
    note = "Runs that differ only in their seed. The mean over seeds; brackets hold the lowest and the highest."
    return _table("methods", "Methods over seeds", note, columns, rows)


def trade_off_table(policies: Sequence[Row]) -> Table:
    """Reward against KL, one row per run and kind of reward, and whether it is on the Pareto front."""
    policy = {row["run"]: row for row in policies}
    rows = [
        {"what": name, **point, **{key: name in policy[point["run"]][key] for key in ("on_front", "on_point_front")}}
        for name, points in trade_offs(policies).items()
        for point in sorted(points, key=lambda point: point["kl"]["value"])
    ]
    columns = [
        Column("reward", lambda row: Cell(row["what"])),
        Column("run", lambda row: Cell(row["run"])),
        Column("KL to the base (nats)", lambda row: estimate(row["kl"], DECIMALS["kl"])),
        Column("figure", lambda row: estimate(row["reward"], DECIMALS["reward"])),
        Column("may be on the Pareto front", lambda row: _yes(row["on_front"])),
        Column("front of the figures", lambda row: _yes(row["on_point_front"])),
    ]
    return _table("trade-offs", "Reward against KL", FRONT_RULE, columns, rows)


def diversity_table(runs: Iterable[Run]) -> Table:
    """Length and diversity of each policy's responses and of its base's."""
    names = {
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
    rows = [
        {"run": run.label, "source": source, "figures": pick(run.results, "generations", source)}
        for run in runs
        for source in ("policy", "base")
        if isinstance(pick(run.results, "generations", source), dict)
    ]
    columns = [
        Column("run", lambda row: Cell(row["run"])),
        Column("responses of", lambda row: Cell(row["source"])),
        *(
            Column(title, lambda row, key=key, digits=digits: figure(number(row["figures"], key), digits))
            for title, (key, digits) in names.items()
        ),
        Column("collapsed", lambda row: Cell("yes" if pick(row["figures"], "collapsed") is True else "no")),
    ]
    note = "All but the last three change with length: compare at a common token limit."
    return _table("diversity", "Length and diversity of the responses", note, columns, rows)


def kind_table(runs: Iterable[Run]) -> Table:
    """The true score of each policy, of all prompts and by kind of prompt."""
    scored = [run for run in runs if number(run.results, "score", "policy") is not None or _kinds(run)]
    kinds = sorted({kind for run in scored for kind in _kinds(run)})

    def cell(scores: Any) -> Cell:
        policy, base = (number(scores, source) for source in ("policy", "base"))
        if policy is None:
            return Cell(NOTHING)
        return Cell(f"{policy:.3f}" if base is None else f"{policy:.3f} ({policy - base:+.3f})", policy)

    columns = [
        Column("run", lambda run: Cell(run.label)),
        Column("all prompts", lambda run: cell(pick(run.results, "score"))),
        *(Column(f"kind: {kind}", lambda run, kind=kind: cell(_kinds(run).get(kind))) for kind in kinds),
    ]
    note = "In parentheses the gain over the base."
    name = scored[0].score_name.capitalize() if kinds else ""
    return _table("kinds", f"{name} by kind of prompt", note, columns, scored if kinds else ())


def _kinds(run: Run) -> dict[str, Any]:
    kinds = pick(run.results, "score", "by_kind")
    return kinds if isinstance(kinds, dict) else {}


def held_out_table(runs: Iterable[Run]) -> Table:
    """What each policy's responses to held-out prompts were worth while it trained."""
    runs = list(runs)
    rows = [{"run": run.label, **row} for run in runs for row in held_out_rows(run.metrics)]
    columns = [
        Column("run", lambda row: Cell(row["run"])),
        Column("step", lambda row: count(row["step"])),
        Column("seconds", lambda row: figure(row["seconds"], 1)),
        *(Column(titled(key, runs), lambda row, key=key: figure(row[key])) for key in HELD_OUT_COLUMNS),
    ]
    note = "During training, on fewer prompts than the tables above; twelve evaluations of a run at most."
    return _table("held-out", "Held-out prompts over steps", note, columns, rows)


def reliability_table(runs: Iterable[Run]) -> Table:
    """The calibration bins of each reward model that hold pairs."""
    columns = [
        Column("run", lambda row: Cell(row["run"])),
        Column("from", lambda row: figure(number(row, "low"), 2)),
        Column("to", lambda row: figure(number(row, "high"), 2)),
        Column("pairs", lambda row: count(number(row, "n"))),
        Column("confidence", lambda row: figure(number(row, "confidence"))),
        Column("accuracy", lambda row: estimate(row["share"])),
    ]
    note = (
        "Confidence is max(p, 1 - p) of the preferred response; a calibrated model has it equal to the accuracy, of "
        "which brackets hold Wilson's 95% interval."
    )
    return _table("reliability", "Reliability of the reward models", note, columns, reliability_bins(runs))


def reliability_bins(runs: Iterable[Run]) -> list[Row]:
    """The calibration bins that hold pairs, each with the label of its `run` and its accuracy as an estimate."""
    return [
        {**row, "run": run.label, "share": _accuracy(row)}
        for run in runs
        for row in _dicts(pick(run.results, "pairs", "calibration"))
        if number(row, "n")
    ]


def _accuracy(row: Row) -> dict[str, float | None] | None:
    value = number(row, "accuracy")
    return None if value is None else with_wilson_interval({"value": value, "low": None, "high": None, "n": row["n"]})


def mistake_table(runs: Iterable[Run]) -> Table:
    """The held-out pairs that each reward model ranks most clearly against their label."""
    rows = [
        {**row, "run": run.label}
        for run in runs
        for row in sorted(run.mistakes, key=lambda row: row["margin"])[:MISTAKES_SHOWN]
    ]
    columns = [
        Column("run", lambda row: Cell(row["run"])),
        Column("margin", lambda row: figure(row["margin"], 2)),
        Column("prompt", lambda row: Cell(row["prompt_text"], prose=True)),
        Column("chosen", lambda row: Cell(row["chosen_text"], prose=True)),
        Column("score of chosen", lambda row: figure(number(row, "chosen_score"), 2)),
        Column("rejected", lambda row: Cell(row["rejected_text"], prose=True)),
        Column("score of rejected", lambda row: figure(number(row, "rejected_score"), 2)),
    ]
    note = f"Held-out pairs ranked against their label, the {MISTAKES_SHOWN} worst of each reward model."
    return _table("mistakes", "Worst mistakes of the reward models", note, columns, rows)


def incomplete_table(rows: Sequence[Row]) -> Table:
    """The folders that have no figures."""
    columns = [Column("run", lambda row: Cell(row["run"])), Column("why", lambda row: Cell(row["reason"]))]
    return _table("incomplete", "Incomplete", "These folders have no figures.", columns, rows)


def problem_table(rows: Sequence[Row]) -> Table:
    """What of the runs' files is damaged."""
    names = ("run", "file", "field", "problem")
    columns = [Column(name, lambda row, name=name: Cell(row[name] or NOTHING)) for name in names]
    note = "Fields of the runs' files that hold no usable value, and lines that cannot be read. Neither is shown."
    return _table("problems", "Problems", note, columns, rows)


def faults(summary: Mapping[str, Sequence[Row]]) -> list[Table]:
    """What no task has figures of: the folders without results, and what is damaged."""
    return [incomplete_table(summary["incomplete"]), problem_table(summary["problems"])]


def _table(name: str, title: str, note: str, columns: Sequence[Column], rows: Sequence[Any]) -> Table:
    cells = [[column.cell(row) for row in rows] for column in columns]
    # A figure that no run has would be a column of dashes.
    filled = [index for index, column in enumerate(cells) if any(cell.text != NOTHING for cell in column)]
    titles = [columns[index].title for index in filled]
    return Table(name, title, note, titles, [[cells[index][row] for index in filled] for row in range(len(rows))])


def _identity(rows: Sequence[Row]) -> tuple[list[Column], str]:
    """The columns that tell the runs apart, and sentences on what they share instead of columns that repeat it."""
    names = ("model", "data")
    shared = [name for name in names if rows and len({row[name] for row in rows}) == 1]
    columns = [
        Column("run", lambda row: Cell(row["run"])),
        Column("method", lambda row: Cell(row["method"])),
        *(Column(name, lambda row, name=name: Cell(row[name] or NOTHING)) for name in names if name not in shared),
        Column("seed", lambda row: count(row["seed"])),
    ]
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


def _n(value: Mapping[str, float | None] | None) -> float | None:
    return value and value["n"]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
