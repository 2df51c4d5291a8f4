"""The worker's other end: it sends cases, waits as long as a case may take, and begins anew after one that hangs."""

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
# What the worker is given of the grader, and of its environment: no expected value, and no key to anything.
FILES = ("__init__", "checks", "fakes", "guard", "scores", "worker")
VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


class WorkerProblem(RuntimeError):
    """The worker does not start, which is the grader's matter and not the student's."""


class Runner:
    """Runs functions of a submission.

    Args:
        submission: the folder that holds the student's package.
        checking: the folder of this file.
        seconds: that one case may take.
        allowed: names of the library that the student may import; None for all.
        user: whom the student's code runs as; None for the grader's own user.

    Raises:
        WorkerProblem: by `run`, if the worker does not start.
    """

    def __init__(
        self, submission: Path, checking: Path, seconds: float, allowed: list[str] | None, user: str | None = None
    ):
        self._submission, self._checking, self._seconds = submission, checking, seconds
        self._allowed, self._user = json.dumps(allowed), user
        self._process: subprocess.Popen | None = None
        self._home: Path | None = None
        self._answers = -1
        self._rest = b""

    def run(self, module: str, function: str, case: dict[str, Any], classes: str) -> dict[str, Any]:
        """The outcome of a case; a hang, the process's end and an answer that is none are errors like any other."""
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
        """End the worker and what it has started, and remove what it was given."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            os.close(self._answers)
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
        self._process, self._home, self._rest = None, None, b""

    def _start(self) -> None:
        with tempfile.TemporaryFile() as errors:
            try:
                self._make_home()
                self._open(errors)
            except (OSError, LookupError, ValueError, subprocess.SubprocessError) as error:
                self.close()
                whose = "" if self._user is None else f" as the user {self._user}"
                raise WorkerProblem(
                    f"{sys.executable} cannot be run{whose} for the student's code in {self._submission}: {error}. "
                    "Nothing is graded"
                ) from None
            try:
                self._line(START_SECONDS)
            except OSError as error:
                self.close()
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                reason = said[-1] if said else f"{type(error).__name__}: {error}"
                raise WorkerProblem(
                    f"the process for the student's code does not start: {reason}. Nothing is graded: mend "
                    f"{sys.executable}, which must be able to import torch"
                ) from None

    def _make_home(self) -> None:
        """A folder with what the worker needs of the grader."""
        home = self._home = Path(tempfile.mkdtemp(prefix="grading-"))
        (home / "checking").mkdir()
        for name in FILES:
            shutil.copy(self._checking / f"{name}.py", home / "checking")
        if self._user is not None:
            for path in (home, *home.rglob("*")):
                shutil.chown(path, self._user)

    def _open(self, errors: BinaryIO) -> None:
        # A process group of the user's own, without the grader's.
        other = {} if self._user is None else {"user": self._user, "group": _group(self._user), "extra_groups": []}
        self._answers, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                # The submission's folder comes last: no file in it stands in for another module.
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
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(theirs)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in VARIABLES or name.startswith("PYTHON")}
        # An empty or relative entry would be the submission, ahead of Python's own modules.
        others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
        return {
            **kept,
            "HOME": str(self._home),
            "TMPDIR": str(self._home),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join([str(self._home), *others]),
            # Packages that were installed for the user alone lie in the other home.
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _line(self, seconds: float) -> bytes:
        """The next line of the answers."""
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
    """Whether an answer has the form of an outcome: the student's code can write what it likes."""
    if not isinstance(answer, dict):
        return False
    if "error" not in answer:
        return "output" in answer
    error = answer["error"]
    return isinstance(error, dict) and all(isinstance(error.get(name), str) for name in ("kind", "message"))


def _group(user: str) -> int:
    import pwd

    return pwd.getpwnam(user).pw_gid
