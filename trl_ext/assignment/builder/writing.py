"""Write the folders of an assignment: the starter or its solution, and the grader next to it."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import shutil
import uuid
from pathlib import Path
from typing import Any

import yaml

from trl_ext.assignment import runtime
from trl_ext.assignment.builder.outcomes import build_cases, uncaught
from trl_ext.assignment.builder.package import SCORES, package_files
from trl_ext.assignment.builder.readme import grader_readme, starter_readme
from trl_ext.assignment.builder.spec import AssignmentSpec, FunctionSpec
from trl_ext.assignment.catalog.catalog import task
from trl_ext.assignment.runtime.running import Runner
from trl_ext.assignment.runtime.verdicts import verdict
from trl_ext.assignment.train.recipe import used_functions
from trl_ext.files import write_text

RUNTIME = Path(runtime.__file__).parent
# Runtime files for both folders, and those only for the grader.
SHARED = ("checks", "fakes", "verdicts")
GRADING = ("running", "worker")
TRAIN = '''\
"""Train on your own functions: `python train.py --recipe NAME`. See README.md."""

from trl_ext.assignment.train.command import main

if __name__ == "__main__":
    main()
'''


def grader_folder(out: Path) -> Path:
    """The grader's folder: next to the starter, never inside it."""
    return out.resolve().with_name(f"{out.resolve().name}_grader")


def write_assignment(
    spec: AssignmentSpec, out: str | Path, *, solution: bool = False, replace: bool = False
) -> list[Path]:
    """Write the starter, or the solved version with `solution`, into `out`, and the grader next to it.

    Both are first written to temporary folders. `replace` renames existing folders, which may contain work or hidden
    cases in use, to `NAME.old-1` and so on.

    Returns:
        The renamed folders.

    Raises:
        ValueError: a folder exists and may not be replaced, or has other contents; the hidden cases are too few to
            reveal every known mistake; a name conflicts with the text around it; or the solution does not pass.
    """
    folder = Path(out).resolve()
    grader = grader_folder(folder)
    for each in (folder, grader):
        _check_folder(each, replace)
    files, allowed = package_files(spec, solution=solution)
    cases = {each.name: _cases(spec, each) for _, each in spec.functions()}
    visible, hidden = ({name: both[part] for name, both in cases.items()} for part in (0, 1))
    texts = {
        folder: _starter_texts(spec, files, allowed, visible),
        grader: _grader_texts(spec, allowed, files[SCORES], hidden, folder.name),
    }
    new = {each: each.with_name(f".{each.name}.new-{uuid.uuid4().hex[:8]}") for each in texts}
    try:
        for each, contents in texts.items():
            for path, text in contents.items():
                write_text(new[each] / path, text)
        if solution:
            _check_solution(spec, new[folder], new[grader], allowed, hidden)
        return _put_in_place(new)
    finally:
        for each in new.values():
            shutil.rmtree(each, ignore_errors=True)


