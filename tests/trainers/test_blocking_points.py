"""How often a training step would wait for a GPU: once for each forward pass, and for one exchange a step."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.blocking import counting
from trl_ext import GRPOConfig, GRPOTrainer, PreferenceConfig, PreferenceTrainer, load_benchmark
from trl_ext.models import resolve_model_path

COMMON = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3, "report_to": "none"}
COMMON |= {"disable_tqdm": True, "save_strategy": "no", "logging_steps": 100}


def counts_of_the_last_step(trainer) -> list[Counter]:
    """What each micro-batch of the last step waits for; the first steps check packing, and sample."""
    step, found = trainer.training_step, []

    def counted(*args, **kwargs):
        with counting() as points:
            loss = step(*args, **kwargs)
        found.append(points)
        return loss

    trainer.training_step = counted
    trainer.train()
    assert trainer.packing.packed_tokens
    return found[-2:]


@pytest.mark.parametrize("loss", ["dpo", "aot"])
def test_of_preferences(loss, tmp_path):
    """The policy's and the reference's pass; a batch-coupled loss scores both micro-batches ahead, in four more."""
    args = PreferenceConfig(str(tmp_path), loss=loss, precompute_ref_log_probs=False, **COMMON)
    rows = load_benchmark("toy")["train_prefs"].select(range(24))
    first, last = counts_of_the_last_step(PreferenceTrainer(resolve_model_path("toy"), args=args, train_dataset=rows))
    assert sum(first.values()) <= 2 + 4 * (loss == "aot"), first
    assert sum(last.values()) <= 2 + 1, last


def test_of_a_policy(tmp_path):
    """A micro-batch of a rollout that an earlier step has sampled."""
    args = GRPOConfig(str(tmp_path), num_generations=4, max_completion_length=8, num_iterations=2, beta=0.0, **COMMON)
    rows = load_benchmark("toy")["train_gen"].select(range(24))
    reward = lambda completions, **_: [float(len(str(one))) for one in completions]  # noqa: E731
    trainer = GRPOTrainer(resolve_model_path("toy"), reward_funcs=reward, args=args, train_dataset=rows)
    trainer.args.max_steps = 4
    first, last = counts_of_the_last_step(trainer)
    assert sum(first.values()) <= 1, first
    assert sum(last.values()) <= 1 + 1, last
