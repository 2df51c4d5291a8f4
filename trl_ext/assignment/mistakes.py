"""Known mistakes, by the functions in which they are made and what a failing test says about them.

A mistake takes `f`, the library's function with a case's arguments, which other arguments may replace, and `a`, these
arguments. What a test says completes the sentence "this is what you get when".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from trl_ext import losses
from trl_ext.advantages import group_centered, group_normalized
from trl_ext.data.packed_sft import encode_documents


def mistakes_of(name: str) -> list[tuple[str, Callable]]:
    """What a test says about each mistake of a function, and the function that makes it from the right one."""
    rows = [(*key.partition(": "), wrong) for key, wrong in MISTAKES.items()]
    return [(says, partial(_make, wrong)) for names, _, says, wrong in rows if name in names.split()]


def _make(wrong: Callable, right: Callable, **arguments: Any) -> Any:
    return wrong(partial(right, **arguments), SimpleNamespace(**arguments))


def given(**changes: Any) -> Callable:
    return lambda f, a: f(**changes)


def as_kind(kind: str, other: str) -> Callable:
    return lambda f, a: f(kind=other if a.kind == kind else a.kind)


def ones(name: str) -> Callable:
    return lambda f, a: f(**{name: torch.ones_like(getattr(a, name))})


def loss(of: Callable) -> Callable:
    """The logistic loss of a function of the scores."""
    return lambda f, a: -logsigmoid(a.beta * of(a.scores))


def up(values: Tensor) -> Tensor:
    return values.sort().values


def normalized(rewards: Tensor, group_size: int, ddof: int = 0, eps: float = 1e-6, within: float = 0.0) -> Tensor:
    """Without exact zeros for a group of equal rewards; `within` is added to the variance."""
    groups = rewards.reshape(-1, group_size)
    deviation = (groups.var(dim=1, correction=ddof, keepdim=True) + within).sqrt() + eps
    return ((groups - groups.mean(dim=1, keepdim=True)) / deviation).reshape(-1)


def no_minimum(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return -log_ratio.exp().clamp(1 - clip_low, 1 + clip_high) * advantages.reshape(len(advantages), -1)


def course_loss(surrogate: Callable, old: Tensor, a: SimpleNamespace) -> Tensor:
    return surrogate(a.policy_log_probs - old, a.advantages, clip_low=a.cliprange, clip_high=a.cliprange)


def by_length(values: Tensor, a: SimpleNamespace) -> Tensor:
    """Values that make a mean of rows' means a mean of tokens."""
    return values * a.response_mask.sum(1, keepdim=True) * len(values) / a.response_mask.sum()


