"""Methods of 2024 to 2026 in numbers: each example gives values and a gradient, to six decimals.

An example is a function of a leaf tensor in float64. Its gradient, where there is one, is also compared with central
differences of its value, which know nothing of the code.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from tests.support.naive_policy import Steps, log_probs, model_in_float64, rows_of
from tests.support.rollout_once import build, prompts, thirds
from tests.support.train_once import relative_difference, result
from tests.support.trl_private import rollout_batches
from trl_ext.advantages import gae, optimal_value
from trl_ext.algorithms import PolicyObjective
from trl_ext.losses import (
    bco,
    length_adaptive_lambda,
    optimal_advantage,
    reward_shift,
    soft_value,
)
from trl_ext.rewards.shaping_steps import soft_overlong


def tensor(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gae_with(lam) -> torch.Tensor:
    """Advantages and returns of a response with reward 1 at its end, and values .5, .6, .7."""
    return torch.cat(gae(tensor([0, 0, 1.0]), tensor([0.5, 0.6, 0.7]), torch.ones(1, 3), 1.0, lam))


# Name -> function, leaf, values, gradient of their sum (None where there is none).
EXAMPLES = {
    # Shift (mean of .2, -.1, -.05 and mean of -.1) / 2 = -0.041667, and a constant for the gradient.
    "BCO": (
        lambda ratios: bco(ratios, torch.tensor([1, 1, 1, 0]), reward_shift([0.05, 3, -0.1, 1]), beta=0.1),
        (2.0, -1.0, -0.5, -1.0),
        (0.579596, 0.722739, 0.697323, 0.664406),
        (-0.043988, -0.051458, -0.050208, 0.048542),
    ),
    "BCO, shift without a label": (lambda sums: tensor(reward_shift(sums.tolist())), (0.6, 3, 0, 0), (0.1,), None),
    "A*-PO, value": (lambda r: soft_value(r, 8, beta=0.5), (1, 0, 0, 1, 0, 0, 0, 0), (0.477229,), None),
    "A*-PO, small beta": (lambda r: soft_value(r, 8, beta=0.05), (1, 0, 0, 1, 0, 0, 0, 0), (0.930685,), None),
    "A*-PO, large beta": (lambda r: soft_value(r, 8, beta=50.0), (1, 0, 0, 1, 0, 0, 0, 0), (0.251881,), None),
    # The log-ratio is 5; 2 (0.001 5 - 0.28311) 0.001 = -0.000556.
    "A*-PO, loss": (
        lambda h: optimal_advantage(
            h[None], 0 * h[None], torch.ones(1, 2), optimal_value(tensor(1), 1, tensor(0.716890))
        ),
        (2.0, 3.0),
        (0.077345,),
        (-0.000556, -0.000556),
    ),
    "DAPO, punishment of long responses": (
        lambda lengths: soft_overlong(lengths, 100, 20),
        (50, 85, 100, 60),
        (0, -0.25, -1, 0),
        None,
    ),
    "VAPO, lambda": (
        lambda lengths: length_adaptive_lambda(lengths),
        (3, 20, 40, 100, 1000, 8000),
        (0, 0, 0.5, 0.8, 0.98, 0.9975),
        None,
    ),
    "VAPO, advantages": (lambda lam: gae_with(lam)[0], (0.8,), (0.372, 0.34, 0.3), None),
    "VAPO, returns": (lambda lam: gae_with(lam)[1], (1.0,), (1, 1, 1), None),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    function, leaf, values, gradient = EXAMPLES[name]
    point = tensor(*leaf).requires_grad_(gradient is not None)
    found = function(point)
    assert found.reshape(-1).tolist() == pytest.approx(values, abs=6e-7)
    assert found.requires_grad == (gradient is not None)
    if gradient is None:
        return
    (slope,) = torch.autograd.grad(found.sum(), point)
    assert slope.tolist() == pytest.approx(gradient, abs=6e-7)


# ---- In a trainer ----


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("size, accumulation", [(8, 1), (2, 4)])
def test_a_star_po_trains_on_its_regression(size, accumulation, policy_path, tmp_path):
    """(0.3 h - (r - V))^2 of eight responses, V from the data; two rows have none, and their advantages are 0."""
    rows = [{**row, "optimal_value": index / 10 if index < 6 else None} for index, row in enumerate(prompts())]
    args = {"algorithm": "a_star_po", "num_generations": 1, "beta": 0.3, "per_device_train_batch_size": size}
    spec = {
        "model": policy_path,
        "perturb": 1,
        "fixed": True,
        "args": {**args, "gradient_accumulation_steps": accumulation},
    }
    steps = Steps()
    trainer = build(spec, str(tmp_path), train_dataset=Dataset.from_list(rows), callbacks=[steps])
    trainer.train()
    policy, reference = model_in_float64(policy_path, steps.weights[0]), model_in_float64(policy_path)
    found = [row for batch in rollout_batches(trainer) for row in rows_of(batch)]
    encode = trainer.processing_class.apply_chat_template
    values = {
        tuple(encode(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]): row[
            "optimal_value"
        ]
        for row in rows
    }
    total = 0.0
    for prompt, response in found:
        with torch.no_grad():
            base = log_probs(reference, prompt, response).sum()
        value = values[tuple(prompt)]
        advantage = 0.0 if value is None else thirds([response])[0] - value
        total = total + (0.3 * (log_probs(policy, prompt, response).sum() - base) - advantage) ** 2 / 8
    total.backward()
    gradient = torch.cat([p.grad.flatten() for _, p in policy.named_parameters()])
    assert result(trainer).losses == pytest.approx([total.item()], rel=1e-6)
    assert relative_difference(steps.gradients[0], gradient) < 1e-6


def test_a_star_po_names_what_it_lacks(policy_path, tmp_path):
    spec = {"model": policy_path, "args": {"algorithm": "a_star_po", "num_generations": 1}}
    rows = [{name: value for name, value in row.items() if name != "optimal_value"} for row in prompts()]
    with pytest.raises(ValueError, match="a_star_po needs the data's column optimal_value"):
        build(spec, str(tmp_path), train_dataset=Dataset.from_list(rows))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"beta": 0.0}, "--beta 0.0 and --surrogate optimal_advantage contradict"),
        ({"kl_in": "reward"}, "--kl_in reward and --surrogate optimal_advantage contradict"),
        ({"advantage": "group_centered"}, "A\\*-PO has advantage optimal_value"),
        ({"ratio": "token"}, "A\\*-PO has ratio none"),
    ],
)
def test_what_contradicts_a_star_po(settings, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective("a_star_po", **settings)
