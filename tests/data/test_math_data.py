"""Problems with known answers: every layout, where bad rows are, prompts, solutions, and the embedded traces."""

from __future__ import annotations

import re

import pytest

from tests.support import REPOSITORY
from tests.support.files import write_rows
from tools.toy_prompts import prompt_pool
from trl_ext.data.math import (
    boxed_answer,
    demonstration,
    last_boxed,
    load_math,
    load_prompt_template,
    math_prompt,
    render,
    template_names,
)
from trl_ext.toy import score

LAYOUTS = {
    "ours": (
        {"row_id": "a", "prompt_text": "What is 1 + 1?", "answer": "2"},
        {"row_id": "a", "prompt_text": "What is 1 + 1?", "answer": "2"},
    ),
    "a number": (
        {"prompt_text": "What is 1 + 1?", "answer": 2, "response": " 2"},
        {"row_id": "rows:1", "prompt_text": "What is 1 + 1?", "answer": "2", "response": " 2"},
    ),
    "gsm8k": (
        {"question": "Clips?", "answer": "He sold 4*250=$<<4*250=1000>>1000.\nSo 1000.\n#### 1,000"},
        {"row_id": "rows:1", "prompt_text": "Clips?", "answer": "1000", "solution": "He sold 4*250=$1000.\nSo 1000."},
    ),
    "math": (
        {"problem": "Halve 1.", "solution": "It is \\boxed{\\frac{1}{2}}.", "answer": "\\frac{1}{2}", "level": 1},
        {
            "row_id": "rows:1",
            "prompt_text": "Halve 1.",
            "answer": "\\frac{1}{2}",
            "solution": "It is \\boxed{\\frac{1}{2}}.",
        },
    ),
    "math without an answer": (
        {"problem": "Halve 1.", "solution": "Not \\boxed{3} but \\boxed{\\frac{1}{2}}."},
        {
            "row_id": "rows:1",
            "prompt_text": "Halve 1.",
            "answer": "\\frac{1}{2}",
            "solution": "Not \\boxed{3} but \\boxed{\\frac{1}{2}}.",
        },
    ),
    "a whole prompt": (
        {"prompt": "User: 1 + 1? <think>", "response": " 2 </think>", "ground_truth": "2"},
        {
            "row_id": "rows:1",
            "prompt_text": "User: 1 + 1? <think>",
            "answer": "2",
            "prompt": "User: 1 + 1? <think>",
            "response": " 2 </think>",
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, tmp_path):
    raw, expected = LAYOUTS[layout]
    assert load_math(write_rows(tmp_path / "rows.jsonl", [raw])) == [expected]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"So it is $\boxed 2$.", "2"),
        (r"It is \boxed 9", "9"),
        (r"It is \boxed 9.", "9"),
        (r"It is $\boxed5$.", "5"),
        (r"$\boxed \frac{1}{2}$", r"\frac{1}{2}"),
        (r"$\boxed {5}$", "5"),
        (r"Not \boxed{3} but $\boxed 2$.", "2"),
        (r"Not $\boxed 2$ but \boxed{ 3 }.", "3"),
    ],
)
def test_boxes_without_braces(solution, answer, tmp_path):
    """As in some of MATH's training rows; fine-tuning on them must teach the box that the reward reads."""
    (row,) = load_math(write_rows(tmp_path / "rows.jsonl", [{"problem": "p", "solution": solution}]))
    assert row["answer"] == answer
    assert last_boxed(demonstration(row, None, boxed=True)).strip() == answer


@pytest.mark.parametrize(
    "solution", [r"\boxed", r"$\boxed$ 5", r"\boxed{}", r"\boxed{ }", r"\boxed{5", r"\boxedx 5", "5", r"\fbox{5}"]
)
def test_what_is_no_box(solution):
    assert boxed_answer(solution) is None


@pytest.mark.parametrize("field", ["nums", "numbers"])
def test_a_countdown_asks_for_its_numbers(field, tmp_path):
    (row,) = load_math(write_rows(tmp_path / "rows.jsonl", [{field: [3, 25, 3], "target": 28}]))
    assert (row["answer"], row["numbers"]) == ("28", [3, 25, 3])
    assert re.findall(r"\d+", row["prompt_text"]) == ["28", "3", "25", "3"]


def test_a_folder_holds_splits(tmp_path):
    write_rows(tmp_path / "test.jsonl", [{"question": "q", "answer": "1"}])
    assert load_math(tmp_path, "test")[0]["row_id"] == "test:1"
    with pytest.raises(FileNotFoundError, match=r"no file train\.jsonl .* holds test\.jsonl"):
        load_math(tmp_path, "train")
    with pytest.raises(FileNotFoundError, match="give toy, word_problems, a folder"):
        load_math(tmp_path / "nowhere")


GOOD = {"row_id": "g", "question": "q", "answer": "1"}
BAD = {
    "no answer": (
        {"row_id": "x", "question": "q"},
        r"line 2, row_id x: answer: missing; the row has row_id, question",
    ),
    "empty question": ({"question": " ", "answer": "1"}, r"line 2: question: empty"),
    "no number": ({"question": "q", "answer": "so\n#### many"}, r"line 2: .*answer: no number after ####.*many"),
    "unknown": ({"text": "q"}, r"line 2: .*no problem with an answer.*this one has text"),
    "no box": ({"problem": "p", "solution": "it is \\boxed{3"}, r"line 2: .*closed \\boxed"),
    "nums": ({"nums": ["3"], "target": 3}, r"line 2: .*nums, target: .*whole numbers"),
    "not finite": ({"question": "q", "answer": float("inf")}, r"line 2: .*answer: must be text"),
    "twice": (GOOD, r"line 2, row_id g: row_id: already used on line 1"),
    "response": ({"question": "q", "answer": "1", "response": 3}, r"line 2: .*response: must be text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(name, tmp_path):
    raw, expected = BAD[name]
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, raw])
    with pytest.raises(ValueError, match=rf"rows\.jsonl: 1 bad row: {expected}") as raised:
        load_math(path)
    assert "\n" not in str(raised.value)


