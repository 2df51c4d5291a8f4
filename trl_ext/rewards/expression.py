"""Evaluate a short formula in plain or LaTeX notation. The text is parsed, never executed."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_DEPTH = 60
# Larger powers, factorials and function arguments would take too long to compute.
MAX_EXPONENT = 10_000
MAX_EXACT_BITS = 1_000_000
MAX_FACTORIAL = 200
MAX_ARGUMENT = 100_000
DIGITS = 80

# Variables take fixed pseudo-random values: complex ones, then positive ones, then real ones of either sign.
COMPLEX_POINTS = range(3)
POSITIVE_POINTS = range(3, 6)
REAL_POINTS = range(3, 10)

# Maps each function name to mpmath's name.
FUNCTIONS = {"sin": "sin", "cos": "cos", "tan": "tan", "exp": "exp", "log": "ln", "ln": "ln"}
FUNCTIONS |= {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
SYNONYMS = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\ast": "*", "**": "^", "×": "*", "·": "*", "÷": "/"}
TOKEN = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+|\\[A-Za-z]+|[A-Za-z]+|\*\*|\S")
COMMAND = re.compile(r"\\[A-Za-z]+")
CLOSING = {"(": ")", "{": "}", "[": "]"}


def values_agree(first: str, second: str) -> bool:
    """Whether two formulas have the same value. Formulas with variables are compared at three complex points.

    Roots and logarithms have branches, so formulas that differ at the complex points still agree if they agree
    at every real point at which both are real. `\\sqrt{x}\\sqrt{y}` and `\\sqrt{xy}` agree; `\\sqrt{x^2}` and `x` do
    not, since they differ for negative x.

    A text that the parser cannot read, or whose value is too large to compute, agrees with none.
    """
    letters = any(character.isalpha() for text in (first, second) for character in COMMAND.sub("", text))
    try:
        points = COMPLEX_POINTS if letters else COMPLEX_POINTS[:1]
        if all(_close(evaluate(first, point), evaluate(second, point)) for point in points):
            return True
    except ValueError:
        return False
    return letters and _agree_where_real(first, second)


def values_differ(first: str, second: str) -> bool:
    """Whether two formulas certainly have different values, by more than the rounding of a decimal.

    If one has a decimal point, values within a millionth of each other may be a rounding. A text that the parser
    cannot read differs from none.
    """
    tolerance = 1e-6 if "." in first + second else 1e-60
    try:
        pairs = [[evaluate(text, point) for text in (first, second)] for point in COMPLEX_POINTS]
    except ValueError:
        return False
    pairs = [[_numbers().convert(value) for value in pair] for pair in pairs]
    return any(abs(one - other) > tolerance * max(abs(one), abs(other)) for one, other in pairs)


def _agree_where_real(first: str, second: str) -> bool:
    """Whether both agree at two or more real points, at least one of them positive, and disagree at none."""
    agreed = 0
    for point in REAL_POINTS:
        if not agreed and point not in POSITIVE_POINTS:
            return False
        try:
            one, other = evaluate(first, point), evaluate(second, point)
        except ValueError:
            continue
        if not _close(one, other):
            return False
        agreed += 1
    return agreed >= 2


def evaluate(text: str, point: int = 0) -> Any:
    """The value of a formula: a fraction if it is rational and short enough, else an mpmath number of 80 digits.

    Args:
        text: `+ - * / ^ !`, brackets, implicit products, `\\frac`, `\\sqrt`, `\\binom`, elementary functions, `\\pi`,
            `e`, `i`; any other letter is a variable.
        point: which of the fixed points the variables take. At `REAL_POINTS` every part of the formula must be real.

    Raises:
        ValueError: the text is not such a formula, is undefined, or exceeds a limit on nesting or size.
    """
    formula = _Formula(text, point)
    try:
        value = formula.sum()
        if formula.tokens:
            raise ValueError(f"unexpected {formula.tokens[-1]!r}")
        return formula.checked(value)
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"no value: {error}") from error


def depths(text: str, opening: str = "([{", closing: str = ")]}") -> list[int]:
    """How many brackets are open after each character."""
    return list(itertools.accumulate((character in opening) - (character in closing) for character in text))


def nesting(text: str) -> int:
    """The maximum nesting depth of brackets of any kind; -1 if their numbers do not balance."""
    found = [0, *depths(text)]
    return max(found) if found[-1] == 0 else -1


@functools.cache
def _numbers():
    """A private mpmath context, so that other code cannot change its precision."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = map(_numbers().convert, (one, other))
    tolerance = _numbers().mpf(10) ** -(DIGITS - 20)
    return abs(one - other) <= tolerance * (max(abs(one), abs(other)) + tolerance)


