"""The online recipes end to end: what they leave, that they resume, and what they refuse in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support import recipes
from tests.support.recipes import SHORT_ROLLOUTS, check_figures, read, write_rewards
from tests.support.rollout_once import build, save_policy, thirds
from trl_ext.runs import arguments, online
from trl_ext.runs.folder import config_text
from trl_ext.toy import MODEL_DIR, score


def save_reward_adapter(folder: Path, seed: int) -> Path:
    """An untrained reward adapter of the embedded model with weights that are not zero."""
    torch.manual_seed(seed)
    base = AutoModelForSequenceClassification.from_pretrained(MODEL_DIR, num_labels=1, dtype=torch.float32)
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)
    return folder


def write_faulty_rewards(folder: Path) -> None:
    """Rewards of 1 that are NaN and infinite for the first held-out prompts, or that fail there."""
    (folder / "faulty.py").write_text(
        "from trl_ext import load_benchmark\n\n"
        "first, second = load_benchmark('toy')['test_gen']['row_id'][:2]\n\n\n"
        "def not_finite(row_id, **columns):\n"
        "    return [{first: float('nan'), second: float('-inf')}.get(row, 1.0) for row in row_id]\n\n\n"
        "def fails_held_out(row_id, **columns):\n"
        "    if second in row_id:\n"
        "        raise KeyError('no answer')\n"
        "    return [1.0] * len(row_id)\n"
    )


@pytest.mark.slow
def test_a_run_of_lora_on_an_ensemble(tmp_path):
    """Two adapters, which share the policy's backbone, and a function besides."""
    write_rewards(tmp_path)
    models = [str(save_reward_adapter(tmp_path / f"rm-{seed}", seed)) for seed in (1, 2)]
    done = recipes.launch(
        "grpo",
        *SHORT_ROLLOUTS,
        *("--reward_model", *models, "--reward_aggregate", "min", "--calibrate_rewards", "true"),
        *("--reward_function", "my_rewards.py:known"),
        *("--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"),
        folder=tmp_path,
    )
    assert done.stderr.count("on the policy's backbone") == 2
    for text in ("reward, ensemble", "reward, rm-2", "ground-truth score", "KL to the base", "in runs/grpo-toy"):
        assert text in done.stdout
    run = tmp_path / "runs" / "grpo-toy"
    saved = load_file(run / "adapter_model.safetensors")
    assert saved and not any("reward" in name or "score" in name for name in saved), "the policy alone is saved"
    results, rows = read(run, "results.json"), read(run, "generations.jsonl")
    check_figures(run, results)
    assert len(rows) == 8 and set(results["rewards"]) == {"ensemble", "rm-1", "rm-2", "known"}
    for row in rows:
        assert row["reward/ensemble"] == pytest.approx(min(row[f"reward/rm-{seed}"] for seed in (1, 2)), abs=1e-6)
        expected = score(row["prompt_text"], row["response_text"], finished=row["finished"])
        assert row["reward/known"] == pytest.approx(expected) == pytest.approx(row["score"])
        # The reference of the embedded prompts is the base's own greedy response.
        assert row["reference_reward/known"] == pytest.approx(row["base_reward/known"])
    settings = results["run"]
    assert (settings["algorithm"], settings["rollouts"], settings["sampled_responses"]) == ("grpo", 4, 32)
    assert not any(settings["skipped_updates"].values())
    metrics = read(run, "metrics.jsonl")
    evaluations = [row for row in metrics if "eval_kl" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert evaluations[0]["eval_kl"] == pytest.approx(0, abs=1e-5), "nothing has been trained yet"
    assert all(f"eval_rewards/{name}/mean" in row for row in evaluations for name in results["rewards"])
    expected = {"reward", "reward_std", "reward_min", "reward_max", "advantages/mean", "advantages/std", "kl"}
    expected |= {"entropy", "clip_ratio/region_mean", "frac_reward_zero_std", "ensemble_std", "unscorable"}
    expected |= {"distinct_2", "collapsed", "completions/mean_length", "skipped_updates", "rewards/rm-1/mean"}
    assert all(expected <= row.keys() for row in metrics if "loss" in row)


BATCHES = {
    "default": [],
    "rollout": ["--generation_batch_size", "256"],
    "micro-batches": ["--steps_per_generation", "4"],
    "one response": ["--num_generations", "1", "--algorithm", "remax", "--gradient_accumulation_steps", "2"],
}


@pytest.mark.parametrize(
    "method, batch",
    # Groups of one are for baselines without a group.
    [(m, b) for m in ("grpo", "gspo", "remax") for b in BATCHES if m == "remax" or b != "one response"],
)
def test_a_saved_configuration_reads_back(method, batch, monkeypatch, tmp_path):
    """Every argument, and what is saved again; sizes that follow from one another are not given twice."""
    arguments = ["--reward_function", "my_rewards.py:known", "--min_new_tokens", "3", "--save_steps", "7"]
    parsed = recipes.parse(monkeypatch, method, *arguments, *BATCHES[batch])
    path = tmp_path / "config.yaml"
    path.write_text(config_text(*parsed))
    again = recipes.parse(monkeypatch, method, "--config", str(path))
    for one, other in zip(parsed, again, strict=True):
        names = [field.name for field in dataclasses.fields(one) if field.init and field.name != "logging_dir"]
        assert {name: getattr(one, name) for name in names} == {name: getattr(other, name) for name in names}
    assert yaml.safe_load(config_text(*again)) == yaml.safe_load(path.read_text())
    training, expected = again[-1], {"default": 64, "rollout": 256, "micro-batches": 256, "one response": 128}
    assert training.generation_batch_size == expected[batch]
    assert training.steps_per_generation == expected[batch] // 64


@pytest.mark.parametrize(
    "args, prompts, rollouts",
    [
        # Micro-batches of 8: 3 updates x 4 / 2 in a rollout.
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 3}, 24, 6),
        # 4 in a rollout, twice over: 9 updates of one are one rollout and the beginning of a second.
        ({"steps_per_generation": 4, "num_iterations": 2, "max_steps": 9}, 24, 2),
        ({"steps_per_generation": 4, "num_iterations": 2, "max_steps": 8}, 24, 1),
        # 2 updates x 2 / 3 in a rollout: one and a third.
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 2}, 24, 2),
        # An epoch of three micro-batches is two updates, of two and of one.
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": -1, "num_train_epochs": 2}, 6, 6),
    ],
)
def test_rollouts_are_counted_as_they_were_made(args, prompts, rollouts, tiny_model_path, tmp_path):
    """By the calls of the reward function and the responses that it was given."""
    calls = []

    def reward(completion_ids, **_):
        calls.append(len(completion_ids))
        return thirds(completion_ids)

    spec = {"model": save_policy(tiny_model_path, tmp_path / "policy"), "prompts": prompts, "args": args}
    trainer = build(spec, str(tmp_path / "run"), reward_funcs=reward)
    trainer.train()
    assert len(calls) == rollouts
    described = online.describe_online(trainer, online.OnlineArguments())
    assert (described["rollouts"], described["sampled_responses"]) == (rollouts, sum(calls))


