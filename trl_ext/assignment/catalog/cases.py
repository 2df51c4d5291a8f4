"""Test inputs for each kind of function: builders that turn a `Draw` into arguments by name.

A builder whose draw has `special == "nan"` puts NaN at the positions that do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trl_ext.assignment.catalog.drawing import GARBAGE, Draw, with_padding

Arguments = dict[str, Any]
Builder = Callable[[Draw], Arguments]


def preference(
    *, reference: bool = True, lengths: bool = False, betas: tuple = (0.1, 0.5), **options: tuple
) -> Builder:
    """Arguments of a preference loss: `options` lists the values that each option cycles through; None omits it."""

    def build(draw: Draw) -> Arguments:
        arguments = {"scores": draw.scores(draw.integer(4, 7), reference=reference, lengths=lengths)}
        chosen = {"beta": draw.turn(*betas), **{name: draw.turn(*values) for name, values in options.items()}}
        if draw.special == "far apart":
            fields = arguments["scores"]["fields"]
            fields["chosen"] = _moved(fields["chosen"], *(800 / chosen["beta"] * sign for sign in (-1, 1)))
        return arguments | {name: value for name, value in chosen.items() if value is not None}

    return build


def preference_without_reference(**options: tuple) -> Builder:
    return preference(reference=False, lengths=True, **options)


def _moved(values: Tensor, *by: float) -> Tensor:
    """Shift the first values beyond the range of an exponential, so that a sigmoid is 0 or 1."""
    amounts = torch.zeros_like(values)
    amounts[: len(by)] = torch.tensor(by)
    return (values.detach() + amounts).requires_grad_()


def bradley_terry(draw: Draw) -> Arguments:
    pairs = draw.integer(3, 6)
    arguments = {name: draw.tensor(pairs, grad=True) for name in ("chosen", "rejected")}
    if draw.special == "far apart":
        return arguments | {"chosen": _moved(arguments["chosen"], -800, 800)}
    settings = draw.turn(
        {}, {"margin": 0.5}, {"label_smoothing": 0.1}, {"centering": 0.01, "margin": draw.tensor(pairs)}
    )
    return arguments | settings


def kto(draw: Draw) -> Arguments:
    rows = draw.integer(4, 7)
    weights = draw.turn({}, {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7})
    return {
        "log_ratio": draw.tensor(rows, grad=True),
        "desirable": torch.arange(rows) % 3 != 1,
        # Alternate a mean above 0 with one below, which is clamped.
        "kl_log_ratio": draw.turn(
            draw.tensor(3, low=-0.2, high=1.5, grad=True), draw.tensor(3, low=-1.5, high=0.2, grad=True)
        ),
        **weights,
    }


def advantage(*, low: float = -2.0, **options: tuple) -> Builder:
    """Arguments of an advantage: groups of different rewards and, in every second case, one of equal rewards."""

    def build(draw: Draw) -> Arguments:
        if draw.special == "equal":
            # In float32, the mean of seven equal values differs from the value.
            equal, rest = torch.full((7,), 0.7), draw.tensor(7, low=low).float()
            return {"rewards": torch.cat([equal, rest]), "group_size": 7}
        group_size, groups = draw.turn(4, 3, 5), draw.turn(2, 3)
        rewards = draw.tensor(groups, group_size, low=low)
        if draw.index % 2:
            rewards[-1] = 0.5
        arguments = {"rewards": rewards.reshape(-1), "group_size": group_size}
        return arguments | {name: draw.turn(*values) for name, values in options.items()}

    return build


def group_rank(draw: Draw) -> Arguments:
    arguments = advantage(scale=(1.0, 2.0))(draw)
    # Rounded to create ties.
    return arguments | {"rewards": arguments["rewards"].round()}


def greedy_baseline(draw: Draw) -> Arguments:
    arguments = advantage()(draw)
    groups = len(arguments["rewards"]) // arguments["group_size"]
    return arguments | {"greedy_rewards": draw.tensor(groups)}


def length_weighted(draw: Draw) -> Arguments:
    arguments = advantage()(draw)
    return arguments | {"lengths": draw.integers(len(arguments["rewards"]), low=1, high=9)}


def gae(draw: Draw) -> Arguments:
    rows, tokens = 3, 5
    mask = draw.mask(rows, tokens)
    return {
        "rewards": with_padding(draw.tensor(rows, tokens), mask),
        "values": with_padding(draw.tensor(rows, tokens), mask),
        "mask": mask.long(),
        "gamma": draw.turn(1.0, 0.9),
        "lam": draw.turn(0.95, 0.5, 1.0),
    }


def clip_advantages(draw: Draw) -> Arguments:
    return {"advantages": draw.tensor(6, low=-4.0, high=4.0), "limit": draw.turn(1.0, 2.5)}


def token_ratio(draw: Draw) -> Arguments:
    new = draw.log_probs(3, 5, grad=True)
    return {"log_probs": new, "old_log_probs": new.detach() + draw.tensor(3, 5, low=-0.5, high=0.5)}


def sequence_ratio(draw: Draw) -> Arguments:
    mask = draw.mask(3, 5)
    arguments = token_ratio(draw)
    filler = math.nan if draw.special == "nan" else GARBAGE
    return {name: with_padding(value, mask, filler) for name, value in arguments.items()} | {"mask": mask.long()}


def surrogate(**options: tuple) -> Builder:
    """Arguments of a surrogate: ratios on both sides of every clip, and advantages of both signs."""

    def build(draw: Draw) -> Arguments:
        rows = draw.integer(3, 5)
        log_ratio = draw.turn(draw.tensor(rows, 4, low=-0.7, high=0.7), draw.tensor(rows, 1, low=-0.7, high=0.7))
        signs = 1.0 - 2.0 * (torch.arange(rows) % 2)
        arguments = {
            "log_ratio": log_ratio.requires_grad_(),
            "advantages": draw.tensor(rows, low=0.2, high=2.0) * signs,
        }
        chosen = {name: draw.turn(*values) for name, values in options.items()}
        return arguments | {name: value for name, value in chosen.items() if value is not None}

    return build


def cispo(draw: Draw) -> Arguments:
    arguments = surrogate(ratio_cap=(1.2, 1.0, 5.0))(draw)
    return arguments | {"log_probs": draw.log_probs(len(arguments["advantages"]), 4, grad=True)}


def reinforce(draw: Draw) -> Arguments:
    return {"log_probs": draw.log_probs(4, 5, grad=True), "advantages": draw.tensor(4, *draw.turn((), (1,)))}


def aggregate(draw: Draw) -> Arguments:
    rows, tokens = draw.integer(3, 4), 6
    mask = draw.mask(rows, tokens)
    if draw.special == "empty row":
        mask[-1] = False
    filler = math.nan if draw.special == "nan" else GARBAGE
    kind = draw.turn("sequence_mean", "token_mean", "constant", "sum")
    losses = with_padding(draw.tensor(rows, tokens), mask, filler).requires_grad_()
    options = {"constant": {"constant": 8.0}}.get(kind, {})
    if kind == "token_mean" and draw.index % 8 == 1:
        # Totals of the whole batch, of which these rows are a part.
        options = {"token_count": 20.0}
    return {"losses": losses, "mask": mask.long(), "kind": kind, **options}


def kl_estimate(draw: Draw) -> Arguments:
    log_probs = draw.log_probs(3, 4, grad=True)
    reference = log_probs.detach() + draw.tensor(3, 4, low=-0.8, high=0.8)
    return {"log_probs": log_probs, "ref_log_probs": reference, "kind": draw.turn("k3", "k1", "k2")}


def masked(first: str = "values", **options: tuple) -> Builder:
    """Arguments of a masked sum or mean, over everything or one dimension; `first` names the reduced argument."""

    def build(draw: Draw) -> Arguments:
        mask = draw.mask(3, 5)
        filler = math.nan if draw.special == "nan" else GARBAGE
        values = with_padding(draw.tensor(3, 5), mask, filler).requires_grad_()
        chosen = {name: draw.turn(*values) for name, values in options.items()}
        return {first: values, "mask": draw.turn(mask, mask.long()), "dim": draw.turn(1, None, -1), **chosen}

    return build


def completion_mask(draw: Draw) -> Arguments:
    ids = draw.integers(4, 6, low=3, high=9)
    # No end token, one, two, and one at the first position.
    ids[1, 3] = ids[2, 1] = ids[2, 4] = ids[3, 0] = 2
    return {"completion_ids": ids, "eos_token_id": draw.turn(2, [2, 3])}


def clipped_value_loss(draw: Draw) -> Arguments:
    old = draw.tensor(3, 4)
    return {
        "values": (old + draw.tensor(3, 4, low=-0.6, high=0.6)).requires_grad_(),
        "old_values": old,
        "returns": draw.tensor(3, 4),
        "clip": draw.turn(0.2, None, 0.4),
    }


def whiten(draw: Draw) -> Arguments:
    mask = draw.mask(3, 5)
    values = with_padding(draw.tensor(3, 5), mask)
    return {"values": values, "mask": mask.long(), "shift_mean": draw.turn(True, False)}


def entropy(draw: Draw) -> Arguments:
    logits = draw.tensor(2, 3, 5, low=-3.0, high=3.0)
    # Beyond the range of an exponential.
    return {"logits": (logits * draw.turn(1.0, 400.0)).requires_grad_()}


def truncate_pair(draw: Draw) -> Arguments:
    prompt, chosen, rejected = (draw.integers(draw.integer(4, 8), low=3, high=60).tolist() for _ in range(3))
    limits = draw.turn({"max_prompt_tokens": 3, "max_response_tokens": 2}, {"max_prompt_tokens": 5}, {})
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected, **limits}


def sequence_log_probs(draw: Draw) -> Arguments:
    logits = draw.tensor(3, 6, 7, low=-3.0, high=3.0, grad=True)
    mask = draw.mask(3, 6, start=draw.turn(2, 1))
    return {"logits": logits, "input_ids": draw.integers(3, 6, low=0, high=6), "response_mask": mask.long()}


def split_minibatches(draw: Draw) -> Arguments:
    rows = draw.turn(7, 6, 5)
    batch = {"rewards": draw.tensor(rows), "tokens": draw.integers(rows, 3, low=0, high=9)}
    return {"batch": batch, "order": draw.permutation(rows), "minibatch_size": draw.turn(2, 3, 5)}


def whole_loss(**options: tuple) -> Builder:
    """Arguments of a whole policy loss: several tokens beyond the clip on both sides, for advantages of both signs."""

    def build(draw: Draw) -> Arguments:
        rows, tokens = 4, 5
        mask = draw.mask(rows, tokens)
        new = draw.log_probs(rows, tokens)
        # Each row moves to one side, so that the mean over a response's tokens is also beyond the clip.
        drift = draw.tensor(rows, tokens, low=0.0, high=0.9) * torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
        made = {
            "log_probs": new,
            "old_log_probs": new - drift,
            "ref_log_probs": new + draw.tensor(rows, tokens, low=-0.5, high=0.5),
        }
        made = {name: with_padding(value, mask).requires_grad_() for name, value in made.items()}
        advantages = draw.tensor(rows, low=0.3, high=2.0) * torch.tensor([1.0, -1.0, 1.0, -1.0])
        chosen = {name: draw.turn(*values) for name, values in options.items()}
        return {**made, "mask": mask.long(), "advantages": advantages, "clip": 0.2, **chosen}

    return build
