"""The value of a short formula in plain or LaTeX notation, by a parser of its own, in bounded time and memory.

Rational arithmetic is exact; roots, powers and functions are computed to 50 digits. Nothing of the text is executed.
"""

from __future__ import annotations

import functools
import math
import random
import re
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 1000
MAX_DEPTH = 60
MAX_DIGITS = 400
# Bits of an exact power, and the size of an argument whose exponential is still a number of ordinary length.
MAX_BITS = 20_000
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 200
DIGITS = 50

# Points at which formulas with variables are compared: anywhere; then positive; then of either sign.
COMPLEX_POINTS = range(3)
POSITIVE_POINTS = range(3, 6)
REAL_POINTS = range(3, 10)

FUNCTIONS = ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "exp", "log", "ln")
SYNONYMS = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\ast": "*", "**": "^", "×": "*", "·": "*", "÷": "/"}

TOKEN = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<command>\\[A-Za-z]+)|(?P<word>[A-Za-z]+)|\*\*|\S")
COMMAND = re.compile(r"\\[A-Za-z]+")
START_OF_FACTOR = re.compile(r"[A-Za-z({\\]")


def values_agree(first: str, second: str) -> bool | None:
    """Whether two formulas have one value; with letters, the same value at three points of the complex plane.

    Roots and logarithms of complex numbers have branches. So they agree too where they do at all of the real points
    at which both are real, as `\\sqrt{x}\\sqrt{y}` and `\\sqrt{xy}`; `\\sqrt{x^2}` is not `x` where that is negative.

    None where either is not a formula that this parser reads, or its value is too large to compute.
    """
    letters = any(character.isalpha() for text in (first, second) for character in COMMAND.sub("", text))
    try:
        points = COMPLEX_POINTS if letters else COMPLEX_POINTS[:1]
        if all(_close(evaluate(first, point), evaluate(second, point)) for point in points):
            return True
    except ValueError:
        return None
    return letters and _agree_where_real(first, second)


def _agree_where_real(first: str, second: str) -> bool:
    """At two of the real points at least, one of them positive, and at none of them not."""
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


def evaluate(text: str, sample: int = 0) -> Any:
    """The value of a formula: a `Fraction` where it is rational, else a complex number of 50 digits.

    Args:
        text: `+ - * / ^ !`, brackets, implicit products, `\\frac`, `\\sqrt`, `\\binom`, elementary functions, `\\pi`,
            `e`, `i`; any other letter is a variable.
        sample: which of the fixed pseudo-random points the variables take. From `REAL_POINTS` on they are real, and
            so must every part of the formula be.

    Raises:
        ValueError: not such a formula, undefined, or beyond a limit on length, nesting, digits or size.
    """
    return _computed(_Formula(text, sample))


def evaluate_arithmetic(text: str) -> tuple[Fraction, list[Fraction]]:
    """The exact value of a formula of numbers, `+ - * /` and brackets, and the numbers in it in their order.

    Raises:
        ValueError: anything else is in it, a division by zero, or a limit as for `evaluate`.
    """
    formula = _Formula(text, None)
    return _computed(formula), formula.numbers


