"""Answers read out of free text, and the parser of formulas against sums done independently."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest

from trl_ext.rewards import parse_gsm8k_response, parse_mmlu_response
from trl_ext.rewards.expression import evaluate, values_agree
from trl_ext.rewards.parsers import countdown_is_solved

OPTIONS = {"question": "Which?", "options": ["a dog", "a cat", "Paris", "none of them"], "answer": "B"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Natalia sold 48/2 = 24 clips in May, 72 altogether.", "72"),
        ("The total is $1,234.50.", "1234.50"),
        ("It costs 5, 6 or 7.", "7"),
        ("so -5", "-5"),
        ("x=-5", "-5"),
        ("it lost -$5", "-5"),
        ("so \u22127", "-7"),  # the minus sign of Unicode
        ("16\u22123", "3"),
        ("16-3", "3"),
        ("(4)-3", "3"),
        ("a 10-year plan", "10"),
        ("#### 18", "18"),
        ("is .5", ".5"),
        ("1,000,000 people", "1000000"),
        (r"\boxed{1{,}234}", "1234"),
        (r"1,\!234 and 5{,} 678", "5678"),
        (r"12\,345\,678 in all", "12345678"),
        (r"\boxed{3, 4{,}567}", "4567"),
        ("3 - 8 = - 5", "-5"),
        ("= -5", "-5"),
        ("= \u2212 5", "-5"),
        ("= \u20135", "-5"),
        ("= - $5", "-5"),
        ("#### - 5", "-5"),
        ("The answer is - 5.", "-5"),
        ("16 - 3", "3"),
        ("16 \u2013 3", "3"),
        ("Total:\n- 5 apples", "5"),  # a list
        ("1e3", "1e3"),
        ("1.5E-3 m", "1.5e-3"),
        ("1e3x", "3"),
        ("-2e5.", "-2e5"),
        (r"is 6.02\times 10^{23}.", "6.02e23"),
        ("is 3 × 10^8 m/s", "3e8"),
        ("2 x 10 = 20", "20"),
        ("１，２３４", "1234"),
        ("－５", "-5"),
        ("١٢ or ১৩", "13"),
        ("5²", "5"),
        ("none here", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert parse_gsm8k_response(text) == number


@pytest.mark.parametrize("text", ["9" * 1_000_000, "1," * 500_000, "-" * 1_000_000, "." * 1_000_000, "$" * 1_000_000])
def test_a_megabyte_takes_no_time(text):
    start = time.process_time()
    parse_gsm8k_response(text)
    parse_mmlu_response(OPTIONS, text)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The correct answer is B.", "B"),
        ("The correct answer is B because cats purr.", "B"),
        ("The answer is (C), Paris.", "C"),
        ("Answer: A. No, the answer is B", "B"),
        (r"the answer is \boxed{C}", "C"),
        (r"\boxed{\text{D}}", "D"),
        ("B", "B"),
        ("(c)", "C"),
        ("B. a cat, since it purrs", "B"),
        ("(B) it is", "B"),
        ("Of (A) and (B), neither", None),
        ("Only (D) is left", "D"),
        ("The answer is A and C", None),
        ("The answer is A or C.", None),
        ("The answer is A, B, and C.", None),
        ("The answer is A, C", None),
        ("The answer is (A) and (C)", None),
        ("The answer is (A), (C) because", None),
        ("The answer is (A) (C)", None),
        ("The answer is A/C", None),
        ("The answer is A & C", None),
        ("The answer is both A and C", None),
        ("The answer is **A** and **C**.", None),
        ("the answer is (a) and (c)", None),
        (r"The answer is \boxed{A} and \boxed{C}", None),
        (r"\boxed{A, C}", None),
        ("Answer: A. Or B.", None),
        ("A and C", None),
        ("(A), (C)", None),
        ("(A) and (C)", None),
        ("A. and C.", None),
        ("(A) (C)", None),
        ("neither A nor B", None),
        ("The answer is neither A nor B", None),
        ("Neither (A) nor B", None),
        ("Neither (A) nor (B)", None),
        ("It is not (A)", None),
        ("It isn't option B", None),
        ("The answer is not (A)", None),
        ("It is not (A) but (B)", "B"),
        ("(A) is wrong, so it must be (C)", "C"),
        ("The answer is A, B is wrong", "A"),
        ("The answer is C and I am sure", "C"),
        ("The answer is C, I believe", "C"),
        ("The answer is A. C is wrong", "A"),
        ("The answer is A, not B", "A"),
        ("The answer is B and a cat purrs", "B"),
        ("The answer is A and C. No, the answer is B", "B"),
        ("The answer is (B) (a cat)", "B"),
        (r"The answer is $\text{B}$.", "B"),
        ("Paris", "C"),
        ("The answer is E", None),
        ("The answer is a cat", None),
        ("My answer: I think so", None),
        ("A bird flew", None),
        ("", None),
    ],
)
def test_choice(text, letter):
    assert parse_mmlu_response(OPTIONS, text) == letter


@pytest.mark.parametrize("options", [None, [], "abcd", ["x"] * 27])
def test_a_row_without_options_is_refused(options):
    with pytest.raises(ValueError, match="options: a row must have a list of 1 to 26"):
        parse_mmlu_response({"options": options}, "B")


@pytest.mark.parametrize(
    ("equation", "solved"),
    [
        ("(1+2)*3*4/6", False),  # 6, and a 6 that is not given
        ("4*3*2*1", True),
        ("4×3×(2÷1)", True),
        (r"4 \times 3 \cdot 2 \div 1", True),
        ("4*3*2", False),  # the 1 is left out
        ("(4+3+1)*3", False),  # 24, of the 3 twice
        ("4*(3+1+2) = 24", True),
        ("4*(3+1+2) = 25", False),
        ("-4*-(3+1+2)", True),
        ("4(3+1+2)", False),
        ("2^4+3*1", False),
        ("2**3*4*1", False),
        ("43-21+2", False),
        ("4*3*2/(1-1)", False),
        ("4*3*2*1 # 24", False),
        ("", False),
        ("1+" * 10_000 + "1", False),
        ("__import__('os')", False),
    ],
)
def test_countdown(equation, solved):
    assert countdown_is_solved(equation, [1, 2, 3, 4], 24) is solved


def test_countdown_is_exact():
    """8 / (3 - 8 / 3) = 8 / (1/3) = 24, which floating point misses by 2e-14."""
    assert 8 / (3 - 8 / 3) != 24
    assert countdown_is_solved("8/(3-8/3)", [3, 3, 8, 8], 24)
    assert not countdown_is_solved("8/(3-8/3)", [3, 8, 8], 24)
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


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("-2^2", -4),
        ("2^3^2", 512),  # 2^9
        ("2^-1", Fraction(1, 2)),
        ("1/2*4", 2),
        ("8/2/2", 2),
        ("2--3", 5),
        (r"\frac{1}{2}\frac{1}{2}", Fraction(1, 4)),
        (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
        (r"\sqrt[3]{27}", 3),
        ("4^{1/2}", 2),
        ("8^{2/3}", 4),
        ("5!", 120),
        (r"\binom{6}{2}", 15),
        ("0.1+0.2", Fraction(3, 10)),
    ],
)
def test_values_of_formulas(formula, value):
    assert abs(evaluate(formula) * value.denominator - value.numerator) < 1e-70


@pytest.mark.parametrize(
    "formula",
    ["", "1+", "5 6", "x2", "(1", "1)", "1/0", r"\int x", "abc", "0^{-1}", "1..2", "²"]
    + [r"\ln 0", r"-\log 0", r"\arctan(i)", r"\frac{1}{2}+\frac{1}{\ln 0}", r"2^{\ln 0}", r"\ln 0-\ln 0"],
)
def test_what_is_no_formula(formula):
    with pytest.raises(ValueError):
        evaluate(formula)


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        (r"\sin(2x)", r"2\sin(x)\cos(x)", True),
        (r"e^{i\pi}+x", "x-1", True),
        (r"\sin 2x\cos 2x", r"\frac{\sin(4x)}{2}", True),
        (r"\sin 2x", r"x\sin 2", False),
        (r"\sin(2)x", r"x\sin 2", True),
        (r"\arctan(1)", r"\frac{\pi}{4}", True),
        (r"\ln(x^2)", r"2\ln(x)", True),  # wherever both are real
        (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}", True),
        (r"\sqrt{1-x}\sqrt{1+x}", r"\sqrt{1-x^2}", True),
        (r"\sqrt{x^2}", "x", False),  # where x is negative, it is -x
        (r"\sqrt{x^2}", "-x", False),
        (r"\sqrt{xy^2}", r"y\sqrt{x}", False),
        (r"\sqrt{x}+\sqrt{y}", r"\sqrt{x+y}", False),
        (r"\sqrt{-x^2}", r"\sqrt{-x^2-1}", False),  # real nowhere
        (r"\ln 0", "5", False),
        (r"\ln 0", "x", False),
        (r"\ln 0", r"\ln 0", False),
        ("(a+b)^3", "a^3+3a^2b+3ab^2+b^3", True),
        ("(a+b)^3", "a^3+3a^2b+3ab^2+b^2", False),
        ("ab^2", "a(b^2)", True),
        ("ab^2", "(ab)^2", False),
        ("10^{40}+1", "10^{40}", False),
        (r"\sqrt{2}+10^{-20}", r"\sqrt{2}", False),
        ("x", "y", False),
        ("9**9**9", "9", False),
        ("(" * 100 + "1" + ")" * 100, "1", False),
    ],
)
def test_values(one, other, agree):
    assert values_agree(one, other) is agree
