"""The recipe of KTO on a folder of labelled responses."""

from __future__ import annotations

import pytest

from tests.support import recipes
from tests.support.files import labelled, write_rows
from tests.support.recipes import read
from trl_ext.evaluation.reporting.curves import panels
from trl_ext.evaluation.reporting.runs import find_runs


@pytest.mark.slow
def test_run_on_a_folder_of_labelled_responses(tmp_path, monkeypatch):
    """Two updates on 9 rows in batches of 4: the ninth is left out, and 8 are trained on, of which 5 - 1 are good."""
    write_rows(tmp_path / "train_prefs.jsonl", labelled(9))
    write_rows(tmp_path / "test_prefs.jsonl", labelled(4))
    write_rows(tmp_path / "test_gen.jsonl", [{"row_id": "g0", "prompt_text": "Name a fruit."}])
    short = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--eval_strategy", "steps", "--eval_steps", "2"]
    data = ["--dataset_name", str(tmp_path), "--output_dir", str(tmp_path / "run"), "--save_strategy", "no"]
    recipes.run(monkeypatch, "kto", *data, *short, "--logging_steps", "1", "--generation_eval_every", "2")
    assert read(tmp_path / "run", "results.json")["run"]["train_responses"] == 8
    metrics = read(tmp_path / "run", "metrics.jsonl")
    # No log-ratio differs from 0 before the first update: every response has a loss of one half.
    assert [row["loss"] for row in metrics if "loss" in row][0] == pytest.approx(0.5, abs=1e-5)
    assert any("eval_loss" in row for row in metrics)
    # TRL's own `kl` is the estimate of the loss; that of the responses has another name, and is drawn.
    of_responses = [row for row in metrics if "sampled_kl" in row]
    assert [row["step"] for row in of_responses] == [0, 2]
    assert not any("kl" in row or "eval_kl" in row for row in of_responses)
    runs, _ = find_runs([tmp_path])
    [panel] = [panel for panel in panels(runs) if panel.title.startswith("KL")]
    expected = [(row["step"], row["sampled_kl"]) for row in of_responses]
    assert panel.curves == {"run": expected}
