"""Problems with known answers: layouts, bad rows, prompts, solutions, and the two embedded data sets."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import pytest

from tests.support import recipes
from tests.support.files import write_rows
from tools.toy_prompts import prompt_pool
from tools.word_problems import SAME_FAMILY, overlap, words_of
from tools.worked_problems import number_text, work_out
from trl_ext.data.math import (
    boxed_answer,
    demonstration,
    last_boxed,
    load_math,
    load_prompt_template,
    math_prompt,
    render,
)
from trl_ext.rewards import r1_zero_reward
from trl_ext.runs import reasoning
from trl_ext.toy import score

FIRST = {"row_id": "rows:1"}
SUM = {"prompt_text": "What is 1 + 1?", "answer": "2"}
HALF = {"prompt_text": "Halve 1.", "answer": "\\frac{1}{2}"}
BOX, BOXES = "It is \\boxed{\\frac{1}{2}}.", "Not \\boxed{3} but \\boxed{\\frac{1}{2}}."
WHOLE = {"prompt": "User: 1 + 1? <think>", "response": " 2 </think>"}
LAYOUTS = {
    "ours": ({"row_id": "a", **SUM}, {"row_id": "a", **SUM}),
    "a number": ({**SUM, "answer": 2, "response": " 2"}, {**FIRST, **SUM, "response": " 2"}),
    "gsm8k": (
        {"question": "Clips?", "answer": "He sold 4*250=$<<4*250=1000>>1000.\nSo 1000.\n#### 1,000"},
        {**FIRST, "prompt_text": "Clips?", "answer": "1000", "solution": "He sold 4*250=$1000.\nSo 1000."},
    ),
    "math": (
        {"problem": "Halve 1.", "solution": BOX, "answer": "\\frac{1}{2}", "level": 1},
        {**FIRST, **HALF, "solution": BOX},
    ),
    "math without an answer": ({"problem": "Halve 1.", "solution": BOXES}, {**FIRST, **HALF, "solution": BOXES}),
    "a whole prompt": (
        {**WHOLE, "ground_truth": "2"},
        {**FIRST, **WHOLE, "prompt_text": WHOLE["prompt"], "answer": "2"},
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
    for source in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError):
            load_math(source, "train")


GOOD = {"row_id": "g", "question": "q", "answer": "1"}
BAD = {
    "no answer": ({"row_id": "x", "question": "q"}, "line 2: row_id x: answer: missing"),
    "empty question": ({"question": " ", "answer": "1"}, "line 2: question: empty"),
    "no number": ({"question": "q", "answer": "so\n#### $"}, "line 2: answer: empty"),
    "unknown": ({"text": "q"}, "line 2: no problem with an answer"),
    "no box": ({"problem": "p", "solution": "it is \\boxed{3"}, "line 2: answer: missing"),
    "nums": ({"nums": ["3"], "target": 3}, "line 2: nums, target"),
    "twice": (GOOD, "line 2: row_id g: row_id: already used on line 1"),
    "response": ({"question": "q", "answer": "1", "response": 3}, "line 2: response: must be text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(name, tmp_path):
    raw, expected = BAD[name]
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, raw])
    with pytest.raises(ValueError, match=rf"rows\.jsonl: 1 bad row: {expected}"):
        load_math(path)


def test_an_empty_file_is_refused(tmp_path):
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
        with pytest.raises(FileNotFoundError, match="train, validation, test"):
            load_math("toy", "dev")

    def test_a_quarter_of_the_traces_is_wrong(self):
        """107 of 400: 100 expected, with a standard deviation of sqrt(400 x 0.25 x 0.75) = 8.7."""
        train = load_math("toy", "train")
        right = [score(row["prompt_text"], row["response"]) == 1 for row in train]
        assert right.count(False) == 107


# ---- Prompt templates ----


def test_the_form_that_the_prompt_shows_earns_the_reward():
    shown = load_prompt_template("r1_zero").split("in this form: <think>")[1].split("\n")[0].rstrip(".")
    assert r1_zero_reward(shown.replace("the answer", "5"), "5")["reward"] == 1


def test_a_users_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Set {a} of é: {question} {question}\n\n", encoding="utf-8")
    template = load_prompt_template(path)
    assert template == load_prompt_template(str(path)) == "Set {a} of é: {question} {question}\n"
    assert render(template, r"\frac{1}{2} {question_}") == (
        "Set {a} of é: \\frac{1}{2} {question_} \\frac{1}{2} {question_}\n"
    )


def test_what_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="did you mean 'r1_zero'"):
        load_prompt_template("r1-zero")
    path = tmp_path / "mine.txt"
    path.write_text("{Question}")
    with pytest.raises(ValueError, match=r"no \{question\}"):
        load_prompt_template(path)


# ---- Embedded word problems ----

SPLITS = {"train": 1831, "validation": 200, "test": 300}
STEP = re.compile(r"([\d.]+) ([-+*/]) ([\d.]+) = ([\d.]+)\.(?: |$)")


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return {split: load_math("word_problems", split) for split in SPLITS}


@pytest.mark.parametrize(
    ("equation", "solution", "value"),
    [
        ("* 27.0 16.0", "27 * 16 = 432.", "432"),
        ("- 25000.0 * 1500.0 8.0", "1500 * 8 = 12000. 25000 - 12000 = 13000.", "13000"),
        ("/ - 19.0 11.0 2.0", "19 - 11 = 8. 8 / 2 = 4.", "4"),
        ("+ 0.1 0.2", "0.1 + 0.2 = 0.3.", "0.3"),
        ("( 7.0 - ( 2.0 + 3.0 ) )", "2 + 3 = 5. 7 - 5 = 2.", "2"),
        ("3 - 4", "3 - 4 = -1.", "-1"),
    ],
)
def test_worked_by_hand(equation, solution, value):
    steps, found = work_out(equation)
    assert (" ".join(steps), number_text(found)) == (solution, value)


def test_splits(rows):
    assert {split: len(found) for split, found in rows.items()} == SPLITS
    assert Counter(row["row_id"].partition("-")[0] for row in rows["train"]) == {"mawps": 1346, "svamp": 485}
    assert load_math("word_problems", "train_mawps") + load_math("word_problems", "train_svamp") == rows["train"]
    with pytest.raises(FileNotFoundError, match="word_problems has no split 'dev' .* train, validation, test"):
        load_math("word_problems", "dev")


def test_every_solution_is_right_and_ends_in_the_answer(rows):
    for row in (row for found in rows.values() for row in found):
        steps = STEP.findall(row["solution"])
        assert (
            1 <= len(steps) <= 2 and "".join(match[0] for match in STEP.finditer(row["solution"])) == row["solution"]
        )
        for first, sign, second, result in steps:
            one, other = Fraction(first), Fraction(second)
            values = {"+": one + other, "-": one - other, "*": one * other, "/": one / other if other else None}
            assert values[sign] == Fraction(result), row
        assert row["solution"].endswith(f" = {row['answer']}.") and float(row["answer"]) >= 0


def test_no_template_and_no_family_is_in_two_splits(rows):
    words = {split: [words_of(row["prompt_text"]) for row in found] for split, found in rows.items()}
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not set(words[one]) & set(words[other])
        assert max(overlap(a, b) for a in words[one] for b in words[other]) < SAME_FAMILY
    templates = [re.sub(r"[^a-z]+", " ", row["prompt_text"].lower()) for row in rows["train"]]
    assert len(set(templates)) == len(templates)


@pytest.mark.parametrize(
    ("flags", "response"),
    [
        ([], "27 * 16 = 432.\n\\boxed{432}"),
        (["--prompt_template=chat"], "<think> 27 * 16 = 432. </think> <answer> 432 </answer>"),
        (["--prompt_template=r1_zero"], " 27 * 16 = 432. </think> <answer> 432 </answer>"),
    ],
)
def test_the_reward_grades_every_demonstration_as_right(flags, response, monkeypatch):
    arguments = recipes.parse(monkeypatch, "sft_math", "--dataset_name=word_problems", *flags)[0]
    problems = reasoning.load_problems(arguments, "train")
    demonstrations, counts = reasoning.choose_demonstrations(arguments, problems)
    assert counts == {"kept": SPLITS["train"], "of": SPLITS["train"]}
    first = demonstrations[0]["completion"]
    assert (first if isinstance(first, str) else first[0]["content"]) == response


def test_the_default_prompt_says_what_form_the_answer_takes(monkeypatch, rows):
    arguments = recipes.parse(monkeypatch, "grpo_math", "--dataset_name=word_problems")[0]
    train, validation, final = reasoning.load_problem_sets(arguments)
    (message,) = train.prompts()[0]
    question, asked = message["content"].split("\n")
    assert question == rows["train"][0]["prompt_text"] and message["role"] == "user"
    assert asked == "Work it out, and put the final number in \\boxed{}."
    assert (train.reward, train.template_name, train.template) == ("question_only", "chat+boxed", None)
    assert validation.rows[0]["row_id"] == rows["validation"][0]["row_id"]
    assert len(final.rows) == SPLITS["test"]
