"""`python -m trl_ext.algorithms`: prints the table of online algorithms, or explains one row."""

from __future__ import annotations

import argparse
import json
from typing import Any

from trl_ext.algorithms import algorithms
from trl_ext.algorithms.explain import explain
from trl_ext.processes import quiet_when_closed


def _table() -> list[dict[str, Any]]:
    rows = []
    for name in algorithms:
        row = algorithms[name]
        about = {"group_size": row.group_size, **row.rollout, "paper": row.paper, "summary": row.summary}
        rows.append({**row.to_dict(), **about})
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    clip = f"{row['epsilon']:g}/{row['epsilon_high']:g}" if row["epsilon"] is not None else ""
    surrogate = f"{row['surrogate']} {clip or row['ratio_cap'] or ''}".strip()
    divergence = f"{row['beta']:g} {row['kl_estimator']} in {row['kl_in']}" if row["beta"] else "none"
    if algorithms[row["algorithm"]].takes_beta:
        divergence = f"{row['beta']:g} in the surrogate"
    return [row["algorithm"], row["advantage"], row["ratio"], surrogate, row["aggregation"], divergence, row["paper"]]


@quiet_when_closed()
def main(arguments: list[str] | None = None) -> None:
    """Print the table, aligned or as JSON, or explain one name."""
    parser = argparse.ArgumentParser(prog="python -m trl_ext.algorithms", description="List the online algorithms.")
    parser.add_argument("--json", action="store_true", help="print every setting as JSON")
    parser.add_argument(
        "--explain",
        metavar="NAME",
        help="settings and source of an algorithm, a preference loss or an advantage, or of your own as "
        "file.py:function",
    )
    given = parser.parse_args(arguments)
    if given.explain:
        try:
            print(explain(given.explain))
        except ValueError as error:
            parser.error(str(error))
        return
    rows = _table()
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    lines = [["algorithm", "advantage", "ratio", "surrogate", "aggregation", "KL", "paper"], *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
