"""Test inputs for each kind of function: builders that turn a `Draw` into arguments by name.

The arguments that a task lists as its options are added to these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trl_ext.assignment.catalog.drawing import Draw

Arguments = dict[str, Any]
Builder = Callable[[Draw], Arguments]


def preference(draw: Draw) -> Arguments:
    """`PreferenceScores` with a reference and lengths, with gradient to the policy's scores."""
    return _scores(draw, ("ref_chosen", "ref_rejected"))


def preference_without_reference(draw: Draw) -> Arguments:
    return _scores(draw, ())


def _scores(draw: Draw, reference: tuple[str, ...]) -> Arguments:
    pairs = draw.integer(4, 7)
    fields = {name: draw.tensor(pairs, low=-30.0, high=-2.0, grad=True) for name in ("chosen", "rejected")}
    fields |= {name: draw.tensor(pairs, low=-30.0, high=-2.0) for name in reference}
    fields |= {name: draw.integers(pairs, low=2, high=12) for name in ("chosen_length", "rejected_length")}
    if draw.special == "far apart":
        # At least 800 for every beta.
        fields["chosen"] = _moved(fields["chosen"], 16000)
    return {"scores": {"$object": "PreferenceScores", "fields": fields}}


def _moved(values: Tensor, by: float) -> Tensor:
    """Shift two values in either direction beyond the range of an exponential, so that a sigmoid is 0 or 1."""
    amounts = torch.zeros_like(values)
    amounts[:2] = torch.tensor([-by, by])
    return (values.detach() + amounts).requires_grad_()


def bradley_terry(draw: Draw) -> Arguments:
    pairs = draw.integer(3, 6)
    arguments = {name: draw.tensor(pairs, grad=True) for name in ("chosen", "rejected")}
    if draw.special == "far apart":
        return arguments | {"chosen": _moved(arguments["chosen"], 800)}
    with_margins = {"centering": 0.01, "margin": draw.tensor(pairs)}
    return arguments | draw.turn({}, {"margin": 0.5}, {"label_smoothing": 0.1}, with_margins)


def kto(draw: Draw) -> Arguments:
    rows = draw.integer(4, 7)
    # Alternate a mean above 0 with one below, which is clamped.
    low, high = draw.turn((-0.2, 1.5), (-1.5, 0.2))
    return {
        "log_ratio": draw.tensor(rows, grad=True),
        "desirable": torch.arange(rows) % 3 != 1,
        "kl_log_ratio": draw.tensor(3, low=low, high=high, grad=True),
        **draw.turn({}, {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}),
    }


def advantage(draw: Draw, low: float = -2.0) -> Arguments:
    """Groups of different rewards and, in every second case, one of equal rewards."""
    if draw.special == "equal":
        # In float32, the mean of seven equal values differs from the value.
        equal, rest = torch.full((7,), 0.7), draw.tensor(7, low=low).float()
        return {"rewards": torch.cat([equal, rest]), "group_size": 7}
    group_size = draw.turn(4, 3, 5)
    rewards = draw.tensor(draw.turn(2, 3), group_size, low=low)
    if draw.index % 2:
        rewards[-1] = 0.5
    return {"rewards": rewards.reshape(-1), "group_size": group_size}


def positive_rewards(draw: Draw) -> Arguments:
    return advantage(draw, low=0.1)


def group_rank(draw: Draw) -> Arguments:
    arguments = advantage(draw)
    # Rounded to create ties.
    return arguments | {"rewards": arguments["rewards"].round()}


