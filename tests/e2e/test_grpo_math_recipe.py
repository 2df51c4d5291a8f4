"""GRPO with verified rewards: stop strings in rollouts, the time budget, and the recipe itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import recipes
from tests.support.recipes import read
from tests.support.trl_private import logged_metrics, score_rollout
from trl_ext import PolicyConfig, PolicyTrainer
from trl_ext.rewards import verified_reward
from trl_ext.runs.folder import config_text
from trl_ext.toy import MODEL_DIR

SHORT = [
    "--max_steps=4",
    "--rollout_batch_size=16",
    "--train_batch_size=16",
    "--per_device_train_batch_size=16",
    "--group_size=4",
    "--eval_every=2",
    "--num_validation_prompts=6",
    "--num_eval_prompts=8",
    "--save_steps=2",
    "--save_total_limit=3",
    "--logging_steps=1",
    "--disable_tqdm=true",
]


# ---- Stop strings ----


def stop_trainer(folder: Path, stop: list[str] | None, **settings) -> PolicyTrainer:
    settings |= {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 48, "beta": 0.0}
    config = PolicyConfig(output_dir=str(folder), stop=stop, report_to="none", use_cpu=True, **settings)
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 25?"}], "answer": str(n + 25)} for n in range(20)]
    return PolicyTrainer(
        AutoModelForCausalLM.from_pretrained(MODEL_DIR),
        reward_funcs=verified_reward("r1_zero"),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
        train_dataset=Dataset.from_list(rows),
    )


@pytest.mark.parametrize("peft", [False, True])
def test_rollouts_end_at_the_stop_string(peft, tmp_path):
    """Sixteen rollouts of the embedded model, which closes most answers: each ends with the tag or its own end."""
    trainer = stop_trainer(tmp_path, ["</answer>"])
    if peft:
        from peft import LoraConfig, get_peft_model

        trainer.model = get_peft_model(trainer.model, LoraConfig(target_modules=["q_proj"]))
        trainer.model_wrapped = trainer.model
    trainer.model.train()
    rows = [trainer.train_dataset[index // 4] for index in range(16)]
    output = score_rollout(trainer, rows)
    tokenizer = trainer.processing_class
    responses = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    closed = [text.endswith("</answer>") for text in texts]
    own_end = [ids[-1] == tokenizer.eos_token_id for ids in responses]
    assert sum(closed) >= 8
    assert all("</answer>" not in text[: -len("</answer>")] for text in texts), "nothing stands behind the tag"
    assert not any(a and b for a, b in zip(closed, own_end, strict=True)), "no end token is put behind the tag"
    assert tokenizer.pad_token_id not in [token for ids in responses for token in ids]
    cut = [not (a or b) for a, b in zip(closed, own_end, strict=True)]
    assert trainer._rollout[1] == [not one for one in cut]
    metrics = logged_metrics(trainer)
    assert metrics["completions/clipped_ratio"] == [pytest.approx(sum(cut) / 16)]
    ended = [len(ids) for ids, one in zip(responses, cut, strict=True) if not one]
    assert metrics["completions/mean_terminated_length"] == [pytest.approx(sum(ended) / len(ended))]
    assert vars(trainer.model).get("generate") in (None, trainer.sampler.generate), "the model is left as it was"


def test_what_a_stop_string_ended_pays_no_penalty(tmp_path):
    trainer = stop_trainer(tmp_path, ["</answer>"], missing_eos_penalty=1.0)
    tag = trainer.processing_class("<answer>5</answer>")["input_ids"]
    assert trainer.has_ended(tag) and trainer.has_ended([trainer.processing_class.eos_token_id])
    assert not trainer.has_ended(tag[:-1]) and not trainer.has_ended([])


def test_rewards_read_no_more_than_evaluations(tmp_path):
    """Where the last token holds `>)`, the bracket is no part of the answer; and what tools say is left as it is."""
    seen = []

    def reward(completions, **columns):
        seen.extend(completions)
        return verified_reward("r1_zero")(None, completions, answer=columns["answer"])

    trainer = stop_trainer(tmp_path, ["</answer>"])
    trainer.reward_funcs, trainer.reward_func_names = [reward], ["reward"]
    trainer.reward_processing_classes = [None]
    kept = "5 </think> <answer> 30 </answer>"
    ids = trainer.processing_class(kept + ")")["input_ids"]
    message, tool = {"role": "assistant", "content": kept + ")"}, {"role": "tool", "content": kept + ")"}
    for completion, expected in (
        (kept + ")", kept),
        ([message], [{**message, "content": kept}]),
        ([tool, message], [tool, {**message, "content": kept}]),
        ("no end", "no end"),
    ):
        rows = [{"prompt": "5 + 25", "answer": "30"}]
        rewards = trainer.total_rewards(rows, ["5 + 25"], [completion], [ids])
        assert seen.pop() == expected
        assert rewards.tolist() == [float(completion != "no end")]


# ---- The time budget ----


def test_a_run_ends_where_its_time_is_up_and_a_rollout_is_used_up(monkeypatch):
    """0.01 hours are 36 s; steps end every 10 s, rollouts every 2 steps: at 20 s, and at 40 s, which is past it."""
    from trl_ext.trainers.callbacks import TimeBudgetCallback

    seconds = SimpleNamespace(seconds=0.0)
    callback = TimeBudgetCallback(0.01, seconds, SimpleNamespace(num_processes=1), period=2)
    stopped = []
    for step in range(1, 6):
        seconds.seconds = 10.0 * step
        control = SimpleNamespace(should_training_stop=False, should_save=False, should_log=False)
        callback.on_step_end(None, SimpleNamespace(global_step=step, max_steps=5), control)
        stopped.append((control.should_training_stop, control.should_save))
    assert stopped == [(False, False)] * 3 + [(True, True), (False, False)]


# ---- The recipe ----


def test_the_last_number_is_the_answer_of_gsm8k(monkeypatch):
    """In training, validation and the final comparison alike, and no tag ends a response."""
    arguments, _, _ = recipes.parse(monkeypatch, "grpo_math", "--reward", "gsm8k", "--num_eval_prompts", "3")
    from trl_ext.runs import reasoning

    sets = reasoning.load_problem_sets(arguments)
    for problems in sets:
        row = problems.rows[0]
        assert problems.reward == "gsm8k"
        assert problems.grade(f"no tags: {row['answer']}", row)["reward"] == 1
        assert problems.grade(f"{row['answer']}, or 0", row)["reward"] == 0
    assert len(sets[2].rows) == 3
    assert reasoning.sampling_settings(arguments, reward="gsm8k").stop == ()
    assert reasoning.sampling_settings(arguments, reward="countdown").stop == ("</answer>",)


def test_a_saved_configuration_reads_back(tmp_path, monkeypatch):
    words = ["--rollout_batch_size", "64", "--train_batch_size", "32", "--per_device_train_batch_size", "16"]
    words += ["--epochs_per_rollout_batch", "2", "--n_grpo_steps", "5", "--use_std_normalization", "false"]
    words += ["--length_normalization", "masked_normalize", "--max_steps", "-1", "--stop", "</answer>"]
    parsed = recipes.parse(monkeypatch, "grpo_math", *words, "--algorithm", "grpo_no_clip")

    path = tmp_path / "config.yaml"
    path.write_text(config_text(*parsed))
    again = recipes.parse(monkeypatch, "grpo_math", "--config", str(path))
    assert yaml.safe_load(config_text(*again)) == yaml.safe_load(path.read_text())
    assert (again[-1].train_batch_size, again[-1].gradient_accumulation_steps) == (16, 2)
    assert again[-1].max_steps == 20 and again[-1].stop == ["</answer>"]


@pytest.mark.slow
def test_a_run_out_of_time_ends_with_a_checkpoint_and_its_table(tmp_path, monkeypatch, capsys):
    """A budget that is spent at once: one rollout of two updates is finished. With more hours it goes on to the end,
    where it is what the run without a budget is."""
    monkeypatch.chdir(tmp_path)
    two = [*SHORT, "--train_batch_size=8", "--per_device_train_batch_size=8", "--save_strategy=steps"]
    recipes.run(monkeypatch, "grpo_math", *two, "--output_dir", "straight")
    capsys.readouterr()
    recipes.run(monkeypatch, "grpo_math", *two, "--output_dir", "broken", "--max_hours", "1e-7")
    assert "stopped by --max_hours 1e-07 after 2 of 4 steps" in capsys.readouterr().out
    results = json.loads((tmp_path / "broken" / "results.json").read_text())
    assert results["run"]["stopped_by_max_hours"] and results["run"]["optimizer_steps"] == 2
    assert (tmp_path / "broken" / "checkpoint-2" / "trainer_state.json").is_file()
    resume = ["--output_dir", "broken", "--resume_from_checkpoint"]
    with pytest.raises(SystemExit):
        recipes.run(monkeypatch, "grpo_math", *two, *resume, "--max_hours", "1e-7")
    assert re.search(r"has taken 0\.00 of its --max_hours 1e-07", capsys.readouterr().err)
    recipes.run(monkeypatch, "grpo_math", *two, *resume, "--max_hours", "1")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "broken"))
    assert all(one[name].equal(other[name]) for name in one)
    steps = [[row["step"] for row in read(tmp_path / name, "metrics.jsonl")] for name in ("straight", "broken")]
    assert sorted(set(steps[0])) == sorted(set(steps[1]))


@pytest.mark.long
def test_the_default_run_improves(tmp_path):
    """The recipe without arguments, as a user starts it: the interval of the gain lies above 0.2."""
    recipes.launch("grpo_math", folder=tmp_path, timeout=600)
    results = json.loads((tmp_path / "runs" / "grpo-math-toy" / "results.json").read_text())
    assert results["score"]["gain"]["low"] > 0.2
