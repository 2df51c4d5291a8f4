"""A policy's generations compared with its base's, during and after training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list

from trl_ext.evaluation.comparing.generations import PolicyComparison, compare_generations
from trl_ext.evaluation.comparing.preferences import approximate_kl, join_pair_scores, preference_metrics
from trl_ext.losses import PreferenceScores
from trl_ext.models import score_responses
from trl_ext.rollouts import Generation, generate_responses, map_over_ranks
from trl_ext.rollouts.generation import recorded_log_probs
from trl_ext.trainers.context import check_context
from trl_ext.trainers.policies import base_policy, trained_policy

if TYPE_CHECKING:
    from trl_ext.evaluation.judging.protocol import PairwiseJudge


@dataclass(frozen=True)
class GenerationSettings:
    """How responses are generated.

    Attributes:
        max_prompt_tokens: longer prompts lose their beginning; None for no limit.
        max_new_tokens: maximum length of a response.
        temperature: temperature for the responses that are compared and shown; 0 for greedy decoding.
        batch_size, seed: prompts per batch, and seed of the sampling.
        num_kl_prompts: the divergence is estimated on the first so many prompts; None for all.
        stop: strings that end a response.
    """

    max_prompt_tokens: int | None
    max_new_tokens: int
    temperature: float = 0.0
    batch_size: int = 32
    seed: int = 0
    num_kl_prompts: int | None = None
    stop: tuple[str, ...] = ()


class GenerationEvaluation:
    """Compares a trainer's policy with its base on fixed prompts.

    Args:
        trainer: a `PreferenceTrainer`; call `remember_base` on it before it trains.
        prompts: dataset rows with `row_id` and `prompt`.
        settings: how to generate.
        judge: decides which response is better; None for no win rate.
        score_function: a known quality of a response; None for none.
        reward_columns: `f(rows, responses, finished, completion_ids) -> {name: rewards}`, the values of reward
            functions; None for none. It also scores the prompts' `reference_response_text`.
    """

    def __init__(
        self,
        trainer,
        prompts: Sequence[dict[str, Any]],
        settings: GenerationSettings,
        *,
        judge: PairwiseJudge | None = None,
        score_function: Callable[..., float] | None = None,
        reward_columns: Callable[..., dict[str, list[float | None]]] | None = None,
    ):
        self.trainer = trainer
        self.prompts = list(prompts)
        self.settings = settings
        limits = {"max_new_tokens": settings.max_new_tokens, "max_prompt_tokens": settings.max_prompt_tokens}
        check_context(trainer.model, [row["prompt"] for row in self.prompts], limits, trainer.processing_class)
        self.judge = judge
        self.score_function = score_function
        self.reward_columns = reward_columns
        self._base_generations: list[Generation] = []
        # Values that are the same in every comparison of so many prompts: rewards of the base's responses and of the
        # references.
        self._fixed_rewards: dict[int, dict[str, dict[str, list[float | None]]]] = {}

    def compare(self, count: int | None = None, *, progress: bool = False) -> PolicyComparison:
        """Generate for the first `count` prompts (None for all) and compare with the base.

        The summary's `kl` is estimated from additional responses to the same prompts, sampled at temperature 1.
        The base's responses are generated once and kept. Those of a policy before its first step are the base's.
        Every process must call this; all return the same result.
        """
        count = len(self.prompts) if count is None else min(count, len(self.prompts))
        own, kl = self._sample([row["prompt"] for row in self.prompts[:count]], progress)
        comparison = compare_generations(
            self.prompts[:count],
            own,
            self._base_generations[:count],
            judge=self.judge,
            score_function=self.score_function,
            rewards=self._rewards(own, count),
        )
        comparison.summary["kl"] = kl
        return comparison

    def _sample(self, prompts: list, progress: bool) -> tuple[list[Generation], dict[str, float]]:
        """The policy's responses, and its divergence from the base."""
        temperature = self.settings.temperature
        if missing := prompts[len(self._base_generations) :]:
            with base_policy(self.trainer) as base:
                self._base_generations += self._generate(base, missing, temperature, "base responses", progress)
        if self.trainer.state.global_step == 0 and self._is_base():
            same = [torch.zeros(1)] * len(prompts)
            return self._base_generations[: len(prompts)], approximate_kl(same, same)
        with trained_policy(self.trainer) as policy:
            own = self._generate(policy, prompts, temperature, "policy responses", progress)
            of_kl = prompts[: self.settings.num_kl_prompts]
            samples = self._generate(policy, of_kl, 1.0, "policy samples", progress)
            policy_log_probs = recorded_log_probs(samples)
            if policy_log_probs is None:
                policy_log_probs = self._score(policy, samples)
        with base_policy(self.trainer) as base:
            base_log_probs = self._score(base, samples)
        return own, approximate_kl(policy_log_probs, base_log_probs)

    def _is_base(self) -> bool:
        """Whether the policy gives the base's token log-probabilities to a response of the base, to the last bit."""
        first = self._base_generations[:1]
        with base_policy(self.trainer) as base:
            [expected] = self._score(base, first)
        with trained_policy(self.trainer) as policy:
            [found] = self._score(policy, first)
        # Last bits may differ between processes: all follow the first.
        return broadcast_object_list([torch.equal(expected, found)])[0]

    def _rewards(self, own: list[Generation], count: int) -> dict[str, dict[str, list[float | None]]] | None:
        """Rewards by function name and by source: the policy's responses, the base's, and the dataset's references."""
        if self.reward_columns is None:
            return None
        rows = self.prompts[:count]
        if count not in self._fixed_rewards:
            fixed = {"base": self._reward(rows, self._base_generations[:count])}
            texts = [row.get("reference_response_text") for row in rows]
            if all(texts):
                tokenizer = self.trainer.processing_class
                ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
                ended = [[*own, tokenizer.eos_token_id] for own in ids]
                references = [Generation([], own, text, finished=True) for own, text in zip(ended, texts, strict=True)]
                fixed["reference"] = self._reward(rows, references)
            self._fixed_rewards[count] = fixed
        by_source = {"policy": self._reward(rows, own), **self._fixed_rewards[count]}
        return {name: {source: columns[name] for source, columns in by_source.items()} for name in by_source["policy"]}

    def _reward(self, rows: list[dict], responses: list[Generation]) -> dict[str, list[float | None]]:
        def score(items: list[tuple[dict, Generation]]) -> list[dict[str, float | None]]:
            own_rows, own = zip(*items, strict=True)
            finished, ids = [one.finished for one in own], [one.response_ids for one in own]
            columns = self.reward_columns(list(own_rows), [one.text for one in own], finished, ids)
            return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

        scored = map_over_ranks(score, list(zip(rows, responses, strict=True)), self.trainer.accelerator)
        return {name: [row[name] for row in scored] for name in scored[0]}

    def _generate(self, model, prompts: list, temperature: float, label: str, progress: bool) -> list[Generation]:
        settings, accelerator = self.settings, self.trainer.accelerator
        # Ranks that share the prompts sample independently; under FSDP all do the same work and must sample alike.
        rank = 0 if self.trainer.is_fsdp_enabled else accelerator.process_index

        def generate(own_prompts: list) -> list[Generation]:
            return generate_responses(
                model,
                self.trainer.processing_class,
                own_prompts,
                max_new_tokens=settings.max_new_tokens,
                max_prompt_tokens=settings.max_prompt_tokens,
                temperature=temperature,
                stop=settings.stop,
                template_kwargs=getattr(self.trainer, "chat_template_kwargs", None),
                batch_size=settings.batch_size,
                seed=settings.seed + rank,
                progress=label if progress and accelerator.is_main_process else None,
            )

        return map_over_ranks(generate, prompts, accelerator)

    def _score(self, model, generations: list[Generation]) -> list:
        rows = [(generation.prompt_ids, generation.response_ids) for generation in generations]
        return score_rows(self.trainer, model, rows, self.settings.batch_size)


