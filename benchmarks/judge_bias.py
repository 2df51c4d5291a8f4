"""How often the interval of a win rate from human labels and a judge covers the truth, and how much the judge saves.

`python -m benchmarks.judge_bias --data FOLDER` reads `FOLDER/llmbar/verdicts.jsonl` (LLMBar: a vetted preference, and
the verdicts of judges in both orders) and `FOLDER/pandalm/` (PandaLM: three annotators, whose mean is the label, and
gpt-3.5-turbo's verdicts). It adds judges that are simulated. Samples of `--rows` prompts are drawn with replacement,
the first of which are labelled. Prints a table and writes `results.json`. `naive` is the coverage of the interval of
the judge's own rate, and `best` the ratio of widths if the best weight were known. With 1,000 samples, the simulation
error of a coverage of 95% is about 1.4%.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy

from benchmarks._pretrained import DATA
from benchmarks.toy_seeds import print_table
from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation.statistics.human_labels import prediction_powered
from trl_ext.evaluation.statistics.intervals import rate_interval
from trl_ext.files import write_json

Pools = dict[str, tuple[numpy.ndarray, numpy.ndarray]]
LLMBAR, PANDALM = "llmbar/verdicts.jsonl", ("pandalm/testset-v1.json", "pandalm/gpt-3.5-turbo-testset-v1.json")
# By their names in the data; another answer of the judge is no verdict, and counts as a tie.
VALUES = {"1": 1.0, "2": 0.0}


def llmbar(folder: Path) -> Pools:
    """Of each judge: the preferences for the first output, and the means of the verdicts in both orders."""
    rows = [row for _, row in read_jsonl(folder / LLMBAR).rows]
    labels = numpy.array([VALUES[row["label"]] for row in rows])

    def values(judge: str) -> numpy.ndarray:
        return numpy.array([sum(VALUES.get(verdict, 0.5) for verdict in row["judges"][judge]) / 2 for row in rows])

    return {f"LLMBar, {judge}": (labels, values(judge)) for judge in rows[0]["judges"]}


def pandalm(folder: Path) -> Pools:
    """The annotators' mean preference for the first response, and the judge's, in one order."""
    rows, judged = (json.loads((folder / name).read_text()) for name in PANDALM)
    labels = [sum(VALUES.get(str(row[f"annotator{k}"]), 0.5) for k in (1, 2, 3)) / 3 for row in rows]
    verdicts = {row["idx"]: VALUES.get(row["gpt_result"], 0.5) for row in judged}
    return {"PandaLM, gpt-3.5-turbo": (numpy.array(labels), numpy.array([verdicts[row["idx"]] for row in rows]))}


def simulated(rate: float, sensitivity: float, specificity: float, size: int = 100_000) -> Pools:
    """Wins at a rate, which the judge recognises with these probabilities, as it does losses."""
    rng = numpy.random.default_rng(0)
    labels = rng.random(size) < rate
    right = rng.random(size) < numpy.where(labels, sensitivity, specificity)
    name = f"rate {rate}, right on {sensitivity} of wins and {specificity} of losses"
    return {name: (labels.astype(float), (labels == right).astype(float))}


def measure(labels: numpy.ndarray, judged: numpy.ndarray, n: int, rows: int, samples: int) -> dict[str, float]:
    """Coverage and widths over samples of the pool; the truth is the mean of its labels."""
    rng, truth = numpy.random.default_rng(n), labels.mean()
    found = []
    for _ in range(samples):
        chosen = rng.integers(len(labels), size=rows)
        y, f = labels[chosen[:n]], judged[chosen]
        result, naive = prediction_powered(y, f[:n], f[n:]), rate_interval(f)
        alone = result.labels_only
        bounds = ((result.low, result.high), (alone.low, alone.high), naive)
        held = [low - 1e-12 <= truth <= high + 1e-12 for low, high in bounds]
        widths = [high - low for low, high in bounds[:2]]
        found.append([*held, *widths, result.rate - truth, result.weight, result.effective_n])
    means = numpy.mean(found, axis=0).tolist()
    constant = labels.std() * judged.std() == 0
    correlation = 0.0 if constant else max(float(numpy.corrcoef(labels, judged)[0, 1]), 0.0)
    return {
        "coverage": means[0],
        "coverage_labels_only": means[1],
        "coverage_naive": means[2],
        "width": means[3],
        "width_ratio": means[3] / means[4],
        "best_ratio": math.sqrt(1 - correlation**2 * (rows - n) / rows),
        "bias": means[5],
        "weight": means[6],
        "effective_n": means[7],
    }


def table_row(name: str, n: int, row: dict[str, Any]) -> list[Any]:
    """A row of the table."""
    shares = [f"{row[key]:.1%}" for key in ("coverage", "coverage_labels_only", "coverage_naive")]
    return [name, n, *shares, *(f"{row[key]:.3f}" for key in ("width", "width_ratio", "best_ratio", "weight"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--labels", nargs="+", type=int, default=[20, 50, 100, 200], help="labelled prompts")
    parser.add_argument("--rows", type=int, default=400, help="prompts in a sample, labelled or not")
    parser.add_argument("--samples", type=int, default=1000, help="of each judge and number of labels")
    parser.add_argument("--folder", type=Path, default=Path("runs/judge-bias"))
    given = parser.parse_args()
    for name in (LLMBAR, *PANDALM):
        if not (given.data / name).is_file():
            parser.error(f"{given.data / name}: no such file; give the folder that holds {name} as --data")
    if not 1 <= min(given.labels) <= max(given.labels) < given.rows:
        parser.error(f"--labels must lie between 1 and --rows {given.rows} minus 1")
    pools = llmbar(given.data) | pandalm(given.data)
    for rate in (0.5, 0.8, 0.95):
        # The second is wrong on losses alone, which few labels may not show.
        for right in ((0.95, 0.9), (1.0, 0.9), (0.85, 0.7), (0.5, 0.5)):
            pools |= simulated(rate, *right)
    results = {}
    for name, pool in pools.items():
        results[name] = {n: measure(*pool, n, given.rows, given.samples) for n in given.labels}
    settings = {"rows": given.rows, "samples": given.samples}
    write_json(given.folder / "results.json", {**settings, "results": results})
    print_table(
        "judge | labels | coverage | labels only | naive | width | to labels only | best | weight",
        [table_row(name, n, row) for name, by_count in results.items() for n, row in by_count.items()],
    )


if __name__ == "__main__":
    main()
