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
from trl_ext.advantages import group_normalized


def mistakes_of(name: str) -> list[tuple[str, Callable]]:
    """What a test says about each mistake of a function, and the function that makes it from the right one."""
    rows = [(*key.partition(": "), wrong) for key, wrong in MISTAKES.items()]
    return [(says, partial(_make, wrong)) for names, _, says, wrong in rows if name in names.split()]


def _make(wrong: Callable, right: Callable, **arguments: Any) -> Any:
    return wrong(partial(right, **arguments), SimpleNamespace(**arguments))


def given(**changes: Any) -> Callable:
    return lambda f, a: f(**changes)


def ones(name: str) -> Callable:
    return lambda f, a: f(**{name: torch.ones_like(getattr(a, name))})


def loss(of: Callable) -> Callable:
    """The logistic loss of a function of the scores."""
    return lambda f, a: -logsigmoid(a.beta * of(a.scores))


def normalized(rewards: Tensor, group_size: int, ddof: int, eps: float) -> Tensor:
    """Without exact zeros for a group of equal rewards."""
    groups = rewards.reshape(-1, group_size)
    deviation = groups.std(dim=1, correction=ddof, keepdim=True) + eps
    return ((groups - groups.mean(dim=1, keepdim=True)) / deviation).reshape(-1)


