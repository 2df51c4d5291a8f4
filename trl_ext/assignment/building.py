"""Test cases with the outcomes of the right function and of known mistakes, and the files of a student's package."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from trl_ext.assignment.catalog import task
from trl_ext.assignment.drawing import Draw, encode_arguments
from trl_ext.assignment.facts import FACTS
from trl_ext.assignment.mistakes import mistakes_of
from trl_ext.assignment.runtime.checks import call
from trl_ext.assignment.runtime.verdicts import differs
from trl_ext.assignment.source import Place, Text, docstring_literal, parsed, place_of
from trl_ext.assignment.spec import AssignmentSpec, FunctionSpec
from trl_ext.assignment.task import Task

# The module of the package that holds the classes which arguments are of, and where the library has them.
CLASSES = "scores"
CLASS_PLACE: Place = ("trl_ext.losses.preference", "PreferenceScores")
ABOUT = {
    "nan": "NaN at positions that do not count",
    "empty row": "a row without a token that counts",
    "equal": "a group of equal rewards in float32",
    "far apart": "margins of about 800 in either direction",
}
# Arguments of a function that choose among what it can do; all other texts are what it works on.
OPTIONS = ("kind", "loss_type")
_FORMULA = re.compile(r"`[^`]*[-+*/=(^][^`]*`")
_PAPER = re.compile(r"\b(arXiv|equation \d|Williams|CS336)")


def build_cases(
    given: Task, seed: int, count: int, *, nan_padding: bool, others: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Cases of a function: `count` of ordinary ones, one in float32, and the special ones.

    All differ from each other in their arguments, and from `others`, which are known to those who are tested.

    Raises:
        ValueError: the library's own function fails on a case, or there are not so many cases.
    """
    wanted = [("at random", index, "") for index in range(count)]
    for special in given.special:
        if special != "nan" or nan_padding:
            wanted += [(ABOUT[special], 100 + index, special) for index in range(min(given.variants, 3))]
    wanted += [("float32", 200, "")] if given.in_float32 else []
    known = [case["arguments"] for case in others]
    cases = []
    for about, index, special in wanted:
        case = _new_case(given, about, (seed, index, special), known)
        known.append(case["arguments"])
        cases.append(_with_outcomes(given, case))
    return cases


def _new_case(given: Task, about: str, drawn: tuple[int, int, str], known: list[dict[str, Any]]) -> dict[str, Any]:
    """A case whose arguments are not known; the first draw of them, or a later one."""
    for attempt in range(100):
        case = _case(given, about, Draw(*drawn, attempt))
        if about == "float32":
            case["arguments"] = _in_float32(case["arguments"])
        if case["arguments"] not in known:
            return case
    raise ValueError(f"{given.name}: no more than {len(known)} different cases; ask for fewer")


def uncaught(given: Task, cases: list[dict[str, Any]]) -> list[str]:
    """Names of the mistakes that none of the cases tells from the right answer."""
    caught = {name for case in cases for name in (each["name"] for each in case["mistakes"])}
    return [each.name for each in mistakes_of(given.name) if each.name not in caught]


def _case(given: Task, about: str, draw: Draw) -> dict[str, Any]:
    arguments = given.build(draw)
    plain = {name: value for name, value in arguments.items() if isinstance(value, (bool, int, float, str))}
    texts = [name for name, value in plain.items() if isinstance(value, str) and name not in OPTIONS]
    options = [f"{name}={value!r}" for name, value in plain.items() if name not in texts]
    case: dict[str, Any] = {"about": ", ".join([about, *options[:4]]), "arguments": encode_arguments(arguments)}
    if texts:
        # Apart, as a hidden case's texts are nobody's business.
        case["texts"] = ", ".join(f"{name}={plain[name]!r}" for name in texts)
    if given.unordered:
        case["unordered"] = True
    if draw.special:
        case["special"] = draw.special
    if given.own_backward:
        case["backward"] = "own"
    if given.compared is not None:
        case["compared"] = list(given.compared)
    differentiated = given.compared if given.differentiated is None else given.differentiated
    if differentiated is not None:
        case["differentiated"] = list(differentiated)
    return case


def _with_outcomes(given: Task, case: dict[str, Any]) -> dict[str, Any]:
    expected = _call(given.function, case)
    if "error" in expected:
        raise ValueError(f"{given.name} fails on its own case: {expected['error']['message']}")
    case = {**case, "expected": expected, "mistakes": []}
    for each in mistakes_of(given.name):
        outcome = _call(partial(each.function, given.function), case)
        # One that fails has a message of its own, and one that is right here says nothing.
        if "error" not in outcome and differs(outcome, case):
            case["mistakes"].append({"name": each.name, "message": each.message, "outcome": outcome})
    return case


def _call(function, case: dict[str, Any]) -> dict[str, Any]:
    threads = torch.get_num_threads()
    # Sums in another order differ in their last bits.
    torch.set_num_threads(1)
    try:
        return call(function, case, CLASS_PLACE[0])
    finally:
        torch.set_num_threads(threads)


