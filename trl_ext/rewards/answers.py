"""Compare a mathematical answer with the truth: as text, part by part, as rational numbers, and as formulas."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from numbers import Real

from trl_ext.data.math import last_boxed
from trl_ext.rewards.formulas import depths, formulas_agree, nesting
from trl_ext.rewards.normalization import FRACTION, INTEGER, canonical, clean, rational

MAX_CHARACTERS = 1000
MAX_NESTING = 30
# `100,200` may be a list or one number.
NUMBERS = re.compile(r"[+-]?[0-9]+(?:,\s*[+-]?[0-9]+)+")
PAIRS = {"(": ")", "[": "]", "⦃": "⦄"}


def is_correct(answer: str, truth: str | float | Iterable[str | float]) -> bool:
    """Whether an answer is correct: equal to the truth, or to one of several truths.

    Notation is normalised, and answers are first compared as text. Lists, tuples and intervals are compared part by
    part in order, explicit sets in any order. Parts whose texts differ are compared as rational numbers, `1/2` and
    `0.5`; other formulas, such as `2\\sqrt{2}` and `\\sqrt{8}`, by value, in a process with a time and a memory limit.
    An integer must be written as an integer and a fraction in the truth's terms: `14/2` is not `7`, and `2/4` is not
    `1/2`. A unit may be omitted, but a different unit is wrong.

    Args:
        answer: at most 1,000 characters, unless it matches the truth letter for letter.
        truth: text, a number, `\\boxed{...}`, or a list of alternatives.

    Raises:
        ValueError: the truth is not an answer.
    """
    return any(_matches(answer, text) for text in truth_texts(truth))


def truth_texts(truth: str | float | Iterable[str | float]) -> list[str]:
    """The truths as texts; for a boxed one, the content of its box.

    Raises:
        ValueError: a truth is not text, a finite number or a list of those, is empty, or has an unclosed box.
    """
    if isinstance(truth, (list, tuple)):
        if not truth:
            raise ValueError("the truth is an empty list; give at least one answer")
        return [text for item in truth for text in truth_texts(item)]
    if isinstance(truth, Real) and math.isfinite(truth):
        return [str(truth)]
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(f"the truth must be a text, a finite number or a list of those, got {truth!r}")
    if "\\boxed" not in truth:
        # The solutions of GSM8K's own column `answer` end with `#### 72`.
        return truth_texts(truth.rpartition("####")[2]) if "####" in truth else [truth.strip()]
    inside = last_boxed(truth)
    if inside is None or not inside.strip():
        raise ValueError(f"the truth {truth[:60]!r} has a \\boxed without an answer in it; mend the data")
    return [inside.strip()]


def _matches(answer: str, truth: str) -> bool:
    answer = answer.strip()
    if answer == truth:
        return True
    if any(not 0 < len(text) <= MAX_CHARACTERS or nesting(text) > MAX_NESTING for text in (answer, truth)):
        return False
    given, true = clean(answer), clean(truth)
    if given.contradicts(true):
        return False
    return _bodies_match(given.body, true.body) or _same_numbers(answer, truth)


def _same_numbers(answer: str, truth: str) -> bool:
    """Whether lists have the same numbers: `100, 200` is a list, and `100,200` may be the same list."""
    lists = [text.strip("$ ") for text in (answer, truth)]
    return all(map(NUMBERS.fullmatch, lists)) and len({"".join(text.split()) for text in lists}) == 1


def _bodies_match(answer: str, truth: str) -> bool:
    answer, truth = (text.replace(r"\{", "⦃").replace(r"\}", "⦄") for text in (answer, truth))
    given, true = (re.split(r"\\cup(?![A-Za-z])", text) for text in (answer, truth))
    return len(given) == len(true) and all(map(_groups_match, given, true))


def _groups_match(answer: str, truth: str) -> bool:
    given, true = _brackets_and_parts(answer), _brackets_and_parts(truth)
    if given[0] != true[0] or len(given[1]) != len(true[1]):
        return False
    if given[0] != "⦃⦄":
        return all(map(_elements_match, given[1], true[1]))
    remaining = list(given[1])
    for element in true[1]:
        index = next((i for i, other in enumerate(remaining) if _elements_match(other, element)), None)
        if index is None:
            return False
        remaining.pop(index)
    return True


def _brackets_and_parts(text: str) -> tuple[str, list[str]]:
    """The brackets around a list and its parts; brackets that only group, as in `(B)` or `(x+1)`, are dropped."""
    text = text.strip()
    # Whether the first bracket is closed by the last character.
    *before, last = depths(text, "([⦃", ")]⦄") or [-1]
    if text and text[0] in PAIRS and text[-1] in PAIRS.values() and last == 0 and 0 not in before:
        inside = _split(text[1:-1])
        if len(inside) > 1 or text[0] != "(":
            return text[0] + text[-1], inside
        if text[-1] == ")":
            return "", inside
    return "", _split(text)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    places = enumerate(depths(text, "([{⦃", ")]}⦄"))
    cuts = [-1, *(place for place, depth in places if depth == 0 and text[place] == ","), len(text)]
    return [text[start + 1 : end].strip() for start, end in itertools.pairwise(cuts)]


def _elements_match(answer: str, truth: str) -> bool:
    given, true = canonical(answer), canonical(truth)
    if given == true:
        return bool(true)
    if not given or not true:
        return False
    if FRACTION.fullmatch(given) and FRACTION.fullmatch(true):
        return False
    if INTEGER.fullmatch(given) or INTEGER.fullmatch(true) or _are_names(given, true, answer + truth):
        return False
    numbers = rational(given), rational(true)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return formulas_agree(given, true)


def _are_names(given: str, true: str, written: str) -> bool:
    """Whether a text is only capitals, or a word such as `no`: not a product, whose factors could change order."""
    return given.isalpha() and true.isalpha() and (written != written.lower() or "o" in written)
