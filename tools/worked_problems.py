"""Worked arithmetic: an equation as short sentences, one for each operation."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from fractions import Fraction

OPERATIONS = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}
SYMBOLS = {symbol for symbol, _ in OPERATIONS.values()}
DECIMAL_PLACES = 4


def number_text(value: Fraction) -> str:
    """A number without needless decimals, as in `432` or `2.5`.

    Raises:
        ValueError: the number does not end within four decimal places.
    """
    text = f"{float(value):.{DECIMAL_PLACES}f}".rstrip("0").rstrip(".")
    if Fraction(text) != value:
        raise ValueError(f"{value} does not end within {DECIMAL_PLACES} decimal places")
    return text


def work_out(equation: str) -> tuple[list[str], Fraction]:
    """The steps of an equation and its value.

    Args:
        equation: in prefix form, as in `- 25000 * 1500 8`, or in infix form, as in `25000 - ( 1500 * 8 )`. The parts
            of a prefix form are separated by spaces. No number has a sign.

    Returns:
        One sentence for each operation, as in `["1500 * 8 = 12000.", "25000 - 12000 = 13000."]`, and the exact value.

    Raises:
        ValueError: the equation is not arithmetic, or a number does not end within four decimal places.
        ZeroDivisionError: the equation divides by zero.
    """
    parts = equation.split()
    if parts and parts[0] in SYMBOLS:
        remaining = iter(parts)
        equation = _infix(remaining)
        if next(remaining, None) is not None:
            raise ValueError(f"more than one value in {' '.join(parts)!r}")
    steps: list[str] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant():
                return Fraction(ast.get_source_segment(equation, node))
            case ast.BinOp(left, sign, right) if type(sign) in OPERATIONS:
                symbol, apply = OPERATIONS[type(sign)]
                first, second = value(left), value(right)
                result = apply(first, second)
                steps.append(f"{number_text(first)} {symbol} {number_text(second)} = {number_text(result)}.")
                return result
        raise ValueError(f"not arithmetic: {equation!r}")

    equation = equation.strip()
    return steps, value(ast.parse(equation, mode="eval").body)


def _infix(parts: Iterator[str]) -> str:
    """The next value of a prefix form, with brackets around every operation."""
    part = next(parts, None)
    if part is None:
        raise ValueError("an operation without its numbers")
    return f"({_infix(parts)} {part} {_infix(parts)})" if part in SYMBOLS else part
