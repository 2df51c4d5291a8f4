"""Wrong answers to losses and advantages."""

from __future__ import annotations

from dataclasses import replace
from operator import methodcaller, neg

import torch
from torch.nn.functional import logsigmoid

from trl_ext.assignment.catalog.task import given, then
from trl_ext.assignment.runtime.verdicts import LOG_OF_SIGMOID

NOT_ZERO = "the rounding of a mean is divided by eps: the advantages of a group of equal rewards are exactly 0"
PER_PAIR = (
    "losses.dpo losses.cdpo losses.robust_dpo losses.ipo losses.hinge losses.dpop losses.apo_zero losses.apo_down "
    "losses.nca losses.sppo losses.aot losses.aot_paired losses.simpo losses.repo losses.cpo losses.orpo "
    "losses.bradley_terry losses.kto"
)
ADVANTAGES = (
    "advantages.group_normalized advantages.group_centered advantages.leave_one_out advantages.group_rank "
    "advantages.greedy_baseline advantages.batch_normalized advantages.mean_normalized advantages.length_weighted"
)
SIGNED = (
    f"{PER_PAIR} {ADVANTAGES} losses.reinforce losses.cispo losses.unclipped_surrogate losses.clipped_surrogate "
    "losses.token_log_ratio losses.sequence_log_ratio models.token_entropy assignment.sequence_log_probs "
    "assignment.grpo_loss assignment.dr_grpo_loss assignment.gspo_loss course.naive_policy_gradient_loss "
    "course.per_instance_dpo_loss"
)


def naive_log(values):
    return torch.log(torch.sigmoid(values))


def sort(values):
    return values.sort().values


def without_reference(scores):
    zeros = torch.zeros_like(scores.chosen)
    return replace(scores, ref_chosen=zeros, ref_rejected=zeros)


def exchanged(scores):
    policy = {"chosen": scores.rejected, "rejected": scores.chosen}
    return replace(scores, **policy, ref_chosen=scores.ref_rejected, ref_rejected=scores.ref_chosen)


def naive_bradley_terry(right, chosen, rejected, margin=0.0, label_smoothing=0.0, centering=0.0):
    logits = chosen - rejected - margin
    losses = -(1 - label_smoothing) * naive_log(logits)
    if label_smoothing:
        losses = losses - label_smoothing * naive_log(-logits)
    return losses + centering * (chosen + rejected) ** 2


def logistic(difference, log_sigmoid=logsigmoid):
    """The logistic loss of a difference of `scores`."""
    return lambda right, scores, beta: -log_sigmoid(beta * difference(scores))


def ranks(scores):
    return sort(scores.chosen_log_ratio) - sort(scores.rejected_log_ratio)


def policy_sorted(scores):
    return sort(scores.chosen) - sort(scores.rejected)


def margins_sorted(scores):
    return sort(scores.chosen - scores.rejected) - sort(scores.ref_chosen - scores.ref_rejected)


def sorted_against(scores):
    return sort(scores.chosen_log_ratio) - scores.rejected_log_ratio.sort(descending=True).values


def beta_on_margin(right, scores, beta, **options):
    return (beta * scores.margin - 1 / (2 * beta)).square()


def not_squared(right, scores, beta, **options):
    return (scores.margin - 1 / (2 * beta)).abs()


def gradient_through_divergence(right, log_ratio, desirable, kl_log_ratio, beta=0.1, **weights):
    gain = beta * (log_ratio - kl_log_ratio.mean().clamp(min=0))
    weight = torch.where(desirable, weights.get("desirable_weight", 1.0), weights.get("undesirable_weight", 1.0))
    return weight.to(gain.dtype) * torch.sigmoid(torch.where(desirable, -gain, gain))


def gradient_through_ratio(right, log_ratio, log_probs, advantages, ratio_cap):
    return -log_ratio.exp().clamp(max=ratio_cap) * advantages.unsqueeze(1) * log_probs


def by_group(change):
    """Advantages computed from rewards with one group per row, independently of the correct function."""

    def wrong(right, rewards, group_size, std_ddof=0, eps=1e-6):
        groups = rewards.reshape(-1, group_size)
        return change(groups, std_ddof, eps).reshape(-1)

    return wrong


