"""The recipe of KTO on the embedded benchmark, from its arguments to its results."""

from __future__ import annotations

import pytest

from tests.support import recipes
from tests.support.files import write_rows
from tests.support.recipes import read, refused
from trl_ext.evaluation.reporting.curves import panels
from trl_ext.evaluation.reporting.runs import find_runs


def labelled(count: int, **changes) -> list[dict]:
    rows = [
        {"row_id": f"r{i}", "prompt_text": f"Name a fruit, {i}.", "completion": f"An apple {i}.", "label": i % 2 == 0}
        for i in range(count)
    ]
    return [{**row, **changes} for row in rows]


BAD_FILES = {
    "desirable.jsonl: 9 bad rows: line 1, row_id r0: label: Input should be a valid boolean": labelled(9, label="yes"),
    "train_dataset has no undesirable response among its 8: KTO weighs": labelled(8, label=True),
    "line 3, row_id r2: completion: empty": [*labelled(2), {**labelled(3)[2], "completion": " "}],
    "line 3, row_id r2: label: Field required": [
        *labelled(2),
        {"row_id": "r2", "prompt_text": "a", "completion": "b"},
    ],
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_a_bad_file_of_labelled_responses(message, tmp_path, monkeypatch, capsys):
    data = write_rows(tmp_path / "desirable.jsonl", BAD_FILES[message])
    flags = ["--dataset_name", str(data), "--output_dir", str(tmp_path / "run")]
    assert message in refused(monkeypatch, capsys, "kto", *flags)


def test_other_recipes_name_the_one_for_labelled_responses(tmp_path, monkeypatch, capsys):
    data = write_rows(tmp_path / "rows.jsonl", labelled(4))
    said = refused(monkeypatch, capsys, "dpo", "--dataset_name", str(data), "--output_dir", str(tmp_path / "run"))
    assert "holds labelled responses and no pairs: they are for KTOTrainer, recipes/kto.py" in said


@pytest.mark.slow
def test_run_on_a_folder_of_labelled_responses(tmp_path, monkeypatch):
    """Two updates on 9 rows in batches of 4: the ninth is left out, and 8 are trained on, of which 5 - 1 are good."""
    write_rows(tmp_path / "train_prefs.jsonl", labelled(9))
    write_rows(tmp_path / "test_prefs.jsonl", labelled(4))
    write_rows(tmp_path / "test_gen.jsonl", [{"row_id": "g0", "prompt_text": "Name a fruit."}])
    short = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--eval_strategy", "steps", "--eval_steps", "2"]
    data = ["--dataset_name", str(tmp_path), "--output_dir", str(tmp_path / "run"), "--save_strategy", "no"]
    recipes.run(monkeypatch, "kto", *data, *short, "--logging_steps", "1")
    results = read(tmp_path / "run", "results.json")
    assert results["run"]["train_responses"] == 8
    metrics = read(tmp_path / "run", "metrics.jsonl")
    # No log-ratio differs from 0 before the first update: every response has a loss of one half.
    assert [row["loss"] for row in metrics if "loss" in row][0] == pytest.approx(0.5, abs=1e-5)
    assert any("eval_loss" in row for row in metrics)


@pytest.mark.slow
def test_run(tmp_path, monkeypatch):
    """The KL of the responses is drawn, and not the estimate of the loss, which has the same name."""
    short = ["--max_steps", "2", "--generation_eval_every", "2", "--num_generation_prompts", "4"]
    short += ["--num_eval_prompts", "8", "--eval_strategy", "steps", "--eval_steps", "2", "--logging_steps", "1"]
    short += ["--save_strategy", "no"]
    recipes.run(monkeypatch, "kto", "--output_dir", str(tmp_path / "run"), *short)
    metrics = read(tmp_path / "run", "metrics.jsonl")
    of_responses = [row for row in metrics if "score" in row]
    assert [row["step"] for row in of_responses] == [0, 2]
    assert not any("kl" in row or "eval_kl" in row for row in of_responses), "those are the loss's estimate"
    runs, _ = find_runs([tmp_path])
    [panel] = [panel for panel in panels(runs) if panel.title.startswith("KL")]
    expected = [(row["step"], row["sampled_kl"]) for row in of_responses]
    assert panel.curves == {"run": expected}
