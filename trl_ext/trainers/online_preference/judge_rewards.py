"""A pairwise judge as a reward function: a response's reward is the share of comparisons that it wins in its group."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from trl_ext.evaluation.judging.pairs import judge_pairs
from trl_ext.evaluation.judging.protocol import PairwiseJudge
from trl_ext.trainers.policy.config import check_whole_groups


class JudgeRewards:
    """Compares every two responses to a prompt, in both orders; a win counts 1, a tie or a disagreement one half.

    A response has no reward if none of its comparisons could be judged. For `G` responses to a prompt, the judge
    receives `G (G - 1)` questions.

    Args:
        judge: the judge.
        group_size: returns the current number of responses to a prompt.
        args: the trainer's configuration; its `reward_errors` decides whether a failing judge stops the run.

    Raises:
        ValueError: the responses to a prompt would be divided among processes, in training or in evaluation.
    """

    # A single response cannot be compared with anything.
    scores_groups = True

    def __init__(self, judge: PairwiseJudge | Callable, group_size: Callable[[], int], args):
        check_whole_groups(args, "a judge compares the responses to a prompt on one process")
        self.judge = judge
        self.group_size = group_size
        self.max_error_fraction = 1.0 if args.reward_errors == "skip" else 0.0
        self.__name__ = getattr(judge, "name", None) or type(judge).__name__

    def __call__(
        self, prompts: list, completions: list, finished: list[bool] | None = None, **_: Any
    ) -> list[float | None]:
        size = self.group_size()
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        ended = [True] * len(texts) if finished is None else finished
        of_group = list(combinations(range(size), 2))
        pairs = [(start + one, start + other) for start in range(0, len(texts), size) for one, other in of_group]
        first, second = zip(*pairs, strict=True)
        outcomes = judge_pairs(
            self.judge,
            [{"row_id": f"response {one} and {other}", "prompt": prompts[one]} for one, other in pairs],
            [texts[index] for index in first],
            [texts[index] for index in second],
            candidate_finished=[ended[index] for index in first],
            base_finished=[ended[index] for index in second],
            max_error_fraction=self.max_error_fraction,
        ).outcomes
        points: list[list[float]] = [[] for _ in texts]
        for (one, other), outcome in zip(pairs, outcomes, strict=True):
            if outcome.error is None:
                won = {"candidate": 1.0, "tie": 0.5, "base": 0.0}
                share = (won[outcome.first] + won[outcome.second]) / 2
                points[one].append(share)
                points[other].append(1 - share)
        return [sum(won) / len(won) if won else None for won in points]
