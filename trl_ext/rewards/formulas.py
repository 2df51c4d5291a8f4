"""Formulas as math-verify reads them, and which it is asked about."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

from trl_ext.rewards.math_worker import verify_in_worker

# math-verify takes a second to parse eighteen brackets around a sum.
MAX_NESTING = 12
GREEK = (
    r"\\(?:var)?(?:[aA]lpha|[bB]eta|[gG]amma|[dD]elta|epsilon|zeta|eta|[tT]heta|[lL]ambda|mu|nu|[xX]i|rho|[sS]igma|tau"
    r"|[pP]hi|chi|[pP]si|[oO]mega)"
)
LONE = r"\((?=[^()]*\))[+-]?(?:[0-9.]+|[A-Za-z])(?:,[+-]?(?:[0-9.]+|[A-Za-z]))*\)"
# A letter before a bracket, with its power: a function or a factor.
CALL = re.compile(rf"((?<![\\A-Za-z])[A-Za-z]{{1,2}}|{GREEK}|\\pi)(\^(?:\{{[^{{}}]*\}}|[0-9]))?({LONE}|\()")
# Derivatives, inverse functions and functions of sums, which math-verify reads as products and quotients.
UNREAD = re.compile(
    r"\\frac\{d ?(?:\^\{?[0-9]\}? ?)?[A-Za-z]?\}\{(?:d ?[A-Za-z](?:\^\{?[0-9]\}?)?)+\}"
    rf"|{GREEK}{LONE}|(?<![A-Za-z\\])[eE]{LONE}|(?:[fg](?=\^\{{-1\}}\()|\\?(?:log|ln|lg)\^\{{-1\}})"
)
CALL_OF_FORMULA = re.compile(rf"(?<![A-Za-z\\])[fg](?!{LONE})\(")
# Towers of powers and of exponentials, long exponents, and factorials of large numbers, of powers or of factorials
# would keep a computer algebra system busy until the time limit.
EXPLOSIVE = re.compile(
    r"\^[\s{(]*[0-9.]+\s*\^[\s{(]*[0-9]|\^[\s{]*\([0-9.\s]+\)\s*\^|\^[\s{(]*[0-9,\s]{5,}|[)}]\s*\^[\s{(]*[0-9]{3}"
    r"|\^[\s{(]*[0-9]+!|[0-9]{4}[\s)}]*!|[)}!]\s*!|(?:(?:exp|e\^)\W*){3}"
)
FUNCTIONS = "sin|cos|tan|exp|log|ln|arcsin|arccos|arctan"
FUNCTION = re.compile(rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])")
# A formula that has a value: no relations, integrals, accents or subscripts, which are compared as text.
COMMANDS = rf"\\(?:frac|sqrt|binom|pi|cdot|times|div|ast|{FUNCTIONS})(?![A-Za-z])"
VALUE = re.compile(rf"(?:[A-Za-z0-9.+\-*/^!(){{}}\[\]\s]|(?<=log)\s*_|{COMMANDS}|{GREEK}(?![A-Za-z]))+")
APPLIED = rf"\\(?:{FUNCTIONS})(?![A-Za-z])(?:[_^](?:\{{[^{{}}]*\}}|[0-9]))?(?![({{])"
# Signs, names of functions and logarithms. From left to right, `\ln x/2` is half of `\ln x`, and `x/2y` half of `xy`.
LATEX_RULES = [
    (re.compile(r"\*\*"), "^"),
    (FUNCTION, r"\\\1 "),
    (re.compile(r"\\log(?!\s*_|[A-Za-z])"), r"\\ln "),
    (re.compile(r"(\\log\s*_)\s*([0-9]+|[A-Za-z])"), r"\1{\2}"),
    (re.compile(rf"({APPLIED})\s*([0-9.]*(?:[A-Za-z]|\\pi)*)(?=[*/]|\\cdot|\\times|\\div)"), r"\1(\2)"),
    (re.compile(r"/([0-9]+)(?![0-9.!^])"), r"\\cdot \\frac{1}{\1}"),
    (re.compile(r"\^\s*([+-]\s*(?:[0-9]+|[A-Za-z]))"), r"^{\1}"),
]


def formulas_agree(answer: str, truth: str) -> bool:
    """Whether two formulas that have a value agree, as the math worker says; decimals are taken as exact."""
    formulas = tuple(re.sub(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+", "", text) for text in (answer, truth))
    if any(map(UNREAD.search, formulas)) or all(map(CALL_OF_FORMULA.search, formulas)):
        return False
    if not all(map(VALUE.fullmatch, formulas)):
        return False
    formulas = tuple(re.sub(r"[0-9]*\.[0-9]+", _as_fraction, text) for text in formulas)
    formulas = _latex(formulas[0], formulas[1]), _latex(formulas[1], formulas[0])
    return all(map(_is_formula, formulas)) and verify_in_worker(*formulas)


def _as_fraction(decimal: re.Match) -> str:
    return r"{{\frac{{{}}}{{{}}}}}".format(*Fraction(decimal[0]).as_integer_ratio())


def _is_formula(text: str) -> bool:
    """Whether a text is a formula of bounded size without words, which math-verify reads as products of letters."""
    depth = nesting(text.replace("[", "(").replace("]", ")"))
    if not text or not 0 <= depth <= MAX_NESTING or EXPLOSIVE.search(text):
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

    for pattern, replacement in LATEX_RULES:
        text = pattern.sub(replacement, text)
    text = CALL.sub(called, text)
    return re.sub(r"(\)|(?<![\^0-9.])[0-9]+)\s*(?=\(|(?<=\))(?:[0-9{]|\\frac))", r"\1 \\cdot ", text)


def depths(text: str, opening: str = "([{", closing: str = ")]}") -> list[int]:
    """How many brackets are open after each character."""
    return list(itertools.accumulate((character in opening) - (character in closing) for character in text))


def nesting(text: str) -> int:
    """The maximum nesting depth of brackets of any kind; -1 if their numbers do not balance."""
    found = [0, *depths(text)]
    return max(found) if found[-1] == 0 else -1
