"""The folders of an assignment: the starter or its solution, and beside it the grader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from trl_ext.assignment import runtime
from trl_ext.assignment.building import CLASSES, build_cases, package_files, uncaught
from trl_ext.assignment.catalog import task
from trl_ext.assignment.readme import grader_readme, starter_readme
from trl_ext.assignment.spec import AssignmentSpec
from trl_ext.files import write_json, write_text

RUNTIME = Path(runtime.__file__).parent
# Of the runtime, what both folders hold, and what the grader alone does.
SHARED = ("checks", "fakes", "verdicts")
GRADING = ("running", "worker")
TRAIN = '''\
"""Train on your own functions: `python train.py --recipe NAME`. See README.md."""

from trl_ext.assignment.training import main

if __name__ == "__main__":
    main()
'''


def grader_folder(out: Path) -> Path:
    """Beside the starter, and never in it."""
    return out.resolve().with_name(f"{out.resolve().name}_grader")


def write_assignment(spec: AssignmentSpec, out: str | Path, *, solution: bool = False, replace: bool = False) -> None:
    """Write the starter, or with `solution` the solved version, into `out`, and the grader beside it.

    Raises:
        ValueError: a folder exists and is not to be replaced or is none of these, or the hidden cases are too few to
            tell a known mistake from the right answer.
    """
    out = Path(out)
    folders = [out.resolve(), grader_folder(out)]
    for folder in folders:
        _check_folder(folder, replace)
    cases = {each.known_as: _cases(spec, each) for _, each in spec.functions()}
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)
    files, allowed = package_files(spec, solution=solution)
    _write_starter(spec, folders[0], files, allowed, {name: visible for name, (visible, _) in cases.items()})
    hidden = {name: own for name, (_, own) in cases.items()}
    _write_grader(spec, folders[1], allowed, files[CLASSES], hidden, folders[0].name)


def _check_folder(folder: Path, replace: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not replace:
        raise ValueError(f"{folder} is there already: give another --out, or --replace to write it anew")
    if not (folder / "tests" / "plan.json").is_file() and not (folder / "grading.json").is_file():
        raise ValueError(f"{folder} holds something else than an assignment: it is not replaced; give another --out")


def _cases(spec: AssignmentSpec, each) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    tests, given = spec.tests, task(each.function)
    visible = build_cases(given, tests.visible_seed, tests.visible, nan_padding=tests.nan_padding)
    hidden = build_cases(given, tests.hidden_seed, tests.hidden, nan_padding=tests.nan_padding)
    missed = uncaught(given, hidden)
    if missed:
        raise ValueError(
            f"tests.hidden: {tests.hidden} cases of {each.function} do not show the mistake {missed[0]!r}; its "
            f"settings take turns over {given.variants}: give more, or another hidden_seed"
        )
    return visible, hidden


def _write_starter(
    spec: AssignmentSpec, folder: Path, files: dict[str, str], allowed: list[str], cases: dict[str, list]
) -> None:
    for name, text in files.items():
        write_text(folder / spec.package / f"{name}.py", text)
    write_text(folder / "train.py", TRAIN)
    write_text(folder / "README.md", starter_readme(spec, allowed))
    recipes = {name: recipe.model_dump(exclude_none=True) for name, recipe in spec.recipes.items()}
    write_text(
        folder / "assignment.yaml",
        yaml.safe_dump({"package": spec.package, "functions": _names(spec), "recipes": recipes}, sort_keys=False),
    )
    write_json(folder / "thresholds.json", [each.model_dump() for each in spec.thresholds])
    tests = folder / "tests"
    _copy(SHARED, tests / "checking")
    write_text(tests / "test_functions.py", (RUNTIME / "visible.py").read_text(encoding="utf-8"))
    write_text(folder / "conftest.py", '"""Its place tells pytest where the package is."""\n')
    _write_cases(tests, cases)
    write_json(tests / "plan.json", {"classes": f"{spec.package}.{CLASSES}", "functions": _items(spec)})


def _write_grader(
    spec: AssignmentSpec, folder: Path, allowed: list[str], scores: str, cases: dict[str, list], name: str
) -> None:
    _copy((*SHARED, *GRADING), folder / "checking")
    # The grader's own, whatever the student has made of the other.
    write_text(folder / "checking" / f"{CLASSES}.py", scores)
    write_text(folder / "grade.py", (RUNTIME / "grade.py").read_text(encoding="utf-8"))
    write_text(folder / "README.md", grader_readme(spec, name))
    _write_cases(folder, cases)
    plan = {
        "title": spec.title,
        "package": spec.package,
        "classes": f"checking.{CLASSES}",
        "seconds": spec.tests.seconds,
        "partial_credit": spec.tests.partial_credit,
        "imports": spec.tests.imports,
        "allowed_imports": allowed,
        "files": {f"{spec.package}.{module}": f"{spec.package}/{module}.py" for module in spec.modules},
        "functions": _items(spec),
        "thresholds": [each.model_dump() for each in spec.thresholds],
        "submission": spec.submission,
        "submission_points": spec.submission_points,
    }
    write_json(folder / "grading.json", plan)


def _names(spec: AssignmentSpec) -> dict[str, dict[str, str]]:
    return {each.known_as: {"module": module, "library": each.function} for module, each in spec.functions()}


def _items(spec: AssignmentSpec) -> list[dict[str, Any]]:
    return [
        {
            "name": each.known_as,
            "module": f"{spec.package}.{module}",
            "points": each.points,
            "cases": f"cases/{each.known_as}.json",
        }
        for module, each in spec.functions()
    ]


def _write_cases(folder: Path, cases: dict[str, list]) -> None:
    for name, own in cases.items():
        # One case to a line: a diff shows which has changed.
        lines = ",\n".join(json.dumps(case, allow_nan=False) for case in own)
        write_text(folder / "cases" / f"{name}.json", f"[\n{lines}\n]\n")


def _copy(names: tuple[str, ...], folder: Path) -> None:
    write_text(folder / "__init__.py", '"""How functions are tried and judged."""\n')
    for name in names:
        write_text(folder / f"{name}.py", (RUNTIME / f"{name}.py").read_text(encoding="utf-8"))
