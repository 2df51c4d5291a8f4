"""The one-file recipes make the trainers' updates: in float64 the parameters agree to 1e-9 of the change."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, get_scheduler

from tests.support import REPOSITORY, rollout_once, train_once
from tests.support.tiny import pairs, perturbed
from tests.support.trl_private import AfterRollout
from trl_ext import GRPOTrainer

ONE_FILE = REPOSITORY / "recipes" / "one_file"
pytestmark = pytest.mark.usefixtures("in_float64")
# AdamW with a schedule and with clipping that takes effect.
OPTIMIZER = {"optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_grad_norm": 0.01}


def script(name: str, **constants) -> SimpleNamespace:
    """A one-file recipe as a module, with some of its constants replaced."""
    found = runpy.run_path(str(ONE_FILE / f"{name}.py"))
    functions = {key: value for key, value in found.items() if callable(value) and hasattr(value, "__globals__")}
    for function in functions.values():
        if function.__module__ == found["__name__"]:
            function.__globals__.update(constants)
    return SimpleNamespace(**functions)


def optimizer_of(policy, updates: int) -> tuple:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=OPTIMIZER["learning_rate"], weight_decay=0.0)
    return optimizer, get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=updates)


def load(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def check_equal(policy, trainer, before) -> None:
    """Both moved, and to the same place: the difference is at most 1e-9 of the largest change of a parameter."""
    own = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    initial = dict(before.named_parameters())
    moved = train_once.largest_difference(own, initial)
    assert moved > 1e-4
    assert train_once.largest_difference(own, train_once.parameters(trainer)) < 1e-9 * moved


@pytest.mark.parametrize("iterations", [1, 3])
def test_grpo(tiny_model_path, tmp_path, iterations):
    recipe = script(
        "grpo", GROUP_SIZE=4, UPDATES_PER_ROLLOUT=iterations, MAX_GRAD_NORM=OPTIMIZER["max_grad_norm"], BETA=0.1
    )
    rollouts = []

    class Recorded(AfterRollout, rollout_once.FixedRollouts, GRPOTrainer):
        def after_rollout(self, output):
            rollouts.append(output)

    spec = {
        "trainer": "GRPOTrainer",
        "model": tiny_model_path,
        "prompts": 2,
        "args": {**OPTIMIZER, "num_iterations": iterations, "max_steps": iterations, "beta": 0.1, "epsilon": 0.2},
    }
    trainer = rollout_once.train(spec, str(tmp_path), trainer_class=Recorded)

    (rollout,) = rollouts
    prompts, responses = (
        [ids[mask.bool()].tolist() for ids, mask in zip(rollout[f"{part}_ids"], rollout[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    )
    policy = load(tiny_model_path)
    # TRL keeps rewards in float32.
    rewards = torch.tensor(rollout_once.thirds(responses), dtype=torch.float32).double()
    batch = recipe.batch_of(prompts, responses, trainer.processing_class.pad_token_id)
    recipe.train_on(policy, load(tiny_model_path), *optimizer_of(policy, iterations), batch, rewards)
    check_equal(policy, trainer, load(tiny_model_path))


def test_preference(tiny_model_path, tmp_path):
    recipe = script("preference", MAX_GRAD_NORM=OPTIMIZER["max_grad_norm"])
    spec = {
        "trainer": "AOTTrainer",
        "model": tiny_model_path,
        "reference_seed": 3,
        "args": {**OPTIMIZER, "max_steps": 2, "per_device_train_batch_size": 4, "beta": 0.1},
    }
    trainer = train_once.train(spec, str(tmp_path))

    policy, reference = load(tiny_model_path), perturbed(load(tiny_model_path), seed=3, scale=0.05)
    steps = optimizer_of(policy, 2)
    tokenizer = trainer.processing_class
    tokenized = [recipe.tokenize(tokenizer, row) for row in pairs(8)]
    for start in (0, 4):
        recipe.train_on(policy, reference, *steps, tokenized[start : start + 4], tokenizer.pad_token_id)
    check_equal(policy, trainer, load(tiny_model_path))
