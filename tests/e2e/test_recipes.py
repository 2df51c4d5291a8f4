"""The recipes end to end: what a run leaves behind, how it is refused, interrupted, resumed and repeated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support import recipes
from tests.support.files import read_rows
from tests.support.recipes import (
    SHORT_PREFERENCE,
    SHORT_ROLLOUTS,
    check_figures,
    check_run,
    read,
    refused,
    write_labelled_pairs,
    write_rewards,
)
from trl_ext import load_benchmark, toy
from trl_ext.rewards import RewardModel
from trl_ext.runs.configs import toy_config
from trl_ext.toy import score


@pytest.mark.slow
def test_a_launched_run_shows_its_steps_and_its_table(tmp_path):
    done = recipes.launch("aot", *SHORT_PREFERENCE, "--save_total_limit=3", folder=tmp_path)
    run, printed = tmp_path / "runs" / "aot-toy", done.stdout
    results = check_run(run, 4)
    for name in ("win rate, ties as half", "held-out accuracy, log-ratio", "KL to the base", "mean length"):
        assert name in printed
    assert printed.count("prompt: ") == 3
    lines = [line for line in printed.splitlines() if line.startswith("step ") and " lr " in line]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert len({line.index("accuracy") for line in lines}) == 1, "aligned"
    assert "it/s]" not in done.stderr, "no bars where there is no terminal"
    rows = read_rows(run / "generations.jsonl")
    assert len(rows) == 12 == results["win_rate"]["n_total"] and results["preferences"]["after"]["n"] == 400
    for row in rows:
        assert row["score"] == score(row["prompt_text"], row["response_text"], finished=row["finished"])
    metrics = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in metrics if "eval_loss" in row] == [2, 4]
    assert [row["step"] for row in metrics if "kl" in row] == [0, 2, 4]
    first, *_ = samples = sorted((run / "samples").iterdir())
    assert [path.name for path in samples] == [f"step_{step:06}.jsonl" for step in (0, 2, 4)]
    assert all(row["response_text"] == row["base_response_text"] for row in read_rows(first))


def test_own_loss_from_a_file(tmp_path, monkeypatch, tiny_model_path):
    """DESIGN's ten-line loss, given as file.py:function; one file of pairs as the data, so nothing held out."""
    (tmp_path / "my_file.py").write_text(
        "import torch\n"
        "from trl_ext import preference_loss\n\n"
        '@preference_loss("squared_hinge_of_a_test", needs_reference=True)\n'
        "def squared_hinge(scores, *, beta):\n"
        "    return torch.relu(1 - beta * scores.margin).square()\n"
    )
    write_labelled_pairs(tmp_path / "pairs.jsonl", 8)
    monkeypatch.chdir(tmp_path)
    flags = ["--loss=my_file.py:squared_hinge", "--dataset_name=pairs.jsonl", "--max_steps=2", "--logging_steps=1"]
    flags += [f"--model_name_or_path={tiny_model_path}", "--per_device_train_batch_size=4"]
    recipes.run(monkeypatch, "preference", *flags)
    run = tmp_path / "runs" / "squared_hinge-pairs"
    assert read(run, "results.json")["run"]["objective"] == "squared_hinge_of_a_test (beta 0.1)"
    # At policy = reference the margin is 0 and the loss (1 - 0)^2 = 1.
    assert read(run, "metrics.jsonl")[0]["loss"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_two_processes_train_and_compare_as_one_does(tmp_path, monkeypatch):
    """2 ranks x 4 pairs see the optimizer batches of 1 x 4 x accumulation 2: AOT's losses and the comparison agree."""
    from tests.support.train_once import in_processes

    arguments = [*SHORT_PREFERENCE, "--eval_strategy=no", "--save_strategy=no", "--learning_rate=1e-3"]
    arguments.append("--warmup_steps=0")
    one, two = tmp_path / "one", tmp_path / "two"
    recipes.run(monkeypatch, "aot", *arguments, f"--output_dir={one}")
    script = [str(recipes.RECIPES / "aot.py"), *arguments, "--gradient_accumulation_steps=1", "--use_cpu=true"]
    in_processes(2, *script, f"--output_dir={two}", cwd=tmp_path)
    losses, results = [], []
    for run in (one, two):
        rows = read_rows(run / "metrics.jsonl")
        losses.append([row["loss"] for row in rows if "loss" in row])
        results.append(json.loads((run / "results.json").read_text()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] - 1e-3, "the losses tell nothing if training does not move"
    assert [result["run"]["processes"] for result in results] == [1, 2]
    assert results[0]["win_rate"] == results[1]["win_rate"]
    one, other = (result["preferences"]["after"]["summed"]["margin"] for result in results)
    assert one == pytest.approx(other, rel=1e-4)


# ---- Every recipe that trains ----


EVALUATED = ["--num_eval_prompts=8", "--save_steps=2", "--logging_steps=1", "--disable_tqdm=true", "--max_steps=4"]
REWARDED = [*SHORT_ROLLOUTS, "--reward_function=my_rewards.py:known"]
RECIPES = {
    "aot": SHORT_PREFERENCE,
    "kto": SHORT_PREFERENCE,
    "reward_model": ["--max_steps=4", "--eval_steps=2", "--save_steps=2", "--logging_steps=1", "--disable_tqdm=true"],
    "sft": [*EVALUATED, "--generation_eval_every=2", "--num_generation_prompts=4"],
    "gspo": REWARDED,
    "dr_grpo": [*REWARDED, '--reward_shaping=[{"kind": "clip", "limit": 0.25}]'],
    "ppo": [*REWARDED, "--num_generations=1", "--generation_batch_size=8", "--num_iterations=1"],
    "online_preference": REWARDED,
    "sft_math": [*EVALUATED, "--generation_eval_every=2", "--num_generation_prompts=4"],
    "online_preference_replay": [*REWARDED, f"--config={toy_config('online_preference_replay')}"],
    "grpo_math": [*EVALUATED, "--rollout_batch_size=8", "--train_batch_size=8", "--per_device_train_batch_size=8"]
    + ["--group_size=4", "--eval_every=2", "--num_validation_prompts=4"],
}
COMMON = ["--learning_rate=1e-3", "--save_total_limit=3"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_and_its_resumption(recipe, tmp_path, monkeypatch, capsys):
    """Four steps, and two and two from a checkpoint: the same settings, figures, responses and weights."""
    monkeypatch.chdir(tmp_path)
    write_rewards(tmp_path)
    flags = [*RECIPES[recipe], *COMMON]
    recipes.run(monkeypatch, recipe, *flags, "--output_dir=straight")
    straight, broken = Path("straight"), Path("broken")
    results = check_run(straight, 4)
    printed = capsys.readouterr().out
    assert "in straight: config.yaml, metrics.jsonl" in printed and "{" not in printed, "no dictionaries"
    assert "--resume_from_checkpoint" in refused(monkeypatch, capsys, recipe, *flags, "--output_dir=straight")

    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "checkpoint-4")
    (broken / "results.json").unlink()
    # By the settings that were written.
    settings = ["--config=straight/config.yaml", "--output_dir=broken", "--resume_from_checkpoint"]
    recipes.run(monkeypatch, recipe, *settings)
    # The times differ.
    assert check_run(broken, 4) | {"run": None} == results | {"run": None}
    one, other = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (straight, broken))
    assert one == other | {"output_dir": "straight"}
    one, other = (load_file(folder / "model.safetensors") for folder in (straight, broken))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    rows = "scores.jsonl" if recipe == "reward_model" else "generations.jsonl"
    assert read(straight, rows) == read(broken, rows)


# ---- Reward models ----


SHORT_REWARD = ["--max_steps=6", "--per_device_train_batch_size=8", "--learning_rate=3e-3", "--warmup_steps=0"]
SHORT_REWARD += ["--eval_steps=2", "--save_steps=2", "--logging_steps=1", "--disable_tqdm=true"]
BEST = ["--load_best_model_at_end=true", "--metric_for_best_model=accuracy"]
BEST += ["--eval_strategy=steps", "--save_strategy=steps"]


@pytest.mark.slow
def test_a_run_keeps_its_best_checkpoint(tmp_path):
    """And as few others as it may; its figures are those of its scores, which the saved model gives again."""
    printed = recipes.launch("reward_model", *SHORT_REWARD, "--save_total_limit=1", folder=tmp_path).stdout
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


def test_pairs_alone_train_without_a_choice(tmp_path, monkeypatch, tiny_model_path, caplog):
    """One file, nothing held out: the last weights are kept, and the lines say why."""
    write_labelled_pairs(tmp_path / "pairs.jsonl", 8)
    monkeypatch.chdir(tmp_path)
    flags = ["--dataset_name=pairs.jsonl", f"--model_name_or_path={tiny_model_path}", *BEST]
    flags += ["--max_steps=2", "--per_device_train_batch_size=4", "--eval_steps=1"]
    recipes.run(monkeypatch, "reward_model", *flags)
    run = tmp_path / "runs" / "reward-model-pairs"
    results = read(run, "results.json")
    assert results["run"]["weights"] == "last"
    assert results["selection"] is results["pairs"] is results["true_order"] is None
    assert (run / "model.safetensors").is_file()
    assert "no split 'test_prefs': held-out pairs will not be evaluated" in caplog.text
    assert "there are no pairs to choose a checkpoint by: the last weights are kept" in caplog.text
