"""`CourseConfig`: the course's words for batches, baselines and lengths, and what they mean for TRL."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.trl_private import BeforeLoss
from trl_ext import PolicyTrainer
from trl_ext.runs.course_config import CourseConfig
from trl_ext.toy import MODEL_DIR


@pytest.fixture
def build(tmp_path):
    def build(**settings) -> CourseConfig:
        return CourseConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **settings)

    return build


def test_sizes_of_the_course_become_those_of_trl(build):
    """256 responses to a rollout, 64 to an update in passes of 16: 4 passes an update, 4 updates a pass over them.

    Two passes over the rollout are 8 updates, so 10 rollouts are 80.
    """
    config = build(
        rollout_batch_size=256,
        train_batch_size=64,
        epochs_per_rollout_batch=2,
        group_size=8,
        per_device_train_batch_size=16,
        n_grpo_steps=10,
    )
    assert (config.generation_batch_size, config.num_generations, config.num_iterations) == (256, 8, 2)
    assert (config.gradient_accumulation_steps, config.steps_per_generation) == (4, 16)
    assert (config.updates_per_rollout, config.max_steps) == (8, 80)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rollout_batch_size": 60, "group_size": 8}, "rollout_batch_size 60 .* group_size 8"),
        ({"rollout_batch_size": 96, "train_batch_size": 64}, "rollout_batch_size 96 .* train_batch_size 64"),
        ({"train_batch_size": 24, "per_device_train_batch_size": 16}, "train_batch_size 24 .* 16 responses"),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, "train_batch_size 32 means gradient_accumul"),
        ({"group_size": 4, "num_generations": 8}, "group_size 4 means num_generations 4, and num_generations is 8"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"length_normalization": "mean"}, "length_normalization must be one of masked_mean, masked_normalize"),
        ({"algorithm": "dr_grpo", "use_std_normalization": True}, "without the standard deviation"),
        ({"algorithm": "dr_grpo", "length_normalization": "masked_mean"}, "without length normalisation"),
        ({"algorithm": "no_baseline", "use_std_normalization": True}, "Rewards times log-probabilities"),
        ({"stop": ["</answer>"], "mask_truncated_completions": True}, "mask_truncated_completions"),
    ],
)
def test_what_contradicts_is_refused_with_the_numbers(settings, expected, build):
    with pytest.raises(ValueError, match=expected):
        build(**{"per_device_train_batch_size": 8, **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"algorithm": "grpo"}, ("group_normalized", "clip", "sequence_mean")),
        ({"algorithm": "grpo", "use_std_normalization": False}, ("group_centered", "clip", "sequence_mean")),
        ({"algorithm": "grpo", "length_normalization": "masked_normalize"}, ("group_normalized", "clip", "constant")),
        ({"algorithm": "dr_grpo"}, ("group_centered", "clip", "constant")),
        ({"algorithm": "no_baseline"}, ("no_baseline", "reinforce", "sequence_mean")),
        ({"algorithm": "reinforce_with_baseline"}, ("group_normalized", "reinforce", "sequence_mean")),
        ({"algorithm": "grpo_no_clip"}, ("group_normalized", "no_clip", "sequence_mean")),
    ],
)
def test_algorithms_and_normalizations(settings, expected, build):
    objective = build(**settings).build_objective()
    assert (objective.advantage, objective.surrogate, objective.aggregation) == expected


@pytest.mark.parametrize("algorithm", ["grpo", "grpo_no_clip", "reinforce_with_baseline"])
def test_the_courses_advantages_and_no_divergence(algorithm, build):
    """Rewards 1, 0, 0, 0: mean 1/4, sum of squares 9/16 + 3/16, so the sample's deviation is sqrt(3/4 / 3) = 1/2.

    Advantages 3/4 and -1/4 over 1/2 + 1e-6; the population's deviation, sqrt(3)/4, would give 1.732 and -0.577.
    """
    objective = build(algorithm=algorithm).build_objective()
    found = objective.advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    assert found.tolist() == pytest.approx([0.75 / 0.500001, *[-0.25 / 0.500001] * 3], abs=1e-6)
    assert objective.beta == 0


def test_what_the_course_sets_can_be_given(build):
    given = build(std_ddof=0, advantage_eps=1e-4, beta=0.04).build_objective()
    assert (given.std_ddof, given.advantage_eps, given.beta) == (0, 1e-4, 0.04)
    # What is not of the course stays as its paper has it, and nothing that an estimator does not read is set.
    assert build(algorithm="gspo").build_objective().std_ddof == 0
    assert build(algorithm="rloo").build_objective().beta == 0.03
    for settings in ({"algorithm": "dr_grpo"}, {"algorithm": "no_baseline"}, {"use_std_normalization": False}):
        config = build(**settings)
        assert (config.std_ddof, config.advantage_eps, config.beta) == (None, None, 0)


# ---- Batches ----


@pytest.mark.parametrize(
    ("sizes", "rows", "responses"),
    [
        # An update is 4 passes of 4, a rollout 2 updates.
        ({"rollout_batch_size": 32, "train_batch_size": 16, "per_device_train_batch_size": 4}, [4] * 8, [32]),
        ({"rollout_batch_size": 16, "train_batch_size": 16, "per_device_train_batch_size": 4}, [4] * 8, [16, 16]),
        # Neither word: one pass of 8, transformers' default.
        ({}, [8, 8], [8, 8]),
    ],
)
def test_passes_and_rollouts_are_as_large_as_was_asked(sizes, rows, responses, build):
    """Two updates of the embedded model: the rows of each pass, and the responses of each rollout."""
    passes, rollouts = [], []

    def reward(completions, **columns):
        rollouts.append(len(completions))
        return [float(index % 2) for index in range(len(completions))]

    class Counting(BeforeLoss, PolicyTrainer):
        def before_loss(self, inputs):
            passes.append(len(inputs["completion_ids"]))
            return inputs

    trainer = Counting(
        AutoModelForCausalLM.from_pretrained(MODEL_DIR),
        reward_funcs=reward,
        args=build(group_size=4, max_steps=2, max_completion_length=4, disable_tqdm=True, save_strategy="no", **sizes),
        processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
        train_dataset=Dataset.from_list([{"prompt": f"{n} + 1 ="} for n in range(20)]),
    )
    trainer.train()
    assert (passes, rollouts) == (rows, responses)
    assert trainer.rollouts * trainer.args.generation_batch_size == sum(responses)