def look_up(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def text_log_prob(a: SimpleNamespace, response: str) -> Tensor:
    ids = torch.tensor(encode_documents(a.tokenizer, [{"prompt": a.prompt, "response": response}]))
    return look_up(a.lm(ids[:, :-1]).logits.log_softmax(-1), ids[:, 1:]).sum()


def matched(pattern: str, place: int) -> Callable:
    return lambda f, a: (re.findall(pattern, a.model_output) or [None])[place]


NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
PAIRS, WHOLE = "dpo ipo aot bradley_terry", "grpo_loss dr_grpo_loss gspo_loss"
SIGNED = (
    f"{PAIRS} {WHOLE} group_normalized group_centered token_log_ratio sequence_log_ratio clipped_surrogate "
    "sequence_log_probs token_entropy naive_policy_gradient_loss per_instance_dpo_loss"
)
STEPS, REWARDS = "sft_microbatch_step policy_microbatch_step", "compute_group_normalized_rewards"
LOG_OF_SIGMOID = (
    "log(sigmoid(x)) or log(1 + exp(-x)) is computed step by step, which is infinite for x of -800: use "
    "torch.nn.functional.logsigmoid"
)
NOT_ZERO = "the rounding of a mean is divided by eps: the advantages of a group of equal rewards are exactly 0"
NO_MINIMUM, MASK = "the minimum is missing: the clipped ratio is taken wherever it lies", "the mask is left out"
# fmt: off
MISTAKES: dict[str, Callable[[Callable, SimpleNamespace], Any]] = {
    f"{SIGNED}: the sign is flipped": lambda f, a: -f(),
    f"{PAIRS}: the losses are averaged over the batch: return one for each row": lambda f, a: f().mean(),
    f"dpo aot bradley_terry: {LOG_OF_SIGMOID}": lambda f, a: -torch.log(torch.exp(-f())),
    "dpo per_instance_dpo_loss: beta is left out": given(beta=1.0),
    "dpo: the reference is left out": loss(lambda scores: scores.chosen - scores.rejected),
    "dpo: the sigmoid's logarithm is left out": lambda f, a: -torch.sigmoid(a.beta * a.scores.margin),
    "dpo: chosen and rejected are exchanged": loss(lambda scores: -scores.margin),
    "ipo: the target is 1 / beta: it is 1 / (2 beta)": lambda f, a: f(beta=a.beta / 2),
    "ipo: beta multiplies the margin, as in DPO": lambda f, a: (a.beta * a.scores.margin - 1 / (2 * a.beta)) ** 2,
    "ipo: the distance is not squared": lambda f, a: f().sqrt(),
    "aot: nothing is sorted: that is DPO": loss(lambda scores: scores.margin),
    "aot: the margins are sorted (paired AOT): sort the chosen and the rejected log-ratios separately":
        loss(lambda scores: up(scores.chosen - scores.rejected) - up(scores.ref_chosen - scores.ref_rejected)),
    "aot: the reference is not taken off": loss(lambda scores: up(scores.chosen) - up(scores.rejected)),
    "aot: the best chosen meets the worst rejected":
        loss(lambda scores: up(scores.chosen_log_ratio) - up(scores.rejected_log_ratio).flip(0)),
    "bradley_terry: chosen and rejected are exchanged": lambda f, a: f(chosen=a.rejected, rejected=a.chosen),
    "bradley_terry: the margin is added: take it off": lambda f, a: f(margin=None if a.margin is None else -a.margin),
    "bradley_terry: label_smoothing is not read": given(label_smoothing=0.0),
    "bradley_terry: centering is not read": given(centering=0.0),
    "group_normalized: the sample's standard deviation is taken (std() divides by G - 1)": given(std_ddof=1),
    "group_normalized: the population's standard deviation is taken although std_ddof is 1": given(std_ddof=0),
    f"group_normalized: {NOT_ZERO}": lambda f, a: normalized(a.rewards, a.group_size, a.std_ddof, a.eps),
    "group_normalized: eps is left out": given(eps=0.0),
    "group_normalized: eps is added to the variance: add it to the standard deviation":
        lambda f, a: normalized(a.rewards, a.group_size, a.std_ddof, 0.0, a.eps),
    "group_normalized: nothing is divided: that is Dr. GRPO": lambda f, a: group_centered(a.rewards, a.group_size),
    "group_normalized group_centered: statistics are of the whole batch": lambda f, a: f(group_size=len(a.rewards)),
    "group_centered: the group's sum is taken off: take off its mean":
        lambda f, a: a.rewards - a.rewards.view(-1, a.group_size).sum(1).repeat_interleave(a.group_size),
    "group_centered: a deviation divides it: that is GRPO": lambda f, a: normalized(a.rewards, a.group_size),
    "token_log_ratio: the ratio itself is returned: return its logarithm": lambda f, a: f().exp(),
    "token_log_ratio: the log-probabilities are divided: subtract them": lambda f, a: a.log_probs / a.old_log_probs,
    "sequence_log_ratio: the log-ratios are summed: take their mean": lambda f, a: f() * a.mask.sum(1, keepdim=True),
    "sequence_log_ratio: the sum is divided by the width T: divide by the response's own length":
        lambda f, a: f() * a.mask.sum(1, keepdim=True) / a.mask.shape[1],
    f"clipped_surrogate: {NO_MINIMUM}": lambda f, a: no_minimum(a.log_ratio, a.advantages, a.clip_low, a.clip_high),
    "clipped_surrogate: the maximum is taken for the minimum": lambda f, a: torch.minimum(
        -a.log_ratio.exp() * a.advantages[:, None], no_minimum(a.log_ratio, a.advantages, a.clip_low, a.clip_high)),
    "clipped_surrogate: the ratio is not clipped": given(clip_low=9.0, clip_high=9.0),
    "clipped_surrogate: clip_high is not read: the ratio may rise by it": lambda f, a: f(clip_high=a.clip_low),
    "clipped_surrogate: dual_clip is not read": given(dual_clip=None),
    "kl_estimate: k3 is that of the other direction: it is exp(-d) - 1 + d":
        lambda f, a: f(log_probs=a.ref_log_probs, ref_log_probs=a.log_probs) if a.kind == "k3" else f(),
    "kl_estimate: k2 lacks the half": lambda f, a: f() * (2 if a.kind == "k2" else 1),
    "kl_estimate: k1 is the reference less the policy": lambda f, a: f() * (-1 if a.kind == "k1" else 1),
    "aggregate: token_count is not read: token_mean divides by it where it is given": given(token_count=None),
    "aggregate: sequence_mean is computed as token_mean": as_kind("sequence_mean", "token_mean"),
    "aggregate: token_mean is computed as sequence_mean": as_kind("token_mean", "sequence_mean"),
    "aggregate: constant divides by the response's length": as_kind("constant", "sequence_mean"),
    "aggregate: sum adds up the rows: take their mean": lambda f, a: f() * (len(a.losses) if a.kind == "sum" else 1),
    f"aggregate sequence_log_ratio masked_mean masked_normalize {WHOLE}: {MASK}, so that padding counts": ones("mask"),
    f"{WHOLE}: gradient flows through old_log_probs: detach them": given(detached=("ref",)),
    f"{WHOLE}: gradient flows through ref_log_probs: detach them": given(detached=("old",)),
    f"{WHOLE}: {NO_MINIMUM}": given(surrogate=no_minimum),
    f"{WHOLE}: the KL term is left out": given(kl_coef=0.0),
    f"{WHOLE}: the KL term is averaged over each response first": given(kl_reduction="sequence_mean"),
    f"{WHOLE}: the KL term is taken off: it is added to the loss": lambda f, a: f(kl_coef=-a.kl_coef),
    "grpo_loss: all tokens count alike (that is DAPO)": given(reduction="token_mean"),
    "dr_grpo_loss: the sums are divided by the responses' lengths (that is GRPO)": given(reduction="sequence_mean"),
    "gspo_loss: the log-ratios are summed: take their mean":
        given(ratio=lambda new, old, mask: losses.masked_sum(new - old, mask, 1).unsqueeze(1)),
    "sequence_log_probs: logits and tokens are not shifted: the logits are about the next token":
        lambda f, a: (look_up(a.logits.log_softmax(-1), a.input_ids) * a.response_mask).sum(1),
    "sequence_log_probs: the mask is not shifted": lambda f, a: f(response_mask=a.response_mask.roll(1, dims=1)),
    "sequence_log_probs: the mean is taken: take the sum": lambda f, a: f() / a.response_mask[:, 1:].sum(1),
    f"sequence_log_probs: {MASK}: the prompt and the padding count": ones("response_mask"),
    "split_minibatches: the last minibatch, which is not full, is dropped":
        lambda f, a: [each for each in f() if len(each["rewards"]) == a.minibatch_size],
    "split_minibatches: the order is not read": lambda f, a: f(order=torch.arange(len(a.order))),
    "completion_mask: the end-of-text token is not counted: it is a token that the policy has chosen":
        lambda f, a: f() & ~torch.isin(a.completion_ids, torch.tensor(a.eos_token_id)),
    "completion_mask: what follows the first end-of-text token is counted": lambda f, a: torch.ones_like(f()),
    "tokenize_prompt_and_output: response_mask is not shifted with the labels: it is one place too far right":
        lambda f, a: f() | {"response_mask": pad(f()["response_mask"], (1, -1))},
    "tokenize_prompt_and_output: the labels are not shifted": lambda f, a: f() | {"labels": f()["input_ids"]},
    "tokenize_prompt_and_output: the prompt is in response_mask":
        lambda f, a: f() | {"response_mask": f()["response_mask"].long().flip(1).cummax(1).values.flip(1)},
    "token_entropy: probabilities are taken for their logarithms": lambda f, a: -a.logits.softmax(-1).square().sum(-1),
    "token_entropy: the mean over the vocabulary is taken: take the sum": lambda f, a: f() / a.logits.shape[-1],
    "response_log_probs: the logits are returned: normalise them with log_softmax":
        lambda f, a: f() | {"log_probs": look_up(a.model(a.input_ids).logits, a.labels)},
    "response_log_probs: the tokens of input_ids are looked up: take the labels": lambda f, a: f(labels=a.input_ids),
    "response_log_probs: no gradient flows: compute it outside torch.no_grad()":
        lambda f, a: {name: values.detach() for name, values in f().items()},
    "masked_mean: the sum is divided by the number of all entries":
        lambda f, a: losses.masked_sum(a.tensor, a.mask, a.dim) / (a.mask | True).sum(a.dim),
    "masked_mean: the sum is returned: divide it": lambda f, a: losses.masked_sum(a.tensor, a.mask, a.dim),
    "masked_normalize: the mean is taken": lambda f, a: losses.masked_mean(a.tensor, a.mask, a.dim),
    "masked_normalize: normalize_constant is not read": given(normalize_constant=1.0),
    f"{REWARDS}: the population's deviation is taken: std() of torch is the sample's":
        lambda f, a: (group_normalized(f()[1], a.group_size, 0, a.advantage_eps), *f()[1:]),
    f"{REWARDS}: {NOT_ZERO}": lambda f, a: (normalized(f()[1], a.group_size, 1, a.advantage_eps), *f()[1:]),
    f"{REWARDS}: statistics are of the whole batch": lambda f, a: f(group_size=len(a.rollout_responses)),
    f"{REWARDS}: normalize_by_std is not read: the advantages are always divided": given(normalize_by_std=True),
    f"{REWARDS}: advantage_eps is not read": given(advantage_eps=0.0),
    "naive_policy_gradient_loss: the losses are averaged: return one for each token": lambda f, a: f().mean(),
    "grpo_clip_loss: gradient flows through the old log-probabilities: detach them":
        lambda f, a: (course_loss(losses.clipped_surrogate, a.old_log_probs, a), {}),
    f"grpo_clip_loss: {NO_MINIMUM}": lambda f, a: (course_loss(no_minimum, a.old_log_probs.detach(), a), {}),
    "grpo_clip_loss: the sign is flipped": lambda f, a: (-f()[0], {}),
    "policy_gradient_loss: no_baseline reads the advantages": lambda f, a: f(raw_rewards=a.advantages),
    "policy_gradient_loss: reinforce_with_baseline reads the raw rewards":
        lambda f, a: f(advantages=a.raw_rewards) if a.loss_type == "reinforce_with_baseline" else f(),
    f"{STEPS}: the loss is not divided by gradient_accumulation_steps": given(gradient_accumulation_steps=1),
    f"{STEPS}: backward() is not called":
        lambda f, a: f(policy_log_probs=a.policy_log_probs.detach().requires_grad_()),
    "sft_microbatch_step: the sign is flipped": lambda f, a: f(policy_log_probs=-a.policy_log_probs),
    "sft_microbatch_step: the rows are summed: take their mean":
        lambda f, a: f(normalize_constant=a.normalize_constant / len(a.policy_log_probs)),
    "policy_microbatch_step: the mean is over all tokens: take that of each row first":
        lambda f, a: f(raw_rewards=by_length(a.raw_rewards, a), advantages=by_length(a.advantages, a)),
    "per_instance_dpo_loss: the reference model is left out": lambda f, a: -logsigmoid(
        a.beta * (text_log_prob(a, a.response_chosen) - text_log_prob(a, a.response_rejected))),
    "per_instance_dpo_loss: chosen and rejected are exchanged":
        lambda f, a: f(response_chosen=a.response_rejected, response_rejected=a.response_chosen),
    "parse_gsm8k_response: the first number is taken: take the last": matched(NUMBER, 0),
    "parse_gsm8k_response: the thousands separators are kept": matched(NUMBER, -1),
    "parse_gsm8k_response: decimals are cut off": lambda f, a: f() and f().partition(".")[0],
    "parse_mmlu_response: the first capital letter is taken, which may begin a word": matched("[A-D]", 0),
    "parse_mmlu_response: the first answer is taken: a response may correct itself":
        lambda f, a: f(model_output=a.model_output.partition(",")[0]),
}
# fmt: on
