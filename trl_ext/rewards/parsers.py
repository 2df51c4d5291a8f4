"""Extract answers from free text: the last number, an option letter, an equation of given numbers."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from trl_ext.rewards.normalization import SEPARATOR, plain_digits

# A minus is a sign if no operand precedes it; one with a space after it only after `=`, `(`, `#`, `:` or `is`.
NUMBER = re.compile(
    r"((?<![\w)\]}.])[-\u2013]|(?:[=(#:]|\bis)[ \t]*[-\u2013][ \t]*)?(?:\\?\$[ \t]*)?"
    r"((?<![0-9])(?<![0-9]\.)[0-9][0-9,]*(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
    r"(?:(?:[eE]|[ \t]*(?:\\times|\\cdot|[×*x])[ \t]*10\^\{?)([+-]?[0-9]{1,3})(?!\w|\.[0-9]))?"
)
OPEN = r"(?:(?:option|choice)\s+)?(?:\\boxed\{|\\(?:text|mathrm|textbf)\{)*\(?"
STATED_CHOICE = re.compile(
    r"(?:answer(?:\s+choice|\s+option)?|correct\s+(?:choice|option)(?=\s*:|\s+(?:is|would|must)\b))(?:\s+is|\s+would\s+be|\s+must\s+be)?"
    r"\s*:?[\s*\"'$]*" + OPEN + r"([A-Z])(?![\w'])",
    re.IGNORECASE,
)
LONE_CHOICE = re.compile(rf"\W*{OPEN}\W*([A-Za-z])\W*", re.IGNORECASE)
LEADING_CHOICE = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])[).:])(?=[\s,/&]|$)")
MARKED_CHOICE = re.compile(r"\(([A-Z])\)|\b(?:[Oo]ption|[Cc]hoice)\s+\(?([A-Z])\b|\\boxed\{\s*([A-Z])\s*\}")
# What follows a letter if it is one of several: `and C`, `, C`, `/C`, `(C)`. A word after the second letter makes it
# the subject of a statement, as in `A, since B is wrong`.
ANOTHER_CHOICE = re.compile(
    rf"[\s)}}\].:*\"'$]*(?:(?:,\s*)?(?:\b(?:and|or|nor|as\s+well\s+as)\b|&)\s*|[,/+]\s*|(?<=\))\s*(?=\([a-z]\)))[*\"'$]*{OPEN}"
    r"[a-z](?![\w'])(?!\s+(?!(?:and|or|nor|are|both|because|since|as)\b)[a-z])",
    re.IGNORECASE,
)
REFUSED_CHOICE = re.compile(
    rf"(?:\b(?:[Nn]ot|[Nn]either|nor|than|except)|n't)\s+(?:be\s+)?{OPEN}[A-Z]\b\)?|\(?\b[A-Z]\)?\s+is\s+(?:not|wrong|incorrect|false)\b"
)
MAX_CHOICE_CHARACTERS = 20_000
MAX_EQUATION_CHARACTERS = 300
EQUATION = re.compile(r"[0-9.+\-*/() ]+")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {"−": "-", "×": "*", "·": "*", "÷": "/", r"\times": "*", r"\cdot": "*", r"\div": "/"}


def parse_gsm8k_response(model_output: str) -> str | None:
    """The last number in a response, without thousands separators or currency; None if there is none.

    `1{,}234` is 1234, `= - 5` is -5, and `1.5\\times 10^{3}` is returned as `1.5e3`.
    """
    last = deque(NUMBER.finditer(SEPARATOR.sub(",", plain_digits(model_output))), maxlen=1)
    if not last:
        return None
    sign, number, exponent = last[0].groups()
    return "-" * bool(sign) + number.replace(",", "") + (f"e{exponent}" if exponent else "")


def parse_mmlu_response(mmlu_example: Mapping[str, Any], model_output: str) -> str | None:
    """The letter of the option that a response chooses; None if it chooses none, several, or one that is not there.

    The forms are tried in this order: the last `answer is B`; a response that is a letter or begins with one, as `B`
    or `(B) ...`; the only letter that is marked, as `(B)` or `option B`; the text of an option as the whole response.

    Raises:
        ValueError: the row has no `options`, the first of which is A.
    """
    options = mmlu_example.get("options")
    if not options or isinstance(options, str) or len(options) > 26:
        raise ValueError(f"options: a row must have a list of 1 to 26 of them, got {options!r}")
    letters = [chr(ord("A") + index) for index in range(len(options))]
    text = " ".join(model_output[-MAX_CHOICE_CHARACTERS:].split())
    letter = _chosen_letter(text)
    if letter is not None:
        return letter if letter in letters else None
    same = [one for one, option in zip(letters, options, strict=True) if _plain(str(option)) == _plain(text)]
    return same[0] if len(same) == 1 and text else None


def _chosen_letter(text: str) -> str | None:
    stated = [match for match in STATED_CHOICE.finditer(text) if not _is_article(text, match)]
    if stated:
        return None if ANOTHER_CHOICE.match(text, stated[-1].end()) else stated[-1][1].upper()
    lone = LONE_CHOICE.fullmatch(text) if len(text) <= 40 else None
    if lone:
        return lone[1].upper()
    text = REFUSED_CHOICE.sub(" ", text)
    leading = LEADING_CHOICE.match(text)
    if leading:
        return None if ANOTHER_CHOICE.match(text, leading.end()) else leading[1] or leading[2]
    marked = {next(filter(None, match.groups())) for match in MARKED_CHOICE.finditer(text)}
    return marked.pop() if len(marked) == 1 else None


def _is_article(text: str, match: re.Match) -> bool:
    """Whether a letter is a word, as in `the answer is a dog` and `my answer: I think`."""
    return (match[1].islower() or match[1] == "I") and re.match(
        r"\s+[A-Za-z]", text[match.end(1) : match.end(1) + 10]
    ) is not None


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .")


def countdown_is_solved(equation: str, numbers: Sequence[int], target: float) -> bool:
    """Whether a formula of `+ - * /` uses each number exactly once and equals the target exactly.

    A correct `= target` may follow the formula. `\\times`, `\\div` and the signs × and ÷ are also accepted.

    Raises:
        ValueError: the numbers are missing, or the target is not a number.
    """
    try:
        given = Counter(Fraction(number) for number in numbers)
        wanted = Fraction(target)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"numbers {numbers!r} and target {target!r}: give a list of numbers and a number") from error
    if not given:
        raise ValueError("numbers: an empty list; a countdown needs at least one number")
    if len(equation) > MAX_EQUATION_CHARACTERS:
        return False
    for sign, plain in SIGNS.items():
        equation = equation.replace(sign, plain)
    left, equals, right = equation.strip().strip("$").partition("=")
    try:
        used: list[Fraction] = []
        value = _arithmetic(left, used)
        return value == wanted and Counter(used) == given and (not equals or _arithmetic(right, []) == wanted)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _arithmetic(text: str, used: list[Fraction]) -> Fraction:
    """Evaluate a formula of numbers, `+ - * /` and brackets exactly; append its numbers to `used`."""
    if not EQUATION.fullmatch(text):
        raise ValueError(f"not arithmetic: {text!r}")
    text = text.strip()

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant():
                used.append(Fraction(ast.get_source_segment(text, node)))
                return used[-1]
            case ast.UnaryOp(op, operand):
                return -value(operand) if isinstance(op, ast.USub) else value(operand)
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"not arithmetic: {text!r}")

    return value(ast.parse(text, mode="eval").body)
