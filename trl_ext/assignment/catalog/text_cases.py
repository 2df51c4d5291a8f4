"""Test inputs for the functions of the reasoning course and the reward rules: builders as in `cases`."""

from __future__ import annotations

import math
from typing import Any

import torch

from trl_ext.assignment.catalog.cases import Arguments, Builder
from trl_ext.assignment.catalog.drawing import GARBAGE, Draw, fake, with_padding

WORDS = ["red", "green", "blue", "one", "two", "three", "four", "five", "cats", "dogs", "sing", "run"]


def _text(draw: Draw, low: int, high: int) -> str:
    return " ".join(WORDS[draw.integer(0, len(WORDS) - 1)] for _ in range(draw.integer(low, high)))


def tokenize(draw: Draw) -> Arguments:
    rows = draw.turn(3, 4)
    # Outputs of different lengths; every third case has an empty one.
    outputs = [_text(draw, 1 + row, 2 + row) for row in range(rows)]
    if draw.index % 3 == 2:
        outputs[0] = ""
    return {
        "prompt_strs": [_text(draw, 2, 5) for _ in range(rows)],
        "output_strs": outputs,
        "tokenizer": fake("tokenizer", **draw.turn({}, {"pad_token_id": None})),
    }


def log_probs(draw: Draw) -> Arguments:
    return {
        "model": fake("model", seed=draw.integer(0, 99), size=9, width=3, grad=True),
        "input_ids": draw.integers(2, 5, low=0, high=8),
        "labels": draw.integers(2, 5, low=0, high=8),
        "return_token_entropy": draw.turn(True, False),
    }


def group_rewards(draw: Draw) -> Arguments:
    if draw.special == "equal":
        return _equal_rewards(draw)
    group_size, groups = draw.turn(4, 3), 3
    truths = [truth for _ in range(groups) for truth in [WORDS[draw.integer(0, 11)]] * group_size]
    # The first of a group is correct, the second almost, the others are random.
    responses = []
    for number, truth in enumerate(truths):
        said = {0: f"{_text(draw, 1, 3)} {truth}", 1: f"{truth} {truth} {_text(draw, 1, 1)}"}
        responses.append(said.get(number % group_size, _text(draw, 1, 4)))
    return {
        "reward_fn": fake("reward"),
        "rollout_responses": responses,
        "repeated_ground_truths": truths,
        "group_size": group_size,
        "advantage_eps": draw.turn(1e-6, 0.1),
        "normalize_by_std": draw.turn(True, True, False),
    }


def _equal_rewards(draw: Draw) -> Arguments:
    """A group with equal rewards whose float32 mean is not exactly that reward."""
    truth, others = WORDS[draw.integer(0, 5)], WORDS[6 + draw.integer(0, 5)]
    return {
        "reward_fn": fake("reward", scale=0.7),
        "rollout_responses": [f"it is {truth}"] * 7 + [truth, others] * 3 + [others],
        "repeated_ground_truths": [truth] * 14,
        "group_size": 7,
        "advantage_eps": 1e-6,
        "normalize_by_std": True,
    }


def naive_loss(draw: Draw) -> Arguments:
    return {
        "raw_rewards_or_advantages": draw.tensor(3, 1),
        "policy_log_probs": draw.log_probs(3, 4, grad=True),
    }


def clip_loss(draw: Draw) -> Arguments:
    new = draw.log_probs(4, 4, grad=True)
    drift = draw.tensor(4, 4, low=0.0, high=0.8) * torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    return {
        "advantages": (draw.tensor(4, low=0.3, high=2.0) * torch.tensor([1.0, -1.0, 1.0, -1.0])).unsqueeze(1),
        "policy_log_probs": new,
        "old_log_probs": (new.detach() - drift).requires_grad_(),
        "cliprange": draw.turn(0.2, 0.4),
    }


def by_type(draw: Draw) -> Arguments:
    arguments = clip_loss(draw)
    arguments["raw_rewards"] = draw.tensor(4, 1, low=0.0, high=1.0)
    types = ("grpo_clip", "no_baseline", "reinforce_with_baseline", "grpo_no_clip")
    return {"loss_type": draw.turn(*types), **arguments}


def sft_step(draw: Draw) -> Arguments:
    mask = draw.mask(3, 5, start=1)
    return {
        "policy_log_probs": with_padding(draw.log_probs(3, 5), mask).requires_grad_(),
        "response_mask": mask.long(),
        "gradient_accumulation_steps": draw.turn(2, 4, 1),
        "normalize_constant": draw.turn(1.0, 3.0, 2.0),
    }


def policy_step(draw: Draw) -> Arguments:
    mask = draw.mask(4, 4)
    arguments = by_type(draw)
    for name in ("policy_log_probs", "old_log_probs"):
        arguments[name] = with_padding(arguments[name].detach(), mask, -5.0).requires_grad_()
    return {**arguments, "response_mask": mask.long(), "gradient_accumulation_steps": draw.turn(2, 3)}


