"""Specifications of `PPOTrainer` for `rollout_once`, and what their tests record."""

from __future__ import annotations

import torch
from transformers import TrainerCallback


def specification(policy_path: str, *, args: dict | None = None, **rest) -> dict:
    """Two updates on one rollout, one response to a prompt."""
    defaults = {"num_generations": 1, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.2}
    return {"trainer": "PPOTrainer", "model": policy_path, "perturb": 1, "args": {**defaults, **(args or {})}, **rest}


def move_value_head(trainer, scale: float = 0.3):
    """Off zero, where values and their gradient would say little."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in trainer.value_model.parameters().items():
            if "value_head.trunk" not in name:
                weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=torch.float32))
    return trainer


class Steps(TrainerCallback):
    """Keeps all weights before each update, and the gradients of those that are trained."""

    def __init__(self):
        self.weights, self.gradients = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.weights.append({name: weight.detach().clone().double() for name, weight in model.named_parameters()})
        trained = {name: w for name, w in model.named_parameters() if w.requires_grad}
        self.gradients.append({name: w.grad.double() for name, w in trained.items()})


KINDS = ("shared", "separate")


def of_kind(kind: str, policy_path: str, args: dict | None = None, **rest) -> dict:
    """With a value function of one of `KINDS`, an adaptive KL coefficient, and four updates."""
    args = {"value_model": kind, "kl_target": 0.5, "kl_horizon": 50, "value_learning_rate": 0.5, **(args or {})}
    if kind == "separate":
        args["value_model_name_or_path"] = policy_path
    return specification(policy_path, args={"max_steps": 4, **args}, **rest)
