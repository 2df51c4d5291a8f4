"""`recipes/reward_model.py` end to end: what it leaves, which checkpoint it keeps, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support import recipes
from tests.support.files import write_rows
from tests.support.recipes import read, refused
from tests.support.tiny import pairs
from trl_ext.runs.folder import config_text

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

    def test_config_reads_back_to_the_same_run(self, toy_run, monkeypatch):
        first, again = toy_run / "runs" / "reward-model-toy", toy_run / "again"
        recipes.run(monkeypatch, "reward_model", "--config", str(first / "config.yaml"), f"--output_dir={again}")
        for key in ("selection", "pairs", "true_order"):
            assert read(first, "results.json")[key] == read(again, "results.json")[key]
        assert largest_difference(first, again) == 0.0


@pytest.mark.slow
def test_wildchat_pairs_with_a_tiny_model(tmp_path, tiny_model_path, monkeypatch, wildchat, caplog):
    """Real text through an adapter, with margins from a column; the choice falls back on the held-out split."""
    run = tmp_path / "run"
    recipes.run(
        monkeypatch,
        "reward_model",
        f"--dataset_name={wildchat}",
        "--train_split=test_prefs",
        f"--model_name_or_path={tiny_model_path}",
        f"--output_dir={run}",
        "--max_prompt_tokens=700",
        "--margin_column=avg_preference_strength",
        "--margin_scale=0.1",
        "--use_peft=true",
        "--lora_target_modules",
        *["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        *SHORT,
        "--max_steps=4",
        *BEST,
        "--learning_rate=1e-2",
    )
    assert "no split 'validation_prefs': the checkpoint is chosen on test_prefs" in caplog.text
    results = read(run, "results.json")
    assert results["run"]["train_pairs"] == 256 == results["pairs"]["n"] == results["selection"]["n"]
    assert results["true_order"] is None
    assert "score" in str(list(load_file(run / "adapter_model.safetensors")))
    assert read(run, "adapter_config.json")["base_model_name_or_path"] == str(Path(tiny_model_path).resolve())
    from trl_ext import load_benchmark
    from trl_ext.rewards import RewardModel

    rows = load_benchmark(wildchat, splits="test_prefs")["test_prefs"][:6]
    model = RewardModel(str(run))
    again = torch.as_tensor(model.score(rows["prompt"], rows["chosen"]))
    expected = torch.tensor([row["chosen_score"] for row in read(run, "scores.jsonl")[:6]])
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max_length=64"], "max_length is not used by RewardConfig"),
        (["--label_smoothing=0.5"], "label_smoothing must lie in [0, 0.5), got 0.5"),
        (["--margin_column=strength"], "margin_column 'strength' is not in the train dataset"),
        (["--train_split=train_gen"], "train_dataset holds prompts and no pairs"),
        (["--train_split=nothing"], "toy has no split 'nothing' to train on"),
        (["--eval_split=tset_prefs"], "Name one of these with --eval_split, or none"),
        (["--eval_split=test_gen"], "eval_dataset holds prompts and no pairs"),
        (["--selection_split=nothing"], "toy has no split 'nothing' to choose a checkpoint by"),
        (["--selection_split=test_gen"], "selection_split holds prompts and no pairs"),
        (["--lerning_rate=1"], "unknown flag --lerning_rate; did you mean 'learning_rate'?"),
        (["--model_name_or_path=./none"], "no model folder './none'"),
    ],
)
def test_one_line_before_any_training(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in refused(monkeypatch, capsys, "reward_model", *arguments)
    assert not (tmp_path / "runs").exists()


def test_an_empty_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "pairs.jsonl").write_text("")
    message = refused(monkeypatch, capsys, "reward_model", f"--dataset_name={tmp_path / 'pairs.jsonl'}")
    assert "pairs.jsonl: empty; expected at least one row" in message


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


def test_switched_off_is_written_as_such(monkeypatch, tmp_path):
    """An explicit `none` must not come back as the default."""

    parsed = recipes.parse(monkeypatch, "reward_model", "--load_best_model_at_end=false", "--max_response_tokens=9")
    text = config_text(*parsed)
    (tmp_path / "again.yaml").write_text(text)
    _, _, again = recipes.parse(monkeypatch, "reward_model", "--config", str(tmp_path / "again.yaml"))
    assert again.load_best_model_at_end is False and again.max_response_tokens == 9
    assert yaml.safe_load(text)["load_best_model_at_end"] is False