def centered(groups, *ignored):
    return groups - groups.mean(dim=1, keepdim=True)


def less_sum(groups, *ignored):
    return groups - groups.sum(dim=1, keepdim=True)


def rounding_divided(groups, ddof, eps):
    return centered(groups) / (groups.std(dim=1, correction=ddof, keepdim=True) + eps)


def eps_in_variance(groups, ddof, eps):
    return centered(groups) / (groups.var(dim=1, correction=ddof, keepdim=True) + eps).sqrt()


def divided(groups, *ignored):
    return centered(groups) / (groups.std(dim=1, correction=0, keepdim=True) + 1e-6)


def whole_batch(right, rewards, group_size, **options):
    return right(rewards, len(rewards), **options)


def quotient(right, log_probs, old_log_probs):
    return log_probs / old_log_probs


def padded_mean(right, log_probs, old_log_probs, mask):
    return (log_probs - old_log_probs).mean(-1, keepdim=True)


def mean_over_width(right, log_probs, old_log_probs, mask):
    return token_sum(right, log_probs, old_log_probs, mask) / mask.shape[1]


def token_sum(right, log_probs, old_log_probs, mask):
    return right(log_probs, old_log_probs, mask) * mask.sum(-1, keepdim=True)


def surrogate(choose, ratio=torch.exp):
    """A clipped loss with a given choice between the weighted ratios and the clipped ones."""

    def wrong(right, log_ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=None):
        ratios, weights = ratio(log_ratio), advantages.unsqueeze(1)
        return -choose(ratios * weights, ratios.clamp(1 - clip_low, 1 + clip_high) * weights)

    return wrong


def one_clip(right, **arguments):
    return right(**{**arguments, "clip_high": arguments["clip_low"]})


def as_kind(kind, other):
    """Compute the reduction of one kind as another."""
    return given(kind=lambda asked: other if asked == kind else asked)


def sum_over_responses(right, mask, kind, **arguments):
    return right(mask=mask, kind=kind, **arguments) * (len(mask) if kind == "sum" else 1)


def other_direction(right, log_probs, ref_log_probs, kind):
    difference = log_probs - ref_log_probs
    return difference.exp() - 1 - difference if kind == "k3" else right(log_probs, ref_log_probs, kind)


def of_kind(wanted, factor):
    """An estimate of one kind, times a factor."""
    return lambda right, kind, **arguments: right(kind=kind, **arguments) * (factor if kind == wanted else 1)


def divided_by_all(right, values, mask, dim=None):
    kept = values.masked_fill(mask == 0, 0)
    return kept.mean() if dim is None else kept.mean(dim)


