"""Worked additions without a mistake."""

from __future__ import annotations

from trl_ext.toy.prompts import parse


def addition_trace(prompt: str) -> str:
    """The response to an addition, digit by digit: `<think>7+8=15 4+3+1=8</think> <answer>85</answer>` for 47 + 38.

    Raises:
        ValueError: the prompt is not an addition.
    """
    task = parse(prompt)
    if task.kind != "add":
        raise ValueError(f"{prompt!r} is no addition, but of the kind {task.kind!r}")
    first, second = task.numbers
    ones = first % 10 + second % 10
    carried = f"+{ones // 10}" if ones >= 10 else ""
    tens = first // 10 + second // 10 + ones // 10
    steps = f"{first % 10}+{second % 10}={ones} {first // 10}+{second // 10}{carried}={tens}"
    return f"<think>{steps}</think> <answer>{first + second}</answer>"