def greedy_baseline(draw: Draw) -> Arguments:
    arguments = advantage(draw)
    return arguments | {"greedy_rewards": draw.tensor(len(arguments["rewards"]) // arguments["group_size"])}


def length_weighted(draw: Draw) -> Arguments:
    arguments = advantage(draw)
    return arguments | {"lengths": draw.integers(len(arguments["rewards"]), low=1, high=9)}


def gae(draw: Draw) -> Arguments:
    mask = draw.mask(3, 5)
    return {name: draw.padded(draw.tensor(3, 5), mask) for name in ("rewards", "values")} | {"mask": mask.long()}


def clip_advantages(draw: Draw) -> Arguments:
    return {"advantages": draw.tensor(6, low=-4.0, high=4.0)}


def token_ratio(draw: Draw) -> Arguments:
    new = draw.log_probs(3, 5)
    old = new + draw.tensor(3, 5, low=-0.5, high=0.5)
    return {"log_probs": new.requires_grad_(), "old_log_probs": old}


def sequence_ratio(draw: Draw) -> Arguments:
    mask, ratio = draw.mask(3, 5), token_ratio(draw)
    return {
        "log_probs": draw.padded(ratio["log_probs"].detach(), mask, grad=True),
        "old_log_probs": draw.padded(ratio["old_log_probs"], mask),
        "mask": mask.long(),
    }


def surrogate(draw: Draw) -> Arguments:
    """Ratios on both sides of every clip, and advantages of both signs."""
    rows = draw.integer(3, 5)
    log_ratio = draw.tensor(rows, draw.turn(4, 1), low=-0.7, high=0.7, grad=True)
    return {"log_ratio": log_ratio, "advantages": draw.signed(rows)}


def cispo(draw: Draw) -> Arguments:
    arguments = surrogate(draw)
    return arguments | {"log_probs": draw.log_probs(len(arguments["advantages"]), 4, grad=True)}


def reinforce(draw: Draw) -> Arguments:
    return {"log_probs": draw.log_probs(4, 5, grad=True), "advantages": draw.tensor(4, *draw.turn((), (1,)))}


def aggregate(draw: Draw) -> Arguments:
    rows, tokens = draw.integer(3, 4), 6
    mask = draw.mask(rows, tokens)
    if draw.special == "empty row":
        mask[-1] = False
    kind = draw.turn("sequence_mean", "token_mean", "constant", "sum")
    arguments = {"losses": draw.padded(draw.tensor(rows, tokens), mask, grad=True), "mask": mask.long(), "kind": kind}
    if kind == "token_mean" and draw.index % 8 == 1:
        # Totals of the whole batch, of which these rows are a part.
        arguments["token_count"] = 20.0
    return arguments | ({"constant": 8.0} if kind == "constant" else {})


def kl_estimate(draw: Draw) -> Arguments:
    log_probs = draw.log_probs(3, 4, grad=True)
    reference = log_probs.detach() + draw.tensor(3, 4, low=-0.8, high=0.8)
    return {"log_probs": log_probs, "ref_log_probs": reference}


def masked(draw: Draw, name: str = "values") -> Arguments:
    """A masked sum or mean, over everything or one dimension."""
    mask = draw.mask(3, 5, start=draw.turn(0, 1))
    return {name: draw.padded(draw.tensor(3, 5), mask, grad=True), "mask": mask, "dim": draw.turn(1, None, 0)}


def masked_tensor(draw: Draw) -> Arguments:
    return masked(draw, "tensor")


def completion_mask(draw: Draw) -> Arguments:
    ids = draw.integers(4, 6, low=3, high=9)
    # No end token, one, two, and one at the first position.
    ids[1, 3] = ids[2, 1] = ids[2, 4] = ids[3, 0] = 2
    return {"completion_ids": ids}


def clipped_value_loss(draw: Draw) -> Arguments:
    old = draw.tensor(3, 4)
    values = (old + draw.tensor(3, 4, low=-0.6, high=0.6)).requires_grad_()
    return {"values": values, "old_values": old, "returns": draw.tensor(3, 4), "clip": draw.turn(0.2, None, 0.4)}


def whiten(draw: Draw) -> Arguments:
    mask = draw.mask(3, 5)
    return {"values": draw.padded(draw.tensor(3, 5), mask), "mask": mask.long()}


def entropy(draw: Draw) -> Arguments:
    logits = draw.tensor(2, 3, 5, low=-3.0, high=3.0)
    # Beyond the range of an exponential.
    return {"logits": (logits * draw.turn(1.0, 400.0)).requires_grad_()}


def truncate_pair(draw: Draw) -> Arguments:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    ids = {name: draw.integers(draw.integer(4, 8), low=3, high=60).tolist() for name in names}
    return ids | draw.turn({"max_prompt_tokens": 3, "max_response_tokens": 2}, {"max_prompt_tokens": 5}, {})


def sequence_log_probs(draw: Draw) -> Arguments:
    logits = draw.tensor(3, 6, 7, low=-3.0, high=3.0, grad=True)
    mask = draw.mask(3, 6, start=draw.turn(2, 1))
    return {"logits": logits, "input_ids": draw.integers(3, 6, low=0, high=6), "response_mask": mask.long()}


def split_minibatches(draw: Draw) -> Arguments:
    rows = draw.turn(7, 6, 5)
    batch = {"rewards": draw.tensor(rows), "tokens": draw.integers(rows, 3, low=0, high=9)}
    return {"batch": batch, "order": draw.permutation(rows)}


def whole_loss(draw: Draw) -> Arguments:
    """A whole policy loss: several tokens beyond the clip on both sides, for advantages of both signs."""
    mask, new = draw.mask(4, 5), draw.log_probs(4, 5)
    tensors = {
        "log_probs": new,
        "old_log_probs": new - draw.drift(5),
        "ref_log_probs": new + draw.tensor(4, 5, low=-0.5, high=0.5),
    }
    tensors = {name: draw.padded(values, mask, grad=True) for name, values in tensors.items()}
    return {**tensors, "mask": mask.long(), "advantages": draw.signed(4), "clip": 0.2}


# ---- The reasoning course ----


def naive_loss(draw: Draw) -> Arguments:
    return {"raw_rewards_or_advantages": draw.tensor(3, 1), "policy_log_probs": draw.log_probs(3, 4, grad=True)}


def clip_loss(draw: Draw) -> Arguments:
    new = draw.log_probs(4, 4)
    old = (new - draw.drift(4)).requires_grad_()
    advantages = draw.signed(4).unsqueeze(1)
    return {"advantages": advantages, "policy_log_probs": new.requires_grad_(), "old_log_probs": old}


def by_type(draw: Draw) -> Arguments:
    return {**clip_loss(draw), "raw_rewards": draw.tensor(4, 1, low=0.0, high=1.0)}


def policy_step(draw: Draw) -> Arguments:
    mask, arguments = draw.mask(4, 4), by_type(draw)
    for name in ("policy_log_probs", "old_log_probs"):
        arguments[name] = draw.padded(arguments[name].detach(), mask, grad=True)
    return {**arguments, "response_mask": mask.long()}


def sft_step(draw: Draw) -> Arguments:
    mask = draw.mask(3, 5, start=1)
    return {"policy_log_probs": draw.padded(draw.log_probs(3, 5), mask, grad=True), "response_mask": mask.long()}
