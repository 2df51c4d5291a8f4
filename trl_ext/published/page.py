"""One page of a published study: `python -m trl_ext.published.page NAME --out FILE`.

The report of the kept runs, with three parts before it: a table of the methods, curves with bands over seeds, and the
worst responses of each run. --docs also writes the table between two markers of a Markdown page.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy

from trl_ext import published
from trl_ext.evaluation.command_line import CommandParser, one_line_errors
from trl_ext.evaluation.methods.runs import MethodRun, metric_values, read_method_run
from trl_ext.evaluation.report import write_report
from trl_ext.evaluation.reporting.curves import HELD_OUT_TITLES, TRAINING_TITLES, Panel, panels
from trl_ext.evaluation.reporting.plots import curve_panels, save_panels
from trl_ext.evaluation.reporting.runs import Run, find_runs
from trl_ext.evaluation.reporting.summary import policy_row
from trl_ext.evaluation.reporting.tables import Cell, Table, count, estimate, figure, render_table
from trl_ext.evaluation.statistics.crossed import crossed_mean
from trl_ext.files import existing_file, write_text
from trl_ext.instructions.scoring import KEPT_IF_CUT

BEGIN, END = "<!-- {study}: rebuilt by trl_ext.published.page -->", "<!-- end of {study} -->"
# Curves of training that are drawn beside those of held-out prompts.
DRAWN = ("reward", "rewards/accuracies", "entropy")
CURVES_TITLE = "Learning curves: the mean over seeds, and the lowest and highest seed"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. It exits with code 2 and one line if there is no such study."""
    with one_line_errors():
        parser = CommandParser(prog="python -m trl_ext.published.page", description=__doc__)
        parser.add_argument("study", help="name of the study, such as smollm2-instructions")
        parser.add_argument("--out", default="results.html", help="HTML file, with others beside it (%(default)s)")
        parser.add_argument("--docs", metavar="FILE", help="Markdown page with the study's markers")
        given = parser.parse_args(arguments)
        print(", ".join(map(str, write_page(given.study, given.out, given.docs))))


def write_page(study: str, out: str | Path, docs: str | Path | None = None) -> list[Path]:
    """Write the page of a study, and its table into a page of the documentation; return the files.

    Raises:
        ValueError: there is no such study, or `docs` lacks its markers.
    """
    out = Path(out)
    folder = published.study_folder(study)
    if docs is not None:
        _parts(docs, study)
    runs, _ = find_runs([folder])
    policies = [run for run in runs if not run.trains_reward_model]
    table, picture = study_table(policies), out.with_suffix(".png")
    pictures = {}
    try:
        save_panels(banded_panels(policies), picture)
        pictures = {CURVES_TITLE: picture.read_bytes()} if picture.is_file() else {}
    except ImportError as error:
        print(f"{picture} was not drawn: {error}")
    write_report(folder, out, stages=[table, worst_table(policies)], pictures=pictures)
    written = [out, out.with_suffix(".md"), *([picture] if pictures else [])]
    if docs is not None:
        before, _, after = _parts(docs, study)
        write_text(docs, f"{before}\n\n{render_table(table, 3)}\n\n{after}")
        written.append(Path(docs))
    return written


def _parts(docs: str | Path, study: str) -> tuple[str, str, str]:
    """The text up to the first marker, between the markers, and from the second on."""
    begin, end = BEGIN.format(study=study), END.format(study=study)
    before, found, rest = existing_file(docs).read_text(encoding="utf-8").partition(begin)
    between, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{docs} lacks the lines {begin} and {end}, between which the table belongs")
    return before + begin, between, end + after


# ---- The table ----


