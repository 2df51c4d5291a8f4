"""Train tiny models with a fault put into one of two processes, and write down how each process ended.

`end_of_processes` starts the processes without a launcher, which would end them all when one fails. This file is run
as `faults_once.py SPECS.json FOLDER`, several runs to one start, of which only one marked as `last` ends its process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.support import REPOSITORY
from tests.support.train_once import build_plain, classes, entries, parameters

NAMES = {"PreferenceTrainer", "RewardTrainer", "PolicyTrainer", "SFTTrainer"}


def build(spec: dict, output_dir: str, **own):
    """The trainer of a specification, not yet trained.

    Keys: `trainer` (a name in trl_ext, or "trl.DPOTrainer"), `model` (path), `args`, `reward` (a function's
    name here), `fault` (a class here, with its own keys), and `kill_at` (the step before which the last process dies).
    """
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    trainer_class, _ = classes(spec["trainer"])
    own.setdefault("trainer_class", trainer_class)
    if "fault" in spec:
        own["trainer_class"] = type(trainer_class.__name__, (globals()[spec["fault"]], trainer_class), {"spec": spec})
    if spec["trainer"] in ("PolicyTrainer", "trl.GRPOTrainer"):
        own.setdefault("reward", globals()[spec.get("reward", "lengths")])
    args = {"learning_rate": 0.01, "max_steps": 4, **spec.get("args", {})}
    if spec["trainer"] in ("PreferenceTrainer", "RewardTrainer", "PolicyTrainer"):
        args = {"packing": "off", **args}

    class KillAt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if _is_last_rank() and state.global_step == spec["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [KillAt()] if "kill_at" in spec else []
    return build_plain({**spec, "args": args}, output_dir, callbacks=callbacks, **own)


def _is_last_rank() -> bool:
    return int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1


# ---- Faults ----


class NotANumber:
    """The last process's loss is NaN at some steps, counted from 0."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        spoil = _is_last_rank() and self.state.global_step in self.spec["steps"] and self.model.training
        return loss * float("nan") if spoil else loss


class OutOfMemory:
    """The backward pass of a step, counted from 1, does not fit."""

    def training_step(self, model, inputs, *args, **kwargs):
        import torch

        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.state.global_step + 1 == self.spec["step"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


# ---- Rewards ----


def lengths(completion_ids, **_) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def hangs_on_the_last_rank(completion_ids, **_) -> list[float]:
    while _is_last_rank():
        try:
            time.sleep(0.01)
        except Exception:
            continue
    return lengths(completion_ids)


# ---- Processes ----


@dataclass
class End:
    """How a process ended: its exit code, what it printed, its seconds, and of each run its `told`."""

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
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.support.faults_once", str(folder / "specs.json"), str(folder)]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ends: list[End] = []
    with ExitStack() as stack:
        started = []
        for rank in range(processes):
            log = stack.enter_context((folder / f"rank{rank}.log").open("w"))
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            environment = {**common, **ranks, "LOCAL_WORLD_SIZE": str(processes)}
            started.append(
                subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
        begun, seconds = time.monotonic(), {}
        while len(seconds) < processes and time.monotonic() - begun < 240:
            for rank, process in enumerate(started):
                if rank not in seconds and process.poll() is not None:
                    seconds[rank] = time.monotonic() - begun
            time.sleep(0.2)
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
    for rank, process in enumerate(started):
        told = folder / f"rank{rank}.json"
        runs = json.loads(told.read_text()) if told.is_file() else []
        text = (folder / f"rank{rank}.log").read_text()
        ends.append(End(process.returncode, text, seconds.get(rank, float("inf")), runs))
    return ends


def told(trainer, error: BaseException | None) -> dict:
    """What is left of a run: its error, skipped updates, steps, logs, and a digest of its parameters."""
    import torch

    values = torch.cat([tensor.flatten() for _, tensor in sorted(parameters(trainer).items())])
    guard = getattr(trainer, "update_guard", None)
    return {
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "skipped": None if guard is None else guard.skipped,
        "step": trainer.state.global_step,
        "finite": bool(values.isfinite().all()),
        "parameters": [values.double().nan_to_num().sum().item(), values.double().nan_to_num().norm().item()],
        "logged": [entry.get("skipped_updates") for entry in entries(trainer)],
        "losses": [entry["loss"] for entry in entries(trainer)],
    }


def main() -> None:
    from trl_ext.rollouts import end_processes

    specs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    runs = []
    for index, spec in enumerate(specs):
        trainer = error = None
        try:
            trainer = build(spec, str(folder / f"{index}-run"))
            trainer.train()
        except Exception as caught:
            error = caught
            print(f"ENDED {time.time():.3f} {type(error).__name__}: {error}", flush=True)
        runs.append({"error": f"{type(error).__name__}: {error}"} if trainer is None else told(trainer, error))
        (folder / f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(runs))
        if error is not None and spec.get("last"):
            raise SystemExit(2)
    from accelerate import Accelerator

    end_processes(Accelerator())


if __name__ == "__main__":
    main()
