"""Known wrong answers: a table from the names of one or several tasks to messages and functions.

A wrong answer takes the correct function and then that function's arguments by name. A message completes the sentence
"this is what you get when". The outcomes are stored with the expected ones, so that a failing test can say why it
fails.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from operator import neg
from typing import Any

import torch

from trl_ext import losses
from trl_ext.assignment.runtime.verdicts import LOG_OF_SIGMOID


def given(**changes: Any) -> Callable:
    """The correct function with other arguments: a value, or a function of an existing argument."""

    def wrong(right, **arguments):
        for name, change in changes.items():
            if not callable(change):
                arguments[name] = change
            elif arguments.get(name) is not None:
                arguments[name] = change(arguments[name])
        return right(**arguments)

    return wrong


def then(change: Callable) -> Callable:
    """The correct function with a modified result."""
    return lambda right, **arguments: change(right(**arguments))


def edited(*texts: str) -> Callable:
    """The correct function with changes to its source: a text, the text in its place, and so on."""
    return lambda right, **arguments: _edited(right, texts)(**arguments)


@cache
def _edited(right: Callable, texts: tuple[str, ...]) -> Callable:
    source = inspect.getsource(right)
    # Without decorators, which would register the function.
    source = source[source.index("def ") :]
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        if old not in source:
            raise ValueError(f"the source of {right.__name__} has no {old!r} to replace")
        source = source.replace(old, new)
    names = {**right.__globals__, "torch": torch, "losses": losses, "naive_log": naive_log}
    exec(f"from __future__ import annotations\n{source}", names)
    return names[right.__name__]


def naive_log(values):
    return torch.log(torch.sigmoid(values))


def as_kind(kind: str, other: str) -> Callable:
    """Compute the reduction of one kind as another."""
    return given(kind=lambda asked: other if asked == kind else asked)


def rounding_divided(right, rewards, group_size, std_ddof=0, eps=1e-6):
    groups = rewards.reshape(-1, group_size)
    deviation = groups.std(dim=1, correction=std_ddof, keepdim=True) + eps
    return ((groups - groups.mean(dim=1, keepdim=True)) / deviation).reshape(-1)


def sum_taken_off(right, rewards, group_size):
    groups = rewards.reshape(-1, group_size)
    return (groups - groups.sum(dim=1, keepdim=True)).reshape(-1)


NOT_ZERO = "the rounding of a mean is divided by eps: the advantages of a group of equal rewards are exactly 0"
NO_MINIMUM = "the clip's minimum is missing: the clipped ratio is taken wherever it lies"
PER_PAIR = (
    "losses.dpo losses.cdpo losses.robust_dpo losses.ipo losses.hinge losses.dpop losses.apo_zero losses.apo_down "
    "losses.nca losses.sppo losses.aot losses.aot_paired losses.simpo losses.repo losses.cpo losses.orpo "
    "losses.bradley_terry losses.kto"
)
ADVANTAGES = (
    "advantages.group_normalized advantages.group_centered advantages.leave_one_out advantages.group_rank "
    "advantages.greedy_baseline advantages.batch_normalized advantages.mean_normalized advantages.length_weighted"
)
WHOLE = "assignment.grpo_loss assignment.dr_grpo_loss assignment.gspo_loss"
SIGNED = (
    f"{PER_PAIR} {ADVANTAGES} {WHOLE} losses.reinforce losses.cispo losses.unclipped_surrogate "
    "losses.clipped_surrogate losses.token_log_ratio losses.sequence_log_ratio models.token_entropy "
    "assignment.sequence_log_probs course.naive_policy_gradient_loss course.per_instance_dpo_loss"
)
# Texts in the library's source.
RANKED = "_of_equal_rank(chosen, rejected)"
LOG_RATIOS = "scores.chosen_log_ratio, scores.rejected_log_ratio"
DEVIATION = "_std(groups.values, groups.scorable, std_ddof) + eps"
LENGTHS = "(mask != 0).sum(-1).clamp(min=1)"
SURROGATE = "clipped_surrogate(log_ratio, advantages.detach(), clip_low=clip, clip_high=clip)"
COURSE_SURROGATE = "losses.clipped_surrogate(log_ratio, advantages, clip_low=cliprange, clip_high=cliprange)"

MISTAKES = {
    # ---- Preference and reward losses ----
    SIGNED: {"the sign is flipped": then(neg)},
    PER_PAIR: {"the losses are averaged over the batch: return one for each row": then(torch.mean)},
    "losses.dpo losses.aot losses.bradley_terry": {LOG_OF_SIGMOID: edited("logsigmoid(", "naive_log(")},
    "losses.dpo losses.hinge": {
        "the reference's log-probabilities are left out": edited("scores.margin", "(scores.chosen - scores.rejected)")
    },
    "losses.dpo": {
        "beta is left out": given(beta=1.0),
        "the sigmoid's logarithm is left out: -sigmoid(beta margin)": edited("logsigmoid(", "torch.sigmoid("),
    },
    "losses.dpo losses.cdpo": {"chosen and rejected are exchanged": edited("scores.margin", "-scores.margin")},
    "losses.aot": {
        "nothing is sorted: that is DPO": edited(RANKED, "rejected"),
        "the margins are sorted (paired AOT): sort the chosen and the rejected log-ratios separately": edited(
            LOG_RATIOS, "scores.chosen - scores.rejected, scores.ref_chosen - scores.ref_rejected"
        ),
        "the reference is not taken off before sorting": edited(LOG_RATIOS, "scores.chosen, scores.rejected"),
        "the best chosen meets the worst rejected": edited(RANKED, "-_of_equal_rank(chosen, -rejected)"),
    },
    "losses.bradley_terry": {
        "chosen and rejected are exchanged": edited("chosen - rejected", "rejected - chosen"),
        "the margin is added: the chosen score must be ahead by it, so it is taken off": given(margin=neg),
        "label_smoothing is not read": given(label_smoothing=0.0),
        "centering is not read": given(centering=0.0),
    },
    "losses.kto": {
        "gradient flows through the estimate of the divergence: detach kl_log_ratio": edited(".detach()", "")
    },
    "losses.ipo": {
        "the target is 1 / beta: it is 1 / (2 beta)": given(beta=lambda beta: beta / 2),
        "beta multiplies the margin, as in DPO": edited("scores.margin", "beta * scores.margin"),
        "the distance is not squared": edited(".square()", ".abs()"),
    },
    # ---- Advantages ----
    "advantages.group_normalized": {
        "the sample's standard deviation is taken (std() divides by G - 1)": given(std_ddof=1),
        "the population's standard deviation is taken although std_ddof is 1": given(std_ddof=0),
        NOT_ZERO: rounding_divided,
        "eps is left out": given(eps=0.0),
        "eps is added to the variance: it is added to the standard deviation": edited(
            DEVIATION, "(_std(groups.values, groups.scorable, std_ddof).square() + eps).sqrt()"
        ),
        "the rewards are not divided by the standard deviation (that is Dr.GRPO)": edited(" / scale", ""),
    },
    "advantages.group_normalized advantages.group_centered advantages.leave_one_out": {
        "the statistics are those of the whole batch": edited("of(rewards, group_size)", "of(rewards, len(rewards))")
    },
    "advantages.group_centered advantages.leave_one_out": {
        "the group's sum is taken off: take off a mean": sum_taken_off
    },
    "advantages.group_centered": {"the result is divided by the standard deviation (that is GRPO)": rounding_divided},
    "advantages.leave_one_out": {
        "a response's own reward is in its baseline (that is Dr.GRPO)": edited(
            "(groups.count - 1).clamp(min=1)", "groups.count"
        )
    },
    # ---- Policy losses ----
    "losses.cispo": {"gradient flows through the capped ratio: detach it": edited(".detach()", "")},
    "losses.token_log_ratio": {
        "the ratio itself is returned: return its logarithm": then(torch.exp),
        "the log-probabilities are divided: the log of a ratio is a difference": edited(" - ", " / "),
    },
    "losses.sequence_log_ratio": {
        "the log-ratios are summed: take their mean over the response's tokens": edited(LENGTHS, "1"),
        "the mask is left out, so that padding counts": given(mask=torch.ones_like),
        "the sum is divided by the width T: divide by the response's own length": edited(LENGTHS, "mask.shape[1]"),
    },
    "losses.clipped_surrogate": {
        "the minimum is missing: the clipped ratio is taken wherever it lies": edited(
            "torch.minimum(ratio * advantages, clipped * advantages)", "clipped * advantages"
        ),
        "the maximum is taken for the minimum": edited("torch.minimum(ratio", "torch.maximum(ratio"),
        "the ratio is not clipped": edited("ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio"),
        "the log-ratio is used as the ratio: take its exponential": edited("bounded_ratio(log_ratio)", "log_ratio"),
        "clip_high is not read: the ratio may rise by it": edited("1 + clip_high", "1 + clip_low"),
        "dual_clip is not read": given(dual_clip=None),
    },
    "losses.aggregate": {
        "token_count is not read: token_mean divides by it where it is given": given(token_count=None),
        "sequence_mean is computed as token_mean: each response counts once": as_kind("sequence_mean", "token_mean"),
        "token_mean is computed as sequence_mean: each token counts once": as_kind("token_mean", "sequence_mean"),
        "constant divides by the response's length": as_kind("constant", "sequence_mean"),
        "sum adds up the responses: take the mean of their sums": edited("dim=-1).mean()\n", "dim=-1).sum()\n"),
        "the mask is left out, so that padding counts": given(mask=torch.ones_like),
    },
    "losses.kl_estimate": {
        "k3 is that of the other direction: it is exp(-d) - 1 + d": edited("(-difference)", "difference"),
        "k2 lacks the half": edited(".square() / 2", ".square()"),
        "k1 is the reference less the policy": edited("return difference\n", "return -difference\n"),
    },
    WHOLE: {
        "gradient flows through old_log_probs: detach them": edited("old_log_probs.detach()", "old_log_probs"),
        "gradient flows through ref_log_probs: detach them": edited("ref_log_probs.detach()", "ref_log_probs"),
        NO_MINIMUM: edited(SURROGATE, "-log_ratio.exp().clamp(1 - clip, 1 + clip) * advantages.unsqueeze(1)"),
        "the KL term is left out": given(kl_coef=0.0),
        "the mask is left out, so that padding counts": given(mask=torch.ones_like),
        "the KL term is averaged over each response first": edited(
            'kl, mask, "token_mean"', 'kl, mask, "sequence_mean"'
        ),
        "the KL term is taken off: it is added to the loss": given(kl_coef=neg),
    },
    "assignment.grpo_loss": {"all tokens count alike (that is DAPO)": edited("sequence_mean", "token_mean")},
    "assignment.gspo_loss": {
        "the log-ratios are summed: take their mean": edited("), mask)\n", "), mask) * mask.sum(1, keepdim=True)\n")
    },
    "assignment.dr_grpo_loss": {
        "the sums are divided by the responses' lengths (that is GRPO)": edited(
            '"constant", constant=max_new_tokens', '"sequence_mean"'
        )
    },
    # ---- Log-probabilities, masks and minibatches ----
    "assignment.sequence_log_probs": {
        "logits and tokens are not shifted: the logits are about the next token": edited(
            "[:, :-1]", "", "[:, 1:]", ""
        ),
        "the mask is not shifted: take response_mask[:, 1:]": edited("_mask[:, 1:]", "_mask[:, :-1]"),
        "the mean is taken over the response's tokens: take the sum": edited("masked_sum(", "losses.masked_mean("),
        "the prompt and the padding are counted: the mask is left out": given(response_mask=torch.ones_like),
    },
    "assignment.split_minibatches": {
        "the last minibatch, which is not full, is dropped": edited(
            "for part in parts", "for part in parts if len(part) == minibatch_size"
        ),
        "the order is not read: take the rows in the order given": given(order=lambda order: torch.arange(len(order))),
    },
    "models.completion_mask": {
        "the end-of-text token is not counted: it is a token that the policy has chosen": edited(" - ends ==", " =="),
        "what follows the first end-of-text token is counted": edited("ends.cumsum(dim=1) - ends", "ends"),
    },
    "models.tokenize_prompt_and_output": {
        "response_mask is not shifted with the labels: it is one place too far right": edited(
            "is_output[:, 1:]", "is_output[:, :-1]"
        ),
        "the labels are not shifted: each is the token after its input": edited("tokens[:, 1:]", "tokens[:, :-1]"),
        "the prompt is in response_mask": edited("len(prompt) : end", ":end"),
    },
    "models.token_entropy": {
        "the probabilities are taken for their logarithms: it is -sum p log p": lambda right, logits: (
            -logits.softmax(-1).square().sum(-1)
        ),
        "the mean over the vocabulary is taken: take the sum": lambda right, logits: right(logits) / logits.shape[-1],
    },
    "models.response_log_probs": {
        "the logits are returned: normalise them with log_softmax": edited("distribution.gather", "row.gather"),
        "the tokens of input_ids are looked up: look up the labels": edited(
            "zip(logits, labels", "zip(logits, input_ids"
        ),
        "no gradient flows: compute it outside torch.no_grad()": edited(".logits", ".logits.detach()"),
    },
    "losses.masked_mean": {
        "the sum is divided by the number of all entries": edited(
            "counts.sum()", "values.numel()", "counts.sum(dim)", "values.shape[dim]"
        )
    },
    "course.masked_mean": {
        "the sum is divided by the number of all entries": edited(
            "losses.masked_mean(tensor, mask, dim)", "losses.masked_sum(tensor, mask, dim) / (mask | True).sum(dim)"
        ),
        "the sum is returned: divide it": edited("losses.masked_mean(", "losses.masked_sum("),
    },
    "course.masked_normalize": {
        "the mean is taken: divide by normalize_constant only": edited(
            "losses.masked_normalize(tensor, mask, normalize_constant, dim)", "losses.masked_mean(tensor, mask, dim)"
        ),
        "normalize_constant is not read": given(normalize_constant=1.0),
    },
    "course.masked_normalize course.masked_mean": {"the mask is left out": given(mask=torch.ones_like)},
    # ---- The reasoning course ----
    "course.compute_group_normalized_rewards": {
        "the population's deviation is taken: std() of torch is the sample's": edited("std_ddof=1", "std_ddof=0"),
        NOT_ZERO: edited(
            "    return advantages",
            "    if normalize_by_std:\n"
            "        differences = groups - groups.mean(1, keepdim=True)\n"
            "        advantages = differences / (groups.std(1, keepdim=True) + advantage_eps)\n"
            "    return advantages.reshape(-1)",
        ),
        "the statistics are those of the whole batch": edited(
            "    pairs = zip(", "    group_size = len(rollout_responses)\n    pairs = zip("
        ),
        "normalize_by_std is not read: the advantages are always divided": given(normalize_by_std=True),
        "advantage_eps is not read": given(advantage_eps=0.0),
    },
    "course.naive_policy_gradient_loss": {"the losses are averaged: return one for each token": then(torch.mean)},
    "course.grpo_clip_loss": {
        "gradient flows through the old log-probabilities: detach them": edited(
            "_log_ratio(advantages, policy_log_probs, old_log_probs)", "policy_log_probs - old_log_probs"
        ),
        "the minimum is missing: the clipped ratio is taken wherever it lies": edited(
            COURSE_SURROGATE, "-log_ratio.exp().clamp(1 - cliprange, 1 + cliprange) * advantages"
        ),
        "the sign is flipped": then(lambda output: (-output[0], output[1])),
    },
    "course.policy_gradient_loss": {
        "no_baseline takes the advantages: it takes the raw rewards": edited('s": raw_rewards', 's": advantages'),
        "reinforce_with_baseline takes the raw rewards": edited('s": advantages', 's": raw_rewards'),
    },
    "course.sft_microbatch_step course.policy_microbatch_step": {
        "the loss is not divided by gradient_accumulation_steps": given(gradient_accumulation_steps=1),
        "backward() is not called": given(policy_log_probs=lambda values: values.detach().requires_grad_()),
    },
    "course.sft_microbatch_step": {
        "the sign is flipped: the loss is the negative log-likelihood": given(policy_log_probs=neg),
        "the rows are summed: take their mean": edited("row_losses.mean()", "row_losses.sum()"),
    },
    "course.policy_microbatch_step": {
        "the mean is over all tokens: take that of each row first": edited("sequence_mean", "token_mean")
    },
    "course.per_instance_dpo_loss": {
        "beta is left out": given(beta=1.0),
        "the reference model is left out": edited("*reference", "*(0 * each for each in reference)"),
        "chosen and rejected are exchanged": edited("*policy, *reference", "*policy[::-1], *reference[::-1]"),
    },
    # ---- Rewards ----
    "rewards.parse_gsm8k_response": {
        "the first number is taken: take the last": edited(", maxlen=1", ""),
        "the thousands separators are kept": edited('.replace(",", "")', ""),
        "decimals are cut off": then(lambda found: found and found.partition(".")[0]),
    },
    "rewards.parse_mmlu_response": {
        "the first capital letter is taken, which may begin a word": edited(
            "_chosen_letter(text)", "next(iter(re.findall('[A-D]', text)), None)"
        ),
        "the first answer is taken: a response may correct itself": edited(
            "_chosen_letter(text)", "_chosen_letter(text.partition(',')[0])"
        ),
    },
    "rewards.r1_zero_reward": {
        "the form is not checked": edited(
            "_graded(answer is not None, _unboxed(answer), ground_truth, fast)",
            "_scores(True, ground_truth in response)",
        )
    },
    "rewards.question_only_reward": {
        "the first box is read: read the last": given(
            response=lambda response: re.sub(r"(\\boxed\{[^}]*\}).*", r"\1", response)
        )
    },
}
