"""The worker's other end: it sends cases, waits as long as a case may take, and begins anew after one that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# For starting Python and importing torch, on a busy machine.
START_SECONDS = 300
MAX_ANSWER_BYTES = 2**24


class Runner:
    """Runs functions of a submission.

    Args:
        submission: the folder that holds the student's package.
        here: the folder that holds the package of this file.
        seconds: that one case may take.
    """

    def __init__(self, submission: Path, here: Path, seconds: float):
        self._submission, self._here, self._seconds = submission, here, seconds
        self._process: subprocess.Popen | None = None
        self._answers = -1
        self._rest = b""

    def run(self, module: str, function: str, case: dict[str, Any], classes: str) -> dict[str, Any]:
        """The outcome of a case; a hang, the process's end and an answer that is none are errors like any other."""
        given = {name: case[name] for name in ("arguments", "backward", "unordered") if name in case}
        request = {"module": module, "function": function, "case": given, "classes": classes}
        try:
            if self._process is None:
                self._start()
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(self._seconds))
            if not isinstance(answer, dict) or not {"error", "output"} & set(answer):
                raise ValueError("no answer")
            return answer
        except TimeoutError:
            self.close()
            message = f"it took more than {self._seconds:g} s: is there a loop without end?"
            return {"error": {"kind": "TimeLimit", "message": message}}
        except (OSError, ValueError):
            self.close()
            return {"error": {"kind": "Ended", "message": "it ended the process in which it ran"}}

    def close(self) -> None:
        """End the worker, and what it has started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        os.close(self._answers)
        self._process, self._rest = None, b""

    def _start(self) -> None:
        self._answers, theirs = os.pipe()
        # The submission's folder comes last: no file in it stands in for another module.
        paths = [str(self._here), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        package = __package__ or Path(__file__).parent.name
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{package}.worker", str(theirs), str(self._submission)],
                cwd=self._submission,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        self._line(START_SECONDS)

    def _line(self, seconds: float) -> bytes:
        """The next line of the answers."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError
            part = os.read(self._answers, 2**16)
            if not part or len(self._rest) > MAX_ANSWER_BYTES:
                raise OSError("the worker has ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line
