"""The online recipes and best-of-n end to end: what they leave, that they resume, and what they refuse in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.support import recipes
from tests.support.files import write_rows
from tests.support.recipes import SHORT_ROLLOUTS, check_figures, read, write_rewards
from tests.support.reward_adapters import save_adapter
from tests.support.rollout_once import build, save_policy, thirds
from trl_ext import load_benchmark
from trl_ext.runs import arguments, online
from trl_ext.runs.folder import config_text
from trl_ext.toy import MODEL_DIR, score

# Rewards of 1 that are NaN and infinite for the first held-out prompts, or that fail there.
FAULTY = """
from trl_ext import load_benchmark
first, second = load_benchmark("toy")["test_gen"]["row_id"][:2]
def not_finite(row_id, **columns):
    return [{first: float("nan"), second: float("-inf")}.get(row, 1.0) for row in row_id]
def fails_held_out(row_id, **columns):
    if second in row_id:
        raise KeyError("no answer")
    return [1.0] * len(row_id)
"""


@pytest.mark.slow
def test_a_run_of_lora_on_an_ensemble(tmp_path):
    """Two adapters, which share the policy's backbone, and a function besides."""
    write_rewards(tmp_path)
    models = [save_adapter(str(MODEL_DIR), tmp_path / f"rm-{seed}", seed=seed) for seed in (1, 2)]
    flags = ["--reward_model", *models, "--reward_aggregate=min", "--calibrate_rewards=true", "--use_peft=true"]
    flags += ["--reward_function=my_rewards.py:known", "--lora_target_modules", "q_proj", "v_proj"]
    done = recipes.launch("grpo", *SHORT_ROLLOUTS, *flags, folder=tmp_path)
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


@pytest.mark.parametrize(("method", "batch"), [*zip(("grpo", "grpo", "gspo", "remax"), BATCHES, strict=True)])
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
    described = online.describe_online(trainer, online.RewardSources())
    assert (described["rollouts"], described["sampled_responses"]) == (rollouts, sum(calls))


def test_rollouts_before_a_resumed_run_are_counted(tiny_model_path, tmp_path):
    """4 updates of 4 micro-batches, of which 2 make a rollout: 8 rollouts, 6 of them before the checkpoint."""
    args = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 4}
    saving = {"save_strategy": "steps", "save_steps": 3}
    spec = {"model": save_policy(tiny_model_path, tmp_path / "policy"), "args": {**args, **saving}}
    build(spec, str(tmp_path / "run")).train()
    trainer = build(spec, str(tmp_path / "run"))
    trainer.train(resume_from_checkpoint=str((tmp_path / "run" / "checkpoint-3").rename(tmp_path / "kept")))
    described = online.describe_online(trainer, online.RewardSources())
    assert (described["rollouts"], described["sampled_responses"]) == (8, 16 * 8)


# ---- Faults after the first step ----


