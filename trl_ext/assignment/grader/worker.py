"""Run a student's functions on cases in a process of its own: `python worker.py FOLDER SECONDS`.

`functions.pt` in the working directory has arguments and no expected values. Each function's outcomes go to a file.
"""

import faulthandler
import importlib
import os
import sys
import traceback
from pathlib import Path

import torch
from checking import call


class ImportGuard:
    """Refuses imports of the libraries that hold the answers."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("trl_ext", "trl"):
            raise ModuleNotFoundError(f"{name} cannot be imported here: the library holds the answers", name=name)


def load(folder, module, name):
    """The function, or the error of the file that should contain it."""
    file = f"{module.replace('.', '/')}.py"
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:
        lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        lines += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
        own = [f"{os.path.relpath(path, folder)}, line {line}" for path, line in lines if path.startswith(folder)]
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return {"error": "", "message": f"{file} cannot be imported ({own[-1] if own else '?'}): {said}"}
    return function if callable(function) else {"error": "", "message": f"{file} has no function {name}"}


if __name__ == "__main__":
    (folder, seconds), home = sys.argv[1:], Path.cwd()
    sys.meta_path.insert(0, ImportGuard())
    # Last, so that the student's files cannot shadow other modules.
    sys.path.append(folder)
    Path("ready").touch()
    for number, item in enumerate(torch.load("functions.pt", weights_only=True)):
        outcomes = []
        for case in item["cases"]:
            # A watchdog outside Python, which ends the process.
            faulthandler.dump_traceback_later(float(seconds), exit=True)
            found = load(folder, item["module"], item["name"])
            outcomes.append(call(found, case) if callable(found) else found)
            torch.save(outcomes, home / f"{number}.pt")
