"""The results section of a model card: the main figures of `results.json`, one per line, with their intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_ext.evaluation.reporting.results import Results
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import estimate, figures
from trl_ext.evaluation.reporting.tables import Table, render_table, shown


def results_section(content: dict[str, Any]) -> str:
    """The figures of a run's `results.json` content as Markdown; empty if there are none."""
    run = Run("", Path(), Results.model_validate(content))
    found, reasoning = figures(run), run.results.reasoning
    if reasoning:
        # The section has these before and after training, by decoding.
        found = {name: value for name, value in found.items() if not name.startswith("accuracy, ")}
        found["gain in accuracy, sampled"] = found.pop("gain in accuracy")
        for when in ("before", "after"):
            for decoding, one in getattr(reasoning, when).items():
                found[f"accuracy {when}, {decoding}"] = estimate(one.accuracy)
    texts = {name: shown(value, name) for name, value in found.items()}
    rows = [{"figure": name, "value": text} for name, text in texts.items() if text != "-"]
    compared = "" if run.trains_reward_model else "; comparisons are with the base model"
    note = f"Measured on held-out data{compared}. Brackets hold 95% intervals."
    return render_table(Table("results", "Results", note, rows))
