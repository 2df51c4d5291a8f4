"""Verified rewards: 1 for a response in the asked form with the right answer, else 0; also as TRL reward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from trl_ext.registry import nearest
from trl_ext.rewards.answers import is_correct, last_boxed, truth_texts
from trl_ext.rewards.parsers import countdown_is_solved, parse_gsm8k_response

Truth = str | float | Iterable[str | float]
Kind = Literal["r1_zero", "question_only", "gsm8k", "countdown"]
KINDS: tuple[str, ...] = get_args(Kind)


def r1_zero_reward(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """The reward of a response that thinks, and answers in tags: `... </think> <answer> 5 </answer>`.

    The form is strict: `</think> <answer>` with one space between, and `</answer>`. The answer is what follows the
    last `<answer>`, and where a `\\boxed` is in it, what the last of them holds.

    Args:
        response: what follows the prompt, whose end is `<think>`.
        ground_truth: text, a number, `\\boxed{...}`, or a list of those of which any one will do.
        fast: False to ask math-verify about answers that `is_correct` cannot confirm by itself.

    Returns:
        `format_reward`, `answer_reward` and `reward`, each 0 or 1; the reward is that of the answer, and an answer in
        the wrong form earns nothing.

    Raises:
        ValueError: the truth is none, or math-verify is asked for and not installed.
    """
    answer = _tagged_answer(response)
    return _graded(answer is not None, _unboxed(answer), ground_truth, fast)


def question_only_reward(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """The reward of a response whose answer is in its last `\\boxed{...}`.

    Given are `format_reward`, `answer_reward` and `reward`, each 0 or 1; the reward is that of the answer. The form is
    right where that box is closed. `\\fbox{}` and `\\boxed 5` are no boxes.

    Args:
        response: what follows the prompt.
        ground_truth: text, a number, `\\boxed{...}`, or a list of those of which any one will do.
        fast: False to ask math-verify about answers that `is_correct` cannot confirm by itself.
    """
    answer = last_boxed(response)
    return _graded(answer is not None, answer, ground_truth, fast)


def gsm8k_reward(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """The reward of a response whose answer is its last number.

    Given are `format_reward`, `answer_reward` and `reward`, each 0 or 1; to have a number is all of the form, and the
    reward is that of the answer. This is the grading of GSM8K (https://arxiv.org/abs/2110.14168).

    Args:
        response: what follows the prompt.
        ground_truth: text, a number, or a list of those of which any one will do.
        fast: False to ask math-verify about answers that `is_correct` cannot confirm by itself.
    """
    answer = parse_gsm8k_response(response)
    return _graded(answer is not None, answer, ground_truth, fast)


def countdown_reward(response: str, numbers: Sequence[int], target: float) -> dict[str, float]:
    """The reward of a response in tags, `... </think> <answer> 2 * 3 + 4 </answer>`, that makes the target.

    Given are `format_reward`, `answer_reward` and `reward`, each 0 or 1. The form is strict, as in `r1_zero_reward`:
    `</think> <answer>` with one space between, and `</answer>`. The answer is a formula of `+ - * /` and brackets with
    each number exactly once; `= target` may follow it, and a `\\boxed` may hold it. The reward is that of the answer.

    Raises:
        ValueError: the numbers or the target are not numbers.
    """
    answer = _tagged_answer(response)
    inside = _unboxed(answer)
    return _scores(answer is not None, countdown_is_solved(inside or "", numbers, target) and inside is not None)


# Those of a response and its truth alone.
ANSWER_REWARDS: dict[str, Callable[..., dict[str, float]]] = {
    "r1_zero": r1_zero_reward,
    "question_only": question_only_reward,
    "gsm8k": gsm8k_reward,
}

# What each kind reads out of a response as its answer; None where there is none.
ANSWER_READERS: dict[str, Callable[[str], str | None]] = {
    "r1_zero": lambda response: _unboxed(_tagged_answer(response)),
    "question_only": last_boxed,
    "gsm8k": parse_gsm8k_response,
    "countdown": lambda response: _unboxed(_tagged_answer(response)),
}


class VerifiedReward:
    """A verified reward with TRL's signature of a reward function. It can be pickled.

    Made by `verified_reward`.
    """

    def __init__(self, kind: Kind, truth_column: str, numbers_column: str, name: str, fast: bool):
        self.kind, self.truth_column, self.numbers_column, self.fast = kind, truth_column, numbers_column, fast
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """One reward per completion, a text or a list of messages.

        Logs the two parts of each reward as the columns `reward/<name>/format` and `reward/<name>/answer`, and their
        means as `rewards/<name>/format` and `rewards/<name>/answer`.

        Raises:
            ValueError: the truth's column is missing or of another length, or one of its rows holds no truth.
        """
        truths = self._column(self.truth_column, columns, len(completions))
        numbers = [None] * len(completions)
        if self.kind == "countdown":
            numbers = self._column(self.numbers_column, columns, len(completions))
        rewards = []
        for index, (completion, truth, given) in enumerate(zip(completions, truths, numbers, strict=True)):
            try:
                rewards.append(self._score(completion_text(completion), truth, given))
            except ValueError as error:
                raise ValueError(f"{self.__name__}: row {index}, column {self.truth_column!r}: {error}") from error
        for part in ("format", "answer"):
            values = [reward[f"{part}_reward"] for reward in rewards]
            if log_extra is not None:
                log_extra(f"reward/{self.__name__}/{part}", values)
            if log_metric is not None and values:
                log_metric(f"rewards/{self.__name__}/{part}", sum(values) / len(values))
        return [reward["reward"] for reward in rewards]

    def _score(self, response: str, truth: Any, numbers: Any) -> dict[str, float]:
        if self.kind == "countdown":
            return countdown_reward(response, numbers, truth)
        return ANSWER_REWARDS[self.kind](response, truth, fast=self.fast)

    def _column(self, name: str, columns: dict[str, Any], rows: int) -> Sequence:
        if name not in columns:
            given = sorted(key for key, values in columns.items() if isinstance(values, (list, tuple)))
            raise ValueError(
                f"{self.__name__}: the dataset has no column {name!r}, but {', '.join(given) or 'none'}; name it with "
                f"truth_column{nearest(name, given)}"
            )
        if len(columns[name]) != rows:
            raise ValueError(f"{self.__name__}: column {name!r} has {len(columns[name])} rows for {rows} completions")
        return columns[name]


def verified_reward(
    kind: Kind = "r1_zero",
    truth_column: str = "answer",
    name: str | None = None,
    *,
    fast: bool = True,
    numbers_column: str = "numbers",
) -> VerifiedReward:
    """A reward function for TRL's trainers.

    Args:
        kind: `r1_zero`, `question_only` and `gsm8k` for `r1_zero_reward`, `question_only_reward` and `gsm8k_reward`;
            `countdown` for `countdown_reward`, whose target is in the truth's column.
        truth_column: the dataset's column with the truth of each row: a text, a number or a list of those.
        name: under which TRL logs it; None for the kind.
        fast: False to ask math-verify about answers that `is_correct` cannot confirm by itself.
        numbers_column: for `countdown`, the column with the numbers to use.

    Raises:
        ValueError: there is no such kind, or math-verify is asked for and not installed.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}{nearest(str(kind), list(KINDS))}")
    if not fast:
        from trl_ext.rewards.time_limit import require_math_verify

        require_math_verify()
    return VerifiedReward(kind, truth_column, numbers_column, name or kind, fast)


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion: as it is, or that of the last of its messages."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    return content or ""


def _tagged_answer(response: str) -> str | None:
    """What follows the last `<answer>`, less the closing tag; None where the form is wrong."""
    if "</think> <answer>" not in response or "</answer>" not in response:
        return None
    return response.rpartition("<answer>")[2].replace("</answer>", "")


def _unboxed(answer: str | None) -> str | None:
    """What is in the answer's last box; the answer itself where it has none, None where the box is not closed."""
    return last_boxed(answer) if answer is not None and "\\boxed" in answer else answer


def _graded(formatted: bool, answer: str | None, truth: Truth, fast: bool) -> dict[str, float]:
    if answer is None:
        # A truth that is none must show at the first response, whatever it is like.
        truth_texts(truth)
        return _scores(formatted, False)
    return _scores(formatted, is_correct(answer, truth, fast=fast))


def _scores(formatted: bool, correct: bool) -> dict[str, float]:
    return {"reward": float(correct), "format_reward": float(formatted), "answer_reward": float(correct)}
