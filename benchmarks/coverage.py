"""How often the library's 95% intervals and plain intervals cover the truth in simulated samples.

`python -m benchmarks.coverage` prints a Markdown table with a row for each kind of sample: the coverage of the plain
interval (1.96 standard errors; for paired rates and best-of-n, percentiles of a bootstrap over prompts), the coverage
of the library's interval, and its mean width. With 2,000 samples of a kind, the simulation error of a coverage of 95%
is about 1%.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy
import torch
from scipy.special import expit

from trl_ext.evaluation import mean_with_interval
from trl_ext.evaluation.comparing.preferences import approximate_kl
from trl_ext.evaluation.comparing.reward_models import best_of_n
from trl_ext.evaluation.statistics.crossed import crossed_mean
from trl_ext.evaluation.statistics.human_labels import prediction_powered
from trl_ext.evaluation.statistics.intervals import rate_difference_interval, rate_interval
from trl_ext.evaluation.statistics.length_control import length_controlled_win_rate

Bounds = tuple[float, float]
# Draws a sample and returns its plain interval and the library's.
Draw = Callable[[numpy.random.Generator], tuple[Bounds, Bounds]]
TOKENS, VOCABULARY, POSITIONS = 20, 50, 30


def normal(values: numpy.ndarray) -> Bounds:
    """The mean plus or minus 1.96 standard errors."""
    half_width = 1.96 * values.std(ddof=1) / len(values) ** 0.5
    return values.mean() - half_width, values.mean() + half_width


def percentiles(values: numpy.ndarray, rng: numpy.random.Generator) -> Bounds:
    """The middle 95% of the means of 1,000 resamples."""
    means = rng.multinomial(len(values), numpy.full(len(values), 1 / len(values)), size=1000) @ values / len(values)
    return tuple(numpy.percentile(means, [2.5, 97.5]))


def of_mean(values: numpy.ndarray, *, gains: bool = False) -> Bounds:
    found = mean_with_interval(values, gains=gains)
    return found["low"], found["high"]


def sampler(function: Callable[..., tuple[Bounds, Bounds]]) -> Callable[..., Draw]:
    """The function's `Draw` for each of its settings."""
    return lambda *settings: lambda rng: function(rng, *settings)


@sampler
def of_values(rng, n: int, kind: str):
    values = getattr(rng, kind)(size=n)
    return normal(values), of_mean(values)


@sampler
def gains(rng, n: int, lost: float, gained: float):
    values = rng.choice([-1.0, 0.0, 1.0], n, p=[lost, 1 - lost - gained, gained])
    return normal(values), of_mean(values, gains=True)


@sampler
def paired_rates(rng, n: int, first: float, second: float, shared: float, dropped: float = 0.0):
    """Wins of two candidates: the prompt alone decides a share of them, and some are missing independently."""
    ease, other = rng.random(n), rng.random(n)
    wins = [ease < first, numpy.where(rng.random(n) < shared, ease, other) < second]
    rows = [numpy.where(rng.random(n) < dropped, numpy.nan, won) for won in wins]
    plain = percentiles(rows[0] - rows[1], rng) if not dropped else (numpy.nan, numpy.nan)
    told = [[None if numpy.isnan(value) else value for value in row] for row in rows]
    return plain, rate_difference_interval(*told) or (-1.0, 1.0)


@sampler
def sampled_accuracy(rng, n: int, samples: int):
    """Shares of correct answers to problems with success probabilities from Beta(0.3, 2)."""
    values = rng.binomial(samples, rng.beta(0.3, 2.0, n)) / samples
    return percentiles(values, rng), rate_interval(values)


@sampler
def with_a_judge(rng, labels: int, right: float):
    """Wins at a rate of 0.6 on 400 prompts; the judge is right on a share of them, and some have labels."""
    wins = (rng.random(400) < 0.6).astype(float)
    judged = numpy.where(rng.random(400) < right, wins, 1 - wins)
    found = prediction_powered(wins[:labels], judged[:labels], judged[labels:])
    return normal(judged), (found.low, found.high)


@sampler
def at_equal_lengths(rng, n: int):
    """Wins with log-odds of 0.3 plus the length term; length differences have mean 50 and deviation 200."""
    gap = rng.normal(50, 200, n)
    wins = (rng.random(n) < expit(0.3 + numpy.tanh(gap / 200))).astype(float)
    found = length_controlled_win_rate(wins.tolist(), 1000 + gap, [1000] * n)
    return (numpy.nan, numpy.nan), (found.low, found.high)


@sampler
def crossed(rng, seeds: int, spread: float):
    """Means over 40 prompts and several seeds, whose effects have this standard deviation; the rest has 1."""
    values = rng.standard_normal((40, 1)) + spread * rng.standard_normal(seeds) + rng.standard_normal((40, seeds))
    found = crossed_mean(values)
    return normal(values.ravel()), (found.low, found.high)


@sampler
def best_of(rng, n: int, prompts: int, kind: str):
    """Mean reward of the best of n of 16 responses; rewards are normal within and between prompts, or in (0, 1)."""
    rewards = rng.standard_normal((prompts, 16)) + rng.standard_normal((prompts, 1))
    rewards = rewards if kind == "reward" else expit(rewards)
    values = numpy.array([best_of_n(row.tolist(), row.tolist(), n)["proxy"] for row in rewards])
    return percentiles(values, rng), of_mean(values)


