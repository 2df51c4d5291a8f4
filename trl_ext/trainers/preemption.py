"""Ends a run whose machine is about to be taken away: a checkpoint, one line, and an exit code to requeue on."""

from __future__ import annotations

import atexit
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import get_worker_info
from transformers import TrainerCallback

from trl_ext.rollouts import end_processes
from trl_ext.trainers.defaults import is_main_process
from trl_ext.trainers.interruption import leave_epoch

# EX_TEMPFAIL of sysexits.h: try again later.
REQUEUE = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# torchrun passes on a SIGTERM that the cluster has sent to every process already.
_SAME_NOTICE_SECONDS = 1.0


class Preemption(TrainerCallback):
    """Ends the program with code 75 (EX_TEMPFAIL) on SIGTERM or SIGUSR1, in training once a checkpoint is written.

    In training, the optimizer step under way is finished, and of a policy's rollout all updates, as a rollout is not
    part of a checkpoint; then every process saves, in full even with `save_only_model`, and stops at the same step,
    whichever of them received the signal. Workers that load the training data outlive a notice to the process group.
    One that comes too late for a checkpoint of the last step lets the program go on to save the model.
    The same command with `--resume_from_checkpoint` goes on from there as though nothing had happened. A second
    SIGTERM, a second or more after the first, ends the process at once, as does any of the signals outside of
    training, where there is nothing to save. Rounds of expert iteration are not saved half-way: they begin again from
    their responses.

    SLURM sends SIGTERM on preemption, and SIGUSR1 where asked to, which leaves more time: `--signal=USR1@300`, sent to
    job steps. Under torchrun, SIGUSR1 must reach the worker processes, and torchrun kills them 30 seconds after a
    SIGTERM. Its own exit code, and that of `accelerate launch`, is 1 whatever theirs: there, requeue on any failure,
    or on the line that is printed.

    Make it in the main thread, add it to the trainer after its other callbacks.

    Args:
        trainer: any trainer of this library.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        # Steps between the places where the run may end.
        self.period = getattr(trainer.args, "updates_per_rollout", 1)
        # Whether the run is in training, as forked workers see it too.
        self._shared = mmap.mmap(-1, 1)
        # Before multiprocessing ends its workers and waits for them.
        atexit.register(self._set_training, False)
        # The first signal, and when the first SIGTERM came.
        self._asked: signal.Signals | None = None
        self._terminated_at: float | None = None
        self._process = os.getpid()
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame) -> None:
        if os.getpid() != self._process:
            self._on_signal_in_a_fork(number)
            return
        if not self._training:
            self._say(number, "outside of training, where there is nothing to save")
            os._exit(REQUEUE)
        self._asked = self._asked or signal.Signals(number)
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self._terminated_at is None:
                self._terminated_at = now
            elif now - self._terminated_at >= _SAME_NOTICE_SECONDS:
                self._say(number, "again, and ended without a checkpoint")
                os._exit(REQUEUE)

    def _on_signal_in_a_fork(self, number: int) -> None:
        """The parent ends a fork by SIGTERM; a notice to the whole process group is not for the fork.

        In training a worker that loads data is needed until the parent has saved, and goes when that does.
        """
        is_needed = get_worker_info() is not None and self._training and os.getppid() == self._process
        if number != signal.SIGUSR1 and not is_needed:
            os._exit(128 + number)

    def _set_training(self, training: bool) -> None:
        self._shared[0] = training

    @property
    def _training(self) -> bool:
        return bool(self._shared[0])

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self._set_training(True)
        if getattr(train_dataloader, "num_workers", 0) and multiprocessing.get_start_method() == "fork":
            # torch gives each worker its own handler of SIGTERM, which ends it.
            train_dataloader.worker_init_fn = partial(
                _init_worker, train_dataloader.worker_init_fn, partial(signal.signal, signal.SIGTERM, self._on_signal)
            )

    def on_step_end(self, args, state, control, **kwargs):
        if (state.global_step % self.period == 0 or state.global_step >= state.max_steps) and self._is_asked():
            control.should_training_stop = True
            self._save(args, control)

    def on_evaluate(self, args, state, control, **kwargs):
        # The last chance for a notice that came in the evaluation after the last step.
        if self._training and state.global_step >= state.max_steps and self._is_asked():
            self._save(args, control)

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.trainer.interrupted:
            leave_epoch(state, control, saves=self.trainer.saves_within_training)

    def _save(self, args, control) -> None:
        self.trainer.interrupted = True
        control.should_save = self.trainer.saves_within_training
        args.save_only_model = False

    def on_train_end(self, args, state, control, **kwargs):
        stopped = self._is_asked()
        if not self.trainer.interrupted and self.trainer.saves_within_training:
            # Too late: what was trained since the last checkpoint is in memory only.
            stopped = False
        self._set_training(False)
        if stopped:
            # The interpreter takes handlers off as it ends, and one more notice would then kill the process.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            number = self._asked or signal.SIGTERM
            self._say(number, f"and ended at step {state.global_step} with what is saved in {args.output_dir}")
            end_processes(self.trainer.accelerator)
            raise SystemExit(REQUEUE)

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
            line = f"\nreceived {name} {what}; --resume_from_checkpoint goes on (exit code {REQUEUE})\n"
            # A signal may come in the middle of a `print`, which cannot begin again within itself.
            os.write(1, line.encode())


def _init_worker(given: Callable[[int], None] | None, more: Callable[[], object], worker: int) -> None:
    """Begin a worker of a DataLoader as given, and with one thing more."""
    if given is not None:
        given(worker)
    more()
