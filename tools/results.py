"""Results of finished runs, in docs/results: rebuild the tables of docs/results.md, or write the runs as folders.

    python tools/results.py
    python tools/results.py --unpack runs/published

A study is four files: `runs.jsonl` (results and configuration of each run), `metrics.jsonl`, `prompts.jsonl` (scores
and lengths of every held-out prompt) and `generations.jsonl` (the responses to ten prompts). Every row names its run,
`{method}-{seed}`. `recipes/compare.py --runs` and `trl-ext report` read the unpacked folders.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import yaml

from trl_ext.evaluation.statistics.crossed import crossed_mean
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.statistics.win_rate import OUTCOME_VALUES
from trl_ext.instructions.scoring import KEPT_IF_CUT

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
DATA = PAGE.parent / "results"
BEGIN, END = "<!-- {study}: rebuilt by tools/results.py -->", "<!-- end of {study} -->"
NONE = "-"
Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--unpack", metavar="FOLDER", type=Path, help="write each study's runs as folders into this one"
    )
    given = parser.parse_args()
    for folder in sorted(path for path in DATA.iterdir() if path.is_dir()):
        if given.unpack:
            unpack(folder, given.unpack / folder.name)
            print(given.unpack / folder.name)
        else:
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), folder), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def unpack(study: Path, folder: Path) -> None:
    """Write the runs of a study as folders `{method}-{seed}`, with the texts of ten responses each."""
    for run in read(study / "runs.jsonl"):
        place = folder / run["run"]
        place.mkdir(parents=True, exist_ok=True)
        (place / "results.json").write_text(json.dumps(run["results"]), encoding="utf-8")
        (place / "config.yaml").write_text(yaml.safe_dump(run["config"], sort_keys=False), encoding="utf-8")
    texts = {(row["run"], row["row_id"]): row for row in read(study / "generations.jsonl")}
    for name, rows in (
        ("metrics", read(study / "metrics.jsonl")),
        (
            "generations",
            [{**row, **texts.get((row["run"], row["row_id"]), {})} for row in read(study / "prompts.jsonl")],
        ),
    ):
        for run, own in _by(rows, "run").items():
            lines = (json.dumps({key: value for key, value in row.items() if key != "run"}) for row in own)
            (folder / run / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _by(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


# ---- The table ----


def with_table(page: str, study: Path) -> str:
    """The page with the table of a study between its two markers.

    Raises:
        ValueError: the page lacks them.
    """
    begin, end = BEGIN.format(study=study.name), END.format(study=study.name)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{PAGE} lacks the lines {begin} and {end}, between which the table belongs")
    return f"{before}{begin}\n\n{render(study)}\n\n{end}{after}"


def render(study: Path) -> str:
    """The table of a study: a row for each method, with its figures over seeds and prompts, and its cost."""
    prompts = _by(read(study / "prompts.jsonl"), "run")
    runs = [run for run in read(study / "runs.jsonl") if run["run"] in prompts]
    methods: dict[str, list[Row]] = {}
    for run in runs:
        methods.setdefault(run["run"].rpartition("-")[0], []).append({**run, "prompts": prompts[run["run"]]})
    rows = [_cells(name, own) for name, own in methods.items()]
    columns = [name for name in rows[0] if any(row[name] != NONE for row in rows)]
    about = runs[0]["results"]["run"]
    commits = ", ".join(sorted({run["results"]["kept"]["commit"] for run in runs}))
    note = (
        f"The model {about['model']} on {about['dataset']}, {max(map(len, prompts.values()))} held-out prompts. Gain "
        "is in score over the model before training. Brackets after gains and after the win rate hold 95% intervals "
        "over prompts and seeds; the others, the lowest and the highest seed. Cut is the share of responses that "
        f"reached the token limit. Hours are of one run with its evaluation. Commit: {commits}."
    )
    sides = [":--" if name in ("method", "seeds", "hardware") else "--:" for name in columns]
    lines = [columns, None, *([row[name] for name in columns] for row in rows)]
    table = [f"| {' | '.join(sides if line is None else map(_escaped, line))} |" for line in lines]
    return "\n".join(["### Methods of the study", "", _escaped(note), "", *table])


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]()_])", r"\\\1", text)


def _cells(method: str, runs: Sequence[Row]) -> dict[str, str]:
    results = [run["results"] for run in runs]
    rows = [run["prompts"] for run in runs]
    kl = [one["kl"]["mean"] for one in results if one.get("kl")]
    tokens = [one["generations"]["policy"]["mean_tokens"] for one in results]
    cut = [sum(not row.get("finished", True) for row in own) / len(own) for own in rows]
    rate, hours = runs[0]["config"].get("learning_rate"), [one["run"]["total_seconds"] / 3600 for one in results]
    halves = results[0]["run"]["dataset"] == "instructions"
    return {
        "method": method,
        "learning rate": NONE if rate is None else f"{rate:g}",
        "steps": str(results[0]["run"].get("optimizer_steps") or NONE),
        "seeds": ", ".join(str(one["run"]["seed"]) for one in results),
        "gain in score": _over_prompts_and_seeds(rows, gain, -1.0),
        "gain, greedy": _over_prompts_and_seeds(rows, greedy_gain, -1.0),
        "gain, cuts cost nothing": _over_prompts_and_seeds(rows, uncut_gain, -1.0) if halves else NONE,
        "win rate, ties as half": _over_prompts_and_seeds(rows, credit, 0.0),
        "KL (nats)": _over_seeds(kl, 2),
        "tokens": _over_seeds(tokens, 1),
        "cut": _over_seeds(cut, 2),
        "hours": f"{math.fsum(hours) / len(hours):.2f}",
        "hardware": ", ".join(sorted({one["kept"]["processor"] for one in results})),
    }


def gain(row: Row) -> float | None:
    """The score of a response minus that of the model before training."""
    scores = row.get("score"), row.get("base_score")
    return None if None in scores else scores[0] - scores[1]


def credit(row: Row) -> float | None:
    """What the judge's verdict is worth, with ties as half."""
    return OUTCOME_VALUES.get(row.get("outcome"))


