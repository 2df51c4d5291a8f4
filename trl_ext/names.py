"""User-given names: hints for unknown names, and functions from the user's own files."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def nearest(name: str, valid: list[str]) -> str:
    """The end of an error message: `; did you mean 'aot'?`, or a full stop if no name is near."""
    matches = [*difflib.get_close_matches(name, valid, n=1), *difflib.get_close_matches(name.lower(), valid, n=1)]
    return f"; did you mean {matches[0]!r}?" if matches else "."


def check_choice(flag: str, value: Any, choices: Iterable[str]) -> None:
    """Reject a value that is not one of the choices; the message has the nearest one and the list."""
    if value not in (known := list(choices)):
        raise ValueError(f"unknown --{flag} {value!r}{nearest(str(value), known)} Known: {', '.join(known)}")


def lazy_names(package: str, names_by_module: Mapping[str, str]) -> tuple[list[str], Callable, Callable]:
    """`__all__`, `__getattr__` and `__dir__` of a package whose modules are imported when their names are used.

    Args:
        package: its name.
        names_by_module: the names in a module, under the module's name in the package or its full name.
    """
    module_of_name = {name: module for module, names in names_by_module.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in module_of_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of_name[name], package), name)

    return [*module_of_name], load, lambda: sorted({*vars(sys.modules[package]), *module_of_name})


def load_module(source: str) -> ModuleType:
    """Import `source`, a path to a .py file (the ending may be left out) or a module name."""
    path = Path(source if source.endswith(".py") else f"{source}.py")
    if not path.is_file():
        if source.endswith(".py"):
            # The config.yaml of a run may hold a path relative to another folder.
            seen = "" if path.is_absolute() else f" in {Path.cwd().name or '/'}, the folder that this runs in"
            raise ValueError(f"no file {source!r} to take a function from{seen}")
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if not f"{source}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"no file {str(path)!r} and no module {source!r} to take a function from") from error
    # The name depends on the path, so that two files called losses.py are not confused.
    module_name = f"trl_ext_user_{zlib.crc32(str(path.resolve()).encode())}_{path.stem}"
    modified = path.stat().st_mtime_ns
    loaded = sys.modules.get(module_name)
    # Execute an edited file again, so that a notebook trains with its current contents.
    if loaded is not None and loaded.__modified__ == modified:
        return loaded
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    module.__modified__ = modified
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def load_function(name: str, kind: str) -> Callable:
    """Load the function that `file.py:function` or `module:function` names.

    Args:
        name: the file or module, and the function.
        kind: the function's description in error messages, such as "reward function".

    Raises:
        ValueError: no such file, module or function.
    """
    source, separator, function_name = name.rpartition(":")
    if not separator:
        raise ValueError(f"the {kind} {name!r} must be given as file.py:function or module:function")
    module = load_module(source)
    function = getattr(module, function_name, None)
    if callable(function):
        return function
    defined = sorted(n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__)
    says = f"it defines {', '.join(defined)}" if defined else "it defines no function"
    raise ValueError(f"{source} has no {kind} {function_name!r}: {says}{nearest(function_name, defined)}")
