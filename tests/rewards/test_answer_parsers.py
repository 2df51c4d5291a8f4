"""Answers read out of free text, and the parser of formulas against sums done independently."""

from __future__ import annotations

import json
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest

from trl_ext.rewards import parse_gsm8k_response, parse_mmlu_response
from trl_ext.rewards.expression import evaluate, values_agree
from trl_ext.rewards.parsers import countdown_is_solved

CORPUS = [json.loads(line) for line in Path(__file__).with_name("parser_corpus.jsonl").read_text().splitlines()]
OPTIONS = {"question": "Which?", "options": ["a dog", "a cat", "Paris", "none of them"], "answer": "B"}


def corpus(kind: str) -> list:
    """The rows of a kind, named by their text; "why" says what is not plain."""
    rows = [row for row in CORPUS if row["kind"] == kind]
    return [pytest.param(row, id=str(row.get("text", row.get("one")))[:60]) for row in rows]


@pytest.mark.parametrize("case", corpus("number"))
def test_last_number(case):
    assert parse_gsm8k_response(case["text"]) == case["expected"]


@pytest.mark.parametrize("text", ["9" * 1_000_000, "1," * 500_000, "-" * 1_000_000, "." * 1_000_000, "$" * 1_000_000])
def test_a_megabyte_takes_no_time(text):
    start = time.process_time()
    parse_gsm8k_response(text)
    parse_mmlu_response(OPTIONS, text)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("case", corpus("choice"))
def test_choice(case):
    assert parse_mmlu_response(OPTIONS, case["text"]) == case["expected"]


@pytest.mark.parametrize("options", [None, [], "abcd", ["x"] * 27])
def test_a_row_without_options_is_refused(options):
    with pytest.raises(ValueError, match="options: a row must have a list of 1 to 26"):
        parse_mmlu_response({"options": options}, "B")


@pytest.mark.parametrize("case", corpus("countdown"))
def test_countdown(case):
    assert countdown_is_solved(case["text"], [1, 2, 3, 4], 24) is case["expected"]


def test_countdown_is_exact():
    """8 / (3 - 8 / 3) = 8 / (1/3) = 24, which floating point misses by 2e-14."""
    assert 8 / (3 - 8 / 3) != 24
    assert countdown_is_solved("8/(3-8/3)", [3, 3, 8, 8], 24)
    assert not countdown_is_solved("8/(3-8/3)", [3, 8, 8], 24)
    assert not countdown_is_solved("1+" * 10_000 + "1", [1], 10_001)
    for numbers, target in (([], 24), (["a"], 24), ([1], None), ([1], float("nan"))):
        with pytest.raises(ValueError, match="number"):
            countdown_is_solved("1", numbers, target)


def random_formula(rng: random.Random, depth: int) -> tuple[str, Fraction]:
    """A formula in mixed notation, and its value by Python's fractions."""
    if depth == 0:
        number = rng.randint(1, 9)
        return rng.choice([(str(number), Fraction(number)), (f"{number}.25", Fraction(4 * number + 1, 4))])
    (left, one), (right, two) = random_formula(rng, depth - 1), random_formula(rng, depth - 1)
    forms = [
        (f"({left}+{right})", one + two),
        (f"({left} - {right})", one - two),
        (rf"{left} \cdot ({right})", one * two),
        (f"({left})({right})", one * two),
        (f"(-{left})^2", one**2),
        (f"({left})^{{3}}", one**3),
    ]
    if two:
        forms += [(rf"\frac{{{left}}}{{{right}}}", one / two), (f"({left})/({right})", one / two)]
    formula, value = rng.choice(forms)
    return formula if formula.startswith(("(", "\\")) and formula.endswith((")", "}")) else f"({formula})", value


def test_formulas_against_fractions():
    """`(-a-b)^2` would not be `(a)^2`: each operand is in brackets of its own, or a number."""
    rng = random.Random(0)
    checked = 0
    for _ in range(400):
        try:
            formula, value = random_formula(rng, rng.randint(1, 3))
        except ZeroDivisionError:
            continue
        if formula.count("(-") == 0 or "(-(" in formula:
            assert abs(evaluate(formula) * value.denominator - value.numerator) < 1e-60 * (1 + abs(value.numerator)), (
                formula
            )
            checked += 1
    assert checked > 200


@pytest.mark.parametrize("case", corpus("formula"))
def test_values_of_formulas(case):
    value = Fraction(case["expected"])
    assert abs(evaluate(case["text"]) * value.denominator - value.numerator) < 1e-70


@pytest.mark.parametrize(
    "formula",
    ["", "1+", "5 6", "x2", "(1", "1)", "1/0", r"\int x", "abc", "0^{-1}", "1..2", "²"]
    + [r"\ln 0", r"-\log 0", r"\arctan(i)", r"\frac{1}{2}+\frac{1}{\ln 0}", r"2^{\ln 0}", r"\ln 0-\ln 0"],
)
def test_what_is_no_formula(formula):
    with pytest.raises(ValueError):
        evaluate(formula)


@pytest.mark.parametrize("case", corpus("values"))
def test_values(case):
    assert values_agree(case["one"], case["other"]) is case["expected"]
