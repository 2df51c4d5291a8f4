"""Agreement of two people who labelled the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from trl_ext.evaluation.statistics.intervals import NORMAL_95, score_bounds


@dataclass(frozen=True)
class Agreement:
    """Cohen's kappa of two raters.

    Attributes:
        kappa: agreement beyond chance: 1 for perfect, 0 for that of independent labels. None if both raters gave one
            and the same label to every row, which leaves nothing to agree on beyond chance.
        low, high: its 95% interval.
        standard_error: of kappa, for large samples.
        observed: share of rows with equal labels.
        by_chance: share that independent raters with the same frequencies would agree on.
        n: rows that both labelled.
    """

    kappa: float | None
    low: float | None
    high: float | None
    standard_error: float | None
    observed: float
    by_chance: float
    n: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return dataclasses.asdict(self)


def cohen_kappa(first: Sequence[str], second: Sequence[str]) -> Agreement:
    """Cohen's kappa (1960) of two raters' labels of the same rows, and its 95% interval.

    The standard error is that of Fleiss, Cohen and Everitt (1969). The interval is Wilson's of the observed
    agreement, at the number of rows at which it would vary as much as kappa does, on the scale of kappa. So it has a
    width even if the raters agree on every row. It covers too little if one label has almost all rows.

    Raises:
        ValueError: there are no labels, or their numbers differ.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"give two labels of each row, and at least one row: got {len(first)} and {len(second)}")
    names, places = numpy.unique([*first, *second], return_inverse=True)
    n = len(first)
    table = numpy.zeros((len(names), len(names)))
    numpy.add.at(table, (places[:n], places[n:]), 1 / n)
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    observed, chance = float(numpy.trace(table)), float(rows @ columns)
    if chance > 1 - 1e-12:
        return Agreement(None, None, None, None, observed, chance, n)
    # The derivative of kappa by each cell's share; its variance over the rows is that of kappa.
    sums = columns[:, None] + rows[None, :]
    slopes = numpy.eye(len(names)) / (1 - chance) - (1 - observed) / (1 - chance) ** 2 * sums
    variance = float((table * slopes**2).sum() - (table * slopes).sum() ** 2) / n
    of_observed = variance * (1 - chance) ** 2
    size = observed * (1 - observed) / of_observed if of_observed > 1e-15 and 0 < observed < 1 else n
    kappa, low, high = (
        (share - chance) / (1 - chance) for share in (observed, *score_bounds(observed, size, NORMAL_95))
    )
    return Agreement(kappa, low, high, max(variance, 0.0) ** 0.5, observed, chance, n)