def _apply(operation: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """The operation on two fractions exactly, on other numbers in mpmath's precision."""
    if not (isinstance(one, Fraction) and isinstance(other, Fraction)):
        one, other = map(_numbers().convert, (one, other))
    return operation(one, other)


def _tokens(word: str) -> list[str]:
    """Split into tokens. Two adjacent letters are two variables; three are a word, unless they name a function."""
    if len(word) == 2 and word.isalpha() and word not in FUNCTIONS:
        return list(word)
    return [SYNONYMS.get(word) or (word[1:] if COMMAND.fullmatch(word) else word)]


class _Formula:
    """A recursive descent parser that evaluates as it reads. `tokens` holds the remaining tokens in reverse."""

    def __init__(self, text: str, point: int):
        self.tokens = [token for word in TOKEN.findall(text) for token in _tokens(word)][::-1]
        self.point = point
        self.last = ""
        self.depth = 0

    def take(self, *expected: str) -> str:
        """Consume and return the next token if it is one of those expected; otherwise return an empty string."""
        if not self.tokens or (expected and self.tokens[-1] not in expected):
            return ""
        self.last = self.tokens.pop()
        return self.last

    def sum(self) -> Any:
        total = self.product()
        while sign := self.take("+", "-"):
            term = self.product()
            total = _apply(operator.add if sign == "+" else operator.sub, total, term)
        return total

    def product(self) -> Any:
        result = self.signed()
        while True:
            if sign := self.take("*", "/"):
                result = _apply(operator.mul if sign == "*" else operator.truediv, result, self.signed())
            elif self.starts_a_factor():
                result = _apply(operator.mul, result, self.power())
            else:
                return result

    def starts_a_factor(self) -> bool:
        """Adjacent factors form a product, unless the second is a number: `5 6` and `x2` are not products."""
        if not self.tokens:
            return False
        following = self.tokens[-1]
        return following[0].isalpha() or following in "({" or (following[0] in "0123456789." and self.last in ")}")

    def signed(self) -> Any:
        sign = 1
        while token := self.take("+", "-"):
            sign = -sign if token == "-" else sign
        return sign * self.power()

    def power(self) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        base = self.atom()
        while self.take("!"):
            base = Fraction(math.factorial(_small_whole(base)))
        if self.take("^"):
            base = self.raised(base, self.signed())
        self.depth -= 1
        return base

    def atom(self) -> Any:
        """A number, a variable, a group in brackets, or a command with its arguments."""
        numbers, token = _numbers(), self.take()
        if token in CLOSING:
            value = self.sum()
            if not self.take(CLOSING[token]):
                raise ValueError(f"{token!r} is not closed")
            return value
        if token[:1].isdigit() or token[:1] == "." != token:
            return Fraction(token)
        if token in FUNCTIONS:
            return self.function(token)
        if token == "sqrt":
            degree = self.atom() if self.tokens[-1:] == ["["] else Fraction(2)
            return self.raised(self.atom(), _apply(operator.truediv, Fraction(1), degree))
        if token == "frac":
            return _apply(operator.truediv, self.atom(), self.atom())
        if token == "binom":
            return Fraction(math.comb(_small_whole(self.atom()), _small_whole(self.atom())))
        if token in ("pi", "e"):
            return +getattr(numbers, token)
        if len(token) == 1 and token.isalpha() and token.isascii():
            return self.checked(numbers.j if token == "i" else self.variable(token))
        raise ValueError(f"unexpected {token!r}")

    def variable(self, letter: str) -> Any:
        generator = random.Random(f"{letter}{self.point}")
        if self.point not in REAL_POINTS:
            return _numbers().mpc(generator.uniform(-2, 2), generator.uniform(-2, 2))
        sign = 1 if self.point in POSITIVE_POINTS else generator.choice((1, -1))
        # One value below 1 and one above: either may lie outside the domain of a root.
        return _numbers().mpf(sign * 2 ** (self.point % 3) * generator.uniform(0.1, 1))

    def function(self, name: str) -> Any:
        base = self.atom() if name == "log" and self.take("_") else None
        exponent = self.atom() if self.take("^") else None
        bracketed = self.tokens[-1:] in (["("], ["{"])
        argument = self.power()
        # The argument of `sin 2x` is 2x.
        while not bracketed and self.tokens and re.fullmatch("[A-Za-z]|pi", self.tokens[-1]):
            argument = _apply(operator.mul, argument, self.power())
        if name not in ("log", "ln") and abs(argument) > MAX_ARGUMENT:
            raise ValueError(f"{name} of a number that is too large")
        value = self.checked(getattr(_numbers(), FUNCTIONS[name])(_numbers().convert(argument)))
        if base is not None:
            value = value / _numbers().ln(_numbers().convert(base))
        return value if exponent is None else self.raised(value, exponent)

    def raised(self, base: Any, exponent: Any) -> Any:
        if abs(exponent) > MAX_EXPONENT or (base == 0 and not exponent.real >= 0):
            raise ValueError(f"no power with the exponent {exponent}")
        if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if bits * abs(exponent) <= MAX_EXACT_BITS:
                return base ** int(exponent)
        return self.checked(_numbers().convert(base) ** _numbers().convert(exponent))

    def checked(self, value: Any) -> Any:
        """Return the value if it is finite and, at a real point, real."""
        if isinstance(value, Fraction):
            return value
        if not _numbers().isfinite(value) or (self.point in REAL_POINTS and value.imag != 0):
            raise ValueError("no finite value, or not real at a real point")
        return value


def _small_whole(value: Any) -> int:
    if value.imag or value.real != int(value.real) or not 0 <= value.real <= MAX_FACTORIAL:
        raise ValueError(f"a factorial or a binomial of other numbers than whole ones from 0 to {MAX_FACTORIAL}")
    return int(value.real)
