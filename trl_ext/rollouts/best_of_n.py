"""Best-of-n: sample several responses to each prompt, score them with any reward, and keep the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.data.conversation import prompt_text
from trl_ext.rollouts.generation import Generation
from trl_ext.rollouts.responses import Engine, Prompt, Row, sample_responses

Reward = Callable[..., Sequence[float | None]]
KEEP_CHOICES = ("best", "top_k", "threshold")


def pick_best(samples: Sequence[Mapping[str, Any]], n: int | None = None) -> Mapping[str, Any] | None:
    """The row with the highest `reward` among the first n (None for all); ties go to the first. None without rewards.

    Raises:
        ValueError: n is below 1 or above the number of rows.
    """
    n = len(samples) if n is None else n
    if not 1 <= n <= len(samples):
        raise ValueError(f"n must lie between 1 and the number of responses, {len(samples)}, got {n}")
    known = [row for row in samples[:n] if row["reward"] is not None]
    return max(known, key=lambda row: row["reward"], default=None)


def kl_bound(n: int) -> float:
    """Upper bound of the KL divergence of best-of-n from the sampled policy, in nats: log n - (n - 1) / n.

    The bound is exact only if no response is sampled twice (Beirami et al. 2024, arXiv 2401.01879).
    """
    return math.log(n) - (n - 1) / n


def best_of_n(
    rows: Sequence[Mapping[str, Any]],
    engine: Engine,
    reward: Reward,
    n: int,
    *,
    score_function: Callable[..., float] | None = None,
    missing_eos_penalty: float = 0.0,
    **options: Any,
) -> list[list[Row]]:
    """Sample n responses to each prompt and score them.

    Args:
        rows: prompts with `row_id` and `prompt` (messages or text); other columns are passed to the reward.
        engine: as for `trl_ext.rollouts.responses.sample_responses`.
        reward: a function with TRL's signature, a `RewardModel` or a `RewardEnsemble`. It receives the keywords
            `prompts`, `completions`, `completion_ids`, `finished` and the rows' columns. A number that is not finite
            counts as None, no reward.
        n: responses to each prompt.
        score_function: the known quality `f(prompt_text, response, *, finished)`, for the column `score`; or None.
        missing_eos_penalty: what is subtracted from the reward of a response that was truncated at the token limit.
        options: other keyword arguments of `sample_responses`, with which an interrupted call is continued.

    Returns:
        The n rows of each prompt, in sampling order: those of `sample_responses` with `reward`, which may be None.

    Raises:
        ValueError: as `sample_responses`; the reward returns the wrong number of values.
        FileExistsError: the file was made with other settings.
    """

    def score(part: list, generations: list[Generation]) -> list[Row]:
        columns = []
        for row, one, value in zip(part, generations, _rewards(part, generations, reward), strict=True):
            rewarded = value is not None and math.isfinite(value)
            penalty = 0.0 if one.finished else missing_eos_penalty
            columns.append({"reward": float(value) - penalty if rewarded else None})
            if score_function is not None:
                known = score_function(prompt_text(row["prompt"]), one.text, finished=one.finished)
                columns[-1]["score"] = known
        return columns

    done = sample_responses(rows, [row["prompt"] for row in rows], engine, score, samples=n, **options)
    return [done[start : start + n] for start in range(0, len(done), n)]


def _rewards(rows: list, generations: list[Generation], reward: Reward) -> Sequence[float | None]:
    """The reward's values of responses."""
    values = reward(
        prompts=[row["prompt"] for row in rows],
        completions=[completion_of(row["prompt"], one.text) for row, one in zip(rows, generations, strict=True)],
        completion_ids=[one.response_ids for one in generations],
        finished=[one.finished for one in generations],
        **{name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")},
    )
    if len(values) != len(rows):
        raise ValueError(f"the reward must return one number or None for each of {len(rows)}: {len(values)} values")
    return values


def demonstrations(
    samples: Sequence[Sequence[Row]],
    prompts: Sequence[Mapping[str, Any]],
    *,
    keep: str = "best",
    count: int = 1,
    threshold: float | None = None,
) -> list[Row]:
    """Rejection sampling: rows to fine-tune on, in the prompt-completion format of TRL's `SFTTrainer`.

    Responses that were truncated or have no text are left out: the model would learn an end token that was never
    sampled. Duplicate responses to a prompt are kept once.

    Args:
        samples: the result of `best_of_n`.
        prompts: the rows passed to it, in the same order.
        keep: `best` for each prompt's best response; `top_k` for its `count` best; `threshold` for all responses with
            a reward of at least `threshold`.
        count: number of responses for `top_k`.
        threshold: lowest reward for `threshold`.

    Returns:
        JSON-ready rows: `row_id` (followed by the rank from the second response on), `prompt`, `completion` (messages
        if the prompt is), `reward`, `rank` (from 1), `sample` and `best_of`.

    Raises:
        ValueError: `keep` is unknown, or the threshold is missing.
    """
    if keep not in KEEP_CHOICES:
        raise ValueError(f"keep must be one of {', '.join(KEEP_CHOICES)}, got {keep!r}")
    if keep == "threshold" and (threshold is None or not math.isfinite(threshold)):
        raise ValueError(f"keep threshold needs keep_threshold, the lowest reward to keep; got {threshold}")
    limits = {"best": 1, "top_k": count, "threshold": None}
    found = []
    for prompt, group in zip(prompts, samples, strict=True):
        usable = [s for s in group if s["reward"] is not None and s["finished"] and s["response_text"].strip()]
        ranked: dict[str, Row] = {}
        for sample in sorted(usable, key=lambda sample: -sample["reward"]):
            ranked.setdefault(sample["response_text"], sample)
        kept = [one for one in ranked.values() if keep != "threshold" or one["reward"] >= threshold]
        found += [
            {
                "row_id": prompt["row_id"] if rank == 1 else f"{prompt['row_id']}:{rank}",
                "prompt": prompt["prompt"],
                "completion": completion_of(prompt["prompt"], sample["response_text"]),
                "reward": sample["reward"],
                "rank": rank,
                "sample": sample["sample"],
                "best_of": len(group),
            }
            for rank, sample in enumerate(kept[: limits[keep]], start=1)
        ]
    return found


def completion_of(prompt: Prompt, response: str) -> list[dict[str, str]] | str:
    """A response in the form of its prompt: messages if the prompt is messages, else text."""
    return response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
