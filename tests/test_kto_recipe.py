"""The recipe of KTO on the embedded benchmark, from its arguments to its results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests import recipes
from trl_ext.evaluation.reporting.curves import panels
from trl_ext.evaluation.reporting.runs import Run


@pytest.mark.slow
def test_run(tmp_path, monkeypatch):
    """Two updates: a run folder with a comparison in it, and the same model before as every run on the benchmark."""
    short = ["--max_steps", "2", "--generation_eval_every", "2", "--num_generation_prompts", "4"]
    short += ["--num_eval_prompts", "8", "--eval_strategy", "steps", "--eval_steps", "2", "--logging_steps", "1"]
    short += ["--save_strategy", "no"]
    recipes.run(monkeypatch, "kto", "--output_dir", str(tmp_path / "run"), *short)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["run"]["objective"] == "kto (beta 0.1, weights 1 and 1)"
    assert results["run"]["train_responses"] == 4000, "two to each pair"
    metrics = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    losses = [row for row in metrics if "loss" in row]
    assert len(losses) == 2 and all(math.isfinite(row["loss"]) for row in losses)
    of_responses = [row for row in metrics if "score" in row]
    assert [row["step"] for row in of_responses] == [0, 2]
    assert not any("kl" in row or "eval_kl" in row for row in of_responses), "those are the loss's estimate"
    run = Run("kto", Path("kto"), results, metrics, [])
    [panel] = [panel for panel in panels([run]) if panel.title.startswith("KL")]
    expected = [(row["step"], row["seconds"], row["sampled_kl"]) for row in of_responses]
    assert panel.curves == {"kto": expected}