def no_minimum(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return -log_ratio.exp().clamp(1 - clip_low, 1 + clip_high) * advantages.reshape(len(advantages), -1)


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
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
    f"{PAIRS} naive_policy_gradient_loss: the losses are averaged: return one for each": lambda f, a: f().mean(),
    f"dpo aot bradley_terry: {LOG_OF_SIGMOID}": lambda f, a: -torch.log(torch.exp(-f())),
    "dpo per_instance_dpo_loss: beta is left out": given(beta=1.0),
    "dpo: the reference is left out": loss(lambda scores: scores.chosen - scores.rejected),
    "ipo: the target is 1 / beta: it is 1 / (2 beta)": lambda f, a: f(beta=a.beta / 2),
    "ipo: beta multiplies the margin, as in DPO": lambda f, a: (a.beta * a.scores.margin - 1 / (2 * a.beta)) ** 2,
    "aot: nothing is sorted: that is DPO": loss(lambda scores: scores.margin),
    "aot: the margins are sorted (paired AOT): sort the chosen and the rejected log-ratios separately":
        loss(lambda of: (of.chosen - of.rejected).sort()[0] - (of.ref_chosen - of.ref_rejected).sort()[0]),
    "bradley_terry: the margin is added: take it off": lambda f, a: f(margin=None if a.margin is None else -a.margin),
    "group_normalized: the sample's standard deviation is taken (std() divides by G - 1)": given(std_ddof=1),
    f"group_normalized: {NOT_ZERO}": lambda f, a: normalized(a.rewards, a.group_size, a.std_ddof, a.eps),
    "group_normalized group_centered: statistics are of the whole batch": lambda f, a: f(group_size=len(a.rewards)),
    "group_centered: a deviation divides it: that is GRPO": lambda f, a: normalized(a.rewards, a.group_size, 0, 1e-6),
    "token_log_ratio: the ratio itself is returned: return its logarithm": lambda f, a: f().exp(),
    "sequence_log_ratio: the log-ratios are summed: take their mean": lambda f, a: f() * a.mask.sum(1, keepdim=True),
    f"clipped_surrogate: {NO_MINIMUM}": lambda f, a: no_minimum(a.log_ratio, a.advantages, a.clip_low, a.clip_high),
    "clipped_surrogate: clip_high is not read: the ratio may rise by it": lambda f, a: f(clip_high=a.clip_low),
    "kl_estimate: k3 is that of the other direction: it is exp(-d) - 1 + d":
        lambda f, a: f(log_probs=a.ref_log_probs, ref_log_probs=a.log_probs) if a.kind == "k3" else f(),
    "kl_estimate: k2 lacks the half": lambda f, a: f() * (2 if a.kind == "k2" else 1),
    "aggregate: token_count is not read: token_mean divides by it where it is given": given(token_count=None),
    "aggregate: sequence_mean is computed as token_mean": lambda f, a: f(kind=a.kind.replace("sequence_", "token_")),
    "aggregate: constant divides by the response's length":
        lambda f, a: f(kind=a.kind.replace("constant", "sequence_mean")),
    f"aggregate sequence_log_ratio masked_mean masked_normalize {WHOLE}: {MASK}, so that padding counts": ones("mask"),
    f"{WHOLE}: gradient flows through old_log_probs: detach them": given(detached=("ref",)),
    f"{WHOLE}: gradient flows through ref_log_probs: detach them": given(detached=("old",)),
    f"{WHOLE}: {NO_MINIMUM}": given(surrogate=no_minimum),
    f"{WHOLE}: the KL term is left out": given(kl_coef=0.0),
    "grpo_loss: all tokens count alike (that is DAPO)": given(reduction="token_mean"),
    "dr_grpo_loss: the sums are divided by the responses' lengths (that is GRPO)": given(reduction="sequence_mean"),
    "gspo_loss: each token has its own ratio (that is GRPO)": given(ratio=lambda new, old, mask: new - old),
    "sequence_log_probs: logits and tokens are not shifted: the logits are about the next token":
        lambda f, a: f(logits=a.logits.roll(-1, dims=1)),
    f"sequence_log_probs: {MASK}: the prompt and the padding count": ones("response_mask"),
    "completion_mask: the end-of-text token is not counted: it is a token that the policy has chosen":
        lambda f, a: f() & ~torch.isin(a.completion_ids, torch.tensor(a.eos_token_id)),
    "tokenize_prompt_and_output: response_mask is not shifted with the labels: it is one place too far right":
        lambda f, a: f() | {"response_mask": pad(f()["response_mask"], (1, -1))},
    "tokenize_prompt_and_output: the labels are not shifted": lambda f, a: f() | {"labels": f()["input_ids"]},
    "token_entropy: probabilities are taken for their logarithms": lambda f, a: -a.logits.softmax(-1).square().sum(-1),
    "response_log_probs: the tokens of input_ids are looked up: take the labels": lambda f, a: f(labels=a.input_ids),
    "masked_mean: the sum is divided by the number of all entries":
        lambda f, a: losses.masked_sum(a.tensor, a.mask, a.dim) / (a.mask | True).sum(a.dim),
    "masked_normalize: the mean is taken": lambda f, a: losses.masked_mean(a.tensor, a.mask, a.dim),
    f"{REWARDS}: the population's deviation is taken: std() of torch is the sample's":
        lambda f, a: (group_normalized(f()[1], a.group_size, 0, a.advantage_eps), *f()[1:]),
    f"{REWARDS}: {NOT_ZERO}": lambda f, a: (normalized(f()[1], a.group_size, 1, a.advantage_eps), *f()[1:]),
    f"{REWARDS}: normalize_by_std is not read: the advantages are always divided": given(normalize_by_std=True),
    f"grpo_clip_loss: {NO_MINIMUM}": lambda f, a: (
        no_minimum(a.policy_log_probs - a.old_log_probs.detach(), a.advantages, a.cliprange, a.cliprange), {}),
    "policy_gradient_loss: no_baseline reads the advantages": lambda f, a: f(raw_rewards=a.advantages),
    f"{STEPS}: the loss is not divided by gradient_accumulation_steps": given(gradient_accumulation_steps=1),
    f"{STEPS}: backward() is not called":
        lambda f, a: f(policy_log_probs=a.policy_log_probs.detach().requires_grad_()),
    "parse_gsm8k_response: the thousands separators are kept":
        lambda f, a: (NUMBER.findall(a.model_output) or [None])[-1],
    "parse_mmlu_response: the first capital letter is taken, which may begin a word":
        lambda f, a: (re.findall("[A-D]", a.model_output) or [None])[0],
}
# fmt: on
