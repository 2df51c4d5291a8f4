"""Embedded word problems: worked steps by hand, the rows, their splits, the form of their answers, and the recipes."""

from __future__ import annotations

import os
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support import REPOSITORY, recipes
from tools.word_problems import SAME_FAMILY, build, overlap, words_of
from tools.worked_problems import number_text, work_out
from trl_ext.data.math import load_math
from trl_ext.runs import reasoning
from trl_ext.word_problems import DATA_DIR

SPLITS = {"train": 1831, "validation": 200, "test": 300}
STEP = re.compile(r"([\d.]+) ([-+*/]) ([\d.]+) = ([\d.]+)\.(?: |$)")


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return {split: load_math("word_problems", split) for split in SPLITS}


# ---- Worked steps ----


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


# ---- The rows ----


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


@pytest.mark.slow
def test_a_build_gives_these_files(tmp_path):
    data = Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (data / "svamp" / "SVAMP.json").is_file():
        pytest.skip("SVAMP is not here")
    dropped = build(data / "svamp", tmp_path)
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (DATA_DIR / f"{split}.jsonl").read_bytes()
    # MAWPS and ASDiv have 3,138 rows, and SVAMP has 1,000.
    assert sum(dropped.values()) + sum(SPLITS.values()) == 3138 + 1000


# ---- Prompts, demonstrations and recipes ----


@pytest.mark.parametrize(
    ("flags", "response"),
    [
        ([], "27 * 16 = 432.\n\\boxed{432}"),
        (["--prompt_template=chat"], "<think> 27 * 16 = 432. </think> <answer> 432 </answer>"),
        (["--prompt_template=r1_zero"], " 27 * 16 = 432. </think> <answer> 432 </answer>"),
    ],
)
def test_the_reward_grades_every_demonstration_as_right(flags, response, monkeypatch):
    arguments = recipes.parse(monkeypatch, "sft", "--dataset_name=word_problems", *flags)[0]
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
