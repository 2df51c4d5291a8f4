"""A curriculum: the prompts of a rollout are drawn by a function of the rewards that their responses had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import numpy as np
from torch import Tensor

from trl_ext.names import load_function
from trl_ext.resilience.faults import TrainingFault
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.policy.resampling import Rows, check_drawable, own_rows, raw_rewards


def draw_prompts(weights: Sequence[float | None], count: int, random: np.random.Generator) -> list[int]:
    """Draw different prompts, each next one in proportion to the weights of those that are left.

    Prompts of weight 0 are drawn when all others are, and all again after the last.

    Args:
        weights: of each prompt, not negative; None where it is not known yet, which counts as the mean of the others,
            or as 1 if that is 0.
        count: how many to draw.
        random: source of the draws.

    Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir".
    """
    known = [weight for weight in weights if weight is not None]
    mean = sum(known) / max(len(known), 1) or 1.0
    chances = np.array([mean if weight is None else weight for weight in weights])
    waits = random.exponential(size=len(chances))
    with np.errstate(divide="ignore"):
        order = np.lexsort((waits, waits / chances)).tolist()
    return [order[place % len(order)] for place in range(count)]


class Curriculum:
    """Weights of the training prompts, from the rewards of their latest responses; does nothing without a function.

    Draws follow from the seed, the number of the rollout and the weights, which checkpoints hold, so that a resumed
    run draws the same. All processes have the same rewards and therefore draw alike.

    Foster et al. 2025, arXiv 2502.12272, weigh prompts whose rewards are 0 or 1 by p (1 - p), where p is their mean.

    Args:
        args: `args.curriculum` names the function from a prompt's rewards, up to [G], to its weight. It is not called
            with rewards that are missing, and a prompt without any keeps its weight.
        given: the trainer's arguments.

    Attributes:
        weights: of each prompt; None for prompts without rewards yet.

    Raises:
        ValueError: prompts cannot be drawn from such data, or dynamic sampling draws them too.
    """

    def __init__(self, args: PolicyConfig, given: dict[str, Any]):
        self.weights: list[float | None] = []
        self._drawn: list[int] = []
        self._weight: Callable[[Tensor], float] | None = None
        if args.curriculum is None:
            return
        if args.resample_groups:
            raise ValueError("curriculum and resample_groups both choose the prompts of a rollout: set one of them")
        check_drawable("curriculum", given)
        self._weight = load_function(args.curriculum, "curriculum")

    def draw(self, trainer, inputs: Rows) -> Rows:
        """This process's rows of a rollout that is about to begin, with the columns of `inputs`, and else `inputs`."""
        rollout = trainer.args.steps_per_generation * trainer.num_iterations
        begins = trainer._step % rollout == 0 or trainer._buffered_inputs is None
        if self._weight is None or not trainer.model.training or not begins:
            return inputs
        self.weights += [None] * (len(trainer.train_dataset) - len(self.weights))
        random = np.random.default_rng((trainer.args.seed, trainer.rollouts))
        count = trainer.args.generation_batch_size // trainer.num_generations
        self._drawn = draw_prompts(self.weights, count, random)
        return own_rows(trainer, self._drawn, inputs)

    def observe(self, trainer) -> None:
        """Weigh the prompts of the rollout anew by its rewards before shaping and penalties.

        Raises:
            TrainingFault: a weight is negative or no number.
        """
        if self._weight is None or not trainer.model.training:
            return
        for index, rewards in zip(self._drawn, raw_rewards(trainer).view(-1, trainer.num_generations), strict=True):
            known = rewards[rewards.isfinite()]
            if not len(known):
                continue
            weight = float(self._weight(known))
            if not (isfinite(weight) and weight >= 0):
                seen = ", ".join(f"{reward:.3g}" for reward in known.tolist())
                raise TrainingFault(
                    f"the curriculum {trainer.args.curriculum} must give a weight of 0 or more, and gave {weight:.3g} "
                    f"for the rewards {seen}"
                )
            self.weights[index] = weight
        seen = 1 - self.weights.count(None) / len(self.weights)
        trainer._metrics["train"]["curriculum/seen"].append(seen)
