"""What the functions of the reasoning course and the reward rules are tried on: builders as in `cases`."""

from __future__ import annotations

import math
from typing import Any

import torch

from trl_ext.assignment.cases import Arguments, Builder
from trl_ext.assignment.drawing import GARBAGE, Draw, fake, with_padding

WORDS = ["red", "green", "blue", "one", "two", "three", "four", "five", "cats", "dogs", "sing", "run"]


def _text(draw: Draw, low: int, high: int) -> str:
    return " ".join(WORDS[draw.integer(0, len(WORDS) - 1)] for _ in range(draw.integer(low, high)))


def tokenize(draw: Draw) -> Arguments:
    rows = draw.turn(3, 4)
    # Outputs of different lengths, in every third case one that is empty.
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
    group_size, groups = draw.turn(4, 3), 3
    truths = [truth for _ in range(groups) for truth in [WORDS[draw.integer(0, 11)]] * group_size]
    # The first of a group is right, the second nearly, the others as they come.
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
    """Of the course's `masked_mean` and `masked_normalize`."""

    def build(draw: Draw) -> Arguments:
        mask = draw.mask(3, 5, start=draw.turn(0, 1))
        filler = math.nan if draw.padding == "nan" else GARBAGE
        tensor = with_padding(draw.tensor(3, 5), mask, filler).requires_grad_()
        given: dict[str, Any] = {"normalize_constant": draw.turn(4.0, 7.0)} if constant else {}
        return {"tensor": tensor, "mask": mask, "dim": draw.turn(1, None, 0), **given}

    return build


_GSM8K = (
    "She has 3 + 4 = 7 apples.",
    "It costs $1,234.50 in all, so the answer is 1,234.50.",
    "I cannot say.",
    "The loss is -12",
    "First 10, then 20, so 30 of them.",
    "The answer is 42",
    "5 from 9 leaves 4.",
    "about 0.75",
)


def gsm8k_text(draw: Draw) -> Arguments:
    return {"model_output": draw.turn(*_GSM8K)}


_MMLU = (
    "The correct answer is B.",
    "The answer is C",
    "I do not know.",
    "The correct answer is D. A is wrong.",
    "(A) is what I choose",
    "The answer is A, no, the answer is B.",
)


def mmlu_text(draw: Draw) -> Arguments:
    example = {"question": "Which one?", "options": ["red", "green", "blue", "grey"], "subject": "colours"}
    return {"mmlu_example": example, "model_output": draw.turn(*_MMLU)}


def tagged(draw: Draw) -> Arguments:
    responses = (
        "so it is five </think> <answer> 5 </answer>",
        "so it is six </think> <answer> 6 </answer>",
        "</think><answer> 5 </answer>",
        "it is 5",
        "a </think> <answer> \\boxed{5} </answer>",
        "first </think> <answer> 4 </answer> no <answer> 5 </answer>",
    )
    return {"response": draw.turn(*responses), "ground_truth": "5"}


def boxed(draw: Draw) -> Arguments:
    responses = ("so \\boxed{5}", "so \\boxed{6}", "it is 5", "\\boxed{4} or rather \\boxed{5}", "so \\boxed{5")
    return {"response": draw.turn(*responses), "ground_truth": "5"}


def last_number(draw: Draw) -> Arguments:
    return {"response": draw.turn("so 3 + 2 = 5", "5, or is it 6", "none", "it costs $1,000"), "ground_truth": "5"}


def countdown(draw: Draw) -> Arguments:
    formulas = ("2 * 3 + 4", "(2 + 3) * 4", "2 * 3 + 4 = 10", "4 + 3 * 3", "10")
    return {
        "response": f"I try </think> <answer> {draw.turn(*formulas)} </answer>",
        "numbers": [2, 3, 4],
        "target": 10,
    }