LOSS_MISTAKES = {
    SIGNED: {"the sign is flipped": then(neg)},
    PER_PAIR: {
        "the losses are averaged over the batch: return one for each row, the caller reduces them": then(
            methodcaller("mean")
        )
    },
    "losses.dpo losses.hinge": {"the reference's log-probabilities are left out": given(scores=without_reference)},
    "losses.dpo": {
        "beta is left out": given(beta=1.0),
        LOG_OF_SIGMOID: logistic(lambda scores: scores.margin, naive_log),
        "the sigmoid's logarithm is left out: -sigmoid(beta margin)": lambda right, scores, beta: (
            -torch.sigmoid(beta * scores.margin)
        ),
    },
    "losses.dpo losses.cdpo": {"chosen and rejected are exchanged": given(scores=exchanged)},
    "losses.aot": {
        LOG_OF_SIGMOID: logistic(ranks, naive_log),
        "nothing is sorted: that is DPO": logistic(lambda scores: scores.margin),
        "the margins are sorted (paired AOT): sort the chosen and the rejected log-ratios separately": logistic(
            margins_sorted
        ),
        "the log-probabilities are sorted without taking the reference's off first": logistic(policy_sorted),
        "one of the two is sorted in descending order: the best chosen meets the worst rejected": logistic(
            sorted_against
        ),
    },
    "losses.bradley_terry": {
        LOG_OF_SIGMOID: naive_bradley_terry,
        "chosen and rejected are exchanged": lambda right, chosen, rejected, **options: right(
            rejected, chosen, **options
        ),
        "the margin is added: the chosen score must be ahead by it, so it is taken off": given(margin=neg),
        "label_smoothing is not read": given(label_smoothing=0.0),
        "centering is not read": given(centering=0.0),
    },
    "losses.kto": {
        "gradient flows through the estimate of the divergence: detach kl_log_ratio": gradient_through_divergence
    },
    "losses.cispo": {"gradient flows through the capped ratio: detach it": gradient_through_ratio},
    "losses.ipo": {
        "the target is 1 / beta: it is 1 / (2 beta)": given(beta=lambda beta: beta / 2),
        "beta multiplies the margin as in DPO: in IPO it is in the target only": beta_on_margin,
        "the distance is not squared": not_squared,
    },
    "advantages.group_normalized": {
        "the sample's standard deviation is taken (std() divides by G - 1)": given(std_ddof=1),
        "the population's standard deviation is taken although std_ddof is 1": given(std_ddof=0),
        NOT_ZERO: by_group(rounding_divided),
        "eps is left out": given(eps=0.0),
        "eps is added to the variance: it is added to the standard deviation": by_group(eps_in_variance),
        "the rewards are not divided by the standard deviation (that is Dr.GRPO)": by_group(centered),
    },
    "advantages.group_normalized advantages.group_centered advantages.leave_one_out": {
        "the statistics are those of the whole batch: take them group by group": whole_batch
    },
    "advantages.group_centered advantages.leave_one_out": {
        "the group's sum is taken off: take off a mean": by_group(less_sum)
    },
    "advantages.group_centered": {"the result is divided by the standard deviation (that is GRPO)": by_group(divided)},
    "advantages.leave_one_out": {"a response's own reward is in its baseline (that is Dr.GRPO)": by_group(centered)},
    "losses.token_log_ratio": {
        "the ratio itself is returned: return its logarithm": then(torch.exp),
        "the log-probabilities are divided: the log of a ratio is a difference": quotient,
    },
    "losses.sequence_log_ratio": {
        "the log-ratios are summed: take their mean over the response's tokens": token_sum,
        "the mask is left out, so that padding counts": padded_mean,
        "the sum is divided by the width T: divide by the response's own length": mean_over_width,
    },
    "losses.clipped_surrogate": {
        "the minimum is missing: the clipped ratio is taken wherever it lies": surrogate(
            lambda whole, clipped: clipped
        ),
        "the maximum is taken for the minimum": surrogate(torch.maximum),
        "the ratio is not clipped": surrogate(lambda whole, clipped: whole),
        "the log-ratio is used as the ratio: take its exponential": surrogate(torch.minimum, ratio=torch.clone),
        "clip_high is not read: the ratio may rise by clip_high and fall by clip_low": one_clip,
        "dual_clip is not read": given(dual_clip=None),
    },
    "losses.aggregate": {
        "token_count is not read: token_mean divides by it where it is given": given(token_count=None),
        "sequence_mean is computed as token_mean: each response counts once, whatever its length": as_kind(
            "sequence_mean", "token_mean"
        ),
        "token_mean is computed as sequence_mean: each token counts once": as_kind("token_mean", "sequence_mean"),
        "constant divides by the response's length: divide by the constant, the same for all": as_kind(
            "constant", "sequence_mean"
        ),
        "sum adds up the responses: take the mean over the responses of their sums": sum_over_responses,
        "the mask is left out, so that padding counts": given(mask=torch.ones_like),
    },
    "losses.kl_estimate": {
        "k3 is that of the other direction: exp(d) - 1 - d in place of exp(-d) - 1 + d": other_direction,
        "k2 lacks the half": of_kind("k2", 2),
        "k1 is the reference less the policy: it is the policy less the reference": of_kind("k1", -1),
    },
    "losses.masked_mean": {
        "the sum is divided by the number of all entries: divide by those that count": divided_by_all
    },
}
