"""The report's tables, which its HTML and its Markdown share: columns, cells as text, and the numbers they sort by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.reporting.curves import HELD_OUT_COLUMNS, held_out_rows
from trl_ext.evaluation.reporting.runs import Run, number, pick
from trl_ext.evaluation.reporting.summary import Row, trade_offs

MISTAKES_SHOWN = 10
NOTHING = "-"


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
    """One row per policy."""
    columns = [
        *_identity(),
        Column("win rate, ties as half", lambda row: estimate(row["win_rate"]["half"])),
        Column("n", lambda row: count(_n(row["win_rate"]["half"]))),
        Column("win rate, ties dropped", lambda row: estimate(row["win_rate"]["agreed"])),
        Column("n without ties", lambda row: count(_n(row["win_rate"]["agreed"]))),
        Column("judge errors", lambda row: count(row["judge_errors"] or None)),
        Column("true score", lambda row: figure(row["score"]["policy"])),
        Column("gain in true score", lambda row: estimate(row["score_gain"])),
        Column("gain in learned reward", _learned),
        Column("KL to the base (nats)", lambda row: estimate(row["kl"], 2)),
        Column("accuracy on held-out pairs", lambda row: estimate(row["pair_accuracy"])),
        Column("tokens", lambda row: figure(row["tokens"]["policy"], 1)),
        Column("tokens, base", lambda row: figure(row["tokens"]["base"], 1)),
        *_times(),
    ]
    note = (
        "Of the responses to held-out prompts, against each run's base; brackets hold 95% intervals. KL is per "
        "response. The win rate with ties dropped is over the prompts on which both orders prefer the same model."
    )
    return _table("policies", "Policies", note, columns, rows)


def reward_model_table(rows: Sequence[Row]) -> Table:
    """One row per reward model."""
    columns = [
        *_identity(),
        Column("weights", lambda row: Cell(row["weights"] or NOTHING)),
        Column("accuracy", lambda row: estimate(row["accuracy"])),
        Column("n", lambda row: count(_n(row["accuracy"]))),
        Column("accuracy, true order", lambda row: estimate(row["true_accuracy"])),
        Column("labels, true order", lambda row: figure(row["label_agreement"])),
        Column("mean margin", lambda row: figure(row["margin"])),
        Column("NLL", lambda row: figure(row["nll"])),
        Column("Brier", lambda row: figure(row["brier"])),
        Column("ECE", lambda row: figure(row["ece"])),
        *_times(),
    ]
    note = (
        "On held-out pairs. Brackets hold 95% intervals. The true order is by a known quality of the responses; the "
        "labels' share of it is what a model that reproduces the labels reaches."
    )
    return _table("reward-models", "Reward models", note, columns, rows)


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
        Column("gain in true score", spread("score_gain")),
        Column("KL to the base (nats)", spread("kl", 2)),
        Column("tokens", spread("tokens", 1)),
        Column("training (s)", spread("training_seconds", 1)),
    ]
    note = "Runs that differ only in their seed. The mean over seeds; brackets hold the lowest and the highest."
    return _table("methods", "Methods over seeds", note, columns, rows)


def trade_off_table(policies: Sequence[Row]) -> Table:
    """Reward against KL, one row per run and kind of reward, and whether it is on the Pareto front."""
    fronts = {row["run"]: row["on_front"] for row in policies}
    rows = [
        {"what": name, **point, "front": name in fronts[point["run"]]}
        for name, points in trade_offs(policies).items()
        for point in sorted(points, key=lambda point: point["kl"]["value"])
    ]
    columns = [
        Column("reward", lambda row: Cell(row["what"])),
        Column("run", lambda row: Cell(row["run"])),
        Column("KL to the base (nats)", lambda row: estimate(row["kl"], 2)),
        Column("figure", lambda row: estimate(row["reward"])),
        Column("Pareto front", lambda row: Cell("yes" if row["front"] else NOTHING, float(row["front"]))),
    ]
    note = "On the front: no run of the same model and data has at least this reward at no more KL, and more of one."
    return _table("trade-offs", "Reward against KL", note, columns, rows)


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
    """The true score by kind of prompt, one row per kind and one column per run."""
    scored = {run.label: pick(run.results, "score", "by_kind") for run in runs}
    scored = {label: kinds for label, kinds in scored.items() if isinstance(kinds, dict) and kinds}
    rows = [{"kind": kind} for kind in sorted({kind for kinds in scored.values() for kind in kinds})]

    def gain(label: str) -> Callable[[Row], Cell]:
        def cell(row: Row) -> Cell:
            policy, base = (number(scored[label], row["kind"], source) for source in ("policy", "base"))
            if policy is None:
                return Cell(NOTHING)
            return Cell(f"{policy:.3f}" if base is None else f"{policy:.3f} ({policy - base:+.3f})", policy)

        return cell

    columns = [Column("kind", lambda row: Cell(row["kind"])), *(Column(label, gain(label)) for label in scored)]
    return _table("kinds", "True score by kind of prompt", "In parentheses the gain over the base.", columns, rows)


def held_out_table(runs: Iterable[Run]) -> Table:
    """What each policy's responses to held-out prompts were worth while it trained."""
    rows = [{"run": run.label, **row} for run in runs for row in held_out_rows(run.metrics)]
    columns = [
        Column("run", lambda row: Cell(row["run"])),
        Column("step", lambda row: count(row["step"])),
        Column("seconds", lambda row: figure(row["seconds"], 1)),
        *(Column(title, lambda row, key=key: figure(row[key])) for key, title in HELD_OUT_COLUMNS.items()),
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
        Column("accuracy", lambda row: figure(number(row, "accuracy"))),
    ]
    note = "Confidence is max(p, 1 - p) of the preferred response; a calibrated model has it equal to the accuracy."
    return _table("reliability", "Reliability of the reward models", note, columns, reliability_bins(runs))


def reliability_bins(runs: Iterable[Run]) -> list[Row]:
    """The calibration bins that hold pairs, each with the label of its `run`."""
    return [
        {**row, "run": run.label}
        for run in runs
        for row in _dicts(pick(run.results, "pairs", "calibration"))
        if number(row, "n")
    ]


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


def _table(name: str, title: str, note: str, columns: Sequence[Column], rows: Sequence[Any]) -> Table:
    cells = [[column.cell(row) for row in rows] for column in columns]
    # A figure that no run has would be a column of dashes.
    filled = [index for index, column in enumerate(cells) if any(cell.text != NOTHING for cell in column)]
    titles = [columns[index].title for index in filled]
    return Table(name, title, note, titles, [[cells[index][row] for index in filled] for row in range(len(rows))])


def _identity() -> list[Column]:
    return [
        Column("run", lambda row: Cell(row["run"])),
        Column("method", lambda row: Cell(row["method"])),
        Column("model", lambda row: Cell(row["model"] or NOTHING)),
        Column("data", lambda row: Cell(row["data"] or NOTHING)),
        Column("steps", lambda row: count(row["steps"])),
        Column("seed", lambda row: count(row["seed"])),
    ]


def _times() -> list[Column]:
    return [
        Column("training (s)", lambda row: figure(row["training_seconds"], 1)),
        Column("in all (s)", lambda row: figure(row["total_seconds"], 1)),
    ]


def _learned(row: Row) -> Cell:
    gains = {name: estimate(gain) for name, gain in row["rewards"].items() if gain is not None}
    if not gains:
        return Cell(NOTHING)
    return Cell("; ".join(f"{name} {cell.text}" for name, cell in gains.items()), next(iter(gains.values())).value)


def _n(value: Mapping[str, float | None] | None) -> float | None:
    return value and value["n"]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
