"""Extract functions from the library's source: complete with the helpers they need, or as a signature to fill in.

The text and its comments are unchanged except for the names of helpers. Helpers from the modules in `INLINED` are
copied; other public functions are imported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

# Helpers from these modules are copied, because students must not import the modules with the answers.
INLINED = (
    "trl_ext.advantages",
    "trl_ext.assignment.",
    "trl_ext.course",
    "trl_ext.data.truncation",
    "trl_ext.losses",
    "trl_ext.models.tokenization",
    "trl_ext.names",
    "trl_ext.registry",
    "trl_ext.rewards.normalization",
    "trl_ext.rewards.parsers",
    "trl_ext.rewards.verified",
)
# A place in the library: a module and a name in it.
Place = tuple[str, str]


@dataclass
class Module:
    """A parsed module of the library.

    Attributes:
        name: name of the module.
        lines: its lines.
        definitions: top-level functions, classes and assignments by name.
        imports: the origin of each imported name: a module and a name in it, or a module and None.
    """

    name: str
    lines: list[str]
    definitions: dict[str, ast.stmt]
    imports: dict[str, tuple[str, str | None]]


@cache
def parsed(name: str) -> Module:
    """Parse the module with this name."""
    source = inspect.getsource(importlib.import_module(name))
    definitions, imports = {}, {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name: (alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    return Module(name, source.splitlines(), definitions, imports)


@dataclass
class Text:
    """A Python file under construction.

    Attributes:
        places: for each place in the library that a file of the package contains, the name of that file.
        file: the name of this file.
        imports: names by the start of the line that imports them.
        helpers: definitions that are copied along.
    """

    places: Mapping[Place, str]
    file: str
    imports: dict[str, set[str]] = field(default_factory=dict)
    helpers: dict[Place, str] = field(default_factory=dict)

    def whole(self, place: Place, name: str) -> str:
        """The text of a definition under a name; records the helpers and imports that it needs."""
        module, node = parsed(place[0]), parsed(place[0]).definitions[place[1]]
        start = node.lineno
        if isinstance(node, ast.ClassDef) and node.decorator_list:
            start = node.decorator_list[0].lineno
        return self._text(module, node, start, node.end_lineno).replace(f" {place[1]}(", f" {name}(", 1)

    def signature(self, place: Place) -> str:
        """The first lines of a function, up to its body."""
        module, node = parsed(place[0]), parsed(place[0]).definitions[place[1]]
        head = ast.Module([ast.Expr(node.args), *([ast.Expr(node.returns)] if node.returns else [])], [])
        return self._text(module, head, node.lineno, node.body[0].lineno - 1)

    def contents(self, docstring: str, definitions: list[str]) -> str:
        """The text of the file."""
        helpers = sorted(self.helpers, key=lambda place: (place[0], _node(place).lineno))
        constants = [self.helpers[place] for place in helpers if not _is_definition(place)]
        others = [self.helpers[place] for place in helpers if _is_definition(place)]
        lines = [f"{line} {', '.join(sorted(names))}" if names else line for line, names in self.imports.items()]
        lines.sort(key=lambda line: (line.startswith("from ."), line.startswith("from"), line))
        head = [docstring_literal(docstring), "", "from __future__ import annotations", "", *lines]
        top = "\n".join([*head, *(["", *constants] if constants else [])]).rstrip("\n")
        return "\n\n\n".join([top, *others, *definitions]) + "\n"

    def _text(self, module: Module, node: ast.AST, start: int, end: int) -> str:
        """Lines of a module, with the names that their nodes have in this file."""
        lines = list(module.lines)
        for line, first, last, name in sorted(self._edits(module, node), reverse=True):
            lines[line - 1] = lines[line - 1][:first] + name + lines[line - 1][last:]
        return "\n".join(lines[start - 1 : end])

    def _edits(self, module: Module, node: ast.AST) -> set[tuple[int, int, int, str]]:
        """The line, start, end and new text of each name that changes."""
        local, edits = _locals(node), set()
        skipped = set()
        if isinstance(node, ast.FunctionDef):
            skipped = {id(each) for decorator in node.decorator_list for each in ast.walk(decorator)}
        for each in ast.walk(node):
            name = None
            if id(each) in skipped:
                continue
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id not in local:
                place = _member(module, each)
                if place is not None:
                    skipped.add(id(each.value))
                    name = self._name(place, each.attr)
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and each.id not in local:
                name = self._resolve(module, each.id)
            if name is not None:
                edits.add((each.lineno, each.col_offset, each.end_col_offset, name))
        return edits

    def _resolve(self, module: Module, name: str) -> str:
        """The name in this file for a name in the module."""
        if name in module.definitions:
            return self._name((module.name, name), name)
        source, member = module.imports.get(name, ("", None))
        if source.startswith("trl_ext") and member:
            return self._name(_defined_at(source, member), name)
        if member:
            self._import(f"from {source} import", member if name == member else f"{member} as {name}")
        elif source:
            self._import(f"import {source}" if name == source else f"import {source} as {name}")
        return name

    def _name(self, place: Place, name: str) -> str:
        """The name in this file for a place in the library, which is copied or imported."""
        source, own = place
        if self.places.get(place) == self.file:
            return own
        if place in self.places:
            self._import(f"from .{self.places[place]} import", own)
            return own
        if not source.startswith(INLINED) and not own.startswith("_"):
            self._import(f"from {source} import", own)
            return name
        wanted = own if own.startswith("_") or own[0].isupper() else f"_{own}"
        if place not in self.helpers:
            self.helpers[place] = ""
            self.helpers[place] = self.whole(place, wanted)
        return wanted

    def _import(self, line: str, *names: str) -> None:
        self.imports.setdefault(line, set()).update(names)


def docstring_literal(text: str) -> str:
    """A triple-quoted literal for any text."""
    if '"""' not in text and not text.endswith(('"', "\\")):
        return f'r"""{text}"""' if "\\" in text else f'"""{text}"""'
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"""{escaped}"""'


def place_of(function: Callable) -> Place:
    """The place of a function in the library."""
    return function.__module__, function.__name__


def _member(module: Module, node: ast.Attribute) -> Place | None:
    """The place of `losses.dpo`, where `losses` is a module of the library."""
    source, member = module.imports.get(node.value.id, ("", None))
    if not source.startswith("trl_ext"):
        return None
    owner = getattr(importlib.import_module(source), member)
    return _defined_at(owner.__name__, node.attr) if isinstance(owner, ModuleType) else None


def _defined_at(module: str, name: str) -> Place:
    """The place where a name is defined, following imports from other modules."""
    known = parsed(module)
    if name in known.definitions or name not in known.imports:
        return module, name
    source, member = known.imports[name]
    return _defined_at(source, member) if source.startswith("trl_ext") else (module, name)


def _locals(node: ast.AST) -> set[str]:
    """Names bound inside a definition: arguments, assignments, nested functions and imports."""
    names = set()
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            names.add(each.arg)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, ast.FunctionDef) and each is not node:
            names.add(each.name)
        elif isinstance(each, ast.ImportFrom):
            names |= {alias.name for alias in each.names}
    return names


def _node(place: Place) -> ast.stmt:
    return parsed(place[0]).definitions[place[1]]


def _is_definition(place: Place) -> bool:
    return isinstance(_node(place), (ast.FunctionDef, ast.ClassDef))
