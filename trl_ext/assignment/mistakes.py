"""Wrong answers that students give, as functions, each with what a test says of it.

The first argument of each is the right function, `right`; the others are those of the right one. Their outcomes on
every case are stored beside the expected one, so that a test that fails can say why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from trl_ext.assignment.runtime.verdicts import LOG_OF_SIGMOID

NOT_ZERO = "the rounding of a mean is divided by eps: the advantages of a group of equal rewards are exactly 0"


@dataclass(frozen=True)
class Mistake:
    """A wrong answer.

    Attributes:
        task: the task's name.
        name: of the mistake.
        message: what is wrong, after "this is what you get when".
        function: the wrong answer; its first argument is the right function.
    """

    task: str
    name: str
    message: str
    function: Callable


MISTAKES: list[Mistake] = []


def mistake(tasks: str, message: str) -> Callable[[Callable], Callable]:
    """Register a wrong answer of one or several tasks, whose names stand apart by spaces."""

    def register(function: Callable) -> Callable:
        for task in tasks.split():
            MISTAKES.append(Mistake(task, function.__name__, message, function))
        return function

    return register


def mistakes_of(task: str) -> list[Mistake]:
    """Those of a task."""
    from trl_ext.assignment import course_mistakes  # noqa: F401  registers its own

    return [each for each in MISTAKES if each.task == task]


PER_PAIR = (
    "losses.dpo losses.cdpo losses.robust_dpo losses.ipo losses.hinge losses.dpop losses.apo_zero losses.apo_down "
    "losses.nca losses.sppo losses.aot losses.aot_paired losses.simpo losses.repo losses.cpo losses.orpo "
    "losses.bradley_terry losses.kto"
)
ADVANTAGES = (
    "advantages.group_normalized advantages.group_centered advantages.leave_one_out advantages.group_rank "
    "advantages.greedy_baseline advantages.batch_normalized advantages.mean_normalized advantages.length_weighted"
)


@mistake(
    f"{PER_PAIR} {ADVANTAGES} losses.reinforce losses.cispo losses.unclipped_surrogate losses.clipped_surrogate "
    "losses.token_log_ratio losses.sequence_log_ratio models.token_entropy assignment.sequence_log_probs "
    "assignment.grpo_loss assignment.dr_grpo_loss assignment.gspo_loss course.naive_policy_gradient_loss "
    "course.per_instance_dpo_loss",
    "the sign is flipped",
)
def sign_flipped(right, *arguments, **keywords):
    return -right(*arguments, **keywords)


@mistake(PER_PAIR, "the losses are averaged over the batch: return one for each row, the caller reduces them")
def averaged(right, *arguments, **keywords):
    return right(*arguments, **keywords).mean()


@mistake("losses.dpo losses.hinge", "the reference's log-probabilities are left out")
def no_reference(right, scores, *, beta):
    scores.ref_chosen, scores.ref_rejected = torch.zeros_like(scores.chosen), torch.zeros_like(scores.chosen)
    return right(scores, beta=beta)


@mistake("losses.dpo", "beta is left out")
def no_beta(right, scores, *, beta):
    return right(scores, beta=1.0)


@mistake("losses.dpo losses.cdpo", "chosen and rejected are exchanged")
def exchanged(right, scores, **keywords):
    scores.chosen, scores.rejected = scores.rejected, scores.chosen
    scores.ref_chosen, scores.ref_rejected = scores.ref_rejected, scores.ref_chosen
    return right(scores, **keywords)


@mistake("losses.dpo", LOG_OF_SIGMOID)
def log_of_sigmoid(right, scores, *, beta):
    return -torch.log(torch.sigmoid(beta * scores.margin))


@mistake("losses.aot", LOG_OF_SIGMOID)
def log_of_sigmoid_of_ranks(right, scores, *, beta):
    chosen, rejected = scores.chosen_log_ratio.sort().values, scores.rejected_log_ratio.sort().values
    return -torch.log(torch.sigmoid(beta * (chosen - rejected)))


@mistake("losses.bradley_terry", LOG_OF_SIGMOID)
def log_of_sigmoid_of_scores(right, chosen, rejected, *, margin=None, label_smoothing=0.0, centering=0.0):
    logits = chosen - rejected - (0.0 if margin is None else margin)
    losses = -(1 - label_smoothing) * torch.log(torch.sigmoid(logits))
    if label_smoothing:
        losses = losses - label_smoothing * torch.log(torch.sigmoid(-logits))
    return losses + centering * (chosen + rejected) ** 2


@mistake("losses.kto", "gradient flows through the estimate of the divergence: detach kl_log_ratio")
def gradient_through_divergence(right, log_ratio, desirable, kl_log_ratio, **options):
    beta = options.get("beta", 0.1)
    gain = beta * (log_ratio - kl_log_ratio.mean().clamp(min=0))
    weights = torch.where(desirable, options.get("desirable_weight", 1.0), options.get("undesirable_weight", 1.0))
    return weights.to(gain.dtype) * torch.sigmoid(torch.where(desirable, -gain, gain))


@mistake("losses.cispo", "gradient flows through the capped ratio: detach it")
def gradient_through_ratio(right, log_ratio, log_probs, advantages, *, ratio_cap):
    return -log_ratio.exp().clamp(max=ratio_cap) * advantages.unsqueeze(1) * log_probs


@mistake("losses.dpo", "the sigmoid's logarithm is left out: -sigmoid(beta margin)")
def no_logarithm(right, scores, *, beta):
    return -torch.sigmoid(beta * scores.margin)


@mistake("losses.ipo", "the target is 1 / beta: it is 1 / (2 beta)")
def target_without_two(right, scores, *, beta, length_normalized=False):
    return right(scores, beta=beta / 2, length_normalized=length_normalized)


@mistake("losses.ipo", "beta multiplies the margin as in DPO: in IPO it is in the target only")
def beta_on_margin(right, scores, *, beta, length_normalized=False):
    return (beta * scores.margin - 1 / (2 * beta)).square()


@mistake("losses.ipo", "the distance is not squared")
def not_squared(right, scores, *, beta, length_normalized=False):
    return (scores.margin - 1 / (2 * beta)).abs()


@mistake("losses.aot", "nothing is sorted: that is DPO")
def not_sorted(right, scores, *, beta):
    return -logsigmoid(beta * scores.margin)


@mistake("losses.aot", "the margins are sorted (paired AOT): sort the chosen and the rejected log-ratios separately")
def sorted_margins(right, scores, *, beta):
    policy = (scores.chosen - scores.rejected).sort().values
    reference = (scores.ref_chosen - scores.ref_rejected).sort().values
    return -logsigmoid(beta * (policy - reference))


@mistake("losses.aot", "the log-probabilities are sorted without taking the reference's off first")
def sorted_without_reference(right, scores, *, beta):
    return -logsigmoid(beta * (scores.chosen.sort().values - scores.rejected.sort().values))


@mistake("losses.aot", "one of the two is sorted in descending order: the best chosen meets the worst rejected")
def sorted_against(right, scores, *, beta):
    chosen = scores.chosen_log_ratio.sort().values
    return -logsigmoid(beta * (chosen - scores.rejected_log_ratio.sort(descending=True).values))


@mistake("losses.bradley_terry", "chosen and rejected are exchanged")
def scores_exchanged(right, chosen, rejected, **options):
    return right(rejected, chosen, **options)


@mistake("losses.bradley_terry", "the margin is added: the chosen score must be ahead by it, so it is taken off")
def margin_added(right, chosen, rejected, *, margin=None, **options):
    return right(chosen, rejected, margin=None if margin is None else -margin, **options)


@mistake("losses.bradley_terry", "label_smoothing is not read")
def no_smoothing(right, chosen, rejected, *, label_smoothing=0.0, **options):
    return right(chosen, rejected, **options)


@mistake("losses.bradley_terry", "centering is not read")
def no_centering(right, chosen, rejected, *, centering=0.0, **options):
    return right(chosen, rejected, **options)


@mistake("advantages.group_normalized", "the sample's standard deviation is taken (std() divides by G - 1)")
def sample_std(right, rewards, group_size, std_ddof=0, eps=1e-6):
    return right(rewards, group_size, std_ddof=1, eps=eps)


@mistake("advantages.group_normalized", "the population's standard deviation is taken although std_ddof is 1")
def population_std(right, rewards, group_size, std_ddof=0, eps=1e-6):
    return right(rewards, group_size, std_ddof=0, eps=eps)


@mistake("advantages.group_normalized", NOT_ZERO)
def rounding_divided(right, rewards, group_size, std_ddof=0, eps=1e-6):
    groups = rewards.reshape(-1, group_size)
    scale = groups.std(dim=1, correction=std_ddof, keepdim=True) + eps
    return ((groups - groups.mean(dim=1, keepdim=True)) / scale).reshape(-1)


@mistake("losses.aggregate", "token_count is not read: token_mean divides by it where it is given")
def no_token_count(right, losses, mask, kind, *, token_count=None, **options):
    return right(losses, mask, kind, **options)


@mistake("advantages.group_normalized", "eps is left out")
def no_eps(right, rewards, group_size, std_ddof=0, eps=1e-6):
    return right(rewards, group_size, std_ddof=std_ddof, eps=0.0)


@mistake("advantages.group_normalized", "eps is added to the variance: it is added to the standard deviation")
def eps_in_variance(right, rewards, group_size, std_ddof=0, eps=1e-6):
    groups = rewards.reshape(-1, group_size)
    scale = (groups.var(dim=1, correction=std_ddof, keepdim=True) + eps).sqrt()
    return ((groups - groups.mean(dim=1, keepdim=True)) / scale).reshape(-1)


@mistake("advantages.group_normalized", "the rewards are not divided by the standard deviation (that is Dr.GRPO)")
def not_divided(right, rewards, group_size, std_ddof=0, eps=1e-6):
    groups = rewards.reshape(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).reshape(-1)


@mistake(
    "advantages.group_normalized advantages.group_centered advantages.leave_one_out",
    "the statistics are those of the whole batch: take them group by group",
)
def whole_batch(right, rewards, group_size, **options):
    return right(rewards, len(rewards), **options)


@mistake("advantages.group_centered advantages.leave_one_out", "the group's sum is taken off: take off a mean")
def sum_for_mean(right, rewards, group_size):
    groups = rewards.reshape(-1, group_size)
    return (groups - groups.sum(dim=1, keepdim=True)).reshape(-1)


@mistake("advantages.group_centered", "the result is divided by the standard deviation (that is GRPO)")
def divided(right, rewards, group_size):
    groups = right(rewards, group_size).reshape(-1, group_size)
    return (groups / (groups.std(dim=1, correction=0, keepdim=True) + 1e-6)).reshape(-1)


@mistake("advantages.leave_one_out", "a response's own reward is in its baseline (that is Dr.GRPO)")
def own_reward_in_baseline(right, rewards, group_size):
    groups = rewards.reshape(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).reshape(-1)


@mistake("losses.token_log_ratio", "the ratio itself is returned: return its logarithm")
def exponentiated(right, log_probs, old_log_probs):
    return right(log_probs, old_log_probs).exp()


@mistake("losses.token_log_ratio", "the log-probabilities are divided: the log of a ratio is a difference")
def quotient(right, log_probs, old_log_probs):
    return log_probs / old_log_probs


@mistake("losses.sequence_log_ratio", "the log-ratios are summed: take their mean over the response's tokens")
def sum_for_token_mean(right, log_probs, old_log_probs, mask):
    return right(log_probs, old_log_probs, mask) * mask.sum(-1, keepdim=True)


@mistake("losses.sequence_log_ratio", "the mask is left out, so that padding counts")
def padding_counts(right, log_probs, old_log_probs, mask):
    return (log_probs - old_log_probs).mean(-1, keepdim=True)


@mistake("losses.sequence_log_ratio", "the sum is divided by the width T: divide by the response's own length")
def divided_by_width(right, log_probs, old_log_probs, mask):
    return right(log_probs, old_log_probs, mask) * mask.sum(-1, keepdim=True) / mask.shape[1]


def _ratio_and_clipped(log_ratio, clip_low, clip_high):
    return log_ratio.exp(), log_ratio.exp().clamp(1 - clip_low, 1 + clip_high)


@mistake("losses.clipped_surrogate", "the minimum is missing: the clipped ratio is taken wherever it lies")
def no_minimum(right, log_ratio, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    return -log_ratio.exp().clamp(1 - clip_low, 1 + clip_high) * advantages.unsqueeze(1)


@mistake("losses.clipped_surrogate", "the maximum is taken for the minimum")
def maximum(right, log_ratio, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    ratio, weights = log_ratio.exp(), advantages.unsqueeze(1)
    return -torch.maximum(ratio * weights, ratio.clamp(1 - clip_low, 1 + clip_high) * weights)


@mistake("losses.clipped_surrogate", "the ratio is not clipped")
def not_clipped(right, log_ratio, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    return -log_ratio.exp() * advantages.unsqueeze(1)


@mistake("losses.clipped_surrogate", "the log-ratio is used as the ratio: take its exponential")
def not_exponentiated(right, log_ratio, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    weights = advantages.unsqueeze(1)
    return -torch.minimum(log_ratio * weights, log_ratio.clamp(1 - clip_low, 1 + clip_high) * weights)


@mistake("losses.clipped_surrogate", "clip_high is not read: the ratio may rise by clip_high and fall by clip_low")
def one_clip(right, log_ratio, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    return right(log_ratio, advantages, clip_low=clip_low, clip_high=clip_low, dual_clip=dual_clip)


@mistake("losses.clipped_surrogate", "dual_clip is not read")
def no_dual_clip(right, log_ratio, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    return right(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)


@mistake("losses.aggregate", "sequence_mean is computed as token_mean: each response counts once, whatever its length")
def tokens_count_alike(right, losses, mask, kind, **options):
    return right(losses, mask, "token_mean" if kind == "sequence_mean" else kind, **options)


@mistake("losses.aggregate", "token_mean is computed as sequence_mean: each token counts once")
def responses_count_alike(right, losses, mask, kind, **options):
    return right(losses, mask, "sequence_mean" if kind == "token_mean" else kind, **options)


@mistake("losses.aggregate", "constant divides by the response's length: divide by the constant, the same for all")
def length_for_constant(right, losses, mask, kind, **options):
    return right(losses, mask, "sequence_mean" if kind == "constant" else kind, **options)


@mistake("losses.aggregate", "sum adds up the responses: take the mean over the responses of their sums")
def sum_over_responses(right, losses, mask, kind, **options):
    return right(losses, mask, kind, **options) * (len(mask) if kind == "sum" else 1)


@mistake("losses.aggregate", "the mask is left out, so that padding counts")
def no_mask(right, losses, mask, kind, **options):
    return right(losses, torch.ones_like(mask), kind, **options)


@mistake("losses.kl_estimate", "k3 is that of the other direction: exp(d) - 1 - d in place of exp(-d) - 1 + d")
def other_direction(right, log_probs, ref_log_probs, kind):
    difference = log_probs - ref_log_probs
    return difference.exp() - 1 - difference if kind == "k3" else right(log_probs, ref_log_probs, kind)


@mistake("losses.kl_estimate", "k2 lacks the half")
def no_half(right, log_probs, ref_log_probs, kind):
    return right(log_probs, ref_log_probs, kind) * (2 if kind == "k2" else 1)


@mistake("losses.kl_estimate", "k1 is the reference less the policy: it is the policy less the reference")
def reversed_difference(right, log_probs, ref_log_probs, kind):
    return right(log_probs, ref_log_probs, kind) * (-1 if kind == "k1" else 1)
