"""Extract functions from the library's source: complete with the helpers they need, or as a signature to fill in.

The text and its comments are unchanged except for names: an assignment may rename functions and move them to other
modules. Helpers from the modules in `INLINED` are copied; other public functions are imported.
"""

from __future__ import annotations

import ast
import importlib
import sys
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
    "trl_ext.rewards.parsers",
    "trl_ext.rewards.verified",
)
# A place in the library: a module and a name in it.
Place = tuple[str, str]
# A replacement: line, start and end in bytes, text.
Edit = tuple[int, int, int, str]


@dataclass
class Module:
    """A parsed module of the library.

    Attributes:
        name: name of the module.
        lines: its lines as bytes, because positions in syntax trees count bytes.
        definitions: top-level functions, classes and assignments by name.
        imports: the origin of each imported name: a module and a name in it, or a module and None.
    """

    name: str
    lines: list[bytes]
    definitions: dict[str, ast.stmt]
    imports: dict[str, tuple[str, str | None]]


@cache
def parsed(name: str) -> Module:
    """Parse the module with this name."""
    module = sys.modules.get(name) or importlib.import_module(name)
    with open(module.__file__, "rb") as file:
        content = file.read()
    definitions, imports = {}, {}
    for node in ast.parse(content).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name.partition(".")[0]: (alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    return Module(name, content.splitlines(), definitions, imports)


@dataclass
class Text:
    """A Python file under construction.

    Attributes:
        own: names in this file by their place in the library.
        elsewhere: for each place in the library that another file of the package contains, its module and name.
        imports: lines of imports.
        helpers: definitions that are copied along, in the order in which they are needed.
    """

    own: Mapping[Place, str]
    elsewhere: Mapping[Place, tuple[str, str]]
    imports: set[str] = field(default_factory=set)
    helpers: dict[Place, str] = field(default_factory=dict)
    _names: dict[Place, str] = field(default_factory=dict)

    def whole(self, place: Place, name: str) -> str:
        """The text of a definition under a name; records the helpers and imports that it needs."""
        module, node = parsed(place[0]), parsed(place[0]).definitions[place[1]]
        edits = self._edits(module, node)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name != node.name:
            edits |= _renaming(module, node, name)
        start = node.lineno
        if isinstance(node, ast.ClassDef) and node.decorator_list:
            start = node.decorator_list[0].lineno
        return _text(module, start, node.end_lineno, edits)

    def signature(self, place: Place, name: str) -> str:
        """The first lines of a function, up to its body."""
        module, node = parsed(place[0]), parsed(place[0]).definitions[place[1]]
        parts = [node.args, *([node.returns] if node.returns else [])]
        edits = set().union(*(self._edits(module, part) for part in parts)) | _renaming(module, node, name)
        return _text(module, node.lineno, node.body[0].lineno - 1, edits)

    def file(self, docstring: str, definitions: list[str]) -> str:
        """The text of the file."""
        head = [docstring_literal(docstring), "", "from __future__ import annotations", ""]
        helpers = sorted(self.helpers.items(), key=lambda item: _order(item[0]))
        constants = [text for place, text in helpers if not _is_definition(place)]
        others = [text for place, text in helpers if _is_definition(place)]
        imports = _import_lines(self.imports)
        top = "\n".join([*head, *imports, *(["", *constants] if constants else [])]).rstrip("\n")
        return "\n\n\n".join([top, *others, *definitions]) + "\n"

    def _edits(self, module: Module, node: ast.AST) -> set[Edit]:
        local, edits = _locals(node), set()

        def note(each: ast.expr, name: str) -> None:
            if name in local:
                raise ValueError(
                    f"{name!r} is another thing inside {getattr(node, 'name', name)}; choose another name"
                )
            edits.add((each.lineno, each.col_offset, each.end_col_offset, name))

        skipped = set()
        if isinstance(node, ast.FunctionDef):
            skipped = {id(each) for decorator in node.decorator_list for each in ast.walk(decorator)}
        for each in ast.walk(node):
            if id(each) in skipped:
                continue
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                place = _member(module, each) if each.value.id not in local else None
                if place is not None:
                    skipped.add(id(each.value))
                    note(each, self._name(place, each.attr))
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and each.id not in local:
                name = self._resolve(module, each.id)
                if name != each.id:
                    note(each, name)
        return edits

    def _resolve(self, module: Module, name: str) -> str:
        """The name in this file for a name in the module."""
        if name in module.definitions:
            return self._name((module.name, name), name)
        source, member = module.imports.get(name, ("", None))
        if source.partition(".")[0] != "trl_ext" or member is None:
            if name in self.own.values() or name in {known_as for _, known_as in self.elsewhere.values()}:
                raise ValueError(f"{name!r} is the name of what the text uses; choose another name")
            if not source:
                return name
            line = f"from {source} import {member}" if member else f"import {source}"
            self.imports.add(line + (f" as {name}" if name not in (member, source.partition(".")[0]) else ""))
            return name
        return self._name(_defined_at(source, member), name)

    def _name(self, place: Place, name: str) -> str:
        """The name in this file for a place in the library, which is copied or imported."""
        if place in self.own:
            return self.own[place]
        if place in self.elsewhere:
            source, known_as = self.elsewhere[place]
            self.imports.add(f"from .{source} import {known_as}")
            return known_as
        if not place[0].startswith(INLINED) and not place[1].startswith("_"):
            self.imports.add(f"from {place[0]} import {place[1]}")
            return name
        if place not in self._names:
            self._names[place] = self._free_name(place)
            self.helpers[place] = self.whole(place, self._names[place])
        return self._names[place]

    def _free_name(self, place: Place) -> str:
        own = place[1]
        if own.isupper():
            return own
        wanted = own if own.startswith("_") or own[0].isupper() else f"_{own}"
        taken = {*self._names.values(), *self.own.values()}
        return f"{wanted}_of_{place[0].rpartition('.')[2]}" if wanted in taken else wanted


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
    if source.partition(".")[0] != "trl_ext":
        return None
    owner = getattr(importlib.import_module(source), member) if member else None
    return _defined_at(owner.__name__, node.attr) if isinstance(owner, ModuleType) else None


def _defined_at(module: str, name: str) -> Place:
    """The place where a name is defined, following imports from other modules."""
    known = parsed(module)
    if name in known.definitions or name not in known.imports:
        return module, name
    source, member = known.imports[name]
    return _defined_at(source, member) if source.startswith("trl_ext") and member else (module, name)


def _locals(node: ast.AST) -> set[str]:
    """Names bound inside a definition: arguments, assignments and nested functions."""
    names = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    inner = (
        each for each in ast.walk(node) if isinstance(each, (ast.FunctionDef, ast.ImportFrom)) and each is not node
    )
    for each in inner:
        names |= {each.name} if isinstance(each, ast.FunctionDef) else {alias.name for alias in each.names}
    return names


def _renaming(module: Module, node: ast.FunctionDef | ast.ClassDef, name: str) -> set[Edit]:
    line = module.lines[node.lineno - 1]
    start = line.index(node.name.encode(), node.col_offset)
    return {(node.lineno, start, start + len(node.name.encode()), name)}


def _text(module: Module, start: int, end: int, edits: set[Edit]) -> str:
    lines = list(module.lines)
    for line, first, last, text in sorted(edits, reverse=True):
        content = lines[line - 1]
        lines[line - 1] = content[:first] + text.encode() + content[last:]
    return b"\n".join(lines[start - 1 : end]).decode()


def _order(place: Place) -> tuple[str, int]:
    return place[0], parsed(place[0]).definitions[place[1]].lineno


def _is_definition(place: Place) -> bool:
    return isinstance(parsed(place[0]).definitions[place[1]], (ast.FunctionDef, ast.ClassDef))


def _import_lines(imports: set[str]) -> list[str]:
    """Lines of imports, merged by module; imports of the package come last."""
    joined: dict[str, list[str]] = {}
    for line in imports:
        source, _, name = line.partition(" import ")
        joined.setdefault(source, []).extend([name] if name else [])
    lines = [f"{source} import {', '.join(sorted(names))}" if names else source for source, names in joined.items()]
    return sorted(lines, key=lambda line: (line.startswith("from ."), line.startswith("from"), line))
