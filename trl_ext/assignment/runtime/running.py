"""The grader's side of the worker: send cases, enforce their time limit, and restart a worker that hangs or ends."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# For starting Python and importing torch, on a busy machine.
START_SECONDS = 300
MAX_ANSWER_BYTES = 2**24
# The grader's files and environment variables that the worker gets: no expected values and no secrets.
FILES = ("__init__", "checks", "fakes", "scores", "worker")
VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


class WorkerProblem(RuntimeError):
    """The worker does not start, which is a fault of the grader and not the student."""


class Runner:
    """Runs functions of a submission.

    Args:
        submission: the folder that holds the student's package.
        checking: the folder of this file.
        seconds: time limit for one case.
        allowed: library names that the student may import; None for all.
        user: user that runs the student's code; None for the grader's own user.

    Raises:
        WorkerProblem: from `run`, if the worker does not start.
    """

    def __init__(
        self, submission: Path, checking: Path, seconds: float, allowed: list[str] | None, user: str | None = None
    ):
        self._submission, self._checking, self._seconds = submission, checking, seconds
        self._allowed, self._user = json.dumps(allowed), user
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._home: Path | None = None

    def run(self, module: str, function: str, case: dict[str, Any], classes: str) -> dict[str, Any]:
        """The outcome of a case; a hang and the end of the process are errors like any other."""
        given = {name: case[name] for name in ("arguments", "own_backward", "unordered")}
        request = {"module": module, "function": function, "case": given, "classes": classes}
        if self._process is None:
            self._start()
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            if self._connection.poll(self._seconds):
                return json.loads(self._connection.recv_bytes(MAX_ANSWER_BYTES))
            error = ("TimeLimit", f"it took more than {self._seconds:g} s: is there a loop without end?")
        except (EOFError, OSError, ValueError):
            error = ("Ended", "it ended the process in which it ran")
        self.close()
        return {"error": dict(zip(("kind", "message"), error, strict=True))}

    def close(self) -> None:
        """End the worker and its child processes, and remove its files."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
        self._process, self._connection, self._home = None, None, None

    def _start(self) -> None:
        with tempfile.TemporaryFile() as errors:
            try:
                self._open(errors)
                if not self._connection.poll(START_SECONDS):
                    raise TimeoutError(f"no answer in {START_SECONDS} s")
                self._connection.recv_bytes()
            except (EOFError, OSError, LookupError, subprocess.SubprocessError) as error:
                self.close()
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                whose = "" if self._user is None else f" as the user {self._user}"
                raise WorkerProblem(
                    f"the process for the student's code does not start{whose}: {said[-1] if said else error}. "
                    f"Nothing is graded; the interpreter is {sys.executable}"
                ) from None

    def _open(self, errors) -> None:
        home = self._home = Path(tempfile.mkdtemp(prefix="grading-"))
        (home / "checking").mkdir()
        for name in FILES:
            shutil.copy(self._checking / f"{name}.py", home / "checking")
        other = {}
        if self._user is not None:
            import pwd

            for path in (home, *home.rglob("*")):
                shutil.chown(path, self._user)
            # Only the user's own groups, without the grader's.
            other = {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid, "extra_groups": []}
        program = [sys.executable, "-P", "-m", "checking.worker"]
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                # The submission's folder comes last, so that its files cannot shadow other modules.
                [*program, str(theirs.fileno()), str(self._submission), self._allowed],
                cwd=home,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                **other,
            )

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in VARIABLES or name.startswith("PYTHON")}
        return {
            **kept,
            "HOME": str(self._home),
            "TMPDIR": str(self._home),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join([str(self._home), os.environ.get("PYTHONPATH", "")]),
            # Packages installed only for the user are in the other home directory.
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
