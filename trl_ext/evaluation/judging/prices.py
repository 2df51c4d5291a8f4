"""Prices of judge models: the package's table of November 2026, which the user can override."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, TypeAdapter, ValidationError


class Price(BaseModel):
    """Dollars per million tokens. The price of cached input tokens defaults to the price of input tokens."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    input: NonNegativeFloat
    output: NonNegativeFloat
    cached_input: NonNegativeFloat | None = None

    def dollars(self, *, input_tokens: int, output_tokens: int, cached_input_tokens: int = 0) -> float:
        cached_price = self.input if self.cached_input is None else self.cached_input
        fresh = input_tokens - cached_input_tokens
        return (fresh * self.input + cached_input_tokens * cached_price + output_tokens * self.output) / 1e6


def load_prices(override: str | Path | Mapping[str, Any] | None = None) -> dict[str, Price]:
    """Prices by model: the package's table, with the user's entries added or replacing those of the same name.

    Args:
        override: a JSON file or a mapping, `{"model": {"input": dollars, "output": dollars, "cached_input": dollars}}`
            per million tokens; `cached_input` is optional.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not JSON, or an entry is not a price.
    """
    table = TypeAdapter(dict[str, Price])
    prices = table.validate_json((files("trl_ext.evaluation") / "judging" / "prices.json").read_bytes())
    if override is None:
        return prices
    source = "prices"
    try:
        if isinstance(override, Mapping):
            return prices | table.validate_python(override)
        source = str(override)
        if not Path(source).is_file():
            raise FileNotFoundError(f"no price file {source!r}")
        return prices | table.validate_json(Path(source).read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ": ".join([source, *map(str, first["loc"])])
        raise ValueError(
            f"{where}: {first['msg']}; a model needs input, output and perhaps cached_input, in dollars per million "
            "tokens"
        ) from None


def find_price(model: str, prices: Mapping[str, Price]) -> Price | None:
    """The price of a model, or of the model whose dated version it is (`gpt-5.4-2026-03-05`); None if unknown."""
    return prices.get(model) or prices.get(re.sub(r"-\d{4}-\d{2}-\d{2}$", "", model))