def greedy_gain(row: Row) -> float | None:
    """The same of greedy answers to a problem, which are right or wrong."""
    if "greedy_category" not in row:
        return None
    right, base = (float(row[f"{whose}greedy_category"] == "correct") for whose in ("", "base_"))
    return right - base


def uncut_gain(row: Row) -> float | None:
    """The gain on `instructions`, had no response lost a part of its score for being cut."""
    if gain(row) is None or "base_finished" not in row:
        return None
    own, base = (row[f"{w}score"] / (1.0 if row[f"{w}finished"] else KEPT_IF_CUT) for w in ("", "base_"))
    return own - base


def _over_prompts_and_seeds(runs: Sequence[Sequence[Row]], value: Callable[[Row], float | None], lowest: float) -> str:
    """The mean, with its interval if there are several seeds, over the prompts with a value in all of them."""
    values = [{row["row_id"]: value(row) for row in own} for own in runs]
    names = [name for name in values[0] if all(own.get(name) is not None for own in values)]
    if not names:
        return NONE
    found = crossed_mean(numpy.array([[own[name] for own in values] for name in names]))
    # With two seeds, an interval can reach beyond the possible values.
    bounds = () if found.low is None else (max(found.low, lowest), min(found.high, 1.0))
    return f"{Estimate(found.mean, *bounds):.3f}"


def _over_seeds(values: Sequence[float], digits: int) -> str:
    ends = (min(values), max(values)) if len(values) > 1 else ()
    return f"{Estimate(math.fsum(values) / len(values), *ends):.{digits}f}" if values else NONE


if __name__ == "__main__":
    main()
