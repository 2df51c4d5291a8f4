"""`PolicyTrainer`: every algorithm trains, what reaches generation, and how updates map to rollouts."""

from __future__ import annotations

import pytest

import trl_ext
from tests.support.rollout_once import DEFAULTS, prompts, train
from tests.support.trl_private import BeforeLoss, rollout_batches
from trl_ext import PolicyConfig

# ---- What reaches generation ----


def test_long_prompts_lose_their_beginning(policy_path, tmp_path):
    """The last 12 tokens, with the template's start of the answer at their end; reward functions see the whole."""
    seen = []

    def reward(prompts, completion_ids, **_):
        seen.extend(prompts)
        return [float(len(ids)) for ids in completion_ids]

    trainer = train({"model": policy_path, "args": {"max_prompt_tokens": 12}}, str(tmp_path), reward_funcs=reward)
    batch = rollout_batches(trainer)[0]
    found = {
        tuple(ids[mask.bool()].tolist()) for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    }
    rows = [row["prompt"] for row in prompts(2)]
    encode = trainer.processing_class.apply_chat_template
    whole = [encode(row, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"] for row in rows]
    assert all(len(ids) > 12 for ids in whole)
    assert found == {tuple(ids[-12:]) for ids in whole}
    assert seen[0] == rows[0] and seen[-1] == rows[1]


# ---- Rollouts and updates ----


@pytest.mark.parametrize(
    "settings, expected",
    [
        # Rows in a rollout / rows per forward pass = micro-batches; times iterations, over accumulation.
        ({"generation_batch_size": 64, "num_iterations": 2, "gradient_accumulation_steps": 2}, 8),
        ({}, 1),
        ({"gradient_accumulation_steps": 4}, 1),
        ({"steps_per_generation": 4, "num_iterations": 3}, 12),
        # 3 micro-batches, 2 to an update: after 3 updates, two rollouts are used up.
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 3),
    ],
)
def test_updates_per_rollout(settings, expected, tmp_path):
    assert PolicyConfig(**{**DEFAULTS, **settings}, output_dir=str(tmp_path)).updates_per_rollout == expected


def test_the_mapping_of_the_course(policy_path, tmp_path):
    """64 responses to 16 prompts, twice over in updates of 16: 8 updates a rollout, and two rollouts for 16 steps."""
    calls, sizes = [], []

    def reward(completion_ids, row_id, **_):
        calls.append(row_id)
        return [float(sum(ids) % 7) for ids in completion_ids]

    class Counting(BeforeLoss, trl_ext.PolicyTrainer):
        def before_loss(self, inputs):
            sizes.append((self.state.global_step, len(inputs["completion_ids"])))
            return inputs

    args = {"generation_batch_size": 64, "num_generations": 4, "num_iterations": 2, "per_device_train_batch_size": 8}
    args |= {"gradient_accumulation_steps": 2, "max_steps": 16, "learning_rate": 0.01}
    spec = {"model": policy_path, "args": args, "prompts": 40}
    trainer = train(spec, str(tmp_path), reward_funcs=reward, trainer_class=Counting)
    assert trainer.args.updates_per_rollout == 8
    assert trainer.state.global_step == 16
    assert [len(call) for call in calls] == [64, 64]
    assert [len(set(call)) for call in calls] == [16, 16]
    assert not set(calls[0]) & set(calls[1])
    assert sizes == [(step, 8) for step in range(16) for _ in range(2)]
