"""`recipes/reward_model.py` end to end: what it leaves, which checkpoint it keeps, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import recipes
from tests.support.files import write_rows
from tests.support.recipes import check_figures, read
from tests.support.tiny import pairs
from trl_ext import load_benchmark, toy
from trl_ext.rewards import RewardModel

SHORT = [
    "--max_steps=6",
    "--per_device_train_batch_size=8",
    "--learning_rate=3e-3",
    "--warmup_steps=0",
    "--eval_steps=2",
    "--save_steps=2",
    "--logging_steps=1",
    "--disable_tqdm=true",
]


BEST = ["--load_best_model_at_end=true", "--metric_for_best_model=accuracy"]
BEST += ["--eval_strategy=steps", "--save_strategy=steps"]


@pytest.mark.slow
def test_a_run_keeps_its_best_checkpoint(tmp_path):
    """And as few others as it may; its figures are those of its scores, which the saved model gives again."""
    printed = recipes.launch("reward_model", *SHORT, "--save_total_limit=1", folder=tmp_path).stdout
    for name in ("accuracy", "true order", "of the labels", "mean margin", "log-likelihood", "Brier", "ECE, 10 bins"):
        assert name in printed
    assert "on 200 pairs of validation_prefs" in printed
    run = tmp_path / "runs" / "reward-model-toy"
    results, scores = read(run, "results.json"), read(run, "scores.jsonl")
    check_figures(run, results)
    held_out = load_benchmark("toy", splits="test_prefs")["test_prefs"]
    rows = {row["row_id"]: row for row in held_out}
    assert len(scores) == 400 and {row["row_id"] for row in scores} == set(rows)
    margins = {row["row_id"]: row["chosen_score"] - row["rejected_score"] for row in scores}
    right = labelled = untied = 0
    for row_id, margin in margins.items():
        prompt = rows[row_id]["prompt"][-1]["content"]
        chosen, rejected = (toy.score(prompt, rows[row_id][side][0]["content"]) for side in ("chosen", "rejected"))
        untied += chosen != rejected
        right += chosen != rejected and (margin > 0) == (chosen > rejected) and margin != 0
        labelled += chosen > rejected
    order = results["true_order"]
    assert (order["n"], order["ties"]) == (untied, 400 - untied)
    assert (order["accuracy"], order["label_agreement"]) == pytest.approx((right / untied, labelled / untied))
    mistakes = read(run, "reward_mistakes.jsonl")
    assert len(mistakes) == min(50, sum(margin <= 0 for margin in margins.values()))
    assert mistakes[0]["margin"] == min(margins.values())
    assert mistakes[0]["chosen_text"] == rows[mistakes[0]["row_id"]]["chosen"][0]["content"]

    selection = results["selection"]
    assert (selection["metric"], selection["split"], selection["n"]) == ("accuracy", "validation_prefs", 200)
    logged = {row["step"]: row["eval_accuracy"] for row in read(run, "metrics.jsonl") if "eval_accuracy" in row}
    assert [*logged] == [2, 4, 6]
    assert selection["value"] == logged[selection["step"]] == max(logged.values())
    best = f"checkpoint-{selection['step']}"
    assert results["run"]["weights"] == best
    # One checkpoint beside the newest may stay, and the best one does.
    one, other = (load_file(folder / "model.safetensors") for folder in (run, run / best))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    model = RewardModel(str(run))
    for side in ("chosen", "rejected"):
        again = torch.as_tensor(model.score(held_out[:20]["prompt"], held_out[:20][side]))
        expected = torch.tensor([row[f"{side}_score"] for row in scores[:20]])
        torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


def write_pairs(path: Path, count: int = 8) -> str:
    rows = [{name: pair[name] for name in ("row_id", "prompt", "chosen", "rejected")} for pair in pairs(count)]
    return f"--dataset_name={write_rows(path, rows)}"


def test_pairs_alone_train_without_a_choice(tmp_path, monkeypatch, tiny_model_path, caplog):
    """One file, nothing held out: the last weights are kept, and the lines say why."""
    data = write_pairs(tmp_path / "pairs.jsonl")
    monkeypatch.chdir(tmp_path)
    model = f"--model_name_or_path={tiny_model_path}"
    steps = [*BEST, "--max_steps=2", "--per_device_train_batch_size=4", "--eval_steps=1"]
    recipes.run(monkeypatch, "reward_model", data, model, *steps)
    run = tmp_path / "runs" / "reward-model-pairs"
    results = read(run, "results.json")
    assert results["run"]["weights"] == "last"
    assert results["selection"] is results["pairs"] is results["true_order"] is None
    assert (run / "model.safetensors").is_file()
    assert "no split 'test_prefs': held-out pairs will not be evaluated" in caplog.text
    assert "there are no pairs to choose a checkpoint by: the last weights are kept" in caplog.text
