"""Best-of-n: sample several responses to each prompt, score them with any reward, and keep the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.data.conversation import prompt_text
from trl_ext.rollouts.generation import Generation
from trl_ext.rollouts.responses import Engine, Prompt, Row, sample_responses

Reward = Callable[..., Sequence[float | None]]


def pick_best(samples: Sequence[Mapping[str, Any]], n: int | None = None) -> Mapping[str, Any] | None:
    """The first row with the highest `reward` among the first n (None for all); None where no row has a reward."""
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
        engine, options: as for `sample_responses`, which also says what is raised.
        reward: a function with TRL's signature, which also receives `finished`; a number that is not finite counts as
            None, no reward.
        score_function: the known quality `f(prompt_text, response, *, finished)`, for the column `score`; or None.
        missing_eos_penalty: what is subtracted from the reward of a response that was truncated at the token limit.

    Returns:
        The n rows of each prompt, in sampling order: those of `sample_responses` with `reward`, which may be None.
    """

    def score(part: list, generations: list[Generation]) -> list[Row]:
        values = reward(
            prompts=[row["prompt"] for row in part],
            completions=[completion_of(row["prompt"], one.text) for row, one in zip(part, generations, strict=True)],
            completion_ids=[one.response_ids for one in generations],
            finished=[one.finished for one in generations],
            **{name: [row[name] for row in part] for name in part[0] if name not in ("prompt", "completion")},
        )
        if len(values) != len(part):
            raise ValueError(f"the reward must return a number or None for each of {len(part)}: {len(values)} values")
        columns = []
        for row, one, value in zip(part, generations, values, strict=True):
            rewarded = value is not None and math.isfinite(value)
            penalty = 0.0 if one.finished else missing_eos_penalty
            columns.append({"reward": float(value) - penalty if rewarded else None})
            if score_function is not None:
                columns[-1]["score"] = score_function(prompt_text(row["prompt"]), one.text, finished=one.finished)
        return columns

    done = sample_responses(rows, [row["prompt"] for row in rows], engine, score, samples=n, **options)
    return [done[start : start + n] for start in range(0, len(done), n)]


def demonstrations(samples: Sequence[Sequence[Row]], prompts: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rejection sampling: each prompt's best response, in the prompt-completion format of TRL's `SFTTrainer`.

    Responses that were truncated or have no text are left out: the model would learn an end token that was never
    sampled. `samples` is the result of `best_of_n` for these prompts. The rows have `row_id`, `prompt`, `completion`
    (messages if the prompt is), `reward`, `sample` and `best_of`.
    """
    found = []
    for prompt, group in zip(prompts, samples, strict=True):
        usable = [sample for sample in group if sample["finished"] and sample["response_text"].strip()]
        if usable and (best := pick_best(usable)):
            completion = completion_of(prompt["prompt"], best["response_text"])
            row = {"row_id": prompt["row_id"], "prompt": prompt["prompt"], "completion": completion}
            found.append({**row, "reward": best["reward"], "sample": best["sample"], "best_of": len(group)})
    return found


def completion_of(prompt: Prompt, response: str) -> list[dict[str, str]] | str:
    """A response in the form of its prompt: messages if the prompt is messages, else text."""
    return response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
