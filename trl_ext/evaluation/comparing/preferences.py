"""How well a model ranks held-out preference pairs, and how far it has diverged from its base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trl_ext.evaluation.statistics.intervals import mean_interval, wilson_interval
from trl_ext.losses import PreferenceScores


def preference_metrics(scores: PreferenceScores) -> dict[str, Any]:
    """Accuracy and mean margin on pairs, for three versions of a response's log-probability.

    Returns:
        `n`, and for each of `summed` (log-probability of the response), `mean` (of a token) and, with a reference,
        `reference_corrected` (log-ratio to the reference): `accuracy` with its Wilson 95% interval `low` and `high`,
        `margin`, the mean difference chosen minus rejected, in nats, and the number of `ties`, which count as wrong.
    """
    size = scores.chosen.numel()
    margins = {"summed": scores.chosen - scores.rejected, "mean": scores.chosen_mean - scores.rejected_mean}
    if scores.ref_chosen is not None:
        margins["reference_corrected"] = scores.margin
    metrics: dict[str, Any] = {"n": size}
    for name, margin in margins.items():
        correct = int((margin > 0).sum())
        low, high = wilson_interval(correct, size)
        metrics[name] = {
            "accuracy": correct / size,
            "low": low,
            "high": high,
            "margin": float(margin.mean()),
            "ties": int((margin == 0).sum()),
        }
    return metrics


def join_pair_scores(
    chosen: Sequence[Tensor],
    rejected: Sequence[Tensor],
    ref_chosen: Sequence[Tensor] | None = None,
    ref_rejected: Sequence[Tensor] | None = None,
) -> PreferenceScores:
    """Token log-probabilities of B pairs, one tensor per response, as `PreferenceScores` of shape [B]."""

    def total(responses: Sequence[Tensor] | None) -> Tensor | None:
        return None if responses is None else torch.stack([response.double().sum() for response in responses])

    return PreferenceScores(
        chosen=total(chosen),
        rejected=total(rejected),
        ref_chosen=total(ref_chosen),
        ref_rejected=total(ref_rejected),
        chosen_length=torch.tensor([len(response) for response in chosen]),
        rejected_length=torch.tensor([len(response) for response in rejected]),
    )


def approximate_kl(policy: Sequence[Tensor], base: Sequence[Tensor]) -> dict[str, float]:
    """Estimate KL(policy || base) of a whole response, in nats, from responses *sampled* from the policy.

    With d = log policy - log base of a token, the sums over a response of d (k1) and of k3 = exp(-d) - 1 + d are both
    unbiased (Schulman 2020, "Approximating KL divergence"). Near the base, k3 varies far less. Far from it, k3 depends
    on rare and large terms. A sample that lacks them gives a mean that is too low and an interval that is too narrow.
    Therefore k3 is used only under two conditions, and k1 otherwise: the standard error of k3 is at most half of that
    of k1, and the mean of k3 - k1, whose expectation is 0, is within four of its own standard errors of 0. With a
    single response, which shows no spread, k3 is used. Greedy responses do not give such an estimate: sample at
    temperature 1.

    Args:
        policy: for each sampled response, its token log-probabilities under the policy.
        base: the same under the base model.

    Returns:
        `mean` per response, its 95% interval `low` and `high`, `per_token`, `n`, and the `estimator` used, k1 or k3.
        A k1 estimate may be negative if the divergence is near 0.
    """
    differences = [own.double() - other.double() for own, other in zip(policy, base, strict=True)]
    k1 = torch.stack([difference.sum() for difference in differences])
    k3 = torch.stack([(torch.expm1(-difference) + difference).sum() for difference in differences])
    control = k3 - k1
    complete = control.mean().abs() <= 4 * control.std(correction=0) / len(control) ** 0.5
    by_k3 = len(k1) == 1 or bool(complete and k3.std(correction=0) <= k1.std(correction=0) / 2)
    totals = (k3 if by_k3 else k1).tolist()
    low, high = mean_interval(totals)
    return {
        "mean": math.fsum(totals) / len(totals),
        "low": low,
        "high": high,
        "per_token": math.fsum(totals) / max(sum(map(len, differences)), 1),
        "n": len(totals),
        "estimator": "k3" if by_k3 else "k1",
    }
