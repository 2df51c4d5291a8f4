"""Whether a mathematical answer is the true one: by its text, its parts, its value and, if asked, math-verify."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from numbers import Real

from trl_ext.data.boxes import last_boxed
from trl_ext.rewards.expression import FUNCTIONS, MAX_CHARACTERS, nesting, values_agree
from trl_ext.rewards.normalization import Answer, clean

MAX_NESTING = 30
INTEGER = re.compile(r"[+-]?[0-9]+")
DECIMAL = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)")
SCIENTIFIC = re.compile(r"([+-]?[0-9]+)(?:\.([0-9]*))?e([+-]?[0-9]{1,3})")
FRACTION = re.compile(r"([+-]?)(?:\\frac\{([+-]?[0-9]+)\}\{([+-]?[0-9]+)\}|([0-9]+)/([0-9]+))")
MIXED = re.compile(r"(-?)([0-9]+)\s*(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|(?<=\s)([0-9]+)/([0-9]+))")
# Digits under a bar repeat.
REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)\\(?:bar|overline)\s*(?:\{([0-9]+)\}|([0-9]))")
MATRIX = re.compile(r"\\begin\{([a-z]*matrix)\}(.*)\\end\{\1\}", re.DOTALL)
# Of a list without spaces it cannot be told whether it is one number.
NUMBERS = re.compile(r"[+-]?[0-9]+(?:,\s*[+-]?[0-9]+)+")
# Spaces that do not count: not those between digits, around a word, or after a command that a letter follows.
WORD = r"[a-z]{3,}"
SPACES = re.compile(
    rf"(\\[a-z]+)\s+(?=[a-z])|(?<![\\a-z])({WORD})\s+(?=[a-z])|([a-z])\s+(?={WORD})|(?<![0-9])\s+|\s+(?![0-9])"
)
SUBSCRIPT = re.compile(r"(?<!log)_\s*([0-9]+|[a-z](?![a-z]))")
PAIRS = {"(": ")", "[": "]", "⦃": "⦄"}
# What takes a computer algebra system long: towers of powers, long exponents, factorials of large numbers or of each
# other.
EXPLOSIVE = re.compile(
    r"(?:\^|\*\*)\s*[{(]?\s*[0-9.]+\s*[})]?\s*(?:\^|\*\*)|(?:\^|\*\*)\s*[{(]?[0-9,\s]{4,}"
    r"|[)}]\s*(?:\^|\*\*)\s*[{(]?[0-9]{3}|[0-9]{4,}\s*[)}]*\s*!|![\s)}]*!"
    r"|(?:\^|\*\*)\s*[0-9a-z]+\s*!|(?:\^|\*\*)[^!]*[)}]\s*!"
)


def is_correct(answer: str, truth: str | float | Iterable[str | float], *, fast: bool = True) -> bool:
    """Whether an answer is the truth, or one of several truths.

    By text: notation is normalised, lists, tuples and intervals are compared part by part and in order, explicit sets
    in any order. By value, where the text differs: `1/2` is `0.5` and `2\\sqrt{2}` is `\\sqrt{8}`. An integer must
    be given as one and a fraction in the truth's terms: `14/2` is not `7`, and `2/4` is not `1/2`. A unit may be left
    out but not be another one. The value is computed by a small parser in this process, within limits.

    Args:
        answer: what stands in the answer's place; at most 1,000 characters, unless it is the truth letter for letter.
        truth: text, a number, `\\boxed{...}`, or a list of those of which any one will do.
        fast: False to ask math-verify as well, in a process with a time and a memory limit; it accepts unreduced
            fractions, lists in any order, equivalent equations and matrices, but also what only computes to the
            truth, as `\\int_0^1 x dx` for `1/2`, and decimals of few digits, as `1.41421356` for `\\sqrt2`.

    Raises:
        ValueError: the truth is none, or math-verify is asked for and not installed.
    """
    if not fast:
        from trl_ext.rewards.time_limit import require_math_verify

        require_math_verify()
    truths = truth_texts(truth)
    return any(_matches(answer, text) for text in truths) or (
        not fast and any(_verified(answer, text) for text in truths)
    )


def truth_texts(truth: str | float | Iterable[str | float]) -> list[str]:
    """The truths as texts; of a boxed one, what is in the box.

    Raises:
        ValueError: not text, a finite number or a list of those; empty; or a box that is not closed.
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
        return [truth.strip()]
    inside = last_boxed(truth)
    if inside is None or not inside.strip():
        raise ValueError(f"the truth {truth[:60]!r} has a \\boxed without an answer in it; mend the data")
    return [inside.strip()]


def _readable(text: str) -> bool:
    """Short enough, and nested little enough, for a parser."""
    return 0 < len(text) <= MAX_CHARACTERS and nesting(text) <= MAX_NESTING


def _matches(answer: str, truth: str) -> bool:
    answer = answer.strip()
    if answer == truth:
        return True
    if not (_readable(answer) and _readable(truth)):
        return False
    given, true = clean(answer), clean(truth)
    if not given.contradicts(true) and _bodies_match(given.body, true.body):
        return True
    return _same_numbers(answer, truth)


def _same_numbers(answer: str, truth: str) -> bool:
    """`100, 200` is a list, and `100,200` may be the same."""
    answer, truth = answer.strip("$ "), truth.strip("$ ")
    if not (NUMBERS.fullmatch(answer) and NUMBERS.fullmatch(truth)):
        return False
    return "".join(answer.split()) == "".join(truth.split())


