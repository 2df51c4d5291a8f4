"""`RolloutPosition`: a run that is taken up in other micro-batches still samples where its updates ask for it."""

from __future__ import annotations

from typing import Any

from trl_ext.trainers.defaults import warn_once_per_run


class RolloutPosition:
    """Mixed in before TRL's `GRPOTrainer`, which samples whenever its count of micro-batches comes round.

    The count is not carried over, as its unit may have changed: it follows from the data that the epoch has used, of
    which every epoch takes whole rollouts.
    """

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
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
