"""Faults for `train_once.build` to put into a trainer, and training in processes without a launcher.

A launcher would end all processes when one fails. This file is run as `faults_once.py SPECS.json FOLDER`, several runs
to one start, of which only one marked as `last` ends its process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerCallback

from tests.support import REPOSITORY, train_once


def build(spec: dict, output_dir: str, **own):
    """The trainer of a specification, not yet trained.

    A further key is `kill_at`, the step before which the last process dies.
    """
    args = {"learning_rate": 0.01, "max_steps": 4, **spec.get("args", {})}
    if spec["trainer"] in ("PreferenceTrainer", "RewardTrainer", "PolicyTrainer"):
        args = {"packing": "off", **args}

    callbacks = []
    if "kill_at" in spec and is_last_rank():
        callbacks = [At("on_step_begin", spec["kill_at"], lambda: signal.raise_signal(signal.SIGKILL))]
    spec = {"pairs": 12, "dtype": None, "rewards": ["lengths"], **spec, "args": args}
    return train_once.build(spec, output_dir, callbacks=callbacks, **own)


def is_last_rank() -> bool:
    return int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1


class At(TrainerCallback):
    """Calls a function once, when an event of that name comes at that step."""

    def __init__(self, event: str, step: int, function):
        self.step, self.function = step, function
        setattr(self, event, self.act)

    def act(self, args, state, control, **_):
        if state.global_step == self.step:
            self.step = None
            self.function()


class NotANumber:
    """The last process's loss is NaN at some `steps`, counted from 0."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        spoil = is_last_rank() and self.state.global_step in self.spec["steps"] and self.model.training
        return loss * float("nan") if spoil else loss


class OutOfMemory:
    """The backward pass of a `step`, counted from 1, does not fit."""

    def training_step(self, model, inputs, *args, **kwargs):
        import torch

        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.state.global_step + 1 == self.spec["step"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


# ---- Processes ----


@dataclass
class End:
    """How a process ended: its exit code, what it printed, its seconds, and what is left of each run."""

    code: int
    text: str
    seconds: float
    runs: list[dict]


def end_of_processes(specs: list[dict], folder: Path, *, processes: int = 2) -> list[End]:
    """Run the specifications in several processes without a launcher, and wait until each has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "specs.json").write_text(json.dumps(specs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.support.faults_once", str(folder / "specs.json"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}

    def end(rank: int) -> End:
        own, begun = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, time.monotonic()
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=REPOSITORY, env=own, timeout=240, **streams)
        told = folder / f"rank{rank}.json"
        runs = json.loads(told.read_text()) if told.is_file() else []
        return End(done.returncode, done.stdout, time.monotonic() - begun, runs)

    with ThreadPoolExecutor(processes) as threads:
        return list(threads.map(end, range(processes)))


def _left(trainer, error: str | None) -> dict:
    """What is left of a run: its error, skipped updates, steps, logs, and a digest of its parameters."""
    import torch

    values = torch.cat([tensor.flatten() for _, tensor in sorted(train_once.parameters(trainer).items())])
    guard, logs = getattr(trainer, "update_guard", None), train_once.entries(trainer)
    return {
        "error": error,
        "skipped": None if guard is None else guard.skipped,
        "step": trainer.state.global_step,
        "finite": bool(values.isfinite().all()),
        "parameters": [values.double().nan_to_num().sum().item(), values.double().nan_to_num().norm().item()],
        "logged": [entry.get("skipped_updates") for entry in logs],
        "losses": [entry["loss"] for entry in logs],
    }


def main() -> None:
    from accelerate import Accelerator

    from trl_ext.rollouts import end_processes

    specs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    runs = []
    for index, spec in enumerate(specs):
        trainer, error = build(spec, str(folder / f"{index}-run")), None
        try:
            trainer.train()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        runs.append(_left(trainer, error))
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(runs))
        if error is not None and spec.get("last"):
            raise SystemExit(2)
    end_processes(Accelerator())


if __name__ == "__main__":
    main()