def _verified(answer: str, truth: str) -> bool:
    """By math-verify, for what it can judge: formulas of bounded size, and no words."""
    from trl_ext.rewards.time_limit import verify_in_worker

    if not (_readable(answer.strip()) and _readable(truth)):
        return False
    given, true = clean(answer), clean(truth)
    if given.contradicts(true) or not (_is_formula(given) and _is_formula(true)):
        return False
    if INTEGER.fullmatch(given.body) and INTEGER.fullmatch(true.body):
        return False
    if _are_names(given.body, true.body, answer + truth):
        return False
    if _hides_a_unit(given, true) or _hides_a_unit(true, given) or _bases(given) != _bases(true):
        return False
    if "=" in given.body + true.body:
        return verify_in_worker(given.equation, true.equation) is True
    return verify_in_worker(given.formula, true.formula) is True


def _is_formula(answer: Answer) -> bool:
    if nesting(answer.body.replace("[", "(").replace("]", ")")) < 0 or EXPLOSIVE.search(answer.body):
        return False
    # To math-verify a word is a product of its letters, and `act` is `cat`.
    words = re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", answer.body))
    return bool(answer.body) and all(word.lower() in FUNCTIONS for word in words if "matrix" not in word)


def _hides_a_unit(one: Answer, other: Answer) -> bool:
    """math-verify drops the letter of `5 m`, and `5 cm` would be the same."""
    return bool(one.unit and not other.unit and re.search(r"[0-9]\s*[A-Za-z]$", other.body))


def _bases(answer: Answer) -> list[str]:
    """The `2` of `1011_2`, which math-verify drops."""
    return re.findall(r"[0-9]\s*_\s*\{?\s*([0-9]+)", answer.body)


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
    brackets = ""
    if text and text[0] in PAIRS and text[-1] in (*PAIRS.values(),) and _closes_at_the_end(text):
        inside = _split(text[1:-1])
        if len(inside) > 1 or text[0] != "(":
            return text[0] + text[-1], inside
        if text[-1] == ")":
            return brackets, inside
    return brackets, _split(text)


def _closes_at_the_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([⦃") - (character in ")]⦄")
        if depth == 0:
            return position == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """At commas that stand in no brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{⦃") - (character in ")]}⦄")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [part.strip() for part in (*parts, text[start:])]


def _elements_match(answer: str, truth: str) -> bool:
    given, true = _canonical(answer), _canonical(truth)
    if given == true:
        return bool(true)
    if not given or not true:
        return False
    if FRACTION.fullmatch(given) and FRACTION.fullmatch(true):
        return False
    if (INTEGER.fullmatch(given) is None) != (INTEGER.fullmatch(true) is None):
        return False
    if _are_names(given, true, answer + truth):
        return False
    return values_agree(given, true) is True


def _are_names(given: str, true: str, written: str) -> bool:
    """Letters alone, capitals or a word such as `no`: not a product, in which their order would not matter."""
    return given.isalpha() and true.isalpha() and (written != written.lower() or "o" in written)


def _canonical(text: str) -> str:
    """One way to write numbers, fractions and mixed numbers; lower case and no spaces for everything else."""
    text = text.strip().lower()
    if INTEGER.fullmatch(text):
        return _number(text)
    matrix = MATRIX.fullmatch(text)
    if matrix:
        rows = (row.split("&") for row in matrix[2].split(r"\\"))
        return f"{matrix[1]}:" + r"\\".join("&".join(map(_canonical, row)) for row in rows)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt\s*([0-9a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\([lg]e)(?:qslant|qq|q)(?![a-z])|\\(ne)q(?![a-z])", r"\\\1\2", text).replace("<=", r"\le ")
    text = text.replace(">=", r"\ge ").replace(r"\lt ", "<").replace(r"\gt ", ">")
    mixed = MIXED.fullmatch(text)
    if mixed:
        sign, whole, *parts = (part for part in mixed.groups() if part is not None)
        return f"{sign}({whole}+{parts[0]}/{parts[1]})"
    text = SUBSCRIPT.sub(r"_{\1}", text)
    text = text[1:] if text.startswith(r"+\infty") else text
    text = SPACES.sub(lambda match: f"{kept} " if (kept := match[1] or match[2] or match[3]) else "", text)
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:-1]:
        text = text[1:-1]
    return _number(text)


def _number(text: str) -> str:
    if INTEGER.fullmatch(text):
        digits = text.lstrip("+-").lstrip("0") or "0"
        return f"-{digits}" if text[0] == "-" and digits != "0" else digits
    decimal = DECIMAL.fullmatch(text)
    if decimal and (decimal[2] or decimal[3]) and not decimal[3].strip("0"):
        return _number(f"{decimal[1]}{decimal[2]}")
    repeating = REPEATING.fullmatch(text)
    if repeating:
        return _repeating_number(*repeating.groups(default=""))
    scientific = SCIENTIFIC.fullmatch(text)
    if scientific:
        decimals = scientific[2] or ""
        exponent = int(scientific[3]) - len(decimals)
        digits = scientific[1] + decimals
        return _number(digits + "0" * exponent) if exponent >= 0 else f"{digits}/10^{{{-exponent}}}"
    fraction = FRACTION.fullmatch(text)
    if fraction:
        sign, *parts = (part for part in fraction.groups() if part is not None)
        negative = (sign == "-") ^ (parts[0][0] == "-") ^ (parts[1][0] == "-")
        return "-" * negative + "/".join(_number(part.lstrip("+-")) for part in parts)
    return text


def _repeating_number(sign: str, whole: str, before: str, *repeated: str) -> str:
    """`0.1(6)` is (16 - 1)/90."""
    digits = "".join(repeated)
    start = int(f"{whole}{before}" or "0")
    value = Fraction(int(f"{start}{digits}") - start, (10 ** len(digits) - 1) * 10 ** len(before))
    return _number(sign + str(value))
