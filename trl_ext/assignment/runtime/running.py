"""The grader's side of the worker: send cases, enforce their time limit, and restart a worker that hangs or ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

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
        self._home: Path | None = None
        self._answers: int | None = None
        self._rest = b""

    def run(self, module: str, function: str, case: dict[str, Any], classes: str) -> dict[str, Any]:
        """The outcome of a case; a hang, the end of the process and an invalid answer are errors like any other."""
        names = ("arguments", "backward", "unordered", "differentiated")
        given = {name: case[name] for name in names if name in case}
        request = {"module": module, "function": function, "case": given, "classes": classes}
        if self._process is None:
            self._start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(self._seconds))
            if not _is_outcome(answer):
                raise ValueError("no answer")
            return answer
        except TimeoutError:
            self.close()
            message = f"it took more than {self._seconds:g} s: is there a loop without end?"
            return {"error": {"kind": "TimeLimit", "message": message}}
        except (OSError, ValueError, RecursionError):
            self.close()
            return {"error": {"kind": "Ended", "message": "it ended the process in which it ran"}}

    def close(self) -> None:
        """End the worker and its child processes, and remove its files."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._answers is not None:
            os.close(self._answers)
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
        self._process, self._home, self._answers, self._rest = None, None, None, b""

    def _start(self) -> None:
        with tempfile.TemporaryFile() as errors:
            try:
                self._open(errors)
                self._line(START_SECONDS)
            except (OSError, LookupError, subprocess.SubprocessError) as error:
                self.close()
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                whose = "" if self._user is None else f" as the user {self._user}"
                raise WorkerProblem(
                    f"the process for the student's code does not start{whose}: {said[-1] if said else error}. "
                    f"Nothing is graded; the interpreter is {sys.executable}"
                ) from None

    def _open(self, errors: BinaryIO) -> None:
        home = self._home = Path(tempfile.mkdtemp(prefix="grading-"))
        (home / "checking").mkdir()
        for name in FILES:
            shutil.copy(self._checking / f"{name}.py", home / "checking")
        other = {}
        if self._user is not None:
            for path in (home, *home.rglob("*")):
                shutil.chown(path, self._user)
            # Only the user's own groups, without the grader's.
            other = {"user": self._user, "group": _group(self._user), "extra_groups": []}
        self._answers, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                # The submission's folder comes last, so that its files cannot shadow other modules.
                [sys.executable, "-P", "-m", "checking.worker", str(theirs), str(self._submission), self._allowed],
                cwd=self._submission,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs],
                start_new_session=True,
                **other,
            )
        finally:
            os.close(theirs)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in VARIABLES or name.startswith("PYTHON")}
        # An empty or relative entry would put the submission ahead of Python's own modules.
        others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
        return {
            **kept,
            "HOME": str(self._home),
            "TMPDIR": str(self._home),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join([str(self._home), *others]),
            # Packages installed only for the user are in the other home directory.
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _line(self, seconds: float) -> bytes:
        """Read the next line of the answers."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError(f"no answer in {seconds:g} s")
            part = os.read(self._answers, 2**16)
            if not part or len(self._rest) > MAX_ANSWER_BYTES:
                raise OSError("it has ended without an answer")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _is_outcome(answer: Any) -> bool:
    """Whether an answer has the form of an outcome: the student's code can write anything."""
    if not isinstance(answer, dict):
        return False
    if "error" not in answer:
        return "output" in answer
    error = answer["error"]
    return isinstance(error, dict) and all(isinstance(error.get(name), str) for name in ("kind", "message"))


def _group(user: str) -> int:
    import pwd

    return pwd.getpwnam(user).pw_gid
