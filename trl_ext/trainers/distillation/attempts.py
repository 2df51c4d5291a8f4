"""Prompts of a teacher that sees the policy's own attempts, their rewards and feedback on them (SDPO)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from trl_ext.trainers.policy.resampling import raw_rewards

# From here on a reward is a success to `with_success`.
SUCCESS = 0.5


@dataclass(frozen=True)
class Attempt:
    """One of the policy's responses to a prompt.

    Attributes:
        response: its text.
        reward: the weighted sum of the reward functions, before shaping; NaN if none could score it.
        own: whether it is the response that the teacher is about to score.
    """

    response: str
    reward: float
    own: bool


def with_success(row: dict[str, Any], attempts: Sequence[Attempt]) -> list[dict] | str | None:
    """The prompt with the best other response below it; None unless its reward is at least 0.5.

    Hübotter et al. 2026 (SDPO), arXiv 2601.20802.
    """
    successes = [attempt for attempt in attempts if not attempt.own and attempt.reward >= SUCCESS]
    if not successes:
        return None
    best = max(successes, key=lambda attempt: attempt.reward)
    shown = f"\n\nA correct solution:\n\n{best.response}\n\nNow solve the task yourself."
    if isinstance(row["prompt"], str):
        return row["prompt"] + shown
    *earlier, last = row["prompt"]
    content = last["content"]
    content = content + shown if isinstance(content, str) else [*content, {"type": "text", "text": shown}]
    return [*earlier, {**last, "content": content}]


def takes_attempts(function: Callable) -> bool:
    """Whether a teacher's prompt is a function of the row and of the attempts, instead of the row alone."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    return sum(one.kind in positional for one in needed) > 1


def attempts_of_rollout(trainer, output: dict) -> list[list[Attempt]]:
    """For each of this process's responses, the responses of its group in order, whichever process has them."""
    rewards = raw_rewards(trainer).tolist()
    # Masks may leave out truncated responses.
    tokens = [ids[:length] for ids, length in zip(output["completion_ids"], trainer._rollout[2], strict=True)]
    texts = gather_object(trainer._tokenizer.batch_decode(tokens, skip_special_tokens=True))
    size = trainer.group_size
    first = trainer.accelerator.process_index * len(tokens)

    def group_of(row: int) -> list[Attempt]:
        start = row - row % size
        return [Attempt(texts[i], rewards[i], i == row) for i in range(start, start + size)]

    return [group_of(first + index) for index in range(len(tokens))]
