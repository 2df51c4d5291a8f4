"""Wrong answers to whole policy losses."""

from __future__ import annotations

from operator import neg

import torch

from trl_ext.assignment.catalog.task import given

WHOLE = "assignment.grpo_loss assignment.dr_grpo_loss assignment.gspo_loss"


def whole(detached=("old_log_probs", "ref_log_probs"), **settings):
    """A whole loss with wrong settings: GRPO's, Dr.GRPO's or GSPO's, by the name of the correct function."""

    def wrong(right, **arguments):
        arguments |= {name: arguments[name].detach() for name in detached}
        return _whole_loss(right, **{**arguments, **settings})

    return wrong


def _whole_loss(
    right,
    log_probs,
    old_log_probs,
    ref_log_probs,
    mask,
    advantages,
    clip,
    kl_coef,
    max_new_tokens=None,
    minimum=True,
    summed=False,
    kl_by_response=False,
    token_mean=False,
):
    counts = mask != 0
    lengths = counts.sum(1).clamp(min=1)
    drift = (log_probs - old_log_probs).masked_fill(~counts, 0)
    ratio = drift.exp()
    if "gspo" in right.__name__:
        ratio = (drift.sum(1) / (1 if summed else lengths)).exp().unsqueeze(1).expand_as(drift)
    weighted, clipped = ratio * advantages.unsqueeze(1), ratio.clamp(1 - clip, 1 + clip) * advantages.unsqueeze(1)
    losses = -(torch.minimum(weighted, clipped) if minimum else clipped)
    rows = losses.masked_fill(~counts, 0).sum(1) / (max_new_tokens or lengths)
    surrogate = losses.masked_fill(~counts, 0).sum() / counts.sum() if token_mean else rows.mean()
    difference = (ref_log_probs - log_probs).masked_fill(~counts, 0)
    divergence = difference.exp() - 1 - difference
    mean = (divergence.sum(1) / lengths).mean() if kl_by_response else divergence.sum() / counts.sum()
    return surrogate + kl_coef * mean


WHOLE_MISTAKES = {
    WHOLE: {
        "gradient flows through the old log-probabilities: detach them": whole(detached=["ref_log_probs"]),
        "gradient flows through the reference's log-probabilities: detach them": whole(detached=["old_log_probs"]),
        "the clip's minimum is missing: the clipped ratio is taken wherever it lies": whole(minimum=False),
        "the KL term is left out": given(kl_coef=0.0),
        "the mask is left out, so that padding counts": given(mask=torch.ones_like),
        "the KL term is averaged over each response first: average it over all tokens": whole(kl_by_response=True),
        "the KL term is taken off: it is added to the loss": given(kl_coef=neg),
    },
    "assignment.grpo_loss": {
        "all tokens count alike (that is DAPO): take each response's mean, then theirs": whole(token_mean=True)
    },
    "assignment.gspo_loss": {
        "the log-ratios are summed: GSPO takes their mean over the response's tokens": whole(summed=True)
    },
    "assignment.dr_grpo_loss": {
        "the sums are divided by the responses' lengths (that is GRPO)": whole(max_new_tokens=None)
    },
}