@pytest.fixture
def run_with(tmp_path, monkeypatch):
    """Run one step of GRPO on a faulty reward; returns the run folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)

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
    files = [(run / f"{name}.jsonl").read_text(encoding="utf-8") for name in ("generations", "metrics")]
    rows, _ = ([strictly(line) for line in text.splitlines()] for text in files)
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


# ---- Best of n ----


SHORT = ["--num_prompts=12", "--n", "1", "2", "4", "--generation_batch_size=24", "--save_every=24", "--use_cpu=true"]


@pytest.fixture
def known(tmp_path, monkeypatch) -> str:
    """The true score as a reward function in a file."""
    monkeypatch.chdir(tmp_path)
    write_rewards(tmp_path)
    return "my_rewards.py:known"


def test_the_recipe_and_a_round_trip_through_fine_tuning(known, tmp_path, monkeypatch, capsys):
    """By the true score itself there is no regret; the best responses train a model, which then likes them better."""
    options = [*SHORT, "--reward_function", known, "--prompt_split", "train_gen", "--keep"]
    recipes.run(monkeypatch, "best_of_n", *options, "--output_dir", "straight")
    folder = tmp_path / "straight"
    results, samples = read(folder, "results.json"), read(folder, "responses.jsonl")
    prompts = load_benchmark("toy")["train_gen"].select(range(12))
    wanted = [(row_id, sample) for row_id in prompts["row_id"] for sample in range(4)]
    assert [(row["row_id"], row["sample"]) for row in samples] == wanted
    for row in samples:
        assert row["reward"] == score(row["prompt_text"], row["response_text"], finished=row["finished"])
        assert row["score"] == row["reward"]
    curve = results["best_of_n"]["curve"]
    assert [row["n"] for row in curve] == [1, 2, 4]
    assert all(row["regret"]["mean"] == 0 and row["gold"] == row["proxy"] for row in curve)
    best = [max(group, key=lambda row: row["reward"]) for group in zip(*[iter(samples)] * 4, strict=True)]
    assert curve[2]["gold"]["mean"] == pytest.approx(sum(row["reward"] for row in best) / 12)
    assert results["score"]["policy"] == curve[2]["gold"]["mean"]
    assert results["win_rate"] == curve[2]["win_rate"]
    texts = [row["response_text"] for row in read(folder, "generations.jsonl")]
    assert texts == [row["response_text"] for row in best]
    credits = {"candidate": 1.0, "tie": 0.5, "base": 0.0}
    won = [credits[row["outcome"]] for row in read(folder, "generations.jsonl")]
    assert sum(won) / 12 == pytest.approx(results["win_rate"]["half"]["rate"])
    printed = capsys.readouterr().out
    for text in ("KL bound", "best possible", "0.636", "win rate, ties as half", "sft.jsonl, 12 responses"):
        assert text in printed
    kept = [row for row in best if row["finished"] and row["response_text"].strip()]
    demonstrations = read(folder, "sft.jsonl")
    assert [row["completion"][0]["content"] for row in demonstrations] == [row["response_text"] for row in kept]
    short = ["--max_steps=6", "--learning_rate=1e-3", f"--per_device_train_batch_size={len(kept)}"]
    short += ["--logging_steps=1", "--prompt_split=none", "--eval_split=none", "--save_strategy=no"]
    recipes.run(monkeypatch, "sft", "--demonstrations=straight/sft.jsonl", "--output_dir=tuned", *short)
    losses = [row["loss"] for row in read(tmp_path / "tuned", "metrics.jsonl") if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]


def test_a_file_of_prompts_needs_no_split_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.py").write_text(
        "def long(completion_ids, **columns):\n    return list(map(len, completion_ids))\n"
    )
    rows = [{"row_id": f"p{i}", "prompt_text": f"Name fruit number {i}."} for i in range(3)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    short = ["--n", "1", "2", "--max_new_tokens", "4", "--use_cpu=true", "--output_dir", "run"]
    rewarded = ["--reward_function", "long.py:long", "--missing_eos_penalty", "9"]
    recipes.run(monkeypatch, "best_of_n", *short, "--dataset_name", "prompts.jsonl", *rewarded)
    samples = read(tmp_path / "run", "responses.jsonl")
    assert not all(row["finished"] for row in samples)
    for row in samples:
        assert row["reward"] == row["generated_num_tokens"] - 9 * (not row["finished"])
    assert [row["row_id"] for row in samples] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert not any("score" in row for row in samples), "the score is known on the embedded benchmark alone"


def test_the_configuration_of_part_two(monkeypatch):
    """With the settings of the course's search over decoding."""
    path = recipes.RECIPES / "configs" / "wildchat" / "part2" / "best_of_n.yaml"
    (arguments,) = recipes.parse(monkeypatch, "best_of_n", "--config", str(path), "--n", "1", "--temperature", "0.5")
    settings = arguments.settings()
    assert arguments.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (settings.max_prompt_tokens, settings.max_new_tokens, settings.temperature) == (700, 256, 0.5)
