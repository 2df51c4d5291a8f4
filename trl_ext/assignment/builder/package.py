"""The student's package: each function blank or solved, taken from the library's source."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

from trl_ext.assignment.builder.source import Text, docstring_literal, parsed, place_of
from trl_ext.assignment.builder.spec import AssignmentSpec, FunctionSpec
from trl_ext.assignment.catalog.catalog import task
from trl_ext.assignment.catalog.task import Task
from trl_ext.losses import PreferenceScores

# The module of the package with the class of arguments.
SCORES = "scores"
# Code that computes something: it contains an operator or a call, and is not only a name, a flag or a negated name.
_FORMULA = re.compile(r"`(-\w+ |.* [-+*/=] |.*[(^](?!\)))", re.DOTALL)


def package_files(spec: AssignmentSpec, *, solution: bool) -> tuple[dict[str, str], list[str]]:
    """The files of the package by name, and the library names that they may import."""
    scores = place_of(PreferenceScores)
    places = {place_of(task(each.function).function): module for module, each in spec.functions()} | {scores: SCORES}
    files = {"__init__": f"{docstring_literal(f'{spec.title}.')}\n"}
    given: set[str] = set()
    for module, content in spec.modules.items():
        own = [place_of(task(each.function).function) for each in content.functions]
        text = Text(places, module)
        files[module] = text.contents(content.description, [text.whole(place, place[1]) for place in own])
        given |= _library_imports(files[module])
        if not solution:
            text = Text(places, module)
            blank = zip(own, content.functions, strict=True)
            definitions = [f"{text.signature(place)}\n{_blank_body(spec, module, each)}" for place, each in blank]
            files[module] = text.contents(content.description, definitions)
    text = Text(places, SCORES)
    files[SCORES] = text.contents("The argument of a preference loss.", [text.whole(scores, scores[1])])
    return files, sorted(given)


def _library_imports(text: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and not node.level]
    library = [node for node in nodes if node.module.partition(".")[0] == "trl_ext"]
    return {f"{node.module}.{alias.name}" for node in library for alias in node.names}


def _blank_body(spec: AssignmentSpec, module: str, each: FunctionSpec) -> str:
    given = task(each.function)
    docstring = docstring_literal("\n".join([*docstring_lines(given, spec.docstring, each.hint), ""]))
    error = f'raise NotImplementedError("implement {given.short_name} in {spec.package}/{module}.py: {given.summary}")'
    if len(error) >= 115:
        error = error.replace("(", "(\n    ", 1)[:-1] + "\n)"
    return textwrap.indent(f"{docstring}\n{error}", "    ")


def docstring_lines(given: Task, style: str, hint: str) -> list[str]:
    """The library's docstring with shapes, paper and notes; in the style `shapes`, `...` replaces formulas."""
    module, name = place_of(given.function)
    text = inspect.cleandoc(ast.get_docstring(parsed(module).definitions[name]) or "")
    # In a reward rule, text that looks like a formula is the required form of an answer.
    if style == "shapes" and given.kind != "reward rule":
        text = re.sub(r"`[^`]*`", lambda code: "`...`" if _FORMULA.match(code[0]) else code[0], text)
    lines = [*text.split("\n"), "", f"Shapes: {given.shapes}."]
    if given.paper:
        lines += ["", f"Paper: {given.paper}"]
    if given.notes:
        lines += ["", *textwrap.wrap(given.notes, 115)]
    if given.compared is not None:
        lines += ["", "The contents of the metadata are your choice: the tests do not read them."]
    if "nan" in given.special:
        lines += ["", "Values at positions that do not count may be NaN and must not reach the result."]
    return lines + (["", f"Hint: {hint}"] if hint else [])
