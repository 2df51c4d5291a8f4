"""What a submission's files import of the library that holds the answers, read from their text. Plain Python."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARY = "trl_ext"


def imports_by_module(submission: Path, plan: dict[str, Any]) -> tuple[dict[str, str | None], list[str]]:
    """What each module imports of the answers, itself or by a file of the submission that it imports.

    Returns:
        By module, what it imports, None for nothing; and what files of the package import that no module does.
    """
    allowed, reached = plan["allowed_imports"], set()
    notes: dict[str, str | None] = {}
    for module, path in plan["files"].items():
        files = _reachable(submission, submission / path)
        reached |= {os.path.realpath(file) for file in files}
        notes[module] = next((note for file in files if (note := _note(submission, file, allowed))), None)
    package = sorted((submission / plan["package"]).rglob("*.py"))
    # Unlike Path.resolve, realpath stands a link to itself.
    others = [path for path in package if os.path.realpath(path) not in reached]
    return notes, [note for path in others if (note := _note(submission, path, allowed))]


def _note(submission: Path, path: Path, allowed: list[str]) -> str | None:
    for line, name in _imports(submission, path):
        if name.partition(".")[0] == LIBRARY and name not in allowed:
            place = path.relative_to(submission).as_posix()
            return f"{place}, line {line}, imports {name}: the library holds the answers"
    return None


def _reachable(submission: Path, first: Path) -> list[Path]:
    """A file, and the submission's files that it imports, and so on; the packages that hold them among them."""
    found, waiting = [], [*_files(submission, _dotted(submission, first)), first]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        waiting += [file for _, name in _imports(submission, path) for file in _files(submission, name)]
    return found


def _files(submission: Path, name: str) -> list[Path]:
    """Files of the submission that an import of `a.b.c` runs; its last part may be a name in `a.b`.

    Names come from the submission's text: any string can be one, and what no file can be called ends the search.
    """
    folder, files = submission, []
    for part in name.split("."):
        if not part or part != os.path.basename(part):
            break
        # isfile, and not Path.is_file, which raises for a name that is too long.
        files += [path for path in (folder / part / "__init__.py", folder / f"{part}.py") if os.path.isfile(path)]
        folder = folder / part
        if not os.path.isdir(folder):
            break
    return files


def _dotted(submission: Path, path: Path) -> str:
    return ".".join(path.relative_to(submission).with_suffix("").parts)


def _imports(submission: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each import; none of a file that cannot be read."""
    # A pipe or a device may have no end.
    if not os.path.isfile(path):
        return
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = path.relative_to(submission).parts[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            constants = [part.value for part in node.args if isinstance(part, ast.Constant)]
            yield from ((node.lineno, value) for value in constants if isinstance(value, str))
