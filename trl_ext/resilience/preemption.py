"""SIGTERM, SIGUSR1 and Ctrl-C: a run that receives one saves a checkpoint, prints one line, and exits."""

from __future__ import annotations

import os
import signal

import torch
from transformers import TrainerCallback

from trl_ext.processes import is_main_process
from trl_ext.rollouts import end_processes

# EX_TEMPFAIL of sysexits.h: try again later.
REQUEUE = 75
# Windows has no SIGUSR1.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class Preemption(TrainerCallback):
    """Ends the program with code 75 (EX_TEMPFAIL) on SIGTERM or SIGUSR1, and with 130 on Ctrl-C, after a checkpoint.

    In training, it first finishes the current optimizer step, and all updates of a policy's rollout, since a
    checkpoint does not contain the rollout. Then every process saves, in full even with `save_only_model`, and stops
    at the same step, whichever of them received the signal. The same command with `--resume_from_checkpoint` continues
    exactly. If a signal comes too late for a checkpoint of the last step, the program saves its model. Further signals
    change nothing. Outside of training, where there is nothing to save, a signal ends the process at once. Rounds of
    expert iteration are not saved halfway: they start again from their responses.

    torchrun kills its workers 30 seconds after a SIGTERM, and exits with 1 itself, as `accelerate launch` does.

    Create it in the main thread, and add it to the trainer after its other callbacks.

    Args:
        trainer: any trainer of this library.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        # Steps between the points where the run may end.
        self.period = getattr(trainer.args, "updates_per_rollout", 1)
        self._training = False
        self._asked: signal.Signals | None = None
        self._process = os.getpid()
        for number in SIGNALS:
            # Ignored under nohup, or by a shell for what runs in its background.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame) -> None:
        if os.getpid() != self._process:
            # A forked process exits on its parent's SIGTERM; SIGUSR1 is only for the parent.
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if not self._training:
            if number == signal.SIGINT:
                # Raises KeyboardInterrupt, on which half-written files are removed.
                signal.default_int_handler(number, frame)
            self._say(number, "outside of training, where there is nothing to save")
            os._exit(REQUEUE)
        if number == signal.SIGINT and self._asked is None and is_main_process():
            os.write(1, b"\ninterrupted: ending after this step (Ctrl-\\ ends the run at once, unsaved)\n")
        self._asked = self._asked or signal.Signals(number)

    def on_train_begin(self, args, state, control, **kwargs):
        self._training = True

    def on_step_end(self, args, state, control, **kwargs):
        if (state.global_step % self.period == 0 or state.global_step >= state.max_steps) and self._is_asked():
            control.should_training_stop = True
            self._save(args, control)

    def on_evaluate(self, args, state, control, **kwargs):
        # The last chance for a signal that came in the evaluation after the last step.
        if self._training and state.global_step >= state.max_steps and self._is_asked():
            self._save(args, control)

    def _save(self, args, control) -> None:
        self.trainer.interrupted = True
        control.should_save = self.trainer.saves_within_training
        args.save_only_model = False

    def on_train_end(self, args, state, control, **kwargs):
        stopped = self._is_asked()
        if not self.trainer.interrupted and self.trainer.saves_within_training:
            # Too late: updates since the last checkpoint are only in memory.
            stopped = False
        self._training = False
        if stopped:
            # The interpreter removes handlers on exit, and another signal would then kill the process.
            for late in SIGNALS[2:]:
                signal.signal(late, signal.SIG_IGN)
            number = self._asked or signal.SIGTERM
            self._say(number, f"and ended at step {state.global_step} with what is saved in {args.output_dir}")
            end_processes(self.trainer.accelerator)
            raise SystemExit(_code(number))

    def _is_asked(self) -> bool:
        """Whether any process has received a signal."""
        accelerator = self.trainer.accelerator
        asked = self._asked is not None
        if accelerator.num_processes == 1:
            return asked
        flag = torch.tensor(int(asked), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum"))

    @staticmethod
    def _say(number: int, what: str) -> None:
        if is_main_process():
            name = signal.Signals(number).name
            line = f"\nreceived {name} {what}; --resume_from_checkpoint goes on (exit code {_code(number)})\n"
            # A signal may interrupt a `print`, which is not reentrant.
            os.write(1, line.encode())


def _code(number: int) -> int:
    return 130 if number == signal.SIGINT else REQUEUE
