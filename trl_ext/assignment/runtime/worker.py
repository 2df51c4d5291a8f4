"""Runs one case after the other in a process of its own: `python -m checking.worker DESCRIPTOR FOLDER`.

Answers go to the descriptor; the folder holds the student's package. It is given arguments and never what is expected
of them. What the student's code prints goes nowhere.
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

    sys.path.append(sys.argv[2])
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:

        def answer(value: dict) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        answer({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            found = _function(request["module"], request["function"])
            if isinstance(found, dict):
                answer({"error": found})
                continue
            answer(checks.call(found, request["case"], request["classes"]))


def _function(module: str, name: str):
    """The function, or what is wrong with the file that should hold it."""
    try:
        loaded = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else "?")
        message = " ".join(str(error).split())[:300]
        place = f"{module.replace('.', '/')}.py cannot be imported (line {line})"
        return {"kind": "ImportProblem", "message": f"{place}: {type(error).__name__}: {message}"}
    function = getattr(loaded, name, None)
    if not callable(function):
        where = Path(str(loaded.__file__)).name
        return {"kind": "Missing", "message": f"{where} has no function {name}"}
    return function


if __name__ == "__main__":
    main()
