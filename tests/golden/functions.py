"""Rows of the golden values for single functions: policy losses, values, rewards, and those of the course."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.golden import inputs as given
from tests.golden.inputs import LOG_PROBS, MASK, OLD_LOG_PROBS, REF_LOG_PROBS, RESPONSE_ADVANTAGES, TOKEN_ADVANTAGES
from tests.golden.objectives import Row, label
from trl_ext import course, losses
from trl_ext.advantages import clip_advantages, gae
from trl_ext.evaluation.comparing.reward_models import reward_metrics
from trl_ext.losses.reductions import AGGREGATIONS, KL_ESTIMATORS
from trl_ext.rewards.ensemble import AGGREGATES, RewardEnsemble, combine
from trl_ext.rewards.shaping import STEPS, ShapedReward

RATIO_SURROGATES: dict[str, list[dict[str, Any]]] = {
    "clipped_surrogate": [{}, {"clip_low": 0.375, "clip_high": 0.5}, {"clip_high": 0.28, "dual_clip": 3.0}],
    "unclipped_surrogate": [{}],
    "sapo": [{}, {"temperature_pos": 0.5, "temperature_neg": 2.0}],
}
SHAPING: dict[str, list[dict[str, Any]]] = {
    "center_reference": [{}],
    "clip": [{"limit": 0.75}],
}


def function_rows() -> Iterator[Row]:
    policy = {"log_probs": LOG_PROBS}
    advantages = {"of responses": RESPONSE_ADVANTAGES, "of tokens": TOKEN_ADVANTAGES}
    for of, a in advantages.items():
        for name, options in RATIO_SURROGATES.items():
            for settings in options:
                for ratio in ("token", "sequence"):
                    function = partial(_surrogate, name, ratio, a, settings)
                    yield label("losses", name, {**settings, "ratio": ratio, "advantages": of}), function, policy
        for settings in ({}, {"ratio_cap": 1.25}):

            def cispo(log_probs, a=a, settings=settings):
                # A shift of the ratio, so that some are above the cap.
                return losses.cispo(_log_ratio("token", log_probs) + 1.25, log_probs, a, **settings)

            yield label("losses", "cispo", {**settings, "advantages": of}), cispo, policy
        yield label("losses", "reinforce", {"advantages": of}), partial(losses.reinforce, advantages=a), policy
    for settings in ({}, {"log_clip": 0.25}):

        def gmpo(log_probs, settings=settings):
            return losses.gmpo(_log_ratio("token", log_probs), MASK, RESPONSE_ADVANTAGES, **settings)

        yield label("losses", "gmpo", settings), gmpo, policy
    for name, ratio in (("token_log_ratio", "token"), ("sequence_log_ratio", "sequence")):
        yield label("losses", name, {}), partial(_log_ratio, ratio), policy

    both = {"log_probs": LOG_PROBS, "ref_log_probs": REF_LOG_PROBS}
    for kind in KL_ESTIMATORS:
        yield label("losses", "kl_estimate", {"kind": kind}), partial(losses.kl_estimate, kind=kind), both
        far = {name: tensor + 40 * (name == "ref_log_probs") for name, tensor in both.items()}
        yield (
            label("losses", "kl_estimate", {"kind": kind, "of": "log-probabilities far apart"}),
            partial(losses.kl_estimate, kind=kind),
            far,
        )
    for dim in (None, 0, 1):
        for name, options in (("masked_sum", {}), ("masked_mean", {}), ("masked_normalize", {"constant": 8.0})):
            function = partial(getattr(losses, name), mask=MASK, dim=dim, **options)
            yield label("losses", name, {"dim": str(dim)}), function, {"values": LOG_PROBS}
    for kind in AGGREGATIONS:
        for counts in ({}, {"token_count": 32.0}):
            function = partial(losses.aggregate, mask=MASK, kind=kind, constant=8.0, **counts)
            yield label("losses", "aggregate", {"kind": kind, **counts}), function, {"losses": LOG_PROBS}

    few = {"one token": given.ONE_TOKEN, "no tokens": torch.zeros_like(MASK)}
    for of, mask in few.items():
        for kind in AGGREGATIONS:
            function = partial(losses.aggregate, mask=mask, kind=kind, constant=8.0)
            yield label("losses", "aggregate", {"kind": kind, "of": of}), function, {"losses": LOG_PROBS}

    values = {"values": given.VALUES, "old_values": given.OLD_VALUES, "returns": given.RETURNS}
    for options in ({}, {"clip": 0.5}, {"clip": None}):
        yield label("losses", "clipped_value_loss", options), partial(losses.clipped_value_loss, **options), values
    for of, mask in {"all": MASK, **few}.items():
        for shift in (True, False):
            function = partial(losses.whiten, mask=mask, shift_mean=shift)
            yield label("losses", "whiten", {"shift_mean": shift, "of": of}), function, {"values": given.VALUES}
    for of, returns in (("returns", given.RETURNS), ("equal returns", torch.ones_like(MASK))):
        function = partial(losses.explained_variance, given.VALUES, returns, MASK)
        yield label("losses", "explained_variance", {"of": of}), function, {}
    for gamma, lam in ((1.0, 0.95), (0.9, 0.5), (0.9, 0.0), (1.0, 1.0)):

        def both_of_gae(rewards, values, gamma=gamma, lam=lam):
            return dict(zip(("value", "returns"), gae(rewards, values, MASK, gamma, lam), strict=True))

        tensors = {"rewards": given.RETURNS, "values": given.VALUES}
        yield label("losses", "gae", {"gamma": gamma, "lambda": lam}), both_of_gae, tensors
    yield "losses/clip_advantages/", partial(clip_advantages, RESPONSE_ADVANTAGES, 0.625), {}

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


def _log_ratio(ratio: str, log_probs: Tensor) -> Tensor:
    if ratio == "token":
        return losses.token_log_ratio(log_probs, OLD_LOG_PROBS)
    return losses.sequence_log_ratio(log_probs, OLD_LOG_PROBS, MASK)


def _surrogate(name: str, ratio: str, advantages: Tensor, settings: dict[str, Any], log_probs: Tensor) -> Tensor:
    return getattr(losses, name)(_log_ratio(ratio, log_probs), advantages, **settings)


# ---- Rewards ----


def reward_rows() -> Iterator[Row]:
    for kind in AGGREGATES:
        options = [{}, {"quantile": 0.625}] if kind == "quantile" else [{}]
        options += [{"coefficient": 0.25}] if kind in ("mean_minus_std", "uwo") else []
        for settings in options:
            yield label("ensemble", kind, settings), partial(combine, given.MEMBER_SCORES, kind, **settings), {}
    yield "ensemble/calibrate/", _calibrated, {}
    for kind in STEPS:
        for settings in SHAPING[kind]:
            yield label("shaping", kind, settings), partial(_shaped, [{"kind": kind, **settings}]), {}
    yield "reward model/reward_metrics/", _metrics, {}


def _calibrated() -> dict[str, Any]:
    members = [partial(_member, row) for row in given.MEMBER_SCORES[:, :5].tolist()]
    ensemble = RewardEnsemble(members).calibrate(["?"] * 5, ["!"] * 5)
    return {"shifts": ensemble.shifts, "scales": ensemble.scales}


def _member(scores: list[float], **_) -> list[float]:
    return scores


def _shaped(steps: list[dict[str, Any]]) -> dict[str, Any]:
    def reward(prompts, completions, **_):
        return [None if text == "none" else float(text) for text in completions]

    shaped = ShapedReward(reward, steps)
    batches = (["1", "-2.5", "none", "0.25"], ["3", "3", "0.5", "-0.125"], ["2"] * 4, ["none"] * 4)
    ids = [[1, 2, 1, 2, 1, 2], [], [5, 5, 5], [1, 1, 1, 1, 1, 1, 1]]
    if shaped.needs_calibration:
        shaped.calibrate(["?"] * 4, batches[0], completion_ids=ids)
    return {f"batch {n}": shaped(["?"] * 4, texts, completion_ids=ids) for n, texts in enumerate(batches, start=1)}


def _metrics() -> dict[str, float]:
    # Without the extreme pairs, which are right or wrong beyond doubt.
    metrics = reward_metrics(given.CHOSEN[[0, 1, 2, 3, 4, 10, 11]] / 8, given.REJECTED[[0, 1, 2, 3, 4, 10, 11]] / 8)
    return {name: metrics[name] for name in ("accuracy", "low", "high", "ties", "margin", "nll", "brier", "ece")}


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
