"""What judging costs: tokens and dollars, from a table of prices that the user can override."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from trl_ext.files import brief, read_json


@dataclass(frozen=True)
class Usage:
    """What was asked of a judge, and what it cost.

    Attributes:
        calls: requests sent, retries included.
        cached: verdicts taken from the cache.
        retries: requests beyond a question's first.
        errors: questions that ended without a verdict.
        input_tokens, output_tokens: as the server counted them; output includes reasoning.
        cached_input_tokens: the part of `input_tokens` that the server had cached, and bills at a lower price.
        dollars: spent on these calls; None where the price is not known.
        cached_dollars: what the verdicts taken from the cache cost when they were asked for.
    """

    calls: int = 0
    cached: int = 0
    retries: int = 0
    errors: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    dollars: float | None = 0.0
    cached_dollars: float | None = 0.0

    def __add__(self, other: Usage) -> Usage:
        # Three times for each verdict, so without the detours of `dataclasses`; the fields are in their order.
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Usage(*(None if None in pair else sum(pair) for pair in pairs))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Price:
    """Dollars per million tokens; without a price of their own, cached input tokens cost as much as others."""

    input: float
    output: float
    cached_input: float | None = None

    def dollars(self, *, input_tokens: int, output_tokens: int, cached_input_tokens: int = 0) -> float:
        cached_price = self.input if self.cached_input is None else self.cached_input
        fresh = input_tokens - cached_input_tokens
        return (fresh * self.input + cached_input_tokens * cached_price + output_tokens * self.output) / 1e6


def load_prices(override: str | Path | Mapping[str, Any] | None = None) -> dict[str, Price]:
    """Prices by model: the package's table, with the user's entries in the place of those of the same name.

    Args:
        override: a JSON file or a mapping, `{"model": {"input": dollars, "output": dollars, "cached_input": dollars}}`
            per million tokens; `cached_input` may be left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no JSON, or an entry is no price.
    """
    table = json.loads((files("trl_ext.evaluation") / "judging" / "prices.json").read_text(encoding="utf-8"))["models"]
    prices = {model: Price(**entry) for model, entry in table.items()}
    if override is None:
        return prices
    source, entries = "prices", override
    if not isinstance(override, Mapping):
        source = str(override)
        if not Path(override).is_file():
            raise FileNotFoundError(f"no price file {source!r}")
        try:
            entries = read_json(override)
        except ValueError as error:
            raise ValueError(f"{source} is not valid JSON: {str(error).removeprefix(f'{source}: ')}") from error
    if not isinstance(entries, Mapping):
        raise ValueError(f"{source} must hold an object of models, got a {type(entries).__name__}")
    return prices | {model: _read_price(source, model, entry) for model, entry in entries.items()}


def find_price(model: str, prices: Mapping[str, Price]) -> Price | None:
    """The price of a model, or of the one that it is a dated version of (`gpt-5.4-2026-03-05`); None if unknown."""
    return prices.get(model) or prices.get(re.sub(r"-\d{4}-\d{2}-\d{2}$", "", model))


def _read_price(source: str, model: str, entry: Any) -> Price:
    names = {field.name for field in dataclasses.fields(Price)}
    known = isinstance(entry, Mapping) and {"input", "output"} <= set(entry) <= names
    if not known or not all(_is_price(value) for value in entry.values()):
        raise ValueError(
            f"{source}: {brief(model)}: must hold input, output and perhaps cached_input, in dollars per million "
            f"tokens, got {brief(json.dumps(entry), 100)}"
        )
    return Price(**entry)


def _is_price(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
