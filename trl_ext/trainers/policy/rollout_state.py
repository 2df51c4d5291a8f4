"""`RolloutState`: the state that online training adds to a checkpoint, and the position within a rollout on resume."""

from __future__ import annotations

from typing import Any

from trl_ext.processes import warn_once_per_run
from trl_ext.rewards import ShapedReward


class RolloutState:
    """Mixin before TRL's `GRPOTrainer`, for a trainer with `plain_reward_functions`."""

    @property
    def shaping_state(self) -> list[dict[str, Any]]:
        """The states of the shaped reward functions, in order; equal on all processes."""
        return [function.state_dict() for function in self._shaped_rewards()]

    @shaping_state.setter
    def shaping_state(self, states: list[dict[str, Any]]) -> None:
        shaped = self._shaped_rewards()
        if len(shaped) != len(states):
            raise ValueError(
                f"the checkpoint has the state of {len(states)} shaped rewards, and there are {len(shaped)}: resume "
                "with the run's own rewards"
            )
        for function, state in zip(shaped, states, strict=True):
            function.load_state_dict(state)

    def _shaped_rewards(self) -> list[ShapedReward]:
        return [f for f in self.plain_reward_functions.values() if isinstance(f, ShapedReward)]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # TRL samples at a fixed interval of micro-batches. The checkpoint does not store their count, since a resumed
        # run may use micro-batches of another size: the count follows from the data that the epoch has used.
        if kwargs["epoch"] == kwargs["epochs_trained"]:
            per_rollout = self.args.steps_per_generation * self.num_iterations
            self._step = kwargs["steps_trained_in_current_epoch"] % per_rollout
            self._buffered_inputs = None
            if self._step:
                warn_once_per_run(
                    f"step {self.state.global_step} lies within a rollout, which is not part of a checkpoint: what is "
                    "left of it is sampled anew"
                )
        super()._run_epoch(*args, **kwargs)
