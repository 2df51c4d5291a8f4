"""The results section of a model card: the main figures of `results.json`, one per line, with their intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_ext.evaluation.reporting.results import Results
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import policy_row, reward_model_row
from trl_ext.evaluation.reporting.tables import Cell, estimate, policy_table, reward_model_table
from trl_ext.files import markdown_line

# Columns of the report's tables that the card shows elsewhere.
NOT_FIGURES = ("run", "method", "model", "data", "seed", "weights", "accuracy, sampled", "accuracy, greedy")


def results_section(content: dict[str, Any]) -> str:
    """The figures of a run's `results.json` content as Markdown; empty if there are none."""
    results = Results.model_validate(content)
    run = Run("", Path(), results)
    table = reward_model_table([reward_model_row(run)]) if run.trains_reward_model else policy_table([policy_row(run)])
    pairs = dict(zip(table.columns, table.rows[0], strict=True)) if table.rows else {}
    if "gain in accuracy" in pairs:
        pairs["gain in accuracy, sampled"] = pairs.pop("gain in accuracy")
    figures = [pair for pair in pairs.items() if pair[0] not in NOT_FIGURES] + _reasoning(results)
    if not figures:
        return ""
    lines = [f"| {markdown_line(name)} | {markdown_line(cell.text)} |" for name, cell in figures]
    note = "Measured on held-out data. Brackets hold 95% intervals."
    if not run.trains_reward_model:
        note = "Measured on held-out data; comparisons are with the base model. Brackets hold 95% intervals."
    return "\n".join(["## Results", "", note, "", "| figure | value |", "| :-- | --: |", *lines])


def _reasoning(results: Results) -> list[tuple[str, Cell]]:
    """Accuracy on problems with known answers, by decoding, before and after training."""
    found = []
    for when in ("before", "after"):
        for decoding, summary in getattr(results.reasoning, when, {}).items():
            found.append((f"accuracy {when}, {decoding}", estimate(summary.accuracy.figure())))
    return found
