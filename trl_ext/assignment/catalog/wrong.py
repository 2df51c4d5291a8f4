"""Wrong answers: functions that take the correct function and then that function's arguments by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from trl_ext import losses


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


def edited(old: str, new: str) -> Callable:
    """The correct function with another text in its source."""
    return lambda right, **arguments: _edited(right, old, new)(**arguments)


@cache
def _edited(right: Callable, old: str, new: str) -> Callable:
    source = inspect.getsource(right)
    if old not in source:
        raise ValueError(f"the source of {right.__name__} has no {old!r} to replace")
    # Without decorators, which would register the function.
    source = source[source.index("def ") :].replace(old, new)
    names = {**right.__globals__, "torch": torch, "losses": losses, "naive_log": naive_log}
    exec(f"from __future__ import annotations\n{source}", names)
    return names[right.__name__]


def naive_log(values):
    return torch.log(torch.sigmoid(values))


def by_group(change):
    """Advantages computed from rewards with one group per row, independently of the correct function."""

    def wrong(right, rewards, group_size, std_ddof=0, eps=1e-6):
        return change(rewards.reshape(-1, group_size), std_ddof, eps).reshape(-1)

    return wrong


def centered(groups, *ignored):
    return groups - groups.mean(dim=1, keepdim=True)


def rounding_divided(groups, ddof, eps):
    return centered(groups) / (groups.std(dim=1, correction=ddof, keepdim=True) + eps)


def eps_in_variance(groups, ddof, eps):
    return centered(groups) / (groups.var(dim=1, correction=ddof, keepdim=True) + eps).sqrt()


def as_kind(kind, other):
    """Compute the reduction of one kind as another."""
    return given(kind=lambda asked: other if asked == kind else asked)


def kept(reduction):
    """Reduce all entries, with 0 where the mask is 0."""

    def wrong(right, mask, dim=None, **reduced):
        (values,) = reduced.values()
        filled = values.masked_fill(mask == 0, 0)
        return reduction(filled) if dim is None else reduction(filled, dim)

    return wrong


def batch_with(name, change):
    """The token batch with one tensor changed."""
    return then(lambda batch: {**batch, name: change(batch)})


def not_shifted(right, logits, input_ids, response_mask):
    log_probs = logits.log_softmax(-1).gather(-1, input_ids.unsqueeze(-1)).squeeze(-1)
    return (log_probs * response_mask).sum(-1)


def over_the_batch(right, rollout_responses, **arguments):
    return right(rollout_responses=rollout_responses, **{**arguments, "group_size": len(rollout_responses)})


def numbers(text):
    return re.findall(r"-?[0-9][0-9,]*(?:\.[0-9]+)?", text)


def first_number(right, model_output):
    found = numbers(model_output)
    return found[0].replace(",", "") if found else None


def commas_kept(right, model_output):
    found = numbers(model_output)
    return found[-1].rstrip(",") if found else None


def first_capital(right, mmlu_example, model_output):
    found = re.search(r"[A-D]", model_output)
    return found[0] if found else None


def first_answer(right, mmlu_example, model_output):
    found = re.search(r"answer is ([A-D])", model_output)
    return found[1] if found else right(mmlu_example, model_output)


def form_not_checked(right, response, ground_truth):
    correct = float(ground_truth in response)
    return {"reward": correct, "format_reward": 1.0, "answer_reward": correct}
