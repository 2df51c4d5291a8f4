"""Runs of recipes as processes, one after another, for comparisons and the pipeline."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from trl_ext.files import read_json, write_json
from trl_ext.resilience.checkpoints import last_checkpoint
from trl_ext.runs import RECIPES
from trl_ext.runs.configs import read_config

# The settings of a run, kept in its folder; a folder without this file belongs to something else.
RECORD_NAME = "run.json"
# Windows has TERM and INT.
_NAMES = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGINT")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


@dataclass(frozen=True)
class Run:
    """One run of a recipe in its own folder.

    Attributes:
        recipe: the recipe's name.
        folder: the run's folder; its name is the run's name.
        arguments: the recipe's arguments.
        launcher: options of `accelerate launch`.
        after: earlier runs whose models this one uses.
    """

    recipe: str
    folder: Path
    arguments: dict[str, Any]
    launcher: list[str] = field(default_factory=list)
    after: tuple[Run, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        return (self.folder / "results.json").is_file()

    def state(self) -> str:
        """finished, new, interrupted (the run is resumed), or to begin anew (updates without a checkpoint)."""
        if self.finished:
            return "finished"
        if not self.folder.exists():
            return "new"
        return "to begin anew" if "--overwrite_output_dir" in self._continuation() else "interrupted"

    def _continuation(self) -> list[str]:
        """The flags by which a recipe takes up what its folder holds."""
        if last_checkpoint(self.folder) is not None:
            return ["--resume_from_checkpoint", "last"]
        # A recipe that samples has no such file, and continues from its responses.
        return ["--overwrite_output_dir", "true"] if (self.folder / "metrics.jsonl").is_file() else []

    def flags(self) -> list[str]:
        """The flags that start the run, or resume it from its last checkpoint."""
        # Imported late, because it loads TRL, which a process that only waits for others does not need.
        from trl_ext.runs.arguments import as_flag

        flags = [text for name, value in self.arguments.items() for text in as_flag(name, value)]
        return [*flags, *self._continuation(), "--output_dir", str(self.folder)]

    def command(self) -> list[str]:
        """The command of `flags`."""
        launch = [sys.executable, "-m", "accelerate.commands.launch", *self.launcher]
        return [*launch, str(RECIPES / f"{self.recipe}.py"), *self.flags()]

    def record(self) -> dict[str, Any]:
        """Every setting of the run, with those in its configuration, and a digest of each run that it uses."""
        settings = settings_of(self.arguments)
        settings.pop("output_dir", None)
        for run in self.after:
            earlier = json.dumps(run.record(), sort_keys=True).encode()
            settings[f"settings of {run.name}"] = hashlib.sha256(earlier).hexdigest()[:16]
        # In the form in which JSON returns it.
        return json.loads(json.dumps({"recipe": self.recipe, **settings}))


def settings_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """A recipe's arguments, above those in their configuration file."""
    own = {name: value for name, value in arguments.items() if name != "config"}
    return {**(read_config(arguments["config"]) if "config" in arguments else {}), **own}


def check_runs(runs: Sequence[Run]) -> None:
    """Reject arguments that a recipe does not accept, and folders of other runs, before anything runs."""
    from trl_ext.runs.arguments import argument_types, check_arguments

    for run in runs:
        try:
            if (types := argument_types(run.recipe)) is not None:
                check_arguments(types, run.flags())
        except ValueError as error:
            raise ValueError(f"the run {run.name} of recipes/{run.recipe}.py: {error}") from None
        if not run.folder.exists() or not any(run.folder.iterdir()):
            continue
        if not (run.folder / RECORD_NAME).is_file():
            raise ValueError(f"{run.folder} holds something that no study started: choose another --output_dir")
        begun, now = read_json(run.folder / RECORD_NAME), run.record()
        changed = [name for name in sorted({*begun, *now}) if begun.get(name) != now.get(name)]
        if changed:
            raise ValueError(
                f"{run.folder} was run with {changed[0]} {begun.get(changed[0])!r}, and now it is "
                f"{now.get(changed[0])!r}: take that back, remove the folder, or choose another --output_dir"
            )


def print_commands(runs: Sequence[Run]) -> None:
    """Print the command of each run, under its name and state."""
    for run in runs:
        print(f"# {run.name}: {run.state()}\n{shlex.join(run.command())}")


def run_all(runs: Sequence[Run], *, stop_at_failure: bool = False) -> list[str]:
    """Run the unfinished runs one after another; return the names of those that failed.

    Raises:
        KeyboardInterrupt, SystemExit: the program was asked to stop, and the current run has stopped too.
    """
    failed: list[str] = []
    for number, run in enumerate(runs, start=1):
        if failed and stop_at_failure:
            break
        print(f"\n=== run {number} of {len(runs)}, {run.name}: {run.state()}", flush=True)
        if run.finished:
            continue
        command = run.command()
        write_json(run.folder / RECORD_NAME, run.record())
        code = run_or_stop(command)
        if code or not run.finished:
            failed.append(run.name)
            print(f"=== {run.name} failed with exit status {code}", flush=True)
    return failed


def launcher_options(accelerate_config: str | None) -> list[str]:
    """Options of `accelerate launch`, without its warnings about defaults and its own traceback.

    Without a file, the user's accelerate configuration applies, or else one process per device.
    """
    if accelerate_config is not None:
        if not Path(accelerate_config).is_file():
            raise FileNotFoundError(f"no file --accelerate_config {accelerate_config}")
        return ["--quiet", "--config_file", accelerate_config]
    import torch
    from accelerate.commands.config.config_args import default_config_file

    if Path(default_config_file).is_file():
        return ["--quiet"]
    devices = max(torch.accelerator.device_count(), 1)
    defaults = ["--num_processes", str(devices), "--num_machines", "1"]
    several = ["--multi_gpu"] if devices > 1 else []
    return ["--quiet", *several, *defaults, "--mixed_precision", "no", "--dynamo_backend", "no"]


def run_or_stop(command: Sequence[str]) -> int:
    """Run a launcher of training processes, and return its exit status.

    The launcher has its own session, so that only this process receives signals from a terminal. It passes them on to
    the training processes, the launcher's children, on which they save and exit. The launcher itself is not signalled
    once it has children, since torchrun would kill them before they have saved. QUIT (Ctrl-\\) kills all.

    Raises:
        KeyboardInterrupt, SystemExit: the program was asked to stop; the code is 128 plus the signal's number.
    """
    launcher = psutil.Popen(command, start_new_session=True)
    workers: list[psutil.Process] = []
    told: set[psutil.Process] = set()
    with _received_signals() as received:
        # Somebody else may end the launcher while its children still save.
        while (code := launcher.poll()) is None or any(map(_runs, workers)):
            with contextlib.suppress(psutil.Error):
                workers = launcher.children() or workers
            if any(number.name == "SIGQUIT" for number in received):
                for process in (launcher, *workers):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            for process in {*(workers or [launcher])} - told if received else ():
                interrupts = workers and received[0] == signal.SIGINT
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGINT if interrupts else signal.SIGTERM)
                told.add(process)
            time.sleep(0.2)
    if not received:
        return code
    if received[0] == signal.SIGINT:
        raise KeyboardInterrupt
    print(f"\nreceived {received[0].name}; the same command resumes this run")
    raise SystemExit(128 + received[0])


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def _received_signals() -> Iterator[list[signal.Signals]]:
    """The signals that arrive within the block, except ignored ones, as under nohup."""
    received: list[signal.Signals] = []
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda n, frame: received.append(signal.Signals(n))) for n in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
