"""How many verdicts a decision takes if asking stops early, against both orders of every prompt, and its errors.

`python -m benchmarks.fewer_verdicts --data FOLDER` reads the 18 judges of `FOLDER/llmbar/`. One response of each pair
is the candidate's: the one that the judge prefers over both orders, with a probability that gives the win rate.
Asking is stopped by `decide`, or both orders of every prompt are asked, and the 95% interval decides. `decided` is how
often the rate was found on the right side of 1/2, or at a rate of 1/2 on any (an error, of which 5% are allowed).
Dollars are those of `--model` for LLMBar's texts. The last line is what a paired design saves on PandaLM's pairs: two
systems against a third on the same prompts, instead of on different ones. Prints a table and writes `results.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from pathlib import Path

import numpy

from benchmarks._pretrained import DATA
from benchmarks.judge_bias import LLMBAR, PANDALM, VALUES
from benchmarks.toy_seeds import print_table
from trl_ext.evaluation import OpenAIJudge, decide, estimate, read_labelled_pairs, read_recorded_verdicts
from trl_ext.evaluation.methods.judge_examination import VALUES as VERDICTS
from trl_ext.evaluation.statistics.intervals import rate_interval
from trl_ext.files import write_json

FIGURES = ("share", "decided", "wrong", "decided_all", "wrong_all", "same", "covered", "early", "one_order")


def recorded(folder: Path) -> dict[str, numpy.ndarray]:
    """Of each judge, P(response A wins) with response A and with response B first, [pairs, 2]."""
    pairs = read_labelled_pairs(folder / "llmbar")
    found = read_recorded_verdicts(folder / LLMBAR, pairs)
    return {
        judge: numpy.array([VERDICTS[row.verdict] for row in verdicts]).reshape(len(pairs), 2)
        for judge, verdicts in found.items()
    }


def sample(table: numpy.ndarray, rate: float, rows: int, rng: numpy.random.Generator) -> numpy.ndarray | None:
    """Verdicts for a candidate with the base and with the candidate first, [rows, 2]; None if the rate is too high."""
    preferred = numpy.abs(table.mean(axis=1) - 0.5).mean()
    if rate - 0.5 > preferred:
        return None
    drawn = table[rng.integers(len(table), size=rows)]
    as_preferred = rng.random(rows) < 0.5 + (rate - 0.5) / (2 * preferred)
    is_a = (drawn.mean(axis=1) > 0.5) == as_preferred
    # If B is the candidate, the pass with A first is that with the base first.
    return numpy.where(is_a[:, None], drawn[:, ::-1], 1 - drawn)


def measure(table: numpy.ndarray, rate: float, rows: int, samples: int, stream: int = 0) -> dict[str, float] | None:
    """Means of the figures over samples; None if the judge cannot give the rate."""
    rng, found = numpy.random.default_rng([rows, round(1000 * rate), stream]), []
    for seed in range(samples):
        drawn = sample(table, rate, rows, rng)
        if drawn is None:
            return None
        told = decide(lambda asked, drawn=drawn: [drawn[i, int(own)] for i, own in asked], rows, seed=seed)
        low, high = rate_interval(drawn.mean(axis=1))
        of_all = "above" if low > 0.5 else "below" if high < 0.5 else "undecided"
        right = {"above", "below"} if rate == 0.5 else {"above"}
        found.append(
            (
                told.n_verdicts / told.n_all,
                *(value for one in (told.decision, of_all) for value in (one in right, one == "below" and rate > 0.5)),
                told.decision == of_all,
                told.low <= rate <= told.high,
                told.stopped == "early",
                told.stopped == "one order",
            )
        )
    return dict(zip(FIGURES, numpy.mean(found, axis=0).tolist(), strict=True))


def paired(folder: Path) -> dict[str, float]:
    """What pairing saves: variances of differences of two systems against a third, on PandaLM's prompts."""
    rows = json.loads((folder / PANDALM[0]).read_text())
    told = {row["idx"]: VALUES.get(row["gpt_result"], 0.5) for row in json.loads((folder / PANDALM[1]).read_text())}
    values: dict[tuple[str, str], dict[tuple[str, str], float]] = defaultdict(dict)
    for row in rows:
        first, second = row["cmp_key"].split("_")
        prompt = row["instruction"], row["input"]
        values[first, second][prompt] = told[row["idx"]]
        values[second, first][prompt] = 1 - told[row["idx"]]
    systems = sorted({name for pair in values for name in pair})
    ratios = []
    for base in systems:
        for one, other in itertools.combinations([name for name in systems if name != base], 2):
            common = values[one, base].keys() & values[other, base].keys()
            columns = numpy.array([[values[name, base][prompt] for prompt in common] for name in (one, other)])
            ratios.append((columns[0] - columns[1]).var() / columns.var(axis=1).sum())
    return {"comparisons": len(ratios), "mean": float(numpy.mean(ratios)), "max": max(ratios), "min": min(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 400], help="prompts")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 0.525, 0.55, 0.575, 0.6, 0.65, 0.7, 0.8])
    parser.add_argument("--samples", type=int, default=200, help="of each judge, number of prompts and rate")
    parser.add_argument("--model", default="gpt-5.4", help="whose price is used")
    parser.add_argument("--folder", type=Path, default=Path("runs/fewer-verdicts"))
    given = parser.parse_args()
    for name in (LLMBAR, *PANDALM):
        if not (given.data / name).is_file():
            parser.error(f"{given.data / name}: no such file; give the folder that holds {name} as --data")
    tables, pairs = recorded(given.data), read_labelled_pairs(given.data / "llmbar")
    prompts = [{"row_id": pair.row_id, "prompt": pair.messages} for pair in pairs]
    texts = [pair.response_a for pair in pairs], [pair.response_b for pair in pairs]
    cost = estimate(OpenAIJudge(given.model), prompts, *texts)
    results, shown = [], []
    for rows, rate in itertools.product(given.rows, given.rates):
        by_judge = {
            judge: measure(table, rate, rows, given.samples, stream)
            for stream, (judge, table) in enumerate(tables.items())
        }
        by_judge = {judge: found for judge, found in by_judge.items() if found is not None}
        means = {name: float(numpy.mean([found[name] for found in by_judge.values()])) for name in FIGURES}
        shares = [found["share"] for found in by_judge.values()]
        dollars = None if cost.dollars is None else 2 * rows * cost.dollars / cost.calls
        results.append({"rows": rows, "rate": rate, "mean": means, "judges": by_judge, "dollars_all": dollars})
        errors = [f"{means[name]:.1%}" for name in ("decided", "decided_all", "wrong", "wrong_all", "same", "covered")]
        spread = f"{means['share']:.0%} ({min(shares):.0%} to {max(shares):.0%})"
        money = "-" if dollars is None else f"{dollars * means['share']:.2f} of {dollars:.2f}"
        shown.append([rows, rate, len(by_judge), spread, money, *errors])
    pairing = paired(given.data)
    write_json(
        given.folder / "results.json",
        {"samples": given.samples, "model": given.model, "results": results, "paired": pairing},
    )
    print_table(
        "prompts | rate | judges | verdicts of all | dollars | decided | by all | wrong | by all | same | covered",
        shown,
    )
    print(
        f"\npaired: {pairing['mean']:.2f} times the variance of different prompts ({pairing['min']:.2f} to "
        f"{pairing['max']:.2f} in {pairing['comparisons']} comparisons), which is the ratio of verdicts for one width"
    )


if __name__ == "__main__":
    main()
