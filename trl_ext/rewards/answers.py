"""Compare a mathematical answer with the truth: its text, its parts, its value and, on request, with math-verify."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from fractions import Fraction
from numbers import Real

from trl_ext.data.math import last_boxed
from trl_ext.rewards.expression import FUNCTIONS, depths, nesting, values_agree, values_differ
from trl_ext.rewards.math_worker import require_math_verify, verify_in_worker
from trl_ext.rewards.normalization import Answer, clean, without_exponent

MAX_CHARACTERS = 1000
MAX_NESTING = 30
INTEGER = re.compile(r"[+-]?[0-9]+")
DECIMAL = re.compile(r"[+-]?(?=\.?[0-9])[0-9]*\.?[0-9]*")
FRACTION = re.compile(r"([+-]?)(?:\\frac\{([+-]?[0-9]+)\}\{([+-]?[0-9]+)\}|([0-9]+)/([0-9]+))")
MIXED = re.compile(r"(-?)([0-9]+)\s*(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|(?<=\s)([0-9]+)/([0-9]+))")
# Repeating decimals: the digits under a bar.
REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)\\(?:bar|overline)\s*(?:\{([0-9]+)\}|([0-9]))")
MATRIX = re.compile(r"\\begin\{([a-z]*matrix)\}(.*)\\end\{\1\}", re.DOTALL)
# `100,200` may be a list or one number.
NUMBERS = re.compile(r"[+-]?[0-9]+(?:,\s*[+-]?[0-9]+)+")
# Spaces to remove. Spaces between digits, around a word, and between a command and a letter are kept.
WORD = r"[a-z]{3,}"
SPACES = re.compile(
    rf"(\\[a-z]+)\s+(?=[a-z])|(?<![\\a-z])({WORD})\s+(?=[a-z])|([a-z])\s+(?={WORD})|(?<![0-9])\s+|\s+(?![0-9])"
)
SUBSCRIPT = re.compile(r"(?<!log)_\s*([0-9]+|[a-z](?![a-z]))")
PAIRS = {"(": ")", "[": "]", "⦃": "⦄"}
# One symbol, though its letters look like factors: a derivative, `y'`, any letter before a lone number in brackets,
# and `f(x+1)` or `P(A)` where both texts have that letter before a bracket: `h(a+b)` beside `(a+b)h` is a product.
# Commands and words are matched after them, so that their last letters are not read as functions.
DIFFERENTIAL = r"(?:d|\\partial) ?(?:\^\{?[0-9]\}? ?)?[A-Za-z]?"
VARIABLES = r"(?:(?:d|\\partial) ?[A-Za-z](?:\^\{?[0-9]\}?)?)+"
DERIVATIVE = re.compile(rf"\\frac\{{({DIFFERENTIAL})\}}\{{({VARIABLES})\}}")
INDEX, LONE = r"(?:_(?:\w|\{\w+\}))?", "[+-]?(?:[0-9.]+|[A-Za-z])"
ARGUMENT = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
GREEK = (
    r"\\(?:var)?(?:[aA]lpha|[bB]eta|[gG]amma|[dD]elta|epsilon|zeta|eta|[tT]heta|[lL]ambda|mu|nu|[xX]i|rho|[sS]igma|tau"
    r"|[pP]hi|chi|[pP]si|[oO]mega)"
)
SYMBOL = re.compile(
    rf"(?P<symbol>(?<![A-Za-z]){DIFFERENTIAL}/{VARIABLES}(?![A-Za-z])|[A-Za-z]{INDEX}'+(?:{ARGUMENT})?"
    rf"|[fg]{INDEX}(?:\^\{{-1\}})?{ARGUMENT}|\\?(?:log|ln|lg)\^\{{-1\}}"
    rf"|(?:[A-Za-z]|{GREEK}){INDEX}\({LONE}(?:,{LONE})*\))|\\[A-Za-z]+|[A-Za-z]{{3,}}|ln"
)
CALLED = re.compile(rf"((?:[A-Za-z]|{GREEK}){INDEX})(?:\^\{{-1\}})?\((?!\(*[+-]?[0-9.]+(?:,[+-]?[0-9.]+)*\)+$).*\)")
# Towers of powers, long exponents, and factorials of large numbers, of powers or of factorials would keep a computer
# algebra system busy until the time limit.
EXPLOSIVE = re.compile(
    r"(?:\^|\*\*)[\s{(]*[0-9.]+[\s})]*(?:\^|\*\*)|(?:\^|\*\*)[\s{(]*[0-9,\s]{4,}|[)}]\s*(?:\^|\*\*)[\s{(]*[0-9]{3}"
    r"|[0-9]{4}[\s)}]*!|(?:\^|\*\*|!).*!"
)


def is_correct(answer: str, truth: str | float | Iterable[str | float], *, fast: bool = True) -> bool:
    """Whether an answer is correct: equal to the truth, or to one of several truths.

    Notation is normalised, and answers are first compared as text. Lists, tuples and intervals are compared part by
    part in order, explicit sets in any order. Parts whose texts differ are compared by value: `1/2` equals `0.5`, and
    `2\\sqrt{2}` equals `\\sqrt{8}`. An integer must be written as an integer and a fraction in the truth's terms:
    `14/2` is not `7`, and `2/4` is not `1/2`. A unit may be omitted, but a different unit is wrong.

    Args:
        answer: at most 1,000 characters, unless it matches the truth letter for letter.
        truth: text, a number, `\\boxed{...}`, or a list of alternatives.
        fast: False to ask math-verify as well, in a process with a time and a memory limit. It accepts unreduced
            fractions, lists in any order, equivalent equations and matrices. It also accepts expressions that evaluate
            to the truth, such as `\\int_0^1 x dx` for `1/2`, and rounded decimals, such as `1.41421356` for `\\sqrt2`.

    Raises:
        ValueError: the truth is not an answer, or math-verify is required and not installed.
    """
    if not fast:
        require_math_verify()
    truths = truth_texts(truth)
    return any(_matches(answer, text) for text in truths) or (
        not fast and any(_verified(answer, text) for text in truths)
    )


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
        return [truth.strip()]
    inside = last_boxed(truth)
    if inside is None or not inside.strip():
        raise ValueError(f"the truth {truth[:60]!r} has a \\boxed without an answer in it; mend the data")
    return [inside.strip()]


def _readable(text: str) -> bool:
    """Whether a text is short and shallow enough to parse."""
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
    """Whether lists have the same numbers: `100, 200` is a list, and `100,200` may be the same list."""
    answer, truth = answer.strip("$ "), truth.strip("$ ")
    if not (NUMBERS.fullmatch(answer) and NUMBERS.fullmatch(truth)):
        return False
    return "".join(answer.split()) == "".join(truth.split())


def _verified(answer: str, truth: str) -> bool:
    """Ask math-verify, but only about formulas of bounded size without words, for which it is not too lenient."""
    if not (_readable(answer.strip()) and _readable(truth)):
        return False
    given, true = clean(answer), clean(truth)
    if (
        given.contradicts(true)
        or not (_is_formula(given) and _is_formula(true))
        or (INTEGER.fullmatch(given.body) and INTEGER.fullmatch(true.body))
        or _are_names(given.body, true.body, answer + truth)
        or _hides_a_unit(given, true)
        or _hides_a_unit(true, given)
        or _bases(given) != _bases(true)
    ):
        return False
    equations = "=" in given.body + true.body
    formulas = _with_letters(*(one.formula(with_variable=equations) for one in (given, true)))
    return formulas is not None and not _numbers_differ(*formulas) and verify_in_worker(*formulas)


def _with_letters(answer: str, truth: str) -> tuple[str, str] | None:
    """Both formulas with a letter of its own for each `f(0)`, `y'` and `\\frac{dy}{dx}`, which are no products.

    Returns:
        The formulas; None if there are not enough letters.
    """
    # In neither case, since the comparison may not distinguish cases.
    used = set((answer + truth).lower() + (answer + truth).upper())
    letters = iter(sorted(set("ABCFGHJKLMPQRTUVWXYZabcfghjklmnpqrstuvwxyz") - used))
    names: dict[str, str] = {}

    def letter(match: re.Match) -> str:
        symbol = match["symbol"]
        called = CALLED.fullmatch(symbol or "")
        if not symbol or called and not all(f"{called[1]}(" in text for text in (answer, truth)):
            return match[0]
        if symbol not in names:
            names[symbol] = next(letters, "")
        return f" {names[symbol]} "

    def replaced(text: str) -> str:
        text = DERIVATIVE.sub(r" \1/\2 ", re.sub(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+", "", text))
        return SYMBOL.sub(letter, text)

    while (replacement := (replaced(answer), replaced(truth))) != (answer, truth):
        answer, truth = replacement
    return None if "" in names.values() else (answer, truth)


def _numbers_differ(answer: str, truth: str) -> bool:
    """Whether a part of the truth has a value that no part of the answer has.

    math-verify rounds to six decimals, so that `2^{-98}` would be `2^{-99}`.
    """
    given, true = (
        [_canonical(part) for part in _brackets_and_parts(text.replace(r"\{", "⦃").replace(r"\}", "⦄"))[1]]
        for text in (answer, truth)
    )
    return any(all(values_differ(one, part) for one in given) for part in true)


def _is_formula(answer: Answer) -> bool:
    if nesting(answer.body.replace("[", "(").replace("]", ")")) < 0 or EXPLOSIVE.search(answer.body):
        return False
    # math-verify reads a word as the product of its letters, so `act` would equal `cat`.
    words = re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", answer.body))
    return bool(answer.body) and all(word.lower() in FUNCTIONS for word in words if "matrix" not in word)


def _hides_a_unit(one: Answer, other: Answer) -> bool:
    """Whether math-verify would ignore a unit: it drops the letter of `5 m`, so `5 cm` would be equal."""
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
    given, true = _canonical(answer), _canonical(truth)
    if given == true:
        return bool(true)
    if not given or not true:
        return False
    if FRACTION.fullmatch(given) and FRACTION.fullmatch(true):
        return False
    if INTEGER.fullmatch(given) or INTEGER.fullmatch(true) or _are_names(given, true, answer + truth):
        return False
    formulas = _with_letters(given, true)
    return formulas is not None and values_agree(*formulas)


def _are_names(given: str, true: str, written: str) -> bool:
    """Whether a text is only capitals, or a word such as `no`: not a product, whose factors could change order."""
    return given.isalpha() and true.isalpha() and (written != written.lower() or "o" in written)


def _canonical(text: str) -> str:
    """A canonical spelling of numbers, fractions and mixed numbers; everything else in lower case without spaces."""
    text = text.strip().lower()
    if INTEGER.fullmatch(text):
        return str(int(text))
    if matrix := MATRIX.fullmatch(text):
        rows = (row.split("&") for row in matrix[2].split(r"\\"))
        return f"{matrix[1]}:" + r"\\".join("&".join(map(_canonical, row)) for row in rows)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt\s*([0-9a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\([lg]e)(?:qslant|qq|q)(?![a-z])|\\(ne)q(?![a-z])", r"\\\1\2", text).replace("<=", r"\le ")
    text = text.replace(">=", r"\ge ").replace(r"\lt ", "<").replace(r"\gt ", ">")
    if mixed := MIXED.fullmatch(text):
        sign, whole, *parts = (part for part in mixed.groups() if part is not None)
        return f"{sign}({whole}+{parts[0]}/{parts[1]})"
    text = SUBSCRIPT.sub(r"_{\1}", text)
    text = text[1:] if text.startswith(r"+\infty") else text
    text = SPACES.sub(lambda match: f"{kept} " if (kept := match[1] or match[2] or match[3]) else "", text)
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:-1]:
        text = text[1:-1]
    return _number(text)


def _number(text: str) -> str:
    """A canonical spelling of a whole number, a fraction, a repeating decimal, or a number with an exponent."""
    text = without_exponent(text)
    if DECIMAL.fullmatch(text):
        if text.partition(".")[2].strip("0"):
            # Decimals are compared by value: `0.5` is `2/4`, and `1/2` is not.
            return text
        return str(int(text) if INTEGER.fullmatch(text) else Fraction(text))
    if fraction := FRACTION.fullmatch(text):
        sign, *parts = (part for part in fraction.groups() if part is not None)
        negative = (sign == "-") ^ (parts[0][0] == "-") ^ (parts[1][0] == "-")
        return "-" * negative + "/".join(_number(part.lstrip("+-")) for part in parts)
    if repeating := REPEATING.fullmatch(text):
        # 0.1666... is (16 - 1)/90.
        sign, whole, before, *repeated = repeating.groups(default="")
        start, digits = int(f"{whole}{before}" or "0"), "".join(repeated)
        value = Fraction(int(f"{start}{digits}") - start, (10 ** len(digits) - 1) * 10 ** len(before))
        return _number(f"{sign}{value}")
    return text