def test_rollouts_before_a_resumed_run_are_counted(tiny_model_path, tmp_path):
    """4 updates of 4 micro-batches, of which 2 make a rollout: 8 rollouts, 6 of them before the checkpoint."""
    args = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 4}
    saving = {"save_strategy": "steps", "save_steps": 3}
    spec = {"model": save_policy(tiny_model_path, tmp_path / "policy"), "args": {**args, **saving}}
    build(spec, str(tmp_path / "run")).train()
    trainer = build(spec, str(tmp_path / "run"))
    trainer.train(resume_from_checkpoint=str((tmp_path / "run" / "checkpoint-3").rename(tmp_path / "kept")))
    described = online.describe_online(trainer, online.OnlineArguments())
    assert (described["rollouts"], described["sampled_responses"]) == (8, 16 * 8)


# ---- Faults after the first step ----


@pytest.fixture
def run_with(tmp_path, monkeypatch):
    """Run one step of GRPO on a faulty reward; returns the run folder."""
    monkeypatch.chdir(tmp_path)
    write_faulty_rewards(tmp_path)

    def run(name: str, every: int, *more: str) -> Path:
        arguments = ["--reward_function", f"faulty.py:{name}", "--max_steps=1", "--save_strategy=no"]
        arguments += [f"--generation_eval_every={every}", "--output_dir", "run", *more]
        recipes.run(monkeypatch, "grpo", *SHORT_ROLLOUTS, *arguments)
        return tmp_path / "run"

    return run


@pytest.mark.slow
def test_rewards_that_are_not_finite_in_evaluation(run_with):
    """They count as none, with the trained steps as they are: files hold null, and means are of the other rows."""

    def strictly(text: str):
        """JSON as the standard has it, which has no NaN."""
        return json.loads(text, parse_constant=pytest.fail)

    run = run_with("not_finite", 1)
    rows, _ = (
        [strictly(line) for line in (run / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("generations", "metrics")
    )
    results = strictly((run / "results.json").read_text(encoding="utf-8"))
    for key in ("reward/not_finite", "base_reward/not_finite", "reference_reward/not_finite"):
        assert [row[key] for row in rows] == [None, None, *[1.0] * 6]
    figures = results["rewards"]["not_finite"]
    assert (figures["policy"], figures["base"], figures["gain"]["mean"]) == (1.0, 1.0, 0.0)
    assert not any(results["run"]["skipped_updates"].values())


@pytest.mark.parametrize("every", [0, 1])
def test_a_function_that_fails_in_evaluation_is_one_line(every, run_with, capsys):
    """Whether it is one of the evaluations during training or the one at the end."""
    with pytest.raises(SystemExit):
        run_with("fails_held_out", every)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "'fails_held_out' failed on row_id" in line and "--reward_errors skip" in line


@pytest.mark.slow
def test_skipped_errors_in_evaluation_leave_a_whole_run(run_with):
    run = run_with("fails_held_out", 0, "--reward_errors", "skip")
    assert [row["reward/fails_held_out"] for row in read(run, "generations.jsonl")] == [None] * 8
    assert read(run, "results.json")["rewards"]["fails_held_out"]["policy"] is None


def test_whose_errors_are_printed(monkeypatch, capsys):
    """Arguments fail alike on every process, and the first one says so; in training, whichever process failed."""
    from trl_ext.resilience.reward_guard import RewardError

    def printed(rank: int, error: Exception, *kinds) -> str:
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as stopped, arguments.one_line_errors(*kinds):
            raise error
        assert stopped.value.code == 2
        return capsys.readouterr().err

    in_training = arguments.MENDABLE_IN_TRAINING
    assert printed(0, ValueError("no\nsuch")) == "error: no such\n"
    assert printed(1, ValueError("no")) == ""
    for rank in (0, 1):
        assert printed(rank, RewardError("row_id 3"), in_training) == "error: row_id 3\n"
        assert printed(rank, FloatingPointError("stopped"), in_training) == "error: stopped\n"
    # A fault of the code itself keeps its traceback.
    with pytest.raises(ValueError), arguments.one_line_errors(in_training):
        raise ValueError
