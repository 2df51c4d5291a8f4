"""Best-of-n: sample several responses to each prompt, score them with any reward, and keep the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.rollouts.generation import Generation
from trl_ext.rollouts.graded import SAVE_EVERY, Engine, sample_rows

if TYPE_CHECKING:
    from accelerate import Accelerator

Reward = Callable[..., Sequence[float | None]]
EMPTY_CHOICES = ("score", "leave_out", "refuse")
KEEP_CHOICES = ("best", "top_k", "threshold")


@dataclass(frozen=True)
class BestOfN:
    """Scored responses, and the best of them.

    Attributes:
        samples: the N JSON-ready rows of each prompt, in sampling order: `row_id`, `sample` (from 0), `prompt_text`,
            `response_text`, `generated_num_tokens`, `finished`, and `reward`, which may be None.
    """

    samples: list[list[dict[str, Any]]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows, prompts in order."""
        return [row for group in self.samples for row in group]

    @property
    def unscorable(self) -> int:
        """Responses without a reward."""
        return sum(row["reward"] is None for row in self.rows)

    def picks(self, n: int | None = None) -> list[dict[str, Any] | None]:
        """The best of each prompt's first n responses (None for all); None if none of them has a reward.

        Raises:
            ValueError: n is below 1 or above the number of responses.
        """
        return [pick_best(group, n) for group in self.samples]


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
    seed: int = 0,
    path: str | Path | None = None,
    save_every: int = SAVE_EVERY,
    accelerator: Accelerator | None = None,
    progress: str | None = None,
) -> BestOfN:
    """Sample n responses to each prompt and score them.

    With a `path`, responses and rewards are appended to the file and synchronized to disk every `save_every`
    responses. A call that finds rows there continues after them. The file must come from the same call: only the
    prompts are checked, so the caller must check everything else.

    Args:
        rows: prompts with `row_id` and `prompt` (messages or text); other columns are passed to the reward.
        engine, seed, path, save_every, accelerator, progress: as for `trl_ext.rollouts.graded.evaluate_reasoning`.
        reward: a function with TRL's signature, a `RewardModel` or a `RewardEnsemble`. It receives the keywords
            `prompts`, `completions`, `completion_ids`, `finished` and the rows' columns. A number that is not finite
            counts as None, no reward.
        n: responses to each prompt.
        empty: how to treat a response without text: `score` it like any other, `leave_out` to give it no reward,
            `refuse` to raise.
        missing_eos_penalty: what is subtracted from the reward of a response that was cut at the token limit.

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
    items = [(row, row["prompt"], sample) for row in rows for sample in range(n)]

    def scored(part: list, generations: list[Generation]) -> list[dict[str, Any]]:
        rows = _scored(part, generations, reward, empty)
        for row in rows:
            if row["reward"] is not None and not row["finished"]:
                row["reward"] -= missing_eos_penalty
        return rows

    options = {"seed": seed, "path": path, "save_every": save_every, "accelerator": accelerator, "progress": progress}
    done = sample_rows(items, engine, scored, **options)
    return BestOfN([done[start : start + n] for start in range(0, len(done), n)])


def demonstrations(
    result: BestOfN,
    prompts: Sequence[Mapping[str, Any]],
    *,
    keep: str = "best",
    count: int = 1,
    threshold: float | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rejection sampling: rows to fine-tune on, in the prompt-completion format of TRL's `SFTTrainer`.

    Responses that were cut at the token limit or have no text are left out: the model would learn an end token that
    was never sampled. Duplicate responses to a prompt are kept once.

    Args:
        result: the result of `best_of_n`.
        prompts: the rows passed to it, in the same order.
        keep: `best` for each prompt's best response; `top_k` for its `count` best; `threshold` for all responses with
            a reward of at least `threshold`.
        count: number of responses for `top_k`.
        threshold: lowest reward for `threshold`.
        provenance: fields to write into every row, such as the model and the reward.

    Returns:
        JSON-ready rows: `row_id` (followed by the rank from the second response on), `prompt`, `completion` (messages
        if the prompt is), `reward`, `rank` (from 1), `sample`, `best_of`, and the provenance.

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
    most = {"best": 1, "top_k": count}.get(keep)
    found = []
    for prompt, samples in zip(prompts, result.samples, strict=True):
        for rank, sample in enumerate(_ranked(samples)[:most], start=1):
            if keep == "threshold" and sample["reward"] < threshold:
                break
            text, plain = sample["response_text"], isinstance(prompt["prompt"], str)
            row = {
                "row_id": prompt["row_id"] if rank == 1 else f"{prompt['row_id']}:{rank}",
                "prompt": prompt["prompt"],
                "completion": text if plain else [{"role": "assistant", "content": text}],
                "reward": sample["reward"],
                "rank": rank,
                "sample": sample["sample"],
                "best_of": len(samples),
            }
            found.append({**row, **(provenance or {})})
    return found


def _ranked(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Complete responses with a reward, best first, without duplicates."""
    usable = [s for s in samples if s["reward"] is not None and s["finished"] and s["response_text"].strip()]
    once: dict[str, dict[str, Any]] = {}
    for sample in sorted(usable, key=lambda sample: -sample["reward"]):
        once.setdefault(sample["response_text"], sample)
    return list(once.values())


def _scored(items: list, generations: Sequence[Generation], reward: Reward, empty: str) -> list[dict[str, Any]]:
    blank = [not generation.text.strip() for generation in generations]
    if empty == "refuse" and any(blank):
        row, _, sample = items[blank.index(True)]
        raise ValueError(
            f"row_id {row['row_id']}, sample {sample}: the response is empty, and a reward of no text says nothing; "
            "score it like any other with empty score, or give it no reward with empty leave_out"
        )
    asked = [index for index in range(len(items)) if empty == "score" or not blank[index]]
    found = _rewards([items[i][0] for i in asked], [generations[i] for i in asked], reward) if asked else []
    rewards = dict(zip(asked, found, strict=True))
    return [
        {
            "row_id": row["row_id"],
            "sample": sample,
            "prompt_text": prompt_text(prompt),
            "response_text": generation.text,
            "generated_num_tokens": len(generation.response_ids),
            "finished": generation.finished,
            "reward": rewards.get(index),
        }
        for index, ((row, prompt, sample), generation) in enumerate(zip(items, generations, strict=True))
    ]


def _rewards(
    rows: Sequence[Mapping[str, Any]], generations: Sequence[Generation], reward: Reward
) -> list[float | None]:
    """Rewards of one response to each row; None if the reward is None or not finite."""
    messages = not isinstance(rows[0]["prompt"], str)
    texts = [generation.text for generation in generations]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
    values = reward(
        prompts=[row["prompt"] for row in rows],
        completions=[[{"role": "assistant", "content": text}] for text in texts] if messages else texts,
        completion_ids=[generation.response_ids for generation in generations],
        finished=[generation.finished for generation in generations],
        **columns,
    )
    if len(values) != len(rows):
        raise ValueError(f"the reward must return one number or None for each of {len(rows)}: {len(values)} values")
    return [float(value) if value is not None and math.isfinite(value) else None for value in values]


def prompt_text(prompt: Sequence[Mapping[str, Any]] | str) -> str:
    """The plain prompt, or the text of the last user message; empty if there is none."""
    if isinstance(prompt, str):
        return prompt
    return next((message["content"] for message in reversed(prompt) if message["role"] == "user"), "")
