"""Best-of-n: sample several responses to each prompt, score them with any reward, and keep the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.rollouts.generation import Generation
from trl_ext.rollouts.graded import Engine, Row, response_fields, sample_rows

Reward = Callable[..., Sequence[float | None]]
Prompt = Sequence[Mapping[str, Any]] | str
EMPTY_CHOICES = ("score", "leave_out", "refuse")
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
    empty: str = "score",
    missing_eos_penalty: float = 0.0,
    **options: Any,
) -> list[list[Row]]:
    """Sample n responses to each prompt and score them.

    Args:
        rows: prompts with `row_id` and `prompt` (messages or text); other columns are passed to the reward.
        engine: called with a list of prompts, `seed` and `progress`; returns one `Generation` for each.
        reward: a function with TRL's signature, a `RewardModel` or a `RewardEnsemble`. It receives the keywords
            `prompts`, `completions`, `completion_ids`, `finished` and the rows' columns. A number that is not finite
            counts as None, no reward.
        n: responses to each prompt.
        empty: how to treat a response without text: `score` it like any other, `leave_out` to give it no reward,
            `refuse` to raise.
        missing_eos_penalty: what is subtracted from the reward of a response that was cut at the token limit.
        options: `seed`, `path`, `save_every`, `accelerator` and `progress` of `trl_ext.rollouts.graded.sample_rows`,
            with which an interrupted call is continued.

    Returns:
        The n JSON-ready rows of each prompt, in sampling order: `row_id`, `sample` (from 0), `prompt_text`,
        `response_text`, `generated_num_tokens`, `finished`, and `reward`, which may be None.

    Raises:
        ValueError: there are no prompts, n is below 1, a response has no text and `empty` is `refuse`, the reward
            returns the wrong number of values or depends on its batch, or the file holds rows of another call.
    """
    if not rows:
        raise ValueError("there are no prompts to sample responses to")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if empty not in EMPTY_CHOICES:
        raise ValueError(f"empty must be one of {', '.join(EMPTY_CHOICES)}, got {empty!r}")
    if getattr(reward, "scores_groups", False):
        raise ValueError(
            "the reward depends on what is scored with a response, so it cannot rank responses of different batches: "
            "leave center and whiten out of its shaping"
        )

    def finish(part: list, generations: list[Generation]) -> list[Row]:
        rewards = _rewards(part, generations, reward, empty)
        return [
            {
                "row_id": row["row_id"],
                "sample": sample,
                "prompt_text": prompt_text(prompt),
                **response_fields(generation),
                "reward": value if value is None or generation.finished else value - missing_eos_penalty,
            }
            for (row, prompt, sample), generation, value in zip(part, generations, rewards, strict=True)
        ]

    items = [(row, row["prompt"], sample) for row in rows for sample in range(n)]
    done = sample_rows(items, engine, finish, **options)
    return [done[start : start + n] for start in range(0, len(done), n)]


def _rewards(items: list, generations: list[Generation], reward: Reward, empty: str) -> list[float | None]:
    """The reward of each response; None for one that the reward or `empty` leaves out, or that is not finite."""
    blank = [not generation.text.strip() for generation in generations]
    if empty == "refuse" and any(blank):
        row, _, sample = items[blank.index(True)]
        raise ValueError(
            f"row_id {row['row_id']}, sample {sample}: the response is empty, and a reward of no text says nothing; "
            "score it like any other with empty score, or give it no reward with empty leave_out"
        )
    scored = [index for index in range(len(items)) if empty == "score" or not blank[index]]
    if not scored:
        return [None] * len(items)
    rows, own = [items[index][0] for index in scored], [generations[index] for index in scored]
    values = reward(
        prompts=[row["prompt"] for row in rows],
        completions=[completion_of(row["prompt"], one.text) for row, one in zip(rows, own, strict=True)],
        completion_ids=[one.response_ids for one in own],
        finished=[one.finished for one in own],
        **{name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")},
    )
    if len(values) != len(rows):
        raise ValueError(f"the reward must return one number or None for each of {len(rows)}: {len(values)} values")
    found = {
        index: float(value)
        for index, value in zip(scored, values, strict=True)
        if value is not None and math.isfinite(value)
    }
    return [found.get(index) for index in range(len(items))]


def demonstrations(
    samples: Sequence[Sequence[Row]],
    prompts: Sequence[Mapping[str, Any]],
    *,
    keep: str = "best",
    count: int = 1,
    threshold: float | None = None,
) -> list[Row]:
    """Rejection sampling: rows to fine-tune on, in the prompt-completion format of TRL's `SFTTrainer`.

    Responses that were cut at the token limit or have no text are left out: the model would learn an end token that
    was never sampled. Duplicate responses to a prompt are kept once.

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
        ValueError: `keep` is unknown, the count is below 1, the threshold is missing.
    """
    if keep not in KEEP_CHOICES:
        raise ValueError(f"keep must be one of {', '.join(KEEP_CHOICES)}, got {keep!r}")
    if count < 1:
        raise ValueError(f"keep_count must be at least 1, got {count}")
    if keep != "top_k" and count != 1:
        raise ValueError(f"keep_count {count} is for keep top_k, and keep {keep} does not read it: leave it out")
    if keep == "threshold" and (threshold is None or not math.isfinite(threshold)):
        raise ValueError(f"keep threshold needs keep_threshold, the lowest reward to keep; got {threshold}")
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
            for rank, sample in enumerate(kept if keep == "threshold" else kept[:count], start=1)
        ]
    return found


def completion_of(prompt: Prompt, response: str) -> list[dict[str, str]] | str:
    """A response in the form of its prompt: messages if the prompt is messages, else text."""
    return response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]


def prompt_text(prompt: Prompt) -> str:
    """The plain prompt, or the text of the last user message; empty if there is none."""
    if isinstance(prompt, str):
        return prompt
    return next((message["content"] for message in reversed(prompt) if message["role"] == "user"), "")