def _in_float32(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_float32(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("dtype") == "float64":
        return {**value, "dtype": "float32"}
    return {name: _in_float32(item) for name, item in value.items()}


def package_files(spec: AssignmentSpec, *, solution: bool) -> tuple[dict[str, str], list[str]]:
    """Files of the student's package by name, blanked or solved, and what of the library they may import."""
    places = {place_of(task(each.function).function): (module, each.known_as) for module, each in spec.functions()}
    places[CLASS_PLACE] = (CLASSES, CLASS_PLACE[1])
    files = {"__init__": f"{docstring_literal(f'{spec.title}.')}\n"}
    given: set[str] = set()
    for module in spec.modules:
        solved = _module_text(spec, module, places, solution=True)
        text = solved if solution else _module_text(spec, module, places, solution=False)
        given |= _library_imports(solved)
        files[module] = text
    scores = Text({CLASS_PLACE: CLASS_PLACE[1]}, {})
    files[CLASSES] = scores.file("What a preference loss is given.", [scores.whole(CLASS_PLACE, CLASS_PLACE[1])])
    return files, sorted(given)


def _module_text(spec: AssignmentSpec, module: str, places: dict[Place, tuple[str, str]], *, solution: bool) -> str:
    own = {place: name for place, (file, name) in places.items() if file == module}
    elsewhere = {place: found for place, found in places.items() if found[0] != module}
    text = Text(own, elsewhere)
    definitions = []
    for each in spec.modules[module].functions:
        place = place_of(task(each.function).function)
        try:
            if solution:
                definitions.append(text.whole(place, each.known_as))
            else:
                definitions.append(f"{text.signature(place, each.known_as)}\n{_blank_body(spec, module, each)}")
        except ValueError as error:
            raise ValueError(f"modules.{module}.functions: name: {error}") from None
    return text.file(spec.modules[module].description, definitions)


def _library_imports(text: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and not node.level]
    library = [node for node in nodes if node.module.partition(".")[0] == "trl_ext"]
    return {f"{node.module}.{alias.name}" for node in library for alias in node.names}


def _blank_body(spec: AssignmentSpec, module: str, each: FunctionSpec) -> str:
    given = task(each.function)
    lines = docstring_lines(given, spec.docstring, each.hint)
    body = [docstring_literal("\n".join([*lines, ""]))]
    error = f"implement {each.known_as} in {spec.package}/{module}.py: {given.summary}"
    one_line = f'raise NotImplementedError("{error}")'
    body.append(one_line if len(one_line) < 115 else f'raise NotImplementedError(\n    "{error}"\n)')
    return "\n".join("    " + line if line else "" for part in body for line in part.split("\n"))


def docstring_lines(given: Task, style: str, hint: str) -> list[str]:
    """A starter's docstring: the library's, or without its formulas; with shapes and the paper in both."""
    full = inspect.cleandoc(ast.get_docstring(_definition(given)) or "")
    sections = full.split("\n\n")
    if style == "full":
        lines = full.split("\n")
    else:
        kept = [part for part in sections[1:] if part.startswith(("Returns:", "Raises:"))]
        names = next((part for part in sections if part.startswith("Args:")), "")
        papers = [sentence for part in sections if not part.startswith("Args:") for sentence in _papers(part)]
        lines = f"{given.summary[0].upper()}{given.summary[1:]}.".split("\n")
        for part in (_without_formulas(names), *map(_without_formulas, kept), *dict.fromkeys(papers)):
            lines += ["", *part.split("\n")] if part else []
        if given.name in FACTS:
            lines += ["", *textwrap.wrap(FACTS[given.name], 115)]
    lines += ["", f"Shapes: {given.shapes}."]
    if given.paper:
        lines += ["", f"Paper: {given.paper}"]
    if given.notes:
        lines += ["", *textwrap.wrap(given.notes, 115)]
    if given.compared is not None:
        lines += ["", "What the metadata hold is yours to choose: the tests do not read them."]
    if "nan" in given.special:
        lines += ["", "What stands at positions that do not count, NaN among it, must not reach the result."]
    return lines + (["", f"Hint: {hint}"] if hint else [])


def _definition(given: Task) -> ast.FunctionDef:
    module, name = place_of(given.function)
    return parsed(module).definitions[name]


def _papers(part: str) -> list[str]:
    """Sentences that name a paper, and no formula."""
    found = [sentence for sentence in _sentences(part) if _PAPER.search(sentence) and "`" not in sentence]
    return ["\n".join(textwrap.wrap(sentence, 115)) for sentence in found]


def _without_formulas(part: str) -> str:
    """A section without the sentences that hold code other than a name."""
    if not part:
        return ""
    heading, *lines = part.split("\n")
    entries: list[str] = []
    for line in lines:
        if line.startswith("        ") and entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    kept = [" ".join(s for s in _sentences(entry) if not _FORMULA.search(s)) for entry in entries]
    indents = {"initial_indent": "    ", "subsequent_indent": "        "}
    return "\n".join([heading, *(line for entry in kept for line in textwrap.wrap(entry, 115, **indents))])


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[a-z\d`)\]]\.)\s+(?=[A-Z])", " ".join(text.split()))