def instance_dpo(draw: Draw) -> Arguments:
    return {
        "lm": fake("model", seed=draw.integer(0, 99), grad=True),
        "lm_ref": fake("model", seed=draw.integer(100, 199)),
        "tokenizer": fake("tokenizer"),
        "beta": draw.turn(0.1, 0.02),
        "prompt": _text(draw, 2, 4),
        "response_chosen": _text(draw, 2, 4),
        "response_rejected": _text(draw, 2, 5),
    }


def masked_course(*, constant: bool) -> Builder:
    """Arguments of the course's `masked_mean` and `masked_normalize`."""

    def build(draw: Draw) -> Arguments:
        mask = draw.mask(3, 5, start=draw.turn(0, 1))
        filler = math.nan if draw.special == "nan" else GARBAGE
        tensor = with_padding(draw.tensor(3, 5), mask, filler).requires_grad_()
        given: dict[str, Any] = {"normalize_constant": draw.turn(4.0, 7.0)} if constant else {}
        return {"tensor": tensor, "mask": mask, "dim": draw.turn(1, None, 0), **given}

    return build


def gsm8k_text(draw: Draw) -> Arguments:
    one, two = draw.integer(3, 60), draw.integer(3, 60)
    price = f"{draw.integer(1, 9)},{draw.integer(100, 999)}.{draw.integer(10, 99)}"
    texts = (
        f"She has {one} + {two} = {one + two} apples.",
        f"It costs ${price} in all, so the answer is {price}.",
        f"I cannot say: {_text(draw, 1, 3)}.",
        f"The loss is -{one}",
        f"First {one}, then {two}, so {one + 2 * two} of them.",
        f"The answer is {one}",
        f"{one} from {one + two} leaves {two}.",
        f"about 0.{two}",
    )
    return {"model_output": draw.turn(*texts)}


def mmlu_text(draw: Draw) -> Arguments:
    options = [WORDS[number] for number in draw.permutation(len(WORDS))[:4].tolist()]
    # One of the texts begins with the letter B.
    own, other = ("AC"[draw.integer(0, 1)], "BD"[draw.integer(0, 1)])
    texts = (
        f"The answer is {other}, no, the answer is {own}.",
        f"({own}) is what I choose, and not the rest",
        f"I would take option {own} of these",
        options["ABCD".index(own)],
        f"Because of it the answer is {own}.",
        "I do not know.",
        f"The correct answer is {own}. {other} is wrong.",
        f"{own}.",
    )
    example = {"question": f"Which one, {_text(draw, 1, 2)}?", "options": options, "subject": "colours"}
    return {"mmlu_example": example, "model_output": draw.turn(*texts)}


def tagged(draw: Draw) -> Arguments:
    right, wrong = draw.integer(10, 54), draw.integer(55, 99)
    responses = (
        f"so it is {_text(draw, 1, 2)} </think> <answer> {right} </answer>",
        f"so it is less </think> <answer> {wrong} </answer>",
        f"</think><answer> {right} </answer>",
        f"it is {right}",
        f"{_text(draw, 1, 2)} </think> <answer> \\boxed{{{right}}} </answer>",
        f"first </think> <answer> {wrong} </answer> no <answer> {right} </answer>",
    )
    return {"response": draw.turn(*responses), "ground_truth": str(right)}


def boxed(draw: Draw) -> Arguments:
    right, wrong = draw.integer(10, 54), draw.integer(55, 99)
    responses = (
        f"so \\boxed{{{right}}}",
        f"so \\boxed{{{wrong}}}",
        f"it is {right}",
        f"\\boxed{{{wrong}}} or rather \\boxed{{{right}}}",
        f"so \\boxed{{{right}",
    )
    return {"response": draw.turn(*responses), "ground_truth": str(right)}


def last_number(draw: Draw) -> Arguments:
    right, wrong, price = draw.integer(10, 54), draw.integer(55, 99), draw.integer(1000, 9999)
    texts = (f"so {right - 2} + 2 = {right}", f"{right}, or is it {wrong}", _text(draw, 2, 4), f"it costs ${price:,}")
    return {"response": draw.turn(*texts), "ground_truth": str(draw.turn(right, right, right, price))}


def countdown(draw: Draw) -> Arguments:
    one, two, three = draw.integer(2, 4), draw.integer(5, 7), draw.integer(8, 12)
    target = one * two + three
    formulas = (
        f"{one} * {two} + {three}",
        f"({one} + {two}) * {three}",
        f"{three} + {one} * {two} = {target}",
        f"{three} + {two} + {two} * ({one} - 1)",
        f"{target}",
    )
    return {
        "response": f"I try {_text(draw, 1, 2)} </think> <answer> {draw.turn(*formulas)} </answer>",
        "numbers": [one, two, three],
        "target": target,
    }
