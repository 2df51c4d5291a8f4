"""Compares training stages, such as base, SFT and PPO, on the same prompts: rewards, true score, KL and length."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from trl_ext.evaluation.comparing.preferences import approximate_kl
from trl_ext.evaluation.statistics.intervals import mean_interval
from trl_ext.models import score_responses
from trl_ext.models.loading import load_policy
from trl_ext.rewards import RewardModel
from trl_ext.rollouts import SamplingSettings, TransformersEngine, sample_responses
from trl_ext.rollouts.generation import recorded_log_probs

Row = dict[str, Any]


def compare_stages(
    models: Mapping[str, str | Path],
    prompts: Sequence[Mapping[str, Any]],
    sampling: SamplingSettings,
    *,
    reference: str,
    reward_models: Mapping[str, str | Path],
    score_function: Callable[..., float] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> tuple[list[Row], dict[str, list[Row]]]:
    """Sample one response from each model to each prompt, and measure rewards, true score, KL and length.

    Args:
        models: `toy`, a folder or a hub name, by stage.
        prompts: rows as `load_prompts` returns them, perhaps with a `family`, and with `graded_as`, the prompt of the
            benchmark by which a response is scored (empty for none), if it is not the prompt itself.
        sampling: how responses are sampled; at temperature 1, by which the KL is estimated.
        reference: the stage from which the KL is measured.
        reward_models: folders or hub names of reward models, by name.
        score_function: a known score `f(prompt_text, response, *, finished)`; None for none.

    Returns:
        One JSON-ready row for each model, with `name`, `model`, the figures of `summarize_samples`, `kl` as from
        `approximate_kl` (None for the reference and for a model with another tokenizer) and `finished`, the share of
        responses that were not truncated; and the samples by model: the rows of `sample_responses` with `rewards` by
        reward model, `true_score` and `family`.
    """
    scorers = {name: RewardModel(place, batch_size=sampling.batch_size) for name, place in reward_models.items()}
    # The reference and the model that is compared with it.
    load = lru_cache(maxsize=2)(load_policy)
    rows, samples = [], {}
    for name, source in models.items():

        def score(part: list, generations: list, name=name, source=source) -> list[Row]:
            messages = [row["prompt"] for row in part]
            texts, finished = [one.text for one in generations], [one.finished for one in generations]
            rewards = {key: one.score(messages, texts, finished=finished).tolist() for key, one in scorers.items()}
            ratios: Sequence = [None] * len(part)
            if name != reference:
                ratios = _log_ratios(load(source), load(models[reference]), generations, sampling.batch_size)
            columns = []
            for index, row in enumerate(part):
                graded_as, true_score = row.get("graded_as", row["prompt_text"]), None
                if score_function and graded_as:
                    true_score = score_function(graded_as, texts[index], finished=finished[index])
                own = {key: values[index] for key, values in rewards.items()}
                family, log_ratios = row.get("family"), ratios[index]
                columns.append({"rewards": own, "true_score": true_score, "family": family, "log_ratios": log_ratios})
            return columns

        found = samples[name] = sample_responses(
            prompts,
            [row["prompt"] for row in prompts],
            TransformersEngine(*load(source), sampling),
            score,
            seed=seed,
            progress=f"{name}: responses" if progress else None,
        )
        ratios = [row.pop("log_ratios") for row in found]
        shares = {"finished": statistics.fmean(row["finished"] for row in found)}
        kl = None if ratios[0] is None else approximate_kl(ratios, [torch.zeros_like(ratio) for ratio in ratios])
        rows.append({"name": name, "model": str(source), "kl": kl, **summarize_samples(found), **shares})
    return rows, samples


def _log_ratios(policy: tuple, reference: tuple, generations: list, batch_size: int) -> Sequence[torch.Tensor | None]:
    """Each response's token log-ratios to the reference; None if the two have different tokenizers."""
    (model, tokenizer), (base, base_tokenizer) = policy, reference
    if tokenizer.get_vocab() != base_tokenizer.get_vocab():
        return [None] * len(generations)
    ids = [one.prompt_ids for one in generations], [one.response_ids for one in generations]
    options = {"batch_size": batch_size, "pad_token_id": tokenizer.pad_token_id or 0}
    own = recorded_log_probs(generations) or score_responses(model, *ids, **options)
    pairs = zip(own, score_responses(base, *ids, **options), strict=True)
    return [mine.double() - other.double() for mine, other in pairs]


def summarize_samples(samples: Sequence[Row]) -> Row:
    """The number of samples, and `mean_and_std` of their rewards by model, true scores (if known) and tokens."""
    scores = [sample["true_score"] for sample in samples if sample["true_score"] is not None]
    names = samples[0]["rewards"]
    return {
        "n": len(samples),
        "rewards": {name: mean_and_std([sample["rewards"][name] for sample in samples]) for name in names},
        "true_score": {**mean_and_std(scores), "n": len(scores)} if scores else None,
        "tokens": mean_and_std([sample["generated_num_tokens"] for sample in samples]),
    }


def mean_and_std(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation of the sample (0 for one value), and the mean's 95% interval."""
    low, high = mean_interval(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": deviation, "low": low, "high": high}
