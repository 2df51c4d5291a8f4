"""SIGTERM and Ctrl-C: a training that receives one saves a checkpoint at the next boundary, and the program ends."""

from __future__ import annotations

import os
import signal

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from trl_ext.processes import end_processes, is_main_process
from trl_ext.resilience.guards import leave_epoch, stop_training


class Preemption(TrainerCallback):
    """Ends the program with code 143 on SIGTERM, and with 130 on Ctrl-C, after a checkpoint.

    It first finishes the current optimizer step, and all updates of a policy's rollout, since a checkpoint does not
    contain the rollout. Then every process saves, in full even with `save_only_model`, and stops at the same step,
    whichever of them received the signal. A signal after the last step lets the program finish. Outside of training,
    and in expert iteration, which repeats an interrupted round, signals act as in any program.

    torchrun kills its workers 30 seconds after a SIGTERM, and exits with 1 itself, as `accelerate launch` does.

    Create it in the main thread, and add it to the trainer after its other callbacks.

    Args:
        trainer: any trainer of this library.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        # Steps between the points where the run may end.
        self.period = getattr(trainer.args, "updates_per_rollout", 1)
        self._asked: signal.Signals | None = None
        self._stopped = False
        self._handlers = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._asked, self._stopped = None, False
        numbers = (signal.SIGTERM, signal.SIGINT) if self.trainer.saves_within_training else ()
        # Ignored under nohup, or by a shell for what runs in its background.
        heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._on_signal) for number in heard}

    def _on_signal(self, number: int, frame) -> None:
        if self._asked is None and is_main_process():
            # A signal may interrupt a `print`, which is not reentrant.
            os.write(1, b"\ninterrupted: saving after this step (Ctrl-\\ ends the run at once, unsaved)\n")
        self._asked = signal.Signals(number)

    def on_step_end(self, args, state, control, **kwargs):
        if (state.global_step % self.period == 0 or state.global_step >= state.max_steps) and self._is_asked():
            self._stopped = True
            # For the rest of the program, which only saves.
            args.save_only_model = args.load_best_model_at_end = False
            args.save_strategy = SaveStrategy.STEPS
            stop_training(args, state, control, saves=True)

    def on_epoch_end(self, args, state, control, **kwargs):
        if self._stopped:
            leave_epoch(state, control, saves=True)

    def on_train_end(self, args, state, control, **kwargs):
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._stopped:
            if is_main_process():
                print(f"\nended at step {state.global_step}; --resume_from_checkpoint resumes from {args.output_dir}")
            end_processes(self.trainer.accelerator)
            raise SystemExit(128 + (self._asked or signal.SIGTERM))

    def _is_asked(self) -> bool:
        """Whether any process has received a signal."""
        accelerator = self.trainer.accelerator
        flag = torch.tensor(int(self._asked is not None), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum"))
