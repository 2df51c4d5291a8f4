"""Skips and counts updates that are not finite, and stops a run after too many of them in a row."""

from __future__ import annotations

import logging

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class UpdateGuard(TrainerCallback):
    """Drops the gradients of an optimizer step whose gradient norm, loss or rewards are not finite.

    The step then changes neither the parameters nor the optimizer's state. The step counter and the learning-rate
    schedule advance. After `limit` such steps in a row, the run saves a checkpoint, if its trainer can, and stops.

    DeepSpeed itself skips steps whose gradient is not finite, inside the backward pass; they are counted here.

    Attributes:
        skipped: number of skipped steps by cause: `reward`, `loss` or `gradient`.
        failure: why the run was stopped; None if it was not.
    """

    def __init__(self, trainer, limit: int):
        self.trainer = trainer
        self.limit = limit
        self.skipped = {"reward": 0, "loss": 0, "gradient": 0}
        self.in_a_row = 0
        self.failure: str | None = None
        self._gradient_norm: torch.Tensor | float = 0.0
        # Whether a reward, and a loss, of this optimizer step was not finite on this process. They stay on the device,
        # since a look at one would wait for the backward pass of its micro-batch.
        self._faults: dict[str, torch.Tensor] = {}

    def observe_gradient_norm(self, norm: torch.Tensor | float | None) -> None:
        """Record the norm of the step's gradient over all processes; any non-finite entry makes it non-finite."""
        # Under FSDP2, a process holds a part of it.
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._gradient_norm = 0.0 if norm is None else norm

    def observe_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of a micro-batch."""
        self._observe("loss", ~loss.detach().isfinite().all())

    def observe_reward(self, bad: torch.Tensor) -> None:
        """Record whether a micro-batch's loss was computed from a reward that was not finite.

        Raises FloatingPointError if it was, under DeepSpeed, which skips only steps whose gradient is not finite.
        """
        self._observe("reward", bad)
        if self.trainer.is_deepspeed_enabled and bad:
            raise FloatingPointError(
                f"a reward at step {self.trainer.state.global_step} was not finite, and DeepSpeed cannot skip the "
                "update: look into the reward function, and resume from the last checkpoint"
            )

    def _observe(self, name: str, bad: torch.Tensor) -> None:
        self._faults[name] = self._faults[name] | bad if name in self._faults else bad

    def on_train_begin(self, args, state, control, **kwargs):
        # Training may continue after a stop, with other settings.
        self.failure, self.in_a_row = None, 0
        self._faults.clear()
        # transformers has reset its counters, and no epoch has begun.
        self.trainer.restore_progress()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        cause = self._cause()
        self._faults.clear()
        self.in_a_row = self.in_a_row + 1 if cause else 0
        if cause:
            # Without gradients, an optimizer leaves parameters and its own state as they are.
            self.trainer.model.zero_grad(set_to_none=True)
            self.skipped[cause] += 1
            logger.warning(f"step {state.global_step + 1}: the {cause} was not finite, the update is skipped")
        if self.in_a_row >= self.limit:
            counts = ", ".join(f"{count} x {name}" for name, count in self.skipped.items() if count)
            self.failure = (
                f"stopped at step {state.global_step + 1}: {self.in_a_row} updates in a row were not finite "
                f"(in all: {counts}); the last checkpoint in {args.output_dir} has finite parameters. Lower the "
                "learning rate, look at the data and the rewards, or raise max_skipped_updates"
            )
            # The checkpoint that follows is meant to be resumed with other settings.
            self.in_a_row = 0
        self.trainer._metrics["train"]["skipped_updates"] = [float(sum(self.skipped.values()))]

    def _cause(self) -> str | None:
        """What was not finite on any process; None if the update can be applied."""
        accelerator = self.trainer.accelerator
        gradient = ~torch.as_tensor(self._gradient_norm).isfinite()
        flags = [self._faults.get("reward", False), self._faults.get("loss", False), gradient]
        flags = [torch.as_tensor(flag, device=accelerator.device, dtype=torch.float32) for flag in flags]
        rewards, losses, gradient = accelerator.reduce(torch.stack(flags), reduction="sum").tolist()
        # In float16 an overflow is routine: the loss scaler skips the step itself and lowers its scale.
        gradient = gradient and accelerator.scaler is None
        return "reward" if rewards else "loss" if losses else "gradient" if gradient else None

    def on_step_end(self, args, state, control, **kwargs):
        if self.failure is not None:
            stop_training(args, state, control, saves=self.trainer.saves_within_training)

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.failure is not None:
            leave_epoch(state, control, saves=self.trainer.saves_within_training)


def stop_training(args, state, control, *, saves: bool) -> None:
    """At the end of a step, stop with a single checkpoint; `leave_epoch` must follow at the end of the epoch."""
    if args.save_total_limit == 1:
        # transformers would keep the best checkpoint alone at the end, and the latest is to resume from.
        args.save_total_limit = 2
    control.should_training_stop = True
    # A complete epoch is logged and evaluated before it is saved, since a resumed run does not repeat that.
    control.should_save = saves and not _completes_epoch(state)


def leave_epoch(state, control, *, saves: bool) -> None:
    """At the end of an epoch in which the run stops, skip what applies only to complete epochs, or save it.

    transformers treats an interrupted epoch as complete.
    """
    control.should_save = saves and _completes_epoch(state)
    if not _completes_epoch(state):
        control.should_log = control.should_evaluate = False


def _completes_epoch(state) -> bool:
    return state.epoch % 1 == 0 or state.global_step >= state.max_steps
