"""Agreement of two people who labelled the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from trl_ext.evaluation.statistics.intervals import NORMAL_95, score_bounds


def cohen_kappa(first: Sequence[str], second: Sequence[str]) -> dict[str, float | None]:
    """Cohen's kappa (1960) of two raters' labels of the same rows, and its 95% interval.

    The standard error is that of Fleiss, Cohen and Everitt (1969). The interval is Wilson's of the observed
    agreement, at the number of rows at which it would vary as much as kappa does, on the scale of kappa. So it has a
    width even if the raters agree on every row. It covers too little if one label has almost all rows.

    Returns:
        `kappa` (1 if all labels agree, 0 for the agreement of independent labels), its `low`, `high` and
        `standard_error`, the `observed` agreement, and `n`. The first four are None if both raters gave a single label
        to all rows.

    Raises:
        ValueError: there are no labels, or their numbers differ.
    """
    n = len(first)
    if not n or n != len(second):
        raise ValueError(f"give two labels of each row, and at least one row: got {n} and {len(second)}")
    names, places = numpy.unique([*first, *second], return_inverse=True)
    table = numpy.zeros((len(names), len(names)))
    numpy.add.at(table, (places[:n], places[n:]), 1 / n)
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    observed, chance = float(numpy.trace(table)), float(rows @ columns)
    found = {"observed": observed, "n": n}
    if len(names) == 1:
        return {"kappa": None, "low": None, "high": None, "standard_error": None, **found}
    # The derivative of kappa by each cell's share; its variance over the rows is that of kappa.
    sums = columns[:, None] + rows[None, :]
    slopes = numpy.eye(len(names)) / (1 - chance) - (1 - observed) / (1 - chance) ** 2 * sums
    variance = max(float((table * slopes**2).sum() - (table * slopes).sum() ** 2) / n, 0.0)
    # At full agreement or none, kappa varies with the observed agreement alone.
    varies = 1e-9 < observed < 1 - 1e-9 and variance > 1e-15
    size = observed * (1 - observed) / (variance * (1 - chance) ** 2) if varies else n
    shares = (observed, *score_bounds(observed, size, NORMAL_95))
    kappa, low, high = ((share - chance) / (1 - chance) for share in shares)
    return {"kappa": kappa, "low": low, "high": high, "standard_error": variance**0.5, **found}
