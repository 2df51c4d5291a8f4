"""Reward and true quality of best-of-n over n: if the reward rises while quality falls, it is over-optimized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from trl_ext.evaluation.comparing.reward_models import best_of_n
from trl_ext.evaluation.reporting.plots import new_figure, save_figure
from trl_ext.evaluation.statistics.intervals import mean_with_interval
from trl_ext.rollouts.best_of_n import kl_bound

FIGURES = ("proxy", "gold", "oracle", "regret")


def best_of_n_curve(samples: Sequence[Sequence[Mapping[str, Any]]], ns: Sequence[int]) -> dict[str, Any]:
    """The expected reward and quality of the best of n for each n, unbiased, with 95% intervals over prompts.

    A prompt's figure is the mean over all choices of n of its responses that have a reward (`best_of_n`). Every n uses
    the same prompts: those with at least as many rewards as the largest n.

    Args:
        samples: for each prompt its responses with `reward` (None for none) and, if known, `score`, the gold.
        ns: numbers of responses, each at least 1.

    Returns:
        JSON-ready: `n_prompts`; `left_out`, the number of prompts with too few rewards; `curve`, one row per n in
        ascending order with `n`, `kl_bound` in nats, `proxy`, and, if gold is known, `gold`, `oracle`, `regret` and
        `gain` (gold minus that of the first n), each with `mean`, `low`, `high`; and `peak`, if gold is known: the `n`
        with the highest gold, and `change`, gold at the largest n minus gold at the peak. The peak is chosen on the
        same prompts, so an interval of the change below 0 slightly overstates the evidence.

    Raises:
        ValueError: no prompt has enough rewards.
    """
    ns = sorted(set(ns))
    scored = [[row for row in group if row["reward"] is not None] for group in samples]
    kept = [group for group in scored if len(group) >= ns[-1]]
    if not kept:
        raise ValueError(f"no prompt has {ns[-1]} responses with a reward: sample more, or ask for a smaller n")
    has_gold = all(row.get("score") is not None for group in kept for row in group)
    names = FIGURES if has_gold else FIGURES[:1]
    keys = ("reward", "score" if has_gold else "reward")
    proxies, golds = ([[row[key] for row in group] for group in kept] for key in keys)
    values = {}
    for n in ns:
        found = [best_of_n(*pair, n) for pair in zip(proxies, golds, strict=True)]
        values[n] = {name: numpy.array([one[name] for one in found]) for name in names}
    curve = [
        {"n": n, "kl_bound": kl_bound(n), **{name: mean_with_interval(values[n][name]) for name in names}} for n in ns
    ]
    peak = None
    if has_gold:
        for row in curve:
            row["gain"] = mean_with_interval(values[row["n"]]["gold"] - values[ns[0]]["gold"], gains=True)
        best = max(ns, key=lambda n: values[n]["gold"].mean())
        change = mean_with_interval(values[ns[-1]]["gold"] - values[best]["gold"], gains=True)
        peak = {"n": best, "change": change}
    return {"n_prompts": len(kept), "left_out": len(samples) - len(kept), "curve": curve, "peak": peak}


def plot_best_of_n(curve: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "") -> None:
    """Draw reward and, if known, gold and the best possible over n as a PNG, with their intervals."""
    shown = [("proxy",), ("gold", "oracle")] if "gold" in curve[0] else [("proxy",)]
    labels = {"proxy": "reward", "gold": "true score", "oracle": "best possible"}
    figure, axes = new_figure(1, len(shown))
    places = [row["n"] for row in curve]
    for axis, names in zip(axes, shown, strict=True):
        for name in names:
            mean, low, high = ([row[name][key] for row in curve] for key in ("mean", "low", "high"))
            axis.plot(places, mean, marker=".", label=labels[name])
            axis.fill_between(places, low, high, alpha=0.15)
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [str(place) for place in places])
        axis.set_xlabel("n")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    save_figure(figure, path, title)
