"""Judges that compare scores: a known score of the task, or a reward model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trl_ext.evaluation.judging.protocol import Messages, Verdict, last_user_text

if TYPE_CHECKING:
    from trl_ext.rewards import RewardModel

# A prompt, a response, and whether the response finished.
Shown = tuple[Messages | str, str, bool]


class ScoreJudge:
    """Prefers the response with the higher of `scores`. Those that differ by no more than `tolerance` are a tie."""

    uses_finished = True
    sequential = True
    identity = None
    tolerance = 0.0

    def judge(self, prompt, response_a, response_b, *, finished_a=True, finished_b=True) -> Verdict:
        first, second = self.scores([(prompt, response_a, finished_a), (prompt, response_b, finished_b)])
        if not math.isfinite(first - second):
            text = last_user_text(prompt)[:80]
            raise ValueError(f"the responses to {text!r} have the scores {first} and {second}; expected numbers")
        if abs(first - second) <= self.tolerance:
            return "tie"
        return "A" if first > second else "B"


class GroundTruthJudge(ScoreJudge):
    """Prefers the response with the higher score, for tasks whose score is known.

    Args:
        score_function: `f(prompt_text, response) -> float` on the text of the last user message; it must accept the
            keyword `finished` if responses may be truncated. Default: the score of the toy benchmark.
    """

    tolerance = 1e-9

    def __init__(self, score_function: Callable[..., float] | None = None):
        if score_function is None:
            from trl_ext.toy import score as score_function
        self.score_function = score_function

    def scores(self, responses: Sequence[Shown]) -> list[float]:
        # Pass the keyword only if it matters, so that a score without it works for responses that all finished.
        return [
            float(self.score_function(last_user_text(prompt), text, **({} if finished else {"finished": False})))
            for prompt, text, finished in responses
        ]


class RewardModelJudge(ScoreJudge):
    """Prefers the response with the higher reward of a `RewardModel`, or of the folder or hub name of one.

    Each response is scored only once.
    """

    def __init__(self, reward_model: RewardModel | str | Path):
        if isinstance(reward_model, str | Path):
            from trl_ext.rewards import RewardModel

            reward_model = RewardModel(reward_model)
        self.reward_model = reward_model
        self._scores: dict[str, float] = {}

    def scores(self, responses: Sequence[Shown]) -> list[float]:
        self.prepare(responses)
        return [self._scores[json.dumps(response)] for response in responses]

    def prepare(self, responses: Iterable[Shown], *, progress: str | None = None) -> None:
        """Score the responses that have no score yet, in batches, with a progress bar of that label."""
        missing = {key: response for response in responses if (key := json.dumps(response)) not in self._scores}
        if not missing:
            return
        prompts, texts, finished = zip(*missing.values(), strict=True)
        rewards = self.reward_model.score(prompts, texts, finished=finished, progress=progress).tolist()
        self._scores |= zip(missing, rewards, strict=True)
