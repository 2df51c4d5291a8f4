"""`EvolutionTrainer`: evolution strategies, which learn from rewards of perturbed policies, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trl_ext.advantages import no_baseline
from trl_ext.algorithms import PolicyObjective
from trl_ext.losses import unclipped_surrogate
from trl_ext.registry import Algorithm
from trl_ext.settings import LOSS_SETTINGS
from trl_ext.trainers.defaults import check_at_least
from trl_ext.trainers.policies import is_zero3
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.policy.generation import greedy_generation
from trl_ext.trainers.policy.reward_functions import length_penalty
from trl_ext.trainers.policy.trainer import PolicyTrainer
from trl_ext.trainers.trl_settings import refuse_given

# Not a row of the table, since `PolicyTrainer` has no population.
EVOLUTION = Algorithm(
    "evolution",
    unclipped_surrogate,
    summary="Evolution strategies on greedy responses",
    paper="2509.24372",
    advantage=no_baseline,
    surrogate="no_clip",
    group_size=1,
)
_NO_LOSS = "the update follows from the rewards of the population alone"
# Settings of `PolicyConfig` without an effect: setting -> why.
_NOT_USED = {
    **dict.fromkeys((*LOSS_SETTINGS, "loss_type", "importance_sampling_level", "delta"), _NO_LOSS),
    **dict.fromkeys(("advantage", "std_ddof", "advantage_eps", "advantage_clip", "scale_rewards"), _NO_LOSS),
    **dict.fromkeys(("entropy_coef", "top_entropy_quantile", "off_policy_mask_threshold"), _NO_LOSS),
    **dict.fromkeys(("sampler_correction", "sampler_correction_min", "sampler_correction_max"), _NO_LOSS),
    **dict.fromkeys(("resample_groups", "group_filter", "curriculum"), "all members of a population have one batch"),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), "responses are greedy"),
    "use_vllm": "vLLM would need the weights of each member",
}


@dataclass
class EvolutionConfig(PolicyConfig):
    """Evolution strategies: the fields of `PolicyConfig`, and those below.

    Raises:
        ValueError: as `PolicyConfig` does, and for settings that a population leaves without an effect.
    """

    _method = "evolution"

    algorithm: str = "evolution"
    population: int = field(default=30, metadata={"help": "Perturbed policies for each update."})
    perturbation: float = field(
        default=1e-3, metadata={"help": "Standard deviation of the noise that is added to each parameter."}
    )
    optim: str = field(default="sgd", metadata={"help": "sgd makes the update of the paper."})
    learning_rate: float = field(default=5e-4, metadata={"help": "Of the update, which does not divide by the noise."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "The schedule of the learning rate."})
    max_grad_norm: float = field(
        default=0.0, metadata={"help": "The sum of noise is large by its number: 0, no clip."}
    )

    def __post_init__(self):
        check_at_least(self, {"population": 2})
        if self.perturbation <= 0:
            raise ValueError(f"perturbation must be positive, got {self.perturbation}")
        refuse_given(self, _NOT_USED)
        super().__post_init__()
        if self.updates_per_rollout > 1 or self.gradient_accumulation_steps > 1:
            raise ValueError(
                "each update has a population of its own, whose responses are one batch: give a larger "
                "per_device_train_batch_size instead of generation_batch_size, num_iterations or accumulation"
            )

    def build_objective(self) -> PolicyObjective:
        """The row `evolution`, of which `PolicyTrainer` uses the group size and the metrics."""
        return self._objective_of(EVOLUTION)


class EvolutionTrainer(PolicyTrainer):
    """Trains a policy by evolution strategies: `EvolutionConfig(population=..., perturbation=...)`.

    For each update, every member n of a population adds noise `sigma e_n` to the parameters and answers the same
    prompts greedily. With the mean rewards of the members, standardised over the population to `z_n`, the update is
    `learning_rate / N sum_n z_n e_n`: an ascent that needs no gradient of the model and no log-probabilities. Noise is
    made again from its seed where it is needed, so that memory holds one further copy of the trained parameters, from
    which they are restored exactly, whatever their precision.

    Accepts the arguments of `PolicyTrainer`. With several processes each answers its share of the prompts, and all
    make the same update. Logged in addition to the metrics of `PolicyTrainer`, which are means over the members:
    `population/best`, `/worst` and `/std` of their mean rewards.

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

    # ---- The population ----

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _generator(self, member: int) -> torch.Generator:
        """The source of a member's noise, the same on all processes and in a resumed run."""
        words = np.random.SeedSequence((self.args.seed, self.state.global_step, member)).generate_state(2)
        seed = int(words[0]) << 32 | int(words[1])
        return torch.Generator(device=self.accelerator.device).manual_seed(seed)

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
            return super()._generate_and_score_completions(inputs)
        saved, rewards = [parameter.detach().clone() for parameter in self._trained()], []
        seen_signal = self._seen_signal
        for member in range(self.args.population):
            with self._perturbed(member, saved), greedy_generation(self):
                output = super()._generate_and_score_completions(inputs)
            rewards.append((self._weighted_sum(self._rollout[0]) - length_penalty(self)).nanmean())
        means = torch.stack(rewards).double()
        known = means[means.isfinite()]
        if len(known):
            for name, value in (("best", known.max()), ("worst", known.min()), ("std", known.std(correction=0))):
                self._metrics["train"][f"population/{name}"].append(value.item())
        self._standardised = standardised(means)
        self._seen_signal = seen_signal or bool(self._standardised.any())
        return output

    # ---- The update ----

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
    """Rewards of a population less their mean, over their standard deviation (of the population) plus 1e-8. [N].

    Those that are not finite, and all if they are equal, become 0.
    """
    known = rewards.isfinite()
    found = rewards[known]
    if not len(found) or bool((found == found[0]).all()):
        return torch.zeros_like(rewards)
    return ((rewards - found.mean()) / (found.std(correction=0) + 1e-8)).masked_fill(~known, 0)


def noise_like(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise of a parameter's shape; parameters in order get consecutive numbers of one generator."""
    return torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
