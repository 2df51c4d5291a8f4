"""Compare a mathematical answer with the truth: its text, its parts, its value and, on request, with math-verify."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from fractions import Fraction
from numbers import Real

from trl_ext.data.math import last_boxed
from trl_ext.rewards.math_worker import verify_in_worker
from trl_ext.rewards.normalization import Answer, clean, without_exponent

MAX_CHARACTERS = 1000
MAX_NESTING = 30
# math-verify takes a second to parse eighteen brackets around a sum.
MAX_FORMULA_NESTING = 12
INTEGER = re.compile(r"[+-]?[0-9]+")
DECIMAL = re.compile(r"[+-]?(?=\.?[0-9])[0-9]*\.?[0-9]*")
DECIMALS = re.compile(r"[0-9]*\.[0-9]+")
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
GREEK = (
    r"\\(?:var)?(?:[aA]lpha|[bB]eta|[gG]amma|[dD]elta|epsilon|zeta|eta|[tT]heta|[lL]ambda|mu|nu|[xX]i|rho|[sS]igma|tau"
    r"|[pP]hi|chi|[pP]si|[oO]mega)"
)
LONE = r"\((?=[^()]*\))[+-]?(?:[0-9.]+|[A-Za-z])(?:,[+-]?(?:[0-9.]+|[A-Za-z]))*\)"
# A letter before a bracket, with its power: a function or a factor.
CALL = re.compile(rf"((?<![\\A-Za-z])[A-Za-z]{{1,2}}|{GREEK}|\\pi)(\^(?:\{{[^{{}}]*\}}|[0-9]))?({LONE}|\()")
# Derivatives, inverse functions and functions of sums, which math-verify reads as products and quotients.
DERIVATIVE = r"(?<![A-Za-z])(?:d|\\partial) ?(?:\^\{?[0-9]\}? ?)?[A-Za-z]?"
UNREAD = re.compile(
    rf"'|\\partial|\\frac\{{{DERIVATIVE}\}}\{{(?:(?:d|\\partial) ?[A-Za-z](?:\^\{{?[0-9]\}}?)?)+\}}|{GREEK}{LONE}"
    rf"|(?<![A-Za-z\\])[eE]{LONE}|(?:[fg](?=\^\{{-1\}}\()|\\?(?:log|ln|lg)\^\{{-1\}})|(?<!log)_(?:\w|\{{\w+\}})\("
)
CALL_OF_FORMULA = re.compile(rf"(?<![A-Za-z\\])[fg](?!{LONE})\(")
# Towers of powers, long exponents, and factorials of large numbers, of powers or of factorials would keep a computer
# algebra system busy until the time limit.
EXPLOSIVE = re.compile(
    r"\^[\s{(]*[0-9.]+\s*\^[\s{(]*[0-9]|\^[\s{]*\([0-9.\s]+\)\s*\^|\^[\s{(]*[0-9,\s]{5,}|[)}]\s*\^[\s{(]*[0-9]{3}"
    r"|\^[\s{(]*[0-9]+!|[0-9]{4}[\s)}]*!|[)}!]\s*!"
)
FUNCTIONS = "sin|cos|tan|exp|log|ln|arcsin|arccos|arctan"
FUNCTION = re.compile(rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])")
# A formula that has a value: no relations, integrals, accents or subscripts, which are compared as text.
COMMANDS = rf"\\(?:frac|sqrt|binom|pi|cdot|times|div|ast|{FUNCTIONS})(?![A-Za-z])"
VALUE = re.compile(rf"(?:[A-Za-z0-9.+\-*/^!(){{}}\[\]\s×·÷]|(?<=log)\s*_|{COMMANDS}|{GREEK}(?![A-Za-z]))+")
# A fraction of whole numbers, which LaTeX would read as 1/(2x) in `1/2x`.
QUOTIENT = re.compile(r"(?<![0-9.^/_])([0-9]+)/([0-9]+)(?![0-9.!^])")


def is_correct(answer: str, truth: str | float | Iterable[str | float], *, fast: bool = True) -> bool:
    """Whether an answer is correct: equal to the truth, or to one of several truths.

    Notation is normalised, and answers are first compared as text. Lists, tuples and intervals are compared part by
    part in order, explicit sets in any order. Parts whose texts differ are compared as rational numbers, `1/2` and
    `0.5`; other formulas, such as `2\\sqrt{2}` and `\\sqrt{8}`, by math-verify, in a process with a time and a memory
    limit. An integer must be written as an integer and a fraction in the truth's terms: `14/2` is not `7`, and
    `2/4` is not `1/2`. A unit may be omitted, but a different unit is wrong.

    Args:
        answer: at most 1,000 characters, unless it matches the truth letter for letter.
        truth: text, a number, `\\boxed{...}`, or a list of alternatives.
        fast: False to give math-verify the whole answers as well. It accepts unreduced fractions, lists in any order,
            equivalent equations and matrices. It also accepts expressions that evaluate to the truth, such as
            `\\int_0^1 x dx` for `1/2`, and rounded decimals, such as `1.41421356` for `\\sqrt2`.

    Raises:
        ValueError: the truth is not an answer.
    """
    return any(_matches(answer, text, fast) for text in truth_texts(truth))


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
    return 0 < len(text) <= MAX_CHARACTERS and _nesting(text) <= MAX_NESTING


def _matches(answer: str, truth: str, fast: bool) -> bool:
    answer = answer.strip()
    if answer == truth:
        return True
    if not (_readable(answer) and _readable(truth)):
        return False
    given, true = clean(answer), clean(truth)
    if given.contradicts(true):
        return False
    if _bodies_match(given.body, true.body) or _same_numbers(answer, truth):
        return True
    return not fast and _equivalent(given, true, written=answer + truth)


def _same_numbers(answer: str, truth: str) -> bool:
    """Whether lists have the same numbers: `100, 200` is a list, and `100,200` may be the same list."""
    answer, truth = answer.strip("$ "), truth.strip("$ ")
    if not (NUMBERS.fullmatch(answer) and NUMBERS.fullmatch(truth)):
        return False
    return "".join(answer.split()) == "".join(truth.split())


def _equivalent(given: Answer, true: Answer, written: str) -> bool:
    """Whether math-verify accepts the whole answer; of whole numbers and names, it is too lenient to be asked."""
    bodies = given.body, true.body
    if _are_names(*bodies, written) or _bases(given.body) != _bases(true.body):
        return False
    if any(map(INTEGER.fullmatch, bodies)) and all(
        INTEGER.fullmatch(body) or NUMBERS.fullmatch(body) for body in bodies
    ):
        return False
    if "percent" not in (given.unit, true.unit):
        one, other = (rational(_canonical(body)) for body in bodies)
        if None not in (one, other) and abs(one - other) > max(abs(one), abs(other)) / 1_000_000:
            return False
    equations = "=" in given.body + true.body
    return _verified(*(one.formula(with_variable=equations) for one in (given, true)), by_value=False)


def _bases(text: str) -> list[str]:
    """The `2` of `1011_2`, which math-verify drops."""
    return re.findall(r"[0-9]\s*_\s*\{?\s*([0-9]+)", text)


def _verified(answer: str, truth: str, *, by_value: bool) -> bool:
    """Ask math-verify, but only about formulas of bounded size without words, which it reads as products of letters.

    Args:
        by_value: whether both must have a value, with decimals taken as exact.
    """
    formulas = tuple(re.sub(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+", "", text) for text in (answer, truth))
    if any(map(UNREAD.search, formulas)) or all(map(CALL_OF_FORMULA.search, formulas)):
        return False
    if by_value and not all(map(VALUE.fullmatch, formulas)):
        return False
    if by_value:
        formulas = tuple(DECIMALS.sub(_as_fraction, text) for text in formulas)
    formulas = _latex(formulas[0], formulas[1]), _latex(formulas[1], formulas[0])
    return all(map(_is_formula, formulas)) and verify_in_worker(*formulas)


def _as_fraction(decimal: re.Match) -> str:
    return r"{{\frac{{{}}}{{{}}}}}".format(*Fraction(decimal[0]).as_integer_ratio())


def _is_formula(text: str) -> bool:
    """Whether a text is a formula of bounded size without words, which math-verify reads as products of letters."""
    depth = _nesting(text.replace("[", "(").replace("]", ")"))
    if not text or not 0 <= depth <= MAX_FORMULA_NESTING or EXPLOSIVE.search(text):
        return False
    letters = FUNCTION.sub("", re.sub(r"\\[A-Za-z]+", r"\\", text))
    return not re.search(r"(?!\w*matrix)(?<![A-Za-z])[A-Za-z]{3,}|[A-Za-z0-9]\s+[0-9]|[A-Za-z][0-9]", letters)


def _latex(text: str, other: str) -> str:
    """A formula as math-verify reads it: commands for functions, `\\frac` for quotients, and `\\cdot` for products."""

    def called(match: re.Match) -> str:
        name, power, brackets = match.groups(default="")
        # `f(0)` is a function, `a(b+c)` a product, and `h(a)` a function if the other text has it as well.
        is_call = brackets != "(" and not power and (not brackets.upper().isupper() or f"{name}(" in other)
        return match[0] if is_call and name != r"\pi" else rf"{name}{power} \cdot {brackets}"

    for sign, latex in (("**", "^"), ("×", r"\times "), ("·", r"\cdot "), ("÷", r"\div ")):
        text = text.replace(sign, latex)
    text = re.sub(r"\\log(?!\s*_|[A-Za-z])", r"\\ln ", FUNCTION.sub(r"\\\1 ", text))
    text = re.sub(r"(\\log\s*_)\s*([0-9]+|[A-Za-z])", r"\1{\2}", QUOTIENT.sub(r"\\frac{\1}{\2}", text))
    text = CALL.sub(called, re.sub(r"\^\s*([+-]\s*(?:[0-9]+|[A-Za-z]))", r"^{\1}", text))
    return re.sub(r"(\)|(?<![\^0-9.])[0-9]+)\s*(?=\(|(?<=\))(?:[0-9{]|\\frac))", r"\1 \\cdot ", text)


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
    *before, last = _depths(text, "([⦃", ")]⦄") or [-1]
    if text and text[0] in PAIRS and text[-1] in PAIRS.values() and last == 0 and 0 not in before:
        inside = _split(text[1:-1])
        if len(inside) > 1 or text[0] != "(":
            return text[0] + text[-1], inside
        if text[-1] == ")":
            return "", inside
    return "", _split(text)


def _depths(text: str, opening: str = "([{", closing: str = ")]}") -> list[int]:
    """How many brackets are open after each character."""
    return list(itertools.accumulate((character in opening) - (character in closing) for character in text))


def _nesting(text: str) -> int:
    """The maximum nesting depth of brackets of any kind; -1 if their numbers do not balance."""
    found = [0, *_depths(text)]
    return max(found) if found[-1] == 0 else -1


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    places = enumerate(_depths(text, "([{⦃", ")]}⦄"))
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
    numbers = rational(given), rational(true)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _verified(given, true, by_value=True)


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
    text = re.sub(r"(?<![a-z])(d[a-z])/(d[a-z])(?![a-z])", r"\\frac{\1}{\2}", SUBSCRIPT.sub(r"_{\1}", text))
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


def rational(text: str) -> Fraction | None:
    """The value of a whole number, a decimal, a fraction or a mixed number in canonical spelling; None for others."""
    if mixed := re.fullmatch(r"(-?)\(([0-9]+)\+([0-9]+)/([0-9]+)\)", text):
        whole, numerator, denominator = map(int, mixed.groups()[1:])
        value = Fraction(whole * denominator + numerator, denominator) if denominator else None
        return -value if mixed[1] and value else value
    is_number = DECIMAL.fullmatch(text) or FRACTION.fullmatch(text)
    return Fraction(text) if is_number and not re.search("/0+$", text) else None