def by_method(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """The runs by the method and the seed in their folder's name."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        method, seed = published.method_and_seed(run.folder)
        found.setdefault(method, {})[seed] = run
    return found


def study_table(runs: Sequence[Run]) -> Table:
    """One row for each method: its figures over seeds and prompts, and its cost."""
    rows = [_method_cells(method, own) for method, own in by_method(runs).items()]
    about, prompts = runs[0].results.run, max(cells["prompts"].value for cells in rows)
    commits = _kept(runs, "commit")
    note = (
        f"The model {about.model} on {about.dataset}, {prompts:.0f} held-out prompts. Gain is in score over the "
        "model before training. Brackets after gains and after the win rate hold 95% intervals over prompts and "
        "seeds; the others, the lowest and the highest seed. Cut is the share of responses that reached the token "
        f"limit. Hours are of one run with its evaluation.{f' Commit: {commits}.' if commits else ''}"
    )
    columns = [name for name in rows[0] if name != "prompts" and any(cells[name].text != "-" for cells in rows)]
    return Table("study", "Methods of the study", note, columns, [[cells[name] for name in columns] for cells in rows])


def _kept(runs: Sequence[Run], name: str) -> str:
    """What `trl_ext.published.keep` was told of the runs, each value once."""
    records = [run.results.model_extra.get("kept", {}) for run in runs]
    return ", ".join(sorted({str(record[name]) for record in records if record.get(name)}))


def _method_cells(method: str, runs: dict[int, Run]) -> dict[str, Cell]:
    found = [policy_row(run) for run in runs.values()]
    rows = [read_method_run(run.folder, method, seed) for seed, run in runs.items()]
    kl = [row["kl"]["value"] for row in found if row["kl"]]
    tokens = [row["tokens"]["policy"] for row in found if row["tokens"]["policy"] is not None]
    cut = [_share_cut(row.rows.values()) for row in rows]
    rate = rows[0].settings.get("learning_rate")
    hours = [row["total_seconds"] / 3600 for row in found if row["total_seconds"] is not None]
    return {
        "method": Cell(method),
        "learning rate": Cell("-" if rate is None else f"{rate:g}", rate),
        "steps": count(found[0]["steps"]),
        "seeds": Cell(", ".join(map(str, sorted(runs)))),
        "gain in score": _over_prompts_and_seeds(rows, "gain", -1.0),
        "gain, greedy": _over_prompts_and_seeds(rows, "gain_greedy", -1.0),
        "gain, cuts cost nothing": _over_prompts_and_seeds(rows, "gain_uncut", -1.0),
        "win rate, ties as half": _over_prompts_and_seeds(rows, "win_rate", 0.0),
        "KL (nats)": _over_seeds(kl, 2),
        "tokens": _over_seeds(tokens, 1),
        "cut": _over_seeds(cut, 2),
        "hours": figure(math.fsum(hours) / len(hours) if hours else None, 2),
        "hardware": Cell(_kept(list(runs.values()), "processor") or "-"),
        "prompts": count(len(rows[0].rows)),
    }


def _over_prompts_and_seeds(runs: Sequence[MethodRun], metric: str, lowest: float) -> Cell:
    """The mean of a metric, or of a gain in score, with its interval if there are several seeds."""
    for run in runs:
        halves = run.results.run.dataset == "instructions"
        for row in run.rows.values():
            if row.get("score") is not None and row.get("base_score") is not None:
                row["gain"] = row["score"] - row["base_score"]
                if "greedy_category" in row:
                    row["gain_greedy"] = _right(row, "") - _right(row, "base_")
                if halves and "base_finished" in row:
                    row["gain_uncut"] = _uncut(row, "") - _uncut(row, "base_")
    try:
        values, _ = metric_values(runs, metric)
    except ValueError:
        return Cell("-")
    found = asdict(crossed_mean(numpy.stack(list(values.values()), axis=1)))
    # With two seeds, an interval can reach beyond the possible values.
    ends = {name: float(numpy.clip(found[name], lowest, 1.0)) for name in ("low", "high") if found[name] is not None}
    return estimate({**found, **ends}, name="mean")


def _uncut(row: Mapping[str, Any], whose: str) -> float:
    """The score of `instructions`, had the response not lost a part of it for being cut."""
    return row[f"{whose}score"] / (1.0 if row[f"{whose}finished"] else KEPT_IF_CUT)


def _right(row: Mapping[str, Any], whose: str) -> float:
    """1 if the greedy answer to a problem is right, else 0."""
    return float(row[f"{whose}greedy_category"] == "correct")


def _share_cut(rows: Collection[Mapping[str, Any]]) -> float:
    return sum(not row.get("finished", True) for row in rows) / len(rows)


def _over_seeds(values: Sequence[float], digits: int) -> Cell:
    if not values:
        return Cell("-")
    low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
    return estimate({"value": math.fsum(values) / len(values), "low": low, "high": high}, digits)


# ---- Curves and responses ----


def banded_panels(runs: Sequence[Run]) -> list[Any]:
    """Functions that draw the curves of each method, with bands over its seeds."""
    titles = {*HELD_OUT_TITLES.values(), *(run.score_name for run in runs[:1])}
    drawn = tuple(TRAINING_TITLES[name] for name in DRAWN)
    found = [panel for panel in panels(runs) if panel.title in titles or panel.title.startswith(drawn)]
    return [draw for panel in found for draw in _banded(panel, by_method(runs))]


def _banded(panel: Panel, methods: dict[str, dict[int, Run]]) -> list[Any]:
    rows: dict[float, dict[str, Any]] = {}
    for method, runs in methods.items():
        at: dict[float, list[float]] = {}
        for run in runs.values():
            for step, _, value in panel.curves.get(run.label) or panel.held_out.get(run.label) or ():
                at.setdefault(step, []).append(value)
        for step, values in at.items():
            row = rows.setdefault(step, {"step": step})
            row[method] = math.fsum(values) / len(values)
            if len(runs) > 1:
                row |= {f"{method}_low": min(values), f"{method}_high": max(values)}
    ordered = [rows[step] for step in sorted(rows)]
    return curve_panels({panel.title: {method: method for method in methods}}, ordered)


def worst_table(runs: Sequence[Run]) -> Table:
    """The worst responses of each run, beside its base's."""
    columns = ["run", "gain", "prompt", "response", "response of the base"]
    rows = [
        [
            Cell(run.label),
            figure(None if None in (row.score, row.base_score) else row.score - row.base_score, 2),
            *(Cell(text or "(empty)", prose=True) for text in (row.prompt_text, row.response_text)),
            Cell(row.base_response_text or "(empty)", prose=True),
        ]
        for run in runs
        for row in run.generations
        if "worst" in row.model_extra
    ]
    note = (
        "The responses of each run with the lowest gain in score, among all held-out prompts. The browser below shows "
        "them too, and the responses to the first prompts by row_id, which were not chosen by their results."
    )
    return Table("worst", "Worst responses", note, columns, rows)


if __name__ == "__main__":
    main()
