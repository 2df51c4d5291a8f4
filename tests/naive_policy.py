"""Policy losses as loops over rows and tokens in float64, which the tensor code is compared with."""

from __future__ import annotations

import math

import torch


def ragged_batch(seed, rows=5, tokens=6):
    """Random scores in float64: log-probabilities old and new, reference, mask with an empty row, advantages."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * torch.rand(rows, tokens, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
    lengths[0], lengths[-1] = tokens, 0
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    old = uniform(-3.0, -0.1)
    new, reference = old + uniform(-0.6, 0.6), old + uniform(-0.5, 0.5)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    return new, old, reference, mask, advantages


def naive_surrogate(name, ratio, frozen_ratio, log_prob, advantage, options):
    if name == "reinforce":
        return -advantage * log_prob
    if name == "no_clip":
        return -advantage * ratio
    if name == "cispo":
        return -advantage * min(frozen_ratio, options["ratio_cap"]) * log_prob
    if name == "quadratic_ratio":
        return -advantage * ratio + options["strength"] * (ratio - 1) ** 2 / 2
    low, high = 1 - options.get("epsilon", 0.2), 1 + options.get("epsilon_high", 0.2)
    if advantage >= 0:
        return -advantage * min(ratio, high)
    loss = -advantage * max(ratio, low)
    return min(loss, -advantage * options["dual_clip"]) if "dual_clip" in options else loss


def naive_reduction(rows, kind, constant=None):
    """`rows` are lists of token losses, some of them empty."""
    if kind == "sequence_mean":
        return sum(sum(row) / len(row) for row in rows if row) / len(rows)
    total = sum(sum(row) for row in rows)
    return total / {"token_mean": sum(map(len, rows)), "constant": len(rows) * (constant or 1), "sum": len(rows)}[kind]


def naive_loss(new, old, mask, advantages, *, surrogate, ratio, kind, frozen=None, constant=None, **options):
    """The loss as a scalar function of nested lists; `frozen` are the log-probabilities that no gradient reaches."""
    frozen, rows = frozen or new, []
    for i, advantage in enumerate(advantages):
        counted = [t for t, counts in enumerate(mask[i]) if counts]
        log_ratios = {t: new[i][t] - old[i][t] for t in counted}
        frozen_ratios = {t: frozen[i][t] - old[i][t] for t in counted}
        if ratio == "sequence" and counted:
            mean = sum(log_ratios.values()) / len(counted)
            frozen_mean = sum(frozen_ratios.values()) / len(counted)
            log_ratios, frozen_ratios = dict.fromkeys(counted, mean), dict.fromkeys(counted, frozen_mean)
        rows.append(
            [
                naive_surrogate(
                    surrogate, math.exp(log_ratios[t]), math.exp(frozen_ratios[t]), new[i][t], advantage, options
                )
                for t in counted
            ]
        )
    return naive_reduction(rows, kind, constant)


def differences(function, values, step=1e-6):
    """Gradient of a scalar function of nested lists by central differences."""
    gradient = [[0.0] * len(row) for row in values]
    for i, row in enumerate(values):
        for t, middle in enumerate(row):
            row[t] = middle + step
            above = function(values)
            row[t] = middle - step
            gradient[i][t] = (above - function(values)) / (2 * step)
            row[t] = middle
    return gradient