def score_pairs(trainer, dataset, *, batch_size: int = 16) -> PreferenceScores:
    """Scores of a tokenized preference dataset under the trained policy, with its base as the reference.

    Args:
        trainer: a `PreferenceTrainer`.
        dataset: the dataset prepared by the trainer, with `prompt_ids`, `chosen_ids` and `rejected_ids`.
        batch_size: rows per forward pass.

    Every process must call this; all return the same result.
    """
    prompts = dataset["prompt_ids"]
    rows = [*zip(prompts, dataset["chosen_ids"], strict=True), *zip(prompts, dataset["rejected_ids"], strict=True)]
    with trained_policy(trainer) as policy:
        own = score_rows(trainer, policy, rows, batch_size)
    with base_policy(trainer) as base:
        other = score_rows(trainer, base, rows, batch_size)
    half = len(prompts)
    return join_pair_scores(own[:half], own[half:], other[:half], other[half:])


def pair_metrics(scores: PreferenceScores) -> dict[str, Any]:
    """Preference metrics of the base (`before`) and of the trained policy (`after`), from `score_pairs`."""
    base = replace(scores, chosen=scores.ref_chosen, rejected=scores.ref_rejected, ref_chosen=None, ref_rejected=None)
    return {"before": preference_metrics(base), "after": preference_metrics(scores)}


def score_rows(trainer, model, rows: list[tuple[list[int], list[int]]], batch_size: int) -> list:
    """Token log-probabilities of (prompt, response) rows, computed across the ranks; one tensor per row."""

    def score(own_rows: list) -> list:
        return score_responses(
            model,
            [prompt for prompt, _ in own_rows],
            [response for _, response in own_rows],
            batch_size=batch_size,
            pad_token_id=trainer.processing_class.pad_token_id,
        )

    return map_over_ranks(score, rows, trainer.accelerator)
