"""Keeps a student's code in the worker from the library that holds the answers, where that is easily done."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path

LIBRARY = "trl_ext"


class Guard:
    """Refuses imports of the library, and functions that are the library's.

    Args:
        allowed: names of the library that the assignment gives, as `trl_ext.data.packed_sft.encode_documents`; what
            their modules import is loaded now.
    """

    def __init__(self, allowed: list[str]):
        self._modules = {name.rpartition(".")[0] for name in allowed}
        found = importlib.util.find_spec(LIBRARY)
        self._root = Path(found.origin).resolve().parent if found and found.origin else None
        for module in self._modules:
            try:
                importlib.import_module(module)
            except ImportError:
                # The grader may do without the library: the student's own import will say so.
                continue
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path=None, target=None):
        """Refuse the library's modules; leave all others, and those that are given, to the finders that follow."""
        given = any(f"{module}.".startswith(f"{name}.") for module in self._modules)
        if name.partition(".")[0] == LIBRARY and not given:
            raise ModuleNotFoundError(f"{name} cannot be imported here: the library holds the answers", name=name)
        return None

    def is_library_s(self, function) -> bool:
        """Whether a function's code lies in the library, whatever it is wrapped in."""
        # All that it has been: what a function says that it wraps may be itself.
        seen = []
        while not any(function is each for each in seen):
            seen.append(function)
            if self._is_of_library(getattr(function, "__code__", None)):
                return True
            inner = function.func if isinstance(function, functools.partial) else None
            function = getattr(function, "__wrapped__", function) if inner is None else inner
        return False

    def _is_of_library(self, code) -> bool:
        try:
            return self._root is not None and Path(os.path.realpath(code.co_filename)).is_relative_to(self._root)
        # No code, or one whose file is no path: any text can be its name.
        except (AttributeError, TypeError, ValueError):
            return False
