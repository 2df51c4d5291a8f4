"""`EvolutionTrainer`: `PolicyTrainer` whose updates follow from the rewards of perturbed policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trl_ext.advantages import group_normalized
from trl_ext.trainers.evolution.config import EvolutionConfig
from trl_ext.trainers.policies import is_zero3
from trl_ext.trainers.policy.generation import greedy_generation
from trl_ext.trainers.policy.reward_functions import length_penalty
from trl_ext.trainers.policy.trainer import PolicyTrainer


class EvolutionTrainer(PolicyTrainer):
    """Trains a policy by evolution strategies: `EvolutionConfig(population=..., perturbation=...)`.

    For each update, every member n of a population adds noise `sigma e_n` to the parameters and answers the same
    prompts greedily. With the mean rewards of the members, standardised over the population to `z_n`, the update is
    `learning_rate / N sum_n z_n e_n`: an ascent that needs no gradient of the model and no log-probabilities. Noise is
    made again from its seed where it is needed, so that memory holds one further copy of the trained parameters, from
    which they are restored exactly, whatever their precision.

    Accepts the arguments of `PolicyTrainer`. Processes share the prompts, and all make the same update. Logged besides
    the metrics of `PolicyTrainer`, means over the members: `population/best`, `/worst` and `/std` of their rewards.

    Qiu et al. 2025, arXiv 2509.24372.

    Raises:
        ValueError: as `PolicyTrainer` does, and for sharded parameters.
    """

    _tag_names = ["trl", "trl_ext", "evolution-strategies"]
    _name = "Evolution strategies"
    _paper: ClassVar[dict] = {
        "title": "Evolution Strategies at Scale: LLM Fine-Tuning Beyond Reinforcement Learning",
        "id": "2509.24372",
    }
    _config_class: ClassVar[type[EvolutionConfig]] = EvolutionConfig
    _without_signal = "all members of every population were rewarded alike"
    _standardised: Tensor | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled or is_zero3(self.accelerator):
            raise ValueError("evolution strategies need whole parameters on each process: use DDP")
        if any(function.of_batch for function in self._shaped_rewards()):
            raise ValueError("reward_shaping: center and whiten would remove what tells members of a population apart")

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _generator(self, member: int) -> torch.Generator:
        """The source of a member's noise, the same on all processes and in a resumed run."""
        words = np.random.SeedSequence((self.args.seed, self.state.global_step, member)).generate_state(2)
        return torch.Generator(device=self.accelerator.device).manual_seed(int(words[0]) << 32 | int(words[1]))

    @contextmanager
    def _perturbed(self, member: int, saved: list[Tensor]) -> Iterator[None]:
        generator, trained = self._generator(member), self._trained()
        try:
            for parameter, before in zip(trained, saved, strict=True):
                parameter.data.copy_(before + self.args.perturbation * noise_like(parameter, generator))
            yield
        finally:
            for parameter, before in zip(trained, saved, strict=True):
                parameter.data.copy_(before)

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:
            with greedy_generation(self):
                return super()._generate_and_score_completions(inputs)
        saved = [parameter.detach().clone() for parameter in self._trained()]
        rewards, seen_signal = [], self._seen_signal
        for member in range(self.args.population):
            with self._perturbed(member, saved), greedy_generation(self):
                output = super()._generate_and_score_completions(inputs)
            # The means of equal rewards in another order are equal only in float64.
            rewards.append((self._weighted_sum(self._rollout[0]) - length_penalty(self)).double().nanmean())
        means = torch.stack(rewards)
        if len(known := means[means.isfinite()]):
            for name, value in (("best", known.max()), ("worst", known.min()), ("std", known.std(correction=0))):
                self._metrics["train"][f"population/{name}"].append(value.item())
        self._standardised = standardised(means)
        self._seen_signal = seen_signal or bool(self._standardised.any())
        return output

    def _compute_loss(self, model, inputs):
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        generators = [self._generator(member) for member in range(self.args.population)]
        # The inner product with the update, whose gradient is the update itself, reversed.
        product = torch.zeros((), device=self.accelerator.device)
        for parameter in self._trained():
            update = torch.zeros(parameter.shape, device=parameter.device)
            for weight, generator in zip(self._standardised.tolist(), generators, strict=True):
                update += weight * noise_like(parameter, generator)
            product = product + (parameter * update.to(parameter.dtype)).sum().float()
        return -product / self.args.population


def standardised(rewards: Tensor) -> Tensor:
    """Rewards of a population less their mean, over their standard deviation; 0 for one that is not finite. [N]."""
    return group_normalized(rewards, len(rewards), eps=1e-8)


def noise_like(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise of a parameter's shape; parameters in order get consecutive numbers of one generator."""
    return torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
