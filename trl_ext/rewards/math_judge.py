"""The process of `math_worker`: answers whether formulas are equal. Not imported by the library."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import random
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse
from sympy import Expr, FiniteSet, Float, I, Symbol, preorder_traversal
from sympy.core.function import AppliedUndef

MEMORY_LIMIT_BYTES = 1 << 30
DIGITS = 80
# Variables take fixed pseudo-random values: complex ones, then positive ones, then ones of either sign.
COMPLEX_POINTS, POSITIVE_POINTS, REAL_POINTS = range(3), range(3, 6), range(3, 10)
# Units have been removed before: with its own rule for units, math-verify would drop the letters of `2ab`.
EXTRACTION = LatexExtractionConfig()
EXTRACTION = dataclasses.replace(
    EXTRACTION, normalization_config=dataclasses.replace(EXTRACTION.normalization_config, units=False)
)


def main(seconds: float) -> None:
    """Answer questions until the input ends. A question that reaches a limit ends the process."""
    output = os.dup(1)
    # Library output must not be read as a verdict.
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A first question triggers math-verify's late imports.
    are_equal("1", r"\frac{2}{2}")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    os.write(output, b"ready\n")
    for line in sys.stdin.buffer:
        # In processor time, so that a busy machine grades as a quiet one does. SIGPROF without a handler ends the
        # process, even inside C code.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        verdict = are_equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(output, b"1\n" if verdict else b"0\n")


def are_equal(answer: str, truth: str) -> bool:
    """Whether the answer equals the truth, both formulas in LaTeX that have a value.

    math-verify reads them. It would round values, so they are compared with many digits.
    """
    formulas = _parsed(answer) + _parsed(truth)
    return len(formulas) == 2 and _values_agree(*formulas)


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> list:
    # Only LaTeX is parsed, because math-verify evaluates plain formulas as Python.
    settings = {"extraction_config": [EXTRACTION], "fallback_mode": "no_fallback"}
    found = parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=False, **settings)
    # A fraction in braces is read as a set of one.
    formulas = [next(iter(one)) if isinstance(one, FiniteSet) and len(one) == 1 else one for one in found[:1]]
    # The value of an unknown function, such as `f(0)`, is one more variable.
    return [one.replace(_is_call, lambda f: Symbol(str(f))) for one in formulas if isinstance(one, Expr)]


def _is_call(expression) -> bool:
    return isinstance(expression, AppliedUndef)


def _values_agree(one, other) -> bool:
    """Whether two expressions agree at complex points or, since roots and logarithms have branches, at real points.

    At real points they must agree wherever every part of both is real, at a positive point and at least twice:
    `\\sqrt{x}\\sqrt{y}` and `\\sqrt{xy}` agree; `\\sqrt{x^2}` and `x` do not, since they differ for negative x.
    """
    both, points = (one, other), COMPLEX_POINTS if one.free_symbols | other.free_symbols else COMPLEX_POINTS[:1]
    if all(_close(*(_value(formula, point) for formula in both)) for point in points):
        # `1/\\ln 0` is no number, though 1/oo is 0.
        return all(value.is_finite for formula in both for value in _parts(formula, points[0]))
    agreed = 0
    for point in REAL_POINTS if len(points) > 1 else ():
        if not agreed and point not in POSITIVE_POINTS:
            break
        if all(value.is_real for formula in both for value in _parts(formula, point)):
            if not _close(*(_value(formula, point) for formula in both)):
                return False
            agreed += 1
    return agreed >= 2


def _value(expression, point: int):
    """The value with the variables at one of the points; `i` is the imaginary unit."""
    values = {symbol: I if symbol.name == "i" else _variable(symbol.name, point) for symbol in expression.free_symbols}
    value = expression.subs(values).doit()
    return value if value.is_Rational else value.evalf(DIGITS)


def _variable(name: str, point: int):
    generator = random.Random(f"{name}{point}")
    if point in COMPLEX_POINTS:
        return Float(generator.uniform(-2, 2), DIGITS) + I * Float(generator.uniform(-2, 2), DIGITS)
    sign = 1 if point in POSITIVE_POINTS else generator.choice((1, -1))
    # One value below 1 and one above: either may lie outside the domain of a root.
    return Float(sign * 2 ** (point % 3) * generator.uniform(0.1, 1), DIGITS)


def _parts(expression, point: int) -> list:
    """The values of the parts of an expression."""
    return [_value(part, point) for part in preorder_traversal(expression)]


def _close(one, other) -> bool:
    """Whether two values are finite and equal up to rounding."""
    if not (one.is_number and other.is_number and one.is_finite and other.is_finite):
        return False
    if one.is_Rational and other.is_Rational:
        return one == other
    return bool(abs(one - other) <= 10.0 ** (20 - DIGITS) * max(abs(one), abs(other)) + 10.0 ** (40 - 2 * DIGITS))


if __name__ == "__main__":
    main(float(sys.argv[1]))