def sharper(sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a policy whose logits are `sharpness` times its base's, and of the base."""
    logits = torch.randn(POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (sharpness * logits).log_softmax(-1), logits.log_softmax(-1)


def without_a_token(left: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a base that gives a token 0.3, and of a policy that gives less at a third of positions."""
    base = torch.full((POSITIONS, VOCABULARY), 0.7 / (VOCABULARY - 1), dtype=torch.float64)
    base[:, 0] = 0.3
    own = base.clone()
    own[::3] = (1 - left) / (VOCABULARY - 1)
    own[::3, 0] = left
    return own.log(), base.log()


def divergence(responses: int, own: torch.Tensor, base: torch.Tensor) -> tuple[float, Draw]:
    """The true KL divergence of a policy from its base over responses, and samples of its estimate."""
    truth = TOKENS * float((own.exp() * (own - base)).sum(-1).mean())
    cumulative = own.exp().cumsum(-1).numpy()

    def draw(rng):
        places = rng.integers(POSITIONS, size=(responses, TOKENS))
        tokens = (rng.random(places.shape)[..., None] > cumulative[places]).sum(-1).clip(max=VOCABULARY - 1)
        log_probs = [model[torch.from_numpy(places), torch.from_numpy(tokens)] for model in (own, base)]
        difference = log_probs[0] - log_probs[1]
        found = approximate_kl(*map(list, log_probs))
        return normal((difference.neg().expm1() + difference).sum(1).numpy()), (found["low"], found["high"])

    return truth, draw


def best_of_truth(n: int, kind: str) -> float:
    rng = numpy.random.default_rng(1)
    rewards = rng.standard_normal((400_000, n)).max(1) + rng.standard_normal(400_000)
    return float((rewards if kind == "reward" else expit(rewards)).mean())


def cells() -> Iterator[tuple[str, float, Draw]]:
    """Name, true value and sampler of each kind of sample."""
    for n in (15, 40, 128):
        yield f"paired rates, 0.97 against 0.95, {n} prompts", 0.02, paired_rates(n, 0.97, 0.95, 0.0)
    for n in (15, 40, 128):
        yield f"paired rates, 0.8 against 0.7, {n} prompts, much shared", 0.1, paired_rates(n, 0.8, 0.7, 0.9)
    yield "paired rates, 0.8 against 0.7, 40 prompts, 30% not counted", 0.1, paired_rates(40, 0.8, 0.7, 0.5, 0.3)
    for n in (3, 5, 10):
        yield f"mean of {n} normal values", 0.0, of_values(n, "standard_normal")
    for n in (5, 10, 64):
        yield f"mean of {n} exponential values", 1.0, of_values(n, "standard_exponential")
    for n in (10, 64):
        yield f"mean of {n} log-normal values", numpy.exp(0.5), of_values(n, "lognormal")
    for n in (5, 10, 40):
        for lost, gained in ((0.05, 0.15), (0.1, 0.3)):
            yield f"gains of {n}: -1 in {lost:.0%}, 1 in {gained:.0%}", gained - lost, gains(n, lost, gained)
    for sharpness in (1.1, 1.5, 1.7, 2.0, 3.0, 4.0):
        yield (f"KL at {sharpness} times the base's logits, 64 responses", *divergence(64, *sharper(sharpness)))
    for left in (3e-3, 1e-3, 1e-4):
        yield (f"KL with {left:g} left of 0.3 at a third of the tokens", *divergence(64, *without_a_token(left)))
    for kind in ("reward", "score"):
        for n in (4, 16):
            yield f"best of {n}, {kind}, 10 prompts", best_of_truth(n, kind), best_of(n, 10, kind)
    for n in (20, 128):
        yield f"win rate at equal lengths, {n} prompts", float(expit(0.3)), at_equal_lengths(n)
    for seeds in (2, 3, 5):
        for spread in (0.0, 0.3):
            yield f"40 prompts, {seeds} seeds of deviation {spread}", 0.0, crossed(seeds, spread)
    for labels in (20, 100):
        for right in (0.99, 0.8):
            yield f"{labels} labels, a judge right on {right:.0%}", 0.6, with_a_judge(labels, right)
    yield "accuracy of 4 samples, 20 problems", 0.3 / 2.3, sampled_accuracy(20, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000, help="of each kind")
    given = parser.parse_args()
    print("| sample | plain | here | mean width |\n|---|---|---|---|")
    for name, truth, draw in cells():
        rng = numpy.random.default_rng(0)
        with numpy.errstate(invalid="ignore"):
            found = numpy.array([draw(rng) for _ in range(given.samples)])
        held = (found[..., 0] <= truth + 1e-12) & (truth - 1e-12 <= found[..., 1])
        plain = "-" if numpy.isnan(found[:, 0]).all() else f"{held[:, 0].mean():.1%}"
        width = (found[:, 1, 1] - found[:, 1, 0]).mean()
        print(f"| {name} | {plain} | {held[:, 1].mean():.1%} | {width:.3f} |", flush=True)


if __name__ == "__main__":
    main()
