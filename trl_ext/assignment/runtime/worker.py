"""Runs one case after the other in a process of its own: `python -m checking.worker DESCRIPTOR FOLDER ALLOWED`.

Answers go to the descriptor; the folder holds the student's package; `ALLOWED` is JSON, the names of the library that
may be imported, or null for all. It is given arguments and never what is expected of them. What the student's code
prints goes nowhere.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Answer every line of the input, until it ends."""
    from . import checks
    from .guard import Guard

    descriptor, folder, allowed = sys.argv[1:]
    guard = None if allowed == "null" else Guard(json.loads(allowed))
    sys.path.append(folder)
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as answers:

        def answer(value: dict) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        # Until here the errors are the grader's own, and the other end reads them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        answer({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            found = _function(request["module"], request["function"], guard)
            if isinstance(found, dict):
                answer({"error": found})
                continue
            answer(checks.call(found, request["case"], request["classes"]))


def _function(module: str, name: str, guard):
    """The function, or what is wrong with the file that should hold it."""
    where = f"{module.rpartition('.')[2]}.py"
    try:
        # What an import leaves in its place may be anything, and asking it for a name may run the student's code.
        function = getattr(importlib.import_module(module), name, None)
        of_library = callable(function) and guard is not None and guard.is_library_s(function)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        own = [frame for frame in frames if frame.filename != guard_file()]
        line = getattr(error, "lineno", None) or (own[-1].lineno if own else "?")
        message = " ".join(str(error).split())[:300]
        place = f"{module.replace('.', '/')}.py cannot be imported (line {line})"
        return {"kind": "ImportProblem", "message": f"{place}: {type(error).__name__}: {message}"}
    if not callable(function):
        return {"kind": "Missing", "message": f"{where} has no function {name}"}
    if of_library:
        return {"kind": "Missing", "message": f"{name} in {where} is the library's own: write it yourself"}
    return function


def guard_file() -> str:
    """The file whose frames say nothing about where a student's import stands."""
    return str(Path(__file__).with_name("guard.py"))


if __name__ == "__main__":
    main()
