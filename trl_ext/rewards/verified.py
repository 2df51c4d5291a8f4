"""Verified rewards: 1 for a correct answer in the required form, else 0; also as TRL reward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.names import nearest
from trl_ext.rewards.answers import is_correct, last_boxed
from trl_ext.rewards.parsers import countdown_is_solved, parse_gsm8k_response

Truth = str | float | Iterable[str | float]


def r1_zero_reward(response: str, ground_truth: Truth) -> dict[str, float]:
    """The reward of a response that thinks and then answers in tags: `... </think> <answer> 5 </answer>`.

    The form is strict: `</think> <answer>` with one space between, and `</answer>`. The answer is the text after the
    last `<answer>`, or the content of the last `\\boxed` in it, if there is one.

    Args:
        response: the text after the prompt, which ends with `<think>`.
        ground_truth: as for `is_correct`.

    Returns:
        `format_reward`, `answer_reward` and `reward`, each 0 or 1. The reward is that of the answer: 0 in the
        wrong form.

    Raises:
        ValueError: the truth is not an answer, whatever the response is.
    """
    answer = _tagged_answer(response)
    return _scores(answer is not None, is_correct(_unboxed(answer) or "", ground_truth))


def question_only_reward(response: str, ground_truth: Truth) -> dict[str, float]:
    """The reward of a response whose answer is in its last `\\boxed{...}`, as `r1_zero_reward`.

    The form is correct if that box is closed. `\\fbox{}` and `\\boxed 5` do not count as boxes.
    """
    answer = last_boxed(response)
    return _scores(answer is not None, is_correct(answer or "", ground_truth))


def gsm8k_reward(response: str, ground_truth: Truth) -> dict[str, float]:
    """The reward of a response whose answer is its last number, as `r1_zero_reward`.

    The form is correct if there is a number. This is the grading of GSM8K (https://arxiv.org/abs/2110.14168).
    """
    answer = parse_gsm8k_response(response)
    return _scores(answer is not None, is_correct(answer or "", ground_truth))


def countdown_reward(response: str, numbers: Sequence[int], target: float) -> dict[str, float]:
    """The reward of a response in tags, `... </think> <answer> 2 * 3 + 4 </answer>`, that makes the target.

    Form and result are those of `r1_zero_reward`. The answer is a formula of `+ - * /` and brackets that uses each
    number exactly once; `= target` may follow it, and it may be in a `\\boxed`.

    Raises:
        ValueError: the numbers or the target are not numeric.
    """
    answer = _tagged_answer(response)
    return _scores(answer is not None, countdown_is_solved(_unboxed(answer) or "", numbers, target))


# f(response, row) -> `reward`, `format_reward` and `answer_reward`, each 0 or 1.
Grader = Callable[[str, Mapping[str, Any]], dict[str, float]]
CATEGORIES = ("correct", "wrong_answer", "wrong_format")
# Rewards that need only a response and its truth.
ANSWER_REWARDS = {"r1_zero": r1_zero_reward, "question_only": question_only_reward, "gsm8k": gsm8k_reward}
KINDS = (*ANSWER_REWARDS, "countdown")


@dataclass(frozen=True)
class VerifiedGrader:
    """A function that grades a response to a row of `trl_ext.data.math.load_math`.

    Attributes:
        kind: `r1_zero` (tags), `question_only` (a box), `gsm8k` (the last number), or `countdown` (tags around an
            expression of the row's `numbers` that makes its `answer`).
    """

    kind: str = "r1_zero"

    def __post_init__(self):
        if self.kind not in KINDS:
            known, kind = ", ".join(KINDS), str(self.kind)
            raise ValueError(f"the reward must be one of {known}, got {kind!r}{nearest(kind, [*KINDS])}")

    def __call__(self, response: str, row: Mapping[str, Any]) -> dict[str, float]:
        if self.kind == "countdown":
            return countdown_reward(response, row.get("numbers"), row["answer"])
        return ANSWER_REWARDS[self.kind](response, row["answer"])

    def parsed_answer(self, response: str) -> str | None:
        """The answer that the reward extracts from a response; None if there is none."""
        if self.kind in ("r1_zero", "countdown"):
            return _unboxed(_tagged_answer(response))
        return last_boxed(response) if self.kind == "question_only" else parse_gsm8k_response(response)


class VerifiedReward:
    """A reward function for TRL's trainers, which can be pickled.

    Args:
        kind: as for `VerifiedGrader`.
        truth_column: the dataset's column with the truth of each row: a text, a number or a list of those; for
            `countdown`, its target, and the column `numbers` has the numbers to use.
    """

    def __init__(self, kind: str = "r1_zero", truth_column: str = "answer"):
        self.grade = VerifiedGrader(kind)
        self.truth_column, self.__name__ = truth_column, kind

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """TRL's reward signature; a completion is a text or a list of messages.

        Logs the two parts of each reward as the columns `reward/<name>/format` and `reward/<name>/answer`, and their
        means as `rewards/<name>/format` and `rewards/<name>/answer`.
        """
        if self.truth_column not in columns:
            raise ValueError(f"{self.__name__}: the dataset has no column {self.truth_column!r}: give truth_column")
        truths = columns[self.truth_column]
        numbers = columns.get("numbers") or [None] * len(truths)
        rewards = []
        for index, (completion, truth, given) in enumerate(zip(completions, truths, numbers, strict=True)):
            try:
                rewards.append(self.grade(completion_text(completion), {"answer": truth, "numbers": given}))
            except ValueError as error:
                raise ValueError(f"{self.__name__}: row {index}, column {self.truth_column!r}: {error}") from error
        for part in ("format", "answer"):
            values = [reward[f"{part}_reward"] for reward in rewards]
            if log_extra is not None:
                log_extra(f"reward/{self.__name__}/{part}", values)
            if log_metric is not None and values:
                log_metric(f"rewards/{self.__name__}/{part}", sum(values) / len(values))
        return [reward["reward"] for reward in rewards]


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion: the string itself, or its last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    return content or ""


def _tagged_answer(response: str) -> str | None:
    """The text after the last `<answer>`, without the closing tag; None if the form is wrong."""
    if "</think> <answer>" not in response or "</answer>" not in response:
        return None
    return response.rpartition("<answer>")[2].replace("</answer>", "")


def _unboxed(answer: str | None) -> str | None:
    """The content of the answer's last box; the answer itself if it has no box, None if the box is not closed."""
    return last_boxed(answer) if answer is not None and "\\boxed" in answer else answer


def _scores(formatted: bool, correct: bool) -> dict[str, float]:
    return {"reward": float(correct), "format_reward": float(formatted), "answer_reward": float(correct)}


def category_of(format_reward: float, answer_reward: float) -> str:
    """The category of a graded response; an answer in the wrong form is never correct."""
    return "correct" if answer_reward else "wrong_answer" if format_reward else "wrong_format"


def count_categories(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The number of rows per `category`; every category is present, even with no rows."""
    return {name: sum(row["category"] == name for row in rows) for name in CATEGORIES}