def nesting(text: str) -> int:
    """How deep brackets of any kind are nested, at most; -1 where they do not balance in number."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest if depth == 0 else -1


def _computed(formula: _Formula) -> Any:
    try:
        return _finite(formula.value())
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"no value: {error}") from error


def _finite(value: Any) -> Any:
    """An infinity is as close to any number as to itself, so it is no value."""
    if not isinstance(value, Fraction) and not _numbers().isfinite(value):
        raise ValueError("no value: it is not finite")
    return value


def _tokens(match: re.Match) -> list[str]:
    """Two letters side by side are two variables; three are a word, unless they name a function."""
    token = SYNONYMS.get(match[0], match[0])
    return list(token) if match["word"] and len(token) == 2 and token not in FUNCTIONS else [token]


class _Formula:
    """Recursive descent that computes while it reads. `sample` None is for arithmetic alone."""

    def __init__(self, text: str, sample: int | None):
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"a formula of {len(text)} characters; {MAX_CHARACTERS} is the limit")
        self.tokens = [token for match in TOKEN.finditer(text) for token in _tokens(match)]
        self.sample = sample
        self.real = sample in REAL_POINTS
        self.position = self.depth = 0
        self.numbers: list[Fraction] = []

    def value(self) -> Any:
        result = self._sum()
        if self.position < len(self.tokens):
            raise ValueError(f"{self._next!r} does not belong there")
        return result

    @property
    def _next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _take(self, expected: str | None = None) -> str:
        token = self._next
        if not token or (expected and token != expected):
            raise ValueError(f"{expected or 'more'} is missing at {token!r}")
        self.position += 1
        return token

    def _sum(self) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        total = self._product()
        while self._next in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            total = _combine("+", total, sign * self._product())
        self.depth -= 1
        return total

    def _product(self) -> Any:
        result = self._signed()
        while True:
            if self._next in ("*", "/"):
                operator = self._take()
                result = _combine(operator, result, self._signed())
            elif self.sample is not None and self._starts_a_factor():
                result = _combine("*", result, self._power())
            else:
                return result

    def _starts_a_factor(self) -> bool:
        """Two things side by side are a product, unless the second is a number: `5 6` is none, nor is `x2`."""
        after_bracket = self.tokens[self.position - 1] in (")", "}")
        return bool(START_OF_FACTOR.match(self._next) or (after_bracket and re.match(r"[0-9.]", self._next)))

    def _signed(self) -> Any:
        sign = 1
        while self._next in ("+", "-"):
            sign *= 1 if self._take() == "+" else -1
        return sign * self._power()

    def _power(self) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        base = self._atom()
        while self.sample is not None and self._next == "!":
            self._take()
            base = _factorial(base)
        if self.sample is not None and self._next == "^":
            self._take()
            base = self._checked(_raise(base, self._signed()))
        self.depth -= 1
        return base

    def _checked(self, value: Any) -> Any:
        if self.real and not isinstance(value, Fraction) and value.imag != 0:
            raise ValueError("not real at a real point")
        return value

    def _atom(self) -> Any:
        """A number, a name with its arguments or a group; as a LaTeX argument as well."""
        token = self._take()
        if token[0] in "0123456789.":
            if len(token) > MAX_DIGITS or token == ".":
                raise ValueError(f"{token[:20]!r} is not a number of at most {MAX_DIGITS} digits")
            self.numbers.append(Fraction(token))
            return self.numbers[-1]
        if token == "(":
            return self._closed_by(")")
        if self.sample is not None:
            if token == "{":
                return self._closed_by("}")
            if token[0] == "\\" or token.isalpha():
                return self._checked(self._named(token))
        raise ValueError(f"{token!r} does not belong there")

    def _closed_by(self, bracket: str) -> Any:
        value = self._sum()
        self._take(bracket)
        return value

    def _named(self, token: str) -> Any:
        name = token.removeprefix("\\")
        context = _numbers()
        if name in FUNCTIONS:
            return self._function(name)
        if name == "pi":
            return +context.pi
        if name == "sqrt":
            return self._root()
        if name in ("frac", "binom"):
            top, bottom = self._atom(), self._atom()
            return _combine("/", top, bottom) if name == "frac" else _binomial(top, bottom)
        if len(name) > 1 or not name.isascii():
            raise ValueError(f"{token!r} is not known")
        return self._letter(name)

    def _letter(self, letter: str) -> Any:
        context = _numbers()
        if letter == "e":
            return +context.e
        if letter == "i":
            return context.mpc(0, 1)
        point = random.Random(f"{letter}{self.sample}")
        if self.real:
            sign = 1 if self.sample in POSITIVE_POINTS else point.choice((1, -1))
            # Below one and above it: each may be outside of a root's domain.
            return context.mpf(sign * 2 ** (self.sample % 3) * point.uniform(0.1, 1))
        return context.mpc(point.uniform(-2, 2), point.uniform(-2, 2))

    def _function(self, name: str) -> Any:
        exponent = base = None
        if self._next == "_" and name == "log":
            self._take()
            base = self._atom()
        if self._next == "^":
            self._take()
            exponent = self._atom()
        bracketed = self._next in ("(", "{")
        argument = self._power()
        # Of `sin 2x` the argument is 2x.
        while not bracketed and (len(self._next) == 1 and self._next.isalpha() or self._next == r"\pi"):
            argument = _combine("*", argument, self._power())
        value = _function_value(name, argument)
        if name == "log" and base is not None:
            value = _combine("/", value, _function_value("log", base))
        return value if exponent is None else _raise(value, exponent)

    def _root(self) -> Any:
        degree = Fraction(2)
        if self._next == "[":
            self._take()
            degree = self._closed_by("]")
        return _raise(self._atom(), _combine("/", Fraction(1), degree))


@functools.cache
def _numbers():
    """A context of mpmath of its own: the shared one's precision is anybody's to change."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


