"""Run cases one after the other in a separate process: `python -m checking.worker DESCRIPTOR FOLDER ALLOWED`.

Cases arrive and outcomes leave through the connection of the descriptor; the folder contains the student's package;
`ALLOWED` is a JSON list of the library names that may be imported, or null for all. The process receives arguments and
never the expected values. Output of the student's code is discarded.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from multiprocessing.connection import Connection

LIBRARY = "trl_ext"


class LibraryGuard:
    """Refuses imports of the library with the answers, except of the modules with the given names.

    The modules that those import are loaded in advance.
    """

    def __init__(self, allowed: list[str]):
        self._modules = {name.rpartition(".")[0] for name in allowed}
        for module in self._modules:
            # Without the library, the student's own import fails with its own message.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)

    def find_spec(self, name: str, path=None, target=None):
        """Refuse the library's modules; leave all others to later finders."""
        given = any(f"{module}.".startswith(f"{name}.") for module in self._modules)
        if name.partition(".")[0] == LIBRARY and not given:
            raise ModuleNotFoundError(f"{name} cannot be imported here: the library holds the answers", name=name)
        return None


def main() -> None:
    """Answer every request until the connection ends."""
    from . import checks

    descriptor, folder, allowed = sys.argv[1:]
    if allowed != "null":
        sys.meta_path.insert(0, LibraryGuard(json.loads(allowed)))
    sys.path.append(folder)
    connection = Connection(int(descriptor))
    # Errors up to here are the grader's own and are read by the other side.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            request = json.loads(connection.recv_bytes())
            found = _function(request["module"], request["function"], folder)
            if isinstance(found, dict):
                outcome = {"error": found}
            else:
                outcome = checks.call(found, request["case"], request["classes"])
            connection.send_bytes(json.dumps(outcome).encode())


def _function(module: str, name: str, folder: str):
    """The function, or the error of the file that should contain it."""
    file = f"{module.replace('.', '/')}.py"
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError):
            frames.append((error.filename or "", error.lineno))
        own = [(os.path.relpath(path, folder), line) for path, line in frames if path.startswith(f"{folder}/")]
        place = "{}, line {}".format(*own[-1]) if own else "?"
        message = f"{file} cannot be imported ({place}): {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return {"kind": "ImportProblem", "message": message}
    return function if callable(function) else {"kind": "Missing", "message": f"{file} has no function {name}"}


if __name__ == "__main__":
    main()
