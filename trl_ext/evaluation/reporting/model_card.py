"""The results section of a model card: the main figures of `results.json`, one per line, with their intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_ext.evaluation.reporting.results import Results
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import policy_row, reward_model_row
from trl_ext.evaluation.reporting.tables import NOTHING, Cell, Table, estimate, render_table, run_figures


def results_section(content: dict[str, Any]) -> str:
    """The figures of a run's `results.json` content as Markdown; empty if there are none."""
    run = Run("", Path(), Results.model_validate(content))
    figures = run_figures(reward_model_row(run) if run.trains_reward_model else policy_row(run))
    reasoning = run.results.reasoning
    if reasoning:
        # The section has these before and after training, by decoding.
        figures = {name: cell for name, cell in figures.items() if not name.startswith("accuracy, ")}
        figures["gain in accuracy, sampled"] = figures.pop("gain in accuracy")
        for when in ("before", "after"):
            for decoding, one in getattr(reasoning, when).items():
                figures[f"accuracy {when}, {decoding}"] = estimate(one.accuracy.figure())
    rows = [[Cell(name), cell] for name, cell in figures.items() if cell.text != NOTHING]
    compared = "" if run.trains_reward_model else "; comparisons are with the base model"
    note = f"Measured on held-out data{compared}. Brackets hold 95% intervals."
    return render_table(Table("results", "Results", note, ["figure", "value"], rows))