def test_many_bad_rows_are_counted_and_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"7 bad rows: line 1.*line 2.*; and \d more; a row holds"):
        load_math(write_rows(tmp_path / "rows.jsonl", [{"text": "q"}] * 7))
    with pytest.raises(ValueError, match="empty"):
        load_math(write_rows(tmp_path / "none.jsonl", []))


def test_prompts():
    row = {"row_id": "a", "prompt_text": "1 + {1}?", "answer": "2"}
    assert math_prompt(row, None) == [{"role": "user", "content": "1 + {1}?"}]
    assert math_prompt(row, "Q: {question}\nA: <think>") == "Q: 1 + {1}?\nA: <think>"
    assert math_prompt({**row, "prompt": "whole"}, "Q: {question}") == "whole"


def test_demonstrations_take_the_form_that_is_asked_for():
    row = {"row_id": "a", "prompt_text": "q", "answer": "72", "solution": "48+24 = 72."}
    tags = "48+24 = 72. </think> <answer> 72 </answer>"
    assert demonstration(row, "{question} <think>") == f" {tags}"
    assert demonstration(row, "{question}") == demonstration(row, None) == f"<think> {tags}"
    assert demonstration(row, "{question}", boxed=True) == "48+24 = 72.\n\\boxed{72}"
    boxed = {**row, "solution": "So \\boxed{72}."}
    assert demonstration(boxed, "{question}", boxed=True) == "So \\boxed{72}."
    assert demonstration({**row, "response": "as it is"}, None) == "as it is"
    assert demonstration({"row_id": "a", "prompt_text": "q", "answer": "72"}, None) is None


class TestTheEmbeddedAdditions:
    def test_splits(self):
        train, validation, test = (load_math("toy", split) for split in ("train", "validation", "test"))
        assert (len(train), len(validation), len(test)) == (400, 200, 200)
        for rows, pool in ((train, "train"), (validation, "validation"), (test, "test")):
            assert {row["prompt_text"] for row in rows} <= set(prompt_pool(pool)["add"])
            for row in rows:
                first, second = re.findall(r"\d+", row["prompt_text"])
                assert row["answer"] == str(int(first) + int(second))
        assert load_math("toy", "train_math") == train
        with pytest.raises(FileNotFoundError, match="train, validation, test"):
            load_math("toy", "dev")

    def test_a_quarter_of_the_traces_is_wrong(self):
        """107 of 400: 100 expected, with a standard deviation of sqrt(400 x 0.25 x 0.75) = 8.7."""
        train = load_math("toy", "train")
        right = [score(row["prompt_text"], row["response"]) == 1 for row in train]
        assert right.count(False) == 107


# ---- Prompt templates ----


def test_r1_zero_is_a_conversation_that_stops_at_the_thoughts():
    prompt = render(load_prompt_template("r1_zero"), "What is 2 + 3?")
    introduction, user, assistant = prompt.split("\n")
    assert user == "User: What is 2 + 3?"
    assert assistant == "Assistant: <think>" and prompt.endswith("Assistant: <think>")
    assert introduction.index("<think>") < introduction.index("</think>") < introduction.index("<answer>")
    assert "</think> <answer> the answer </answer>" in introduction


def test_the_form_that_the_prompt_shows_earns_the_reward():
    from trl_ext.rewards import r1_zero_reward

    shown = load_prompt_template("r1_zero").split("in this form: <think>")[1].split("\n")[0].rstrip(".")
    assert r1_zero_reward(shown.replace("the answer", "5"), "5")["reward"] == 1


def test_the_others():
    assert render(load_prompt_template("question_only"), "What?") == "What?"
    prompt = render(load_prompt_template("alpaca_sft"), "Name a colour.")
    assert prompt.endswith("\n\n### Instruction:\nName a colour.\n\n### Response:\n")
    assert template_names() == ["alpaca_sft", "boxed", "question_only", "r1_zero"]


def test_a_users_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Set {a} of é: {question} {question}\n\n", encoding="utf-8")
    template = load_prompt_template(path)
    assert template == load_prompt_template(str(path)) == "Set {a} of é: {question} {question}\n"
    assert render(template, r"\frac{1}{2} {question_}") == (
        "Set {a} of é: \\frac{1}{2} {question_} \\frac{1}{2} {question_}\n"
    )


def test_what_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="alpaca_sft, boxed, question_only, r1_zero; did you mean 'r1_zero'"):
        load_prompt_template("r1-zero")
    path = tmp_path / "mine.txt"
    path.write_text("{Question}")
    with pytest.raises(ValueError, match=r"mine\.txt: no \{question\} in this prompt template"):
        load_prompt_template(path)


def test_the_files_are_part_of_the_package():
    import fnmatch
    import tomllib

    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["trl_ext"]
    for name in template_names():
        assert any(fnmatch.fnmatch(f"data/prompt_templates/{name}.txt", pattern) for pattern in patterns)
