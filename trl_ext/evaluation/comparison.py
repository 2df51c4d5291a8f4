"""A policy against its base on the same prompts: outcomes, scores, diagnostics, and the rows to look at."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.evaluation.diagnostics import diagnose_generations
from trl_ext.evaluation.intervals import gain_interval, mean_interval, wilson_interval
from trl_ext.evaluation.judge import PairwiseJudge, compare, last_user_text
from trl_ext.evaluation.win_rate import win_rate
from trl_ext.files import write_json, write_json_lines
from trl_ext.rollouts import Generation


@dataclass
class PolicyComparison:
    """What a comparison found.

    Attributes:
        summary: JSON-ready figures: `win_rate` (None without a judge), `score` (None without a score function),
            `rewards` by reward function (None without one) and the diagnostics of both models' responses under
            `generations`.
        rows: one per prompt, JSON-ready: both responses, their lengths, whether each ended, the outcome, and scores.
    """

    summary: dict[str, Any]
    rows: list[dict[str, Any]]

    def write(self, folder: str | Path, **run: Any) -> None:
        """Write `results.json` and `generations.jsonl`, which `write_report` reads, each replaced atomically.

        Args:
            folder: of the run; made where it is missing.
            run: what the report says of it, ready for JSON: `objective`, `model`, `dataset`, `seed`, ...
        """
        write_json(Path(folder) / "results.json", {"run": run, **self.summary})
        write_json_lines(Path(folder) / "generations.jsonl", self.rows)


def compare_generations(
    prompts: Sequence[Mapping[str, Any]],
    policy: Sequence[Generation],
    base: Sequence[Generation],
    *,
    max_new_tokens: int,
    judge: PairwiseJudge | None = None,
    score_function: Callable[..., float] | None = None,
    rewards: Mapping[str, Mapping[str, Sequence[float | None]]] | None = None,
) -> PolicyComparison:
    """Compare two models' responses to the same prompts.

    Args:
        prompts: dataset rows with `row_id`, `prompt`, and optionally `kind`, by which mean scores are broken down.
        policy: the policy's responses, in the prompts' order.
        base: the base's responses.
        max_new_tokens: the limit under which both were generated.
        judge: decides each prompt, in both orders of showing; None for no win rate.
        score_function: `f(prompt_text, response, finished=...) -> float`, a known quality; None for no scores.
        rewards: what reward functions gave, by function name and then by whose response it was: `policy`, `base`, and
            `reference` where the dataset has responses; one per prompt, None where there is none.
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
        outcomes = compare(
            judge,
            prompts,
            [generation.text for generation in policy],
            [generation.text for generation in base],
            candidate_finished=[generation.finished for generation in policy],
            base_finished=[generation.finished for generation in base],
        )
        for row, outcome in zip(rows, outcomes, strict=True):
            row["outcome"] = outcome.first if outcome.first == outcome.second else "tie"
        summary["win_rate"] = win_rate(outcomes).to_dict()
    if score_function is not None:
        for row in rows:
            row["score"] = score_function(row["prompt_text"], row["response_text"], finished=row["finished"])
            row["base_score"] = score_function(
                row["prompt_text"], row["base_response_text"], finished=row["base_finished"]
            )
        kinds = [prompt.get("kind") for prompt in prompts]
        summary["score"] = _score_summary(rows, kinds)
    if rewards:
        _add_rewards(rows, prompts, rewards)
        summary["rewards"] = {name: _reward_summary(by_source) for name, by_source in rewards.items()}
    summary["generations"] = {
        name: diagnose_generations(
            [generation.text for generation in generations],
            token_ids=[generation.response_ids for generation in generations],
            finished=[generation.finished for generation in generations],
            max_new_tokens=max_new_tokens,
        ).to_dict()
        for name, generations in (("policy", policy), ("base", base))
    }
    return PolicyComparison(summary, rows)


def mean_with_interval(values: Sequence[float], *, gains: bool = False) -> dict[str, float]:
    """The `mean` of the values and its 95% interval, `low` to `high`.

    The interval is `intervals.mean_interval`'s; of zeros and ones alone, such as verified rewards, it is Wilson's. It
    may reach beyond the range of the values where there are few.

    Args:
        values: for two policies on the same prompts, the differences of their scores.
        gains: whether the values are such differences. Where they are -1, 0 and 1 alone, the interval is Tango's.

    Raises:
        ValueError: no values.
    """
    counts = Counter(map(float, values))
    if gains and counts and counts.keys() <= {-1.0, 0.0, 1.0}:
        low, high = gain_interval(counts[1.0], counts[-1.0], len(values))
    elif not gains and counts and counts.keys() <= {0.0, 1.0}:
        low, high = wilson_interval(counts[1.0], len(values))
    else:
        low, high = mean_interval(values)
    return {"mean": float(_mean(values)), "low": low, "high": high}


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
    """Means by whose responses they are, and the gain over the base with its interval, over rows that have both."""
    summary: dict[str, Any] = {}
    for source, values in by_source.items():
        known = [value for value in values if value is not None]
        summary[source] = _mean(known) if known else None
    for other in ("base", "reference"):
        pairs = zip(by_source["policy"], by_source.get(other, ()), strict=False)
        gains = [own - value for own, value in pairs if own is not None and value is not None]
        if gains:
            summary["gain" if other == "base" else "gain_over_reference"] = mean_with_interval(gains, gains=True)
    return summary


def _score_summary(rows: list[dict], kinds: list[str | None]) -> dict[str, Any]:
    gains = [row["score"] - row["base_score"] for row in rows]
    by_kind: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"policy": [], "base": []})
    for row, kind in zip(rows, kinds, strict=True):
        if kind is not None:
            by_kind[kind]["policy"].append(row["score"])
            by_kind[kind]["base"].append(row["base_score"])
    return {
        "policy": _mean([row["score"] for row in rows]),
        "base": _mean([row["base_score"] for row in rows]),
        "gain": mean_with_interval(gains, gains=True),
        "by_kind": {kind: {name: _mean(values) for name, values in by_kind[kind].items()} for kind in sorted(by_kind)},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
