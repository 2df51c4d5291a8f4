"""Figures of the pages in docs/learn.

`python -m benchmarks.learn_figures` writes three PNG files into `docs/images` (`--folder`) within seconds. Nothing is
trained and nothing is random, so the same versions of torch and matplotlib draw the same files.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy
import torch
from scipy.stats import binom
from torch import Tensor

from trl_ext.evaluation import wilson_interval
from trl_ext.losses import PreferenceScores, clipped_surrogate, dpo, hinge, ipo

matplotlib.use("Agg")
from matplotlib import pyplot

BETA, CLIP = 0.1, 0.2


def value_and_slope(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """The function and its derivative at each point."""
    at = at.clone().requires_grad_()
    value = function(at)
    (slope,) = torch.autograd.grad(value.sum(), at)
    return value.detach(), slope


def of_margin(loss: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """A preference loss as a function of the margin alone."""

    def losses(margin: Tensor) -> Tensor:
        zero = torch.zeros_like(margin)
        return loss(PreferenceScores(margin, zero, zero, zero), beta=BETA)

    return losses


def preference(folder: Path) -> None:
    """DPO, IPO and hinge against the margin, each divided by its size at margin 0."""
    margin = torch.linspace(-10, 30, 801, dtype=torch.float64)
    figure, (left, right) = panels("loss / loss at margin 0", "slope / slope size at margin 0", "margin m (nats)")
    for loss in (dpo, ipo, hinge):
        value, slope = value_and_slope(of_margin(loss), margin)
        at_zero, slope_at_zero = value_and_slope(of_margin(loss), torch.zeros(1, dtype=torch.float64))
        left.plot(margin, value / at_zero, label=loss.__name__)
        right.plot(margin, slope / slope_at_zero.abs())
    left.set_ylim(0, 2.5)
    right.set_ylim(-2, 2)
    left.legend(title=f"beta {BETA}")
    save(figure, folder / "learn_preference.png")


def policy(folder: Path) -> None:
    """The clipped surrogate against the ratio, and its gradient with respect to the log-probability."""
    ratio = torch.linspace(0.4, 1.8, 1401, dtype=torch.float64)
    figure, (left, right) = panels("loss", "slope in the log-probability", "ratio")
    for advantage in (1.0, -1.0):

        def losses(log_ratio: Tensor, advantage: float = advantage) -> Tensor:
            advantages = torch.full_like(log_ratio, advantage)
            return clipped_surrogate(log_ratio[:, None], advantages, clip_low=CLIP, clip_high=CLIP)[:, 0]

        value, slope = value_and_slope(losses, ratio.log())
        left.plot(ratio, value, label=f"advantage {advantage:+.0f}")
        right.plot(ratio, slope)
    for axes in (left, right):
        for end in (1 - CLIP, 1 + CLIP):
            axes.axvline(end, color="grey", linestyle=":", linewidth=1)
    left.legend()
    save(figure, folder / "learn_policy.png")


def normal_interval(successes: int, n: int) -> tuple[float, float]:
    """The textbook interval, 1.96 standard errors to either side of the rate."""
    rate = successes / n
    half_width = 1.96 * math.sqrt(rate * (1 - rate) / n)
    return rate - half_width, rate + half_width


def coverage(interval: Callable[[int, int], tuple[float, float]], rate: float, n: int) -> float:
    """The exact probability that the interval of n trials holds the true rate."""
    counts = numpy.arange(n + 1)
    holds = [low <= rate <= high for low, high in (interval(int(count), n) for count in counts)]
    return float(binom.pmf(counts, n, rate)[holds].sum())


def evaluation(folder: Path) -> None:
    """Coverage of the normal and of the Wilson interval over the number of prompts."""
    sizes = range(5, 201)
    rates = (0.7, 0.9)
    figure, both = panels("coverage", "coverage", "prompts")
    for axes, rate in zip(both, rates, strict=True):
        axes.plot(sizes, [coverage(normal_interval, rate, n) for n in sizes], label="normal", linewidth=1)
        axes.plot(sizes, [coverage(wilson_interval, rate, n) for n in sizes], label="Wilson", linewidth=1)
        axes.axhline(0.95, color="grey", linestyle=":", linewidth=1)
        axes.set_ylim(0.6, 1)
        axes.set_title(f"true win rate {rate}", fontsize=10)
    both[0].legend()
    save(figure, folder / "learn_evaluation.png")


def panels(left: str, right: str, shared: str):
    """A figure of two panels with their axes' names."""
    figure, both = pyplot.subplots(1, 2, figsize=(8, 3))
    for axes, name in zip(both, (left, right), strict=True):
        axes.set(xlabel=shared, ylabel=name)
        axes.grid(alpha=0.3)
    return figure, both


def save(figure, path: Path) -> None:
    figure.tight_layout()
    # Without the version of matplotlib in the file.
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for draw in (preference, policy, evaluation):
        draw(folder)


if __name__ == "__main__":
    main()
