"""A reward model as a judge: the response with the higher reward is the better one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from trl_ext.evaluation.judge import Messages, Verdict
from trl_ext.rewards import RewardModel


class RewardModelJudge:
    """Prefers the response with the higher reward. Each response is scored once, however often it is shown.

    Args:
        reward_model: a `RewardModel`, or the folder or hub name of one.
        tolerance: rewards that differ by no more than this are a tie.

    Raises:
        ValueError: the tolerance is negative.
    """

    uses_finished = True
    sequential = True
    identity = None

    def __init__(self, reward_model: RewardModel | str | Path, *, tolerance: float = 0.0):
        if not tolerance >= 0:
            raise ValueError(f"tolerance must be at least 0, got {tolerance}")
        self.reward_model = RewardModel(reward_model) if isinstance(reward_model, str | Path) else reward_model
        self.tolerance = tolerance
        self._scores: dict[str, float] = {}

    def judge(
        self,
        prompt: Messages | str,
        response_a: str,
        response_b: str,
        *,
        finished_a: bool = True,
        finished_b: bool = True,
    ) -> Verdict:
        pair = [(prompt, response_a, finished_a), (prompt, response_b, finished_b)]
        self.prepare(pair)
        first, second = (self._scores[_key(*response)] for response in pair)
        if abs(first - second) <= self.tolerance:
            return "tie"
        return "A" if first > second else "B"

    def prepare(self, responses: Iterable[tuple[Messages | str, str, bool]], *, progress: str | None = None) -> None:
        """Score what is not scored yet, in batches.

        Args:
            responses: prompt, response, and whether it ended by itself.
            progress: what a progress bar calls the work; None for no bar.

        Raises:
            ValueError: a reward is no number.
        """
        missing = {_key(*response): response for response in responses if _key(*response) not in self._scores}
        if not missing:
            return
        prompts, texts, finished = zip(*missing.values(), strict=True)
        scores = self.reward_model.score(prompts, texts, finished=finished, progress=progress)
        for key, text, score in zip(missing, texts, scores.tolist(), strict=True):
            if not math.isfinite(score):
                raise ValueError(f"the reward model gave {score} to the response {text[:80]!r}; expected a number")
            self._scores[key] = score


def _key(prompt: Messages | str, response: str, finished: bool) -> str:
    return json.dumps([prompt, response, bool(finished)])
