"""Rows of the golden values for the losses of reward models and KTO, and for the functions of the course."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.golden import inputs as given
from tests.golden.inputs import LOG_PROBS, MASK, OLD_LOG_PROBS, RESPONSE_ADVANTAGES, TOKEN_ADVANTAGES
from tests.golden.objectives import Row, label
from trl_ext import course, losses


def pair_rows() -> Iterator[Row]:
    scores = {"chosen": given.CHOSEN / 8, "rejected": given.REJECTED / 8}
    all_options = {"margin": 1.0, "label_smoothing": 0.125, "centering": 0.25}
    for options in ({}, {"margin": 0.5}, {"margin": given.COLUMNS["win"]}, all_options):
        yield label("losses", "bradley_terry", options), partial(losses.bradley_terry, **options), scores
    desirable = given.COLUMNS["win"] > 0.25
    for options in ({}, {"beta": 0.5}, {"desirable_weight": 0.75, "undesirable_weight": 1.5}):
        for z in (-1.0, 2.0):

            def kto(log_ratio, kl_log_ratio, options=options):
                return losses.kto(log_ratio, desirable, kl_log_ratio, **options)

            tensors = {"log_ratio": given.CHOSEN - given.REF_CHOSEN, "kl_log_ratio": given.COLUMNS["loss"] + z}
            yield label("losses", "kto", {**options, "divergence": z}), kto, tensors


# ---- The course's functions ----


def course_rows() -> Iterator[Row]:
    for dim in (None, 0, 1):
        tensor = {"tensor": LOG_PROBS}
        function = partial(course.masked_mean, mask=MASK, dim=dim)
        yield label("course", "masked_mean", {"dim": str(dim)}), function, tensor
        function = partial(course.masked_normalize, mask=MASK, normalize_constant=8.0, dim=dim)
        yield label("course", "masked_normalize", {"dim": str(dim)}), function, tensor
    for by_std in (True, False):
        function = partial(_group_normalized, by_std)
        yield label("course", "compute_group_normalized_rewards", {"normalize_by_std": by_std}), function, {}

    policy = {"policy_log_probs": LOG_PROBS}
    function = partial(course.naive_policy_gradient_loss, RESPONSE_ADVANTAGES.unsqueeze(1))
    yield "course/naive_policy_gradient_loss/", function, policy
    read = {"raw_rewards": TOKEN_ADVANTAGES, "advantages": RESPONSE_ADVANTAGES, "old_log_probs": OLD_LOG_PROBS}
    read["cliprange"] = 0.1875
    arguments = {"advantages": RESPONSE_ADVANTAGES, "cliprange": 0.1875}
    tensors = {**policy, "old_log_probs": OLD_LOG_PROBS}
    yield "course/grpo_clip_loss/", partial(_with_metadata, course.grpo_clip_loss, arguments), tensors
    for kind in course.LOSS_TYPES:
        arguments = {**read, "loss_type": kind}
        function = partial(_with_metadata, course.policy_gradient_loss, arguments)
        yield label("course", "policy_gradient_loss", {"loss_type": kind}), function, policy
        arguments = {**arguments, "response_mask": MASK, "gradient_accumulation_steps": 4}
        function = partial(_with_metadata, course.policy_microbatch_step, arguments)
        yield label("course", "policy_microbatch_step", {"loss_type": kind}), function, policy
    for options in ({}, {"normalize_constant": 8.0}):
        arguments = {"response_mask": MASK, "gradient_accumulation_steps": 4, **options}
        function = partial(_with_metadata, course.sft_microbatch_step, arguments)
        yield label("course", "sft_microbatch_step", options), function, policy

    yield "course/token_entropy/", course.token_entropy, {"logits": given.LOGITS}
    model = {"logits": given.BIGRAM_LOGITS}
    yield "course/response_log_probs/", _response_log_probs, model
    yield "course/per_instance_dpo_loss/", _dpo_of_texts, model
    yield "course/tokenize_prompt_and_output/", partial(_tokens, given.Letters()), {}


def _group_normalized(by_std: bool) -> dict[str, Any]:
    def reward(response: str, truth: str) -> dict[str, float]:
        return {"reward": float(response) * float(truth), "format_reward": float(response)}

    responses = ["0", "1", "0.5", "0.25", "1", "1", "1", "1", "0", "0", "0", "1"]
    truths = ["1"] * 8 + ["2"] * 4
    advantages, rewards, metadata = course.compute_group_normalized_rewards(reward, responses, truths, 4, 1e-6, by_std)
    return {"advantages": advantages, "rewards": rewards, **metadata}


def _with_metadata(function, arguments: dict[str, Any], **tensors: Tensor) -> dict[str, Tensor]:
    loss, metadata = function(**tensors, **arguments)
    return {"value": loss, **metadata}


def _tokens(tokenizer: given.Letters) -> dict[str, Tensor]:
    return course.tokenize_prompt_and_output(["two and", "one"], ["three", "four and five"], tokenizer)


def _response_log_probs(logits: Tensor) -> dict[str, Tensor]:
    tokens = _tokens(given.Letters())
    return course.response_log_probs(given.Bigram(logits), tokens["input_ids"], tokens["labels"], True)


def _dpo_of_texts(logits: Tensor) -> Tensor:
    models = (given.Bigram(logits), given.Bigram(given.REF_BIGRAM_LOGITS))
    return torch.stack([course.per_instance_dpo_loss(*models, given.Letters(), 0.5, "add", "one and two", "six")])
