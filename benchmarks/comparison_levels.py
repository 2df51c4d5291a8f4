"""Check the intervals and tests of `recipes/compare.py` in simulated studies, by the number of seeds.

`python -m benchmarks.comparison_levels` prints a Markdown table of the coverage of
95% intervals, the share of true nulls that one test at 0.05 / 11 rejects, and the share of studies with eleven equal
methods in which Holm's first step finds a difference. Effects are normal, with residual variance 1 and prompt variance
0.3 or 1.
"""

from __future__ import annotations

import argparse
import math

import numpy

from tests.evaluation.statistics.test_method_comparison import rejects, studies
from trl_ext.evaluation.statistics.crossed import Variances

METHODS = 11
SEEDS = (2, 3, 5)
PROMPTS = (40, 100, 200)
# Ratio of the seeds' to the prompts' contribution to the variance of a mean.
RATIOS = (1, 3, 10)


def single_tests(seeds: int, count: int) -> tuple[list[float], list[float], float]:
    """Coverages without and with a seed effect, and the highest level of a test at 0.05 / 11."""
    without, with_seeds, levels = [], [], []
    for prompts in PROMPTS:
        for prompt in (0.3, 1.0):
            for ratio in (0, *RATIOS):
                values = studies(Variances(prompt, ratio * prompt / prompts * seeds, 1), prompts, seeds, count)
                (with_seeds if ratio else without).append(1 - rejects(values).mean())
                levels.append(rejects(values, 0.05 / METHODS).mean())
    return without, with_seeds, max(levels)


def some_difference(seeds: int, ratio: float, count: int) -> float:
    """Share of studies in which at least one of eleven methods is found to differ from an equal baseline."""
    variances = Variances(0.5, ratio * 0.5 / 100 * seeds, 0.5)
    rng = numpy.random.default_rng(seeds)

    def values() -> numpy.ndarray:
        parts = {(100, 1): variances.prompt, (1, seeds): variances.seed, (100, seeds): variances.rest}
        return sum(math.sqrt(part) * rng.standard_normal((count, *shape)) for shape, part in parts.items())

    baseline, called = values(), numpy.zeros(count, dtype=bool)
    for _ in range(METHODS):
        called |= rejects(values() - baseline, 0.05 / METHODS)
    return float(called.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=6000, help="of each kind")
    given = parser.parse_args()
    print("| seeds | coverage, no effect of seeds | with one | level of 0.05 / 11 | called, ratios 1, 3, 10 |")
    print("|---|---|---|---|---|")
    for seeds in SEEDS:
        *covered, level = single_tests(seeds, given.studies)
        cells = " | ".join(f"{min(shares):.3f} to {max(shares):.3f}" for shares in covered)
        called = ", ".join(f"{some_difference(seeds, ratio, given.studies):.3f}" for ratio in RATIOS)
        print(f"| {seeds} | {cells} | {level:.4f} | {called} |")


if __name__ == "__main__":
    main()
