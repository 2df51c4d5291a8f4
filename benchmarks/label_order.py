"""Whether labels go further where the judge is uncertain: widths against labels of random prompts, and coverage.

`python -m benchmarks.label_order --data FOLDER` uses the recorded verdicts of `benchmarks.judge_bias`. It draws
samples of `--rows` prompts, and labels `--labels` of each: at random, and by `draw_order` in proportion to the
uncertainty of the judge's own verdicts in both orders (`own`) or of all of LLMBar's judges (`all`). It adds a
simulated judge, which is right on 99% of the prompts on which its orders agree. Prints a table and writes
`results.json`. `bias` is the mean error in standard errors of one estimate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy

from benchmarks import judge_bias
from benchmarks._pretrained import DATA
from benchmarks.toy_seeds import print_table
from trl_ext.evaluation.statistics.human_labels import prediction_powered
from trl_ext.evaluation.statistics.sampled_labels import uncertainty, weighted_prediction_powered
from trl_ext.files import write_json

Pool = tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]


def pools(folder: Path) -> dict[str, Pool]:
    """Labels, verdicts and sizes of each judge."""
    llmbar = judge_bias.llmbar(folder)
    found = {}
    everybody = 2 * sum(verdicts for _, verdicts in llmbar.values())
    together = numpy.array(uncertainty(everybody, [2 * len(llmbar)] * len(everybody)))
    for name, (labels, verdicts) in (llmbar | judge_bias.pandalm(folder)).items():
        # PandaLM's judge was asked in one order.
        orders = 2 if name in llmbar else 1
        own = uncertainty(orders * verdicts, [orders] * len(labels))
        found[f"{name}, own"] = (labels, verdicts, numpy.array(own))
        if name in llmbar:
            found[f"{name}, all"] = (labels, verdicts, together)
    rng = numpy.random.default_rng(0)
    labels, agree = rng.random(100_000) < 0.6, rng.random(100_000) < 0.7
    verdicts = numpy.where(agree, labels == (rng.random(100_000) < 0.99), 0.5)
    found["simulated, own"] = (labels.astype(float), verdicts, numpy.array(uncertainty(2 * verdicts, [2] * 100_000)))
    return found


def measure(pool: Pool, n: int, rows: int, samples: int) -> dict[str, float]:
    """Means over samples of the pool; the truth is the mean of its labels."""
    rng, truth = numpy.random.default_rng(n), pool[0].mean()
    found = []
    for _ in range(samples):
        chosen = rng.integers(len(pool[0]), size=rows)
        y, f, sizes = (column[chosen] for column in pool)
        at_random = prediction_powered(y[:n], f[:n], f[n:])
        priorities = sizes / (1 - rng.random(rows))
        order = numpy.argsort(-priorities)
        drawn, rest = order[:n], order[n:]
        weights = numpy.maximum(1, priorities[rest[0]] / sizes[drawn])
        own = weighted_prediction_powered(y[drawn], f[drawn], f[rest], weights)
        covered = [one.low <= truth <= one.high for one in (own, at_random)]
        found.append([*covered, own.high - own.low, at_random.high - at_random.low, own.rate - truth])
    means, deviation = numpy.mean(found, axis=0), numpy.std(found, axis=0)[4]
    return {
        "coverage": float(means[0]),
        "coverage_at_random": float(means[1]),
        "width": float(means[2]),
        "width_ratio": float(means[2] / means[3]),
        "bias": float(means[4] / deviation),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--labels", nargs="+", type=int, default=[20, 50, 100, 200])
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("runs/label-order"))
    given = parser.parse_args()
    results = {
        name: {n: measure(pool, n, given.rows, given.samples) for n in given.labels}
        for name, pool in pools(given.data).items()
    }
    write_json(given.folder / "results.json", {"rows": given.rows, "samples": given.samples, "results": results})
    lines = [
        [name, n, *(f"{value:.3f}" for value in row.values())]
        for name, own in results.items()
        for n, row in own.items()
    ]
    print_table("judge, uncertainty | labels | coverage | at random | width | to random | bias", lines)


if __name__ == "__main__":
    main()
