"""The recipe of KTO on the embedded benchmark, from its arguments to its results."""

from __future__ import annotations

import json
import math

import pytest

from tests import recipes


@pytest.mark.slow
def test_run(tmp_path, monkeypatch):
    """Two updates: a run folder with a comparison in it, and the same model before as every run on the benchmark."""
    short = ["--max_steps", "2", "--generation_eval_every", "0", "--num_eval_prompts", "8", "--eval_strategy", "no"]
    short += ["--logging_steps", "1", "--save_strategy", "no"]
    recipes.run(monkeypatch, "kto", "--output_dir", str(tmp_path / "run"), *short)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["run"]["objective"] == "kto (beta 0.1, weights 1 and 1)"
    assert results["run"]["train_responses"] == 4000, "two to each pair"
    first, *_ = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert math.isfinite(first["loss"])