def _inexact(value: Any) -> Any:
    if isinstance(value, Fraction):
        context = _numbers()
        return context.mpf(value.numerator) / value.denominator
    return value


def _combine(operator: str, left: Any, right: Any) -> Any:
    if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
        left, right = _inexact(left), _inexact(right)
    elif max(map(_bits, (left, right))) > 4 * MAX_BITS:
        raise ValueError("a number of too many digits")
    if operator == "+":
        return left + right
    return left * right if operator == "*" else left / right


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _raise(base: Any, exponent: Any) -> Any:
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"an exponent beyond {MAX_EXPONENT}")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            if _bits(base) * abs(exponent) > MAX_BITS:
                raise ValueError(f"a power of more than {MAX_BITS} bits")
            return base**exponent.numerator
        root = _exact_root(base, exponent.denominator)
        if root is not None:
            return _raise(root, Fraction(exponent.numerator))
    if base == 0:
        raise ValueError("a power of zero that has no value here")
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return base**exponent.numerator
    context = _numbers()
    return _exponential(_inexact(exponent) * context.ln(_inexact(base)))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The root of a rational number if it is rational too; of a negative one, the principal root is not."""
    if value < 0 or degree > 64 or _bits(value) > MAX_BITS:
        return None
    parts = []
    for part in (value.numerator, value.denominator):
        root = _integer_root(part, degree)
        if root**degree != part:
            return None
        parts.append(root)
    return Fraction(*parts)


def _integer_root(number: int, degree: int) -> int:
    """The largest integer whose power does not exceed the number, by Newton's steps from above."""
    if number < 2:
        return number
    root = 1 << -(-number.bit_length() // degree)
    while True:
        smaller = ((degree - 1) * root + number // root ** (degree - 1)) // degree
        if smaller >= root:
            return root
        root = smaller


def _exponential(value: Any) -> Any:
    if abs(value) > MAX_EXPONENT * 10:
        raise ValueError("an exponential that is too large")
    return _numbers().exp(value)


def _function_value(name: str, argument: Any) -> Any:
    argument = _inexact(argument)
    if name == "exp":
        return _exponential(argument)
    if abs(argument) > MAX_EXPONENT and name not in ("log", "ln"):
        raise ValueError(f"{name} of a number that is too large")
    context = _numbers()
    names = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "log": "ln"}
    return _finite(getattr(context, names.get(name, name))(argument))


def _whole(value: Any, limit: int) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= limit:
        raise ValueError(f"only whole numbers from 0 to {limit} have factorials here")
    return value.numerator


def _factorial(value: Any) -> Fraction:
    return Fraction(math.factorial(_whole(value, MAX_FACTORIAL)))


def _binomial(top: Any, bottom: Any) -> Fraction:
    return Fraction(math.comb(_whole(top, MAX_FACTORIAL), _whole(bottom, MAX_FACTORIAL)))


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = _inexact(one), _inexact(other)
    context = _numbers()
    tolerance = context.mpf(10) ** -30 * max(abs(one), abs(other)) + context.mpf(10) ** -45
    return bool(abs(one - other) <= tolerance)
