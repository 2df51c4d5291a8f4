"""Functions as text, taken out of the library's own source: whole with what they need, or as a signature to fill in.

The text stays as it was written, comments and all; only names change, where a function stands in another module than
in the library. What belongs to the arithmetic of tensors comes along; other public functions are imported.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

# Of these modules, what a function needs comes along: an import of them would be an import of the answers.
INLINED = (
    "trl_ext.advantages",
    "trl_ext.assignment.",
    "trl_ext.course",
    "trl_ext.data.truncation",
    "trl_ext.losses",
    "trl_ext.models.tokenization",
    "trl_ext.registry",
    "trl_ext.rewards.parsers",
    "trl_ext.rewards.verified",
)
# Where something stands in the library: its module and its name.
Place = tuple[str, str]
# A replacement in a line: line, start and end in bytes, text.
Edit = tuple[int, int, int, str]


@dataclass
class Module:
    """A module of the library, parsed.

    Attributes:
        name: of the module.
        lines: of its text, as bytes, since positions in syntax trees count bytes.
        definitions: top-level functions, classes and assignments by name.
        imports: what each imported name is: a module and a name in it, or a module and None.
    """

    name: str
    lines: list[bytes]
    definitions: dict[str, ast.stmt]
    imports: dict[str, tuple[str, str | None]]


@cache
def parsed(name: str) -> Module:
    """The module of a name, from its file."""
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
    """A file of Python in the making.

    Attributes:
        own: names in this file by their place in the library.
        elsewhere: imports of what other files of the package hold, by its place: module of the package and name.
        imports: lines of imports.
        helpers: definitions that come along, in the order in which they are needed.
    """

    own: Mapping[Place, str]
    elsewhere: Mapping[Place, tuple[str, str]]
    imports: set[str] = field(default_factory=set)
    helpers: dict[Place, str] = field(default_factory=dict)
    _names: dict[Place, str] = field(default_factory=dict)

    def whole(self, place: Place, name: str) -> str:
        """A definition under a name, with the helpers and imports that it needs noted here."""
        module, node = parsed(place[0]), parsed(place[0]).definitions[place[1]]
        edits = self._edits(module, node)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name != node.name:
            edits |= _renaming(module, node, name)
        start = node.lineno
        if isinstance(node, ast.ClassDef) and node.decorator_list:
            start = node.decorator_list[0].lineno
        return _text(module, start, node.end_lineno, edits)

    def signature(self, place: Place, name: str) -> str:
        """A function's first lines, up to where its body begins."""
        module, node = parsed(place[0]), parsed(place[0]).definitions[place[1]]
        parts = [node.args, *([node.returns] if node.returns else [])]
        edits = set().union(*(self._edits(module, part) for part in parts)) | _renaming(module, node, name)
        return _text(module, node.lineno, node.body[0].lineno - 1, edits)

    def file(self, docstring: str, definitions: list[str]) -> str:
        """The whole file."""
        head = [docstring_literal(docstring), "", "from __future__ import annotations", ""]
        helpers = sorted(self.helpers.items(), key=lambda item: _order(item[0]))
        constants = [text for place, text in helpers if not _is_definition(place)]
        others = [text for place, text in helpers if _is_definition(place)]
        imports = _in_groups(self.imports)
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
        """What a name of the module is called here."""
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
        """What something of the library is called here; it comes along or is imported."""
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
    """A literal between three quotes, which reads as that text whatever it holds."""
    if '"""' not in text and not text.endswith(('"', "\\")):
        return f'r"""{text}"""' if "\\" in text else f'"""{text}"""'
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"""{escaped}"""'


def place_of(function: Callable) -> Place:
    """Where a function stands in the library."""
    return function.__module__, function.__name__


def _member(module: Module, node: ast.Attribute) -> Place | None:
    """The place of `losses.dpo`, where `losses` is a module of the library."""
    source, member = module.imports.get(node.value.id, ("", None))
    if source.partition(".")[0] != "trl_ext":
        return None
    owner = getattr(importlib.import_module(source), member) if member else None
    return _defined_at(owner.__name__, node.attr) if isinstance(owner, ModuleType) else None


def _defined_at(module: str, name: str) -> Place:
    """Where a name of a module is defined, which may be a module that this one imports it from."""
    known = parsed(module)
    if name in known.definitions or name not in known.imports:
        return module, name
    source, member = known.imports[name]
    return _defined_at(source, member) if source.startswith("trl_ext") and member else (module, name)


def _locals(node: ast.AST) -> set[str]:
    """Names that a definition gives values itself: arguments, assignments, functions inside it."""
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
    edits = {(node.lineno, start, start + len(node.name.encode()), name)}
    if isinstance(node, ast.ClassDef):
        # Its methods name it too, and in annotations.
        edits |= {
            (each.lineno, each.col_offset, each.end_col_offset, name)
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and each.id == node.name
        }
    return edits


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


def _in_groups(imports: set[str]) -> list[str]:
    """Lines of imports, joined where they have one module: the standard library's, others', the package's."""
    joined: dict[str, set[str]] = {}
    lines = []
    for line in imports:
        if line.startswith("from "):
            source, _, names = line.removeprefix("from ").partition(" import ")
            joined.setdefault(source, set()).add(names)
        else:
            lines.append(line)
    lines += [f"from {source} import {', '.join(sorted(names, key=_case_last))}" for source, names in joined.items()]

    def group(line: str) -> int:
        root = line.split()[1]
        return 2 if root.startswith(".") else 0 if root.partition(".")[0] in sys.stdlib_module_names else 1

    groups = [sorted((x for x in lines if group(x) == g), key=lambda x: (x.startswith("from"), x)) for g in range(3)]
    return "\n\n".join("\n".join(each) for each in groups if each).splitlines()


def _case_last(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[0].isupper(), name
