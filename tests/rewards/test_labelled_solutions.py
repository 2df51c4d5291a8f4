"""The grader against GSM8K's labels: four models' solutions to each test question, each marked right or wrong.

The file is `gsm8k/example_model_solutions.jsonl` of openai/grade-school-math, in the folder that
TRL_EXT_BENCHMARK_DATA names. A solution ends with `A: 18`, and its lines hold the calculator's notes, such as
`<<16-3=13>>`.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.support import REPOSITORY
from trl_ext.rewards import gsm8k_reward, question_only_reward, r1_zero_reward
from trl_ext.rewards.math_worker import require_math_verify


@pytest.fixture(scope="module")
def solutions() -> list[tuple[str, str, bool]]:
    """Each solution with the truth and its label."""
    data = os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data")
    path = os.path.join(data, "gsm8k", "example_model_solutions.jsonl")
    if not os.path.isfile(path):
        pytest.skip("GSM8K's example solutions are not here")
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    found = [
        (answer["solution"], row["ground_truth"].rpartition("\nA: ")[2].replace(",", ""), answer["is_correct"])
        for row in rows
        for answer in row.values()
        if isinstance(answer, dict)
    ]
    assert len(found) == 4 * 1319
    return found


def disagreements(solutions, reward) -> list[tuple[str, str, bool]]:
    return [(text, truth, label) for text, truth, label in solutions if (reward(text, truth) == 1) != label]


def test_the_last_number_is_graded_as_the_labels_say(solutions):
    """Those cut before their answer, eleven of them, have a last number too, which is wrong as their label is."""
    assert disagreements(solutions, lambda text, truth: gsm8k_reward(text, truth)["reward"]) == []


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_answers_in_a_box_and_in_tags_are_graded_as_the_labels_say(solutions, fast):
    """Answers are spelled `18`, `18.0`, `2,125`, `-3`, `1/5`, `-1.8 billion` or `10+John's age`."""
    if not fast:
        try:
            require_math_verify()
        except ValueError:
            pytest.skip("math-verify is not installed")

    def boxed(text: str, truth: str) -> float:
        reasoning, mark, answer = text.rpartition("A: ")
        return question_only_reward(rf"{reasoning}\boxed{{{answer}}}" if mark else text, truth, fast=fast)["reward"]

    def tagged(text: str, truth: str) -> float:
        reasoning, mark, answer = text.rpartition("A: ")
        return r1_zero_reward(f"{reasoning}</think> <answer>{answer}</answer>" * bool(mark), truth, fast=fast)[
            "reward"
        ]

    assert disagreements(solutions, boxed) == []
    assert disagreements(solutions, tagged) == []
