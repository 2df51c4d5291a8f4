"""`EvolutionConfig`: a `PolicyConfig` with a population in place of a loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl_ext.advantages import no_baseline
from trl_ext.algorithms import PolicyObjective
from trl_ext.losses import unclipped_surrogate
from trl_ext.registry import Algorithm
from trl_ext.settings import LOSS_SETTINGS
from trl_ext.trainers.defaults import check_at_least
from trl_ext.trainers.policy.config import PolicyConfig
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


class EvolutionObjective(PolicyObjective):
    """The row `evolution`, described by its population, since nothing of a loss is used."""

    def __init__(self, **population: float):
        super().__init__(EVOLUTION)
        self._population = population

    def to_dict(self) -> dict:
        return {"algorithm": "evolution", **self._population, "options": {}}


_NO_LOSS = "the update follows from the rewards of the population alone"
# Settings of `PolicyConfig` without an effect: setting -> why.
_NOT_USED = {
    **dict.fromkeys((*LOSS_SETTINGS, "loss_type", "importance_sampling_level", "delta", "entropy_coef"), _NO_LOSS),
    **dict.fromkeys(("advantage", "std_ddof", "advantage_eps", "advantage_clip", "scale_rewards"), _NO_LOSS),
    **dict.fromkeys(("top_entropy_quantile", "off_policy_mask_threshold"), _NO_LOSS),
    **dict.fromkeys(("resample_groups", "group_filter", "curriculum"), "all members of a population have one batch"),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), "responses are greedy"),
    "num_generations": "greedy responses to a prompt are all the same",
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
    perturbation: float = field(default=1e-3, metadata={"help": "Standard deviation of the noise of a parameter."})
    optim: str = field(default="sgd", metadata={"help": "sgd makes the update of the paper."})
    learning_rate: float = field(default=5e-4, metadata={"help": "Of the update, which does not divide by the noise."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "The schedule of the learning rate."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "0 for no clip: a sum of noise is large."})

    def __post_init__(self):
        check_at_least(self, {"population": 2})
        if self.perturbation <= 0:
            raise ValueError(f"perturbation must be positive, got {self.perturbation}")
        refuse_given(self, _NOT_USED)
        super().__post_init__()
        if self.updates_per_rollout > 1 or self.gradient_accumulation_steps > 1:
            raise ValueError(
                "each update has a population of its own, and its responses are one batch: leave out "
                "generation_batch_size, num_iterations and gradient_accumulation_steps"
            )

    def build_objective(self) -> EvolutionObjective:
        """The row `evolution` with its population."""
        return EvolutionObjective(population=self.population, perturbation=self.perturbation)