def _check_folder(folder: Path, replace: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not replace:
        raise ValueError(
            f"{folder} is there already: give another --out, or --replace to write it anew and keep this one beside it"
        )
    if not (folder / "tests" / "plan.json").is_file() and not (folder / "grading.json").is_file():
        raise ValueError(f"{folder} holds something other than an assignment: it is not replaced; give another --out")


def _put_in_place(new: dict[Path, Path]) -> list[Path]:
    """Move each new folder into place; return the previous folders under their new names."""
    numbered = ([each.with_name(f"{each.name}.old-{n}") for each in new] for n in itertools.count(1))
    old = next(names for names in numbered if not any(path.exists() for path in names))
    kept = []
    for (folder, written), before in zip(new.items(), old, strict=True):
        # An empty folder is not kept.
        if folder.exists() and any(folder.iterdir()):
            kept.append(folder.rename(before))
        written.replace(folder)
    return kept


def _check_solution(
    spec: AssignmentSpec, folder: Path, grader: Path, allowed: list[str], cases: dict[str, list]
) -> None:
    """Run the solution on its hidden cases, as the grader does."""
    runner = Runner(folder, grader / "checking", spec.tests.seconds, allowed if spec.tests.imports == "zero" else None)
    with contextlib.closing(runner):
        for module, each in spec.functions():
            for case in cases[each.name]:
                outcome = runner.run(f"{spec.package}.{module}", each.name, case, f"checking.{SCORES}")
                problem = verdict(outcome, case)
                if problem is not None:
                    raise ValueError(f"modules.{module}: the solution of {each.name} would not pass: {problem}")


def _cases(spec: AssignmentSpec, each: FunctionSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The visible and the hidden cases of a function."""
    tests, given = spec.tests, task(each.function)
    visible = build_cases(given, tests.visible_seed, tests.visible)
    # Try several random seeds: the cases of one may not reveal every mistake.
    seeds = [secrets.randbelow(2**31) for _ in range(5)] if tests.hidden_seed is None else [tests.hidden_seed]
    for seed in seeds:
        hidden = build_cases(given, seed, tests.hidden, others=visible)
        missed = uncaught(given, hidden)
        if not missed:
            return visible, hidden
    raise ValueError(
        f"tests.hidden: {tests.hidden} cases of {each.function} do not show the mistake {missed[0]!r}; its "
        f"settings take turns over {given.variants}: give more, or another hidden_seed"
    )


def _starter_texts(
    spec: AssignmentSpec, files: dict[str, str], allowed: list[str], cases: dict[str, list]
) -> dict[str, str]:
    """The starter's files by path."""
    known = {
        "package": spec.package,
        "functions": {each.name: {"module": module, "library": each.function} for module, each in spec.functions()},
        "recipes": {name: recipe.model_dump(exclude_none=True) for name, recipe in spec.recipes.items()},
    }
    return {
        **{f"{spec.package}/{name}.py": text for name, text in files.items()},
        "train.py": TRAIN,
        "README.md": starter_readme(spec, allowed),
        "assignment.yaml": yaml.safe_dump(known, sort_keys=False),
        "conftest.py": '"""Its place tells pytest where the package is."""\n',
        **_runtime_texts(SHARED, "tests/checking"),
        "tests/test_functions.py": _runtime_text("visible"),
        **_case_texts("tests/cases", cases),
        "tests/plan.json": _json({"classes": f"{spec.package}.{SCORES}", "functions": _items(spec)}),
    }


def _grader_texts(
    spec: AssignmentSpec, allowed: list[str], scores: str, cases: dict[str, list], name: str
) -> dict[str, str]:
    """The grader's files by path."""
    library = {each.name: each.function for _, each in spec.functions()}
    uses = {name: used_functions(recipe, library) for name, recipe in spec.recipes.items()}
    plan = {
        "title": spec.title,
        "package": spec.package,
        "classes": f"checking.{SCORES}",
        **spec.tests.model_dump(include={"seconds", "partial_credit", "imports"}),
        "allowed_imports": allowed,
        "functions": _items(spec),
        # With the functions that the run must take from the student.
        "thresholds": [{**each.model_dump(), "uses": uses[each.recipe]} for each in spec.thresholds],
        **spec.model_dump(include={"submission", "submission_points", "submission_zero_at"}),
    }
    return {
        **_runtime_texts((*SHARED, *GRADING), "checking"),
        # The grader uses its own copy: the student may have changed the other.
        f"checking/{SCORES}.py": scores,
        "grade.py": _runtime_text("grade"),
        "README.md": grader_readme(spec, name, allowed),
        **_case_texts("cases", cases),
        "grading.json": _json(plan),
    }


def _items(spec: AssignmentSpec) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "module": f"{spec.package}.{module}",
            "points": each.points,
            "cases": f"cases/{each.name}.json",
        }
        for module, each in spec.functions()
    ]


def _case_texts(folder: str, cases: dict[str, list]) -> dict[str, str]:
    # One case per line, so that a diff shows which case changed.
    lines = {name: ",\n".join(json.dumps(case, allow_nan=False) for case in own) for name, own in cases.items()}
    return {f"{folder}/{name}.json": f"[\n{text}\n]\n" for name, text in lines.items()}


def _runtime_texts(names: tuple[str, ...], folder: str) -> dict[str, str]:
    first = {f"{folder}/__init__.py": '"""How functions are tried and judged."""\n'}
    return first | {f"{folder}/{name}.py": _runtime_text(name) for name in names}


def _runtime_text(name: str) -> str:
    return (RUNTIME / f"{name}.py").read_text(encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
