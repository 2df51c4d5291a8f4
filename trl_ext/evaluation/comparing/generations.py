"""Compares a policy with its base on the same prompts: outcomes, scores, diagnostics, and the rows themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trl_ext.evaluation.judging.pairs import judge_pairs
from trl_ext.evaluation.judging.protocol import PairwiseJudge, last_user_text
from trl_ext.evaluation.statistics.intervals import mean_with_interval
from trl_ext.evaluation.statistics.win_rate import win_rate
from trl_ext.files import write_json, write_json_lines
from trl_ext.rollouts import Generation
from trl_ext.rollouts.diagnostics import diagnose_generations


@dataclass
class PolicyComparison:
    """The JSON-ready result of a comparison.

    Attributes:
        summary: `win_rate` (None without a judge), `score` (None without a score function), `rewards` by reward
            function (None without one) and the diagnostics of both models' responses under `generations`.
        rows: for each prompt both responses, their lengths, whether each finished, the outcome, and scores.
    """

    summary: dict[str, Any]
    rows: list[dict[str, Any]]

    def write(self, folder: str | Path, **run: Any) -> None:
        """Write `results.json` and `generations.jsonl`, which `write_report` reads.

        `run` is JSON-ready information about the run: `objective`, `model`, `dataset`, `seed`, ...
        """
        write_json(Path(folder) / "results.json", {"run": run, **self.summary})
        write_json_lines(Path(folder) / "generations.jsonl", self.rows)


def compare_generations(
    prompts: Sequence[Mapping[str, Any]],
    policy: Sequence[Generation],
    base: Sequence[Generation],
    *,
    judge: PairwiseJudge | None = None,
    score_function: Callable[..., float] | None = None,
    rewards: Mapping[str, Mapping[str, Sequence[float | None]]] | None = None,
) -> PolicyComparison:
    """Compare two models' responses to the same prompts.

    Args:
        prompts: dataset rows with `row_id`, `prompt`, and optionally `kind`, by which mean scores are grouped.
        policy: the policy's responses, in the order of the prompts.
        base: the base's responses.
        judge: decides each prompt, in both orders; None for no win rate.
        score_function: `f(prompt_text, response, finished=...) -> float`, a known quality; None for no scores.
        rewards: values of reward functions, by function name and then by source: `policy`, `base`, and `reference` if
            the dataset has responses; one per prompt, None if there is none.
    """
    rows = [
        {
            "row_id": prompt["row_id"],
            "prompt_text": last_user_text(prompt["prompt"]),
            "response_text": own.text,
            "base_response_text": other.text,
            "generated_num_tokens": len(own.response_ids),
            "base_generated_num_tokens": len(other.response_ids),
            "finished": own.finished,
            "base_finished": other.finished,
            **({"kind": prompt["kind"]} if prompt.get("kind") is not None else {}),
        }
        for prompt, own, other in zip(prompts, policy, base, strict=True)
    ]
    summary: dict[str, Any] = {"n_prompts": len(rows), "win_rate": None, "score": None, "rewards": None}
    if judge is not None:
        outcomes = judge_pairs(
            judge,
            prompts,
            [one.text for one in policy],
            [one.text for one in base],
            candidate_finished=[one.finished for one in policy],
            base_finished=[one.finished for one in base],
            max_concurrency=1,
            max_error_fraction=1,
        ).outcomes
        for row, outcome in zip(rows, outcomes, strict=True):
            row["outcome"] = outcome.first if outcome.first == outcome.second else "tie"
        summary["win_rate"] = win_rate(outcomes).to_dict()
    if score_function is not None:
        for row, prefix in itertools.product(rows, ("", "base_")):
            text, finished = row[f"{prefix}response_text"], row[f"{prefix}finished"]
            row[f"{prefix}score"] = score_function(row["prompt_text"], text, finished=finished)
        summary["score"] = _score_summary(rows)
    if rewards:
        _add_rewards(rows, prompts, rewards)
        summary["rewards"] = {name: _reward_summary(by_source) for name, by_source in rewards.items()}
    summary["generations"] = {
        name: diagnose_generations(
            [generation.text for generation in generations],
            token_ids=[generation.response_ids for generation in generations],
            finished=[generation.finished for generation in generations],
        )
        for name, generations in (("policy", policy), ("base", base))
    }
    return PolicyComparison(summary, rows)


def _add_rewards(rows: list[dict], prompts: Sequence[Mapping[str, Any]], rewards: Mapping[str, Mapping]) -> None:
    for row, prompt in zip(rows, prompts, strict=True):
        if prompt.get("reference_response_text"):
            row["reference_response_text"] = prompt["reference_response_text"]
    for name, by_source in rewards.items():
        for source, values in by_source.items():
            key = f"reward/{name}" if source == "policy" else f"{source}_reward/{name}"
            for row, value in zip(rows, values, strict=True):
                row[key] = value


def _reward_summary(by_source: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """Means by source of the responses, and the gain over the base with its interval, over rows that have both."""
    known = {source: [value for value in values if value is not None] for source, values in by_source.items()}
    summary: dict[str, Any] = {source: fmean(values) if values else None for source, values in known.items()}
    for other, name in (("base", "gain"), ("reference", "gain_over_reference")):
        pairs = zip(by_source["policy"], by_source.get(other, ()), strict=False)
        if gains := [own - value for own, value in pairs if own is not None and value is not None]:
            summary[name] = mean_with_interval(gains, gains=True)
    return summary


def _score_summary(rows: list[dict]) -> dict[str, Any]:
    def means(rows: list[dict]) -> dict[str, float]:
        return {"policy": fmean([row["score"] for row in rows]), "base": fmean([row["base_score"] for row in rows])}

    kinds = sorted({row["kind"] for row in rows if "kind" in row})
    gain = mean_with_interval([row["score"] - row["base_score"] for row in rows], gains=True)
    by_kind = {kind: means([row for row in rows if row.get("kind") == kind]) for kind in kinds}
    return {**means(rows), "gain": gain, "by_kind": by_kind}
