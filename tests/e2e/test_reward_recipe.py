"""`recipes/reward_model.py` end to end: what it leaves, which checkpoint it keeps, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import recipes
from tests.support.files import write_rows
from tests.support.recipes import read
from tests.support.tiny import pairs

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


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory) -> Path:
    """The folder of a short `accelerate launch recipes/reward_model.py`, which keeps as few checkpoints as it may."""
    folder = tmp_path_factory.mktemp("reward-run")
    done = recipes.launch("reward_model", *SHORT, "--save_total_limit=1", folder=folder)
    (folder / "stdout.txt").write_text(done.stdout)
    return folder


def largest_difference(one: Path, other: Path) -> float:
    first, second = (load_file(path / "model.safetensors") for path in (one, other))
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.slow
class TestARun:
    def test_files_and_table(self, toy_run):
        run = toy_run / "runs" / "reward-model-toy"
        for name in ("config.yaml", "metrics.jsonl", "scores.jsonl", "reward_mistakes.jsonl", "results.json"):
            assert (run / name).stat().st_size > 0, name
        assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
        assert not list(run.glob(".*")), "a temporary file was left"
        printed = (toy_run / "stdout.txt").read_text()
        for name in (
            "accuracy",
            "true order",
            "of the labels",
            "mean margin",
            "log-likelihood",
            "Brier",
            "ECE, 10 bins",
        ):
            assert name in printed
        assert "on 200 pairs of validation_prefs" in printed

    def test_results_are_those_of_the_scores(self, toy_run):
        from trl_ext import load_benchmark, toy

        run = toy_run / "runs" / "reward-model-toy"
        results, scores = read(run, "results.json"), read(run, "scores.jsonl")
        rows = {row["row_id"]: row for row in load_benchmark("toy", splits="test_prefs")["test_prefs"]}
        assert len(scores) == 400 and {row["row_id"] for row in scores} == set(rows)
        margins = {row["row_id"]: row["chosen_score"] - row["rejected_score"] for row in scores}
        assert results["pairs"]["accuracy"] == sum(margin > 0 for margin in margins.values()) / 400
        assert results["pairs"]["margin"] == pytest.approx(sum(margins.values()) / 400)
        right = labelled = untied = 0
        for row_id, margin in margins.items():
            row = rows[row_id]
            prompt = row["prompt"][-1]["content"]
            chosen, rejected = (toy.score(prompt, row[side][0]["content"]) for side in ("chosen", "rejected"))
            if chosen != rejected:
                untied += 1
                right += (margin > 0) == (chosen > rejected) and margin != 0
                labelled += chosen > rejected
        order = results["true_order"]
        assert (order["n"], order["ties"]) == (untied, 400 - untied)
        assert order["accuracy"] == pytest.approx(right / untied)
        assert order["label_agreement"] == pytest.approx(labelled / untied)
        mistakes = read(run, "reward_mistakes.jsonl")
        assert len(mistakes) == min(50, sum(margin <= 0 for margin in margins.values()))
        assert mistakes[0]["margin"] == min(margins.values())
        assert mistakes[0]["chosen_text"] == rows[mistakes[0]["row_id"]]["chosen"][0]["content"]

    def test_best_checkpoint_is_kept_and_is_the_run(self, toy_run):
        run = toy_run / "runs" / "reward-model-toy"
        results = read(run, "results.json")
        selection = results["selection"]
        assert (selection["metric"], selection["split"], selection["n"]) == ("accuracy", "validation_prefs", 200)
        logged = {row["step"]: row["eval_accuracy"] for row in read(run, "metrics.jsonl") if "eval_accuracy" in row}
        assert [*logged] == [2, 4, 6]
        assert selection["value"] == logged[selection["step"]] == max(logged.values())
        assert results["run"]["weights"] == f"checkpoint-{selection['step']}"
        # One checkpoint beside the newest may stay, and the best one does.
        assert largest_difference(run, run / f"checkpoint-{selection['step']}") == 0.0

    def test_saved_model_gives_the_scores_of_the_run(self, toy_run):
        from trl_ext import load_benchmark
        from trl_ext.rewards import RewardModel

        run = toy_run / "runs" / "reward-model-toy"
        rows, scores = load_benchmark("toy", splits="test_prefs")["test_prefs"][:20], read(run, "scores.jsonl")[:20]
        model = RewardModel(str(run))
        for side in ("chosen", "rejected"):
            again = torch.as_tensor(model.score(rows["prompt"], rows[side]))
            expected = torch.tensor([row[f"{side}_score"] for row in scores])
            torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


def write_pairs(path: Path, count: int = 8) -> str:
    rows = [{name: pair[name] for name in ("row_id", "prompt", "chosen", "rejected")} for pair in pairs(count)]
    write_rows(path, rows)
    return f"--dataset_name={path}"


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


def test_the_course_run(monkeypatch):
    """The course's settings, number by number."""
    path = recipes.RECIPES / "configs" / "wildchat" / "reward_model.yaml"
    arguments, model, training = recipes.parse(monkeypatch, "reward_model", "--config", str(path))
    assert model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (model.use_peft, model.lora_r, model.lora_alpha, model.lora_dropout) == (True, 32, 64, 0.05)
    assert (training.learning_rate, training.num_train_epochs) == (3e-5, 3)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (8, 4)
    assert (training.eval_steps, training.save_steps) == (25, 25)
    assert (training.load_best_model_at_end, training.metric_for_best_model) == (True, "accuracy")
    assert (training.max_prompt_tokens, training.max_response_tokens) == (700, 512)
    assert training.disable_dropout is False
    assert arguments.eval_split == "test_prefs" and arguments.selection_split is None
    assert "bf16: true" in path.read_text() and model.dtype == "bfloat16"
