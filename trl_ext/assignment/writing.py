"""The folders of an assignment: the starter or its solution, and beside it the grader."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml

from trl_ext.assignment import runtime
from trl_ext.assignment.building import CLASSES, build_cases, package_files, uncaught
from trl_ext.assignment.catalog import task
from trl_ext.assignment.readme import grader_readme, starter_readme
from trl_ext.assignment.recipe_rules import used_functions
from trl_ext.assignment.runtime.running import Runner
from trl_ext.assignment.runtime.verdicts import verdict
from trl_ext.assignment.spec import AssignmentSpec, ThresholdSpec
from trl_ext.files import write_text

RUNTIME = Path(runtime.__file__).parent
# Of the runtime, what both folders hold, and what the grader alone does.
SHARED = ("checks", "fakes", "verdicts")
GRADING = ("guard", "imports", "running", "worker")
TRAIN = '''\
"""Train on your own functions: `python train.py --recipe NAME`. See README.md."""

from trl_ext.assignment.training import main

if __name__ == "__main__":
    main()
'''


def grader_folder(out: Path) -> Path:
    """Beside the starter, and never in it."""
    return out.resolve().with_name(f"{out.resolve().name}_grader")


def write_assignment(
    spec: AssignmentSpec, out: str | Path, *, solution: bool = False, replace: bool = False
) -> list[Path]:
    """Write the starter, or with `solution` the solved version, into `out`, and the grader beside it.

    Both are made whole before anything that is there is touched. What `replace` finds there is kept beside it, under
    the names `NAME.old-1` and so on: it may hold somebody's work, a repository, or hidden cases that are in use.

    Returns:
        The folders that are kept, under their new names.

    Raises:
        ValueError: a folder exists and is not to be replaced or is none of these, the hidden cases are too few to
            tell a known mistake from the right answer, a name does not fit the text that it stands in, or the solution
            does not pass.
    """
    folder = Path(out).resolve()
    if not folder.name:
        raise ValueError(f"--out {out} is no folder that can be written: name a new one")
    grader = grader_folder(folder)
    for each in (folder, grader):
        _check_folder(each, replace)
    files, allowed = package_files(spec, solution=solution)
    cases = {each.known_as: _cases(spec, each) for _, each in spec.functions()}
    visible, hidden = ({name: both[part] for name, both in cases.items()} for part in (0, 1))
    starter_texts = _starter_texts(spec, files, allowed, visible)
    grader_texts = _grader_texts(spec, allowed, files[CLASSES], hidden, folder.name)
    for path, text in (*starter_texts.items(), *grader_texts.items()):
        if path.endswith(".py"):
            _check_text(path, text)

    def full_points(new: dict[Path, Path]) -> None:
        if solution:
            _check_solution(spec, new[folder], new[grader], allowed, hidden)

    return _write_folders({folder: starter_texts, grader: grader_texts}, full_points)


def _check_folder(folder: Path, replace: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not replace:
        raise ValueError(
            f"{folder} is there already: give another --out, or --replace to write it anew and keep this one beside it"
        )
    if not _is_assignment(folder):
        raise ValueError(f"{folder} holds something else than an assignment: it is not replaced; give another --out")


def _is_assignment(folder: Path) -> bool:
    """Whether a starter or a grader is in a folder, as its plan shows."""
    for plan in (folder / "tests" / "plan.json", folder / "grading.json"):
        try:
            content = json.loads(plan.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and {"classes", "functions"} <= content.keys():
            return True
    return False


def _check_text(path: str, text: str) -> None:
    try:
        compile(text, path, "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or "?"
        raise ValueError(
            f"{path}, line {line}, would be no Python ({error.args[0]}): look at the specification's names, "
            "descriptions and hints for characters that cannot be printed"
        ) from None


def _check_solution(
    spec: AssignmentSpec, folder: Path, grader: Path, allowed: list[str], cases: dict[str, list]
) -> None:
    """Run the solution through its hidden cases, as the grader does."""
    runner = Runner(folder, grader / "checking", spec.tests.seconds, allowed if spec.tests.imports == "zero" else None)
    with contextlib.closing(runner):
        for module, each in spec.functions():
            for case in cases[each.known_as]:
                outcome = runner.run(f"{spec.package}.{module}", each.known_as, case, f"checking.{CLASSES}")
                problem = verdict(outcome, case)
                if problem is not None:
                    raise ValueError(f"modules.{module}: the solution of {each.known_as} would not pass: {problem}")


def _write_folders(folders: dict[Path, dict[str, str]], check: Callable[[dict[Path, Path]], None]) -> list[Path]:
    """Write each folder beside its place, check them, then put all in their places; returns where the old ones are."""
    mark = uuid.uuid4().hex[:8]
    new = {folder: folder.with_name(f".{folder.name}-{mark}-new") for folder in folders}
    old = _old_names(folders)
    moves: list[tuple[Path, Path]] = []
    try:
        for folder, texts in folders.items():
            for path, text in texts.items():
                write_text(new[folder] / path, text)
        check(new)
        for folder in folders:
            for source, target in ((folder, old[folder]), (new[folder], folder)):
                if source.exists():
                    moves.append((source, target))
                    source.rename(target)
    except BaseException:
        for source, target in reversed(moves):
            # The last may have failed.
            if target.exists() and not source.exists():
                target.rename(source)
        for folder in new.values():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    for folder in old.values():
        # One that was empty.
        with contextlib.suppress(OSError):
            folder.rmdir()
    return [folder for folder in old.values() if folder.exists()]


def _old_names(folders: Collection[Path]) -> dict[Path, Path]:
    """Names beside the folders with one number for all, which none of them has been kept under."""
    numbered = ({each: each.with_name(f"{each.name}.old-{n}") for each in folders} for n in itertools.count(1))
    return next(names for names in numbered if not any(map(os.path.lexists, names.values())))


def _cases(spec: AssignmentSpec, each) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    tests, given = spec.tests, task(each.function)
    visible = build_cases(given, tests.visible_seed, tests.visible, nan_padding=tests.nan_padding)
    seeds = (tests.hidden_seed,) if tests.hidden_seed is not None else _seeds_but(tests.visible_seed)
    for seed in seeds:
        hidden = build_cases(given, seed, tests.hidden, nan_padding=tests.nan_padding, others=visible)
        missed = uncaught(given, hidden)
        if not missed:
            break
    if missed:
        raise ValueError(
            f"tests.hidden: {tests.hidden} cases of {each.function} do not show the mistake {missed[0]!r}; its "
            f"settings take turns over {given.variants}: give more, or another hidden_seed"
        )
    return visible, hidden


def _seeds_but(other: int) -> list[int]:
    """Seeds that nobody knows; a few, since by chance a case may not tell a mistake from the right answer."""
    return [seed for seed in (secrets.randbelow(2**31) for _ in range(5)) if seed != other]


def _starter_texts(
    spec: AssignmentSpec, files: dict[str, str], allowed: list[str], cases: dict[str, list]
) -> dict[str, str]:
    """The starter's files by their path in it."""
    recipes = {name: recipe.model_dump(exclude_none=True) for name, recipe in spec.recipes.items()}
    known = {"package": spec.package, "functions": _names(spec), "recipes": recipes}
    return {
        **{f"{spec.package}/{name}.py": text for name, text in files.items()},
        "train.py": TRAIN,
        "README.md": starter_readme(spec, allowed),
        "assignment.yaml": yaml.safe_dump(known, sort_keys=False),
        "thresholds.json": _json([each.model_dump() for each in spec.thresholds]),
        "conftest.py": '"""Its place tells pytest where the package is."""\n',
        **_runtime_texts(SHARED, "tests/checking"),
        "tests/test_functions.py": _runtime_text("visible"),
        **_case_texts("tests/cases", cases),
        "tests/plan.json": _json({"classes": f"{spec.package}.{CLASSES}", "functions": _items(spec)}),
    }


def _grader_texts(
    spec: AssignmentSpec, allowed: list[str], scores: str, cases: dict[str, list], name: str
) -> dict[str, str]:
    """The grader's files by their path in it."""
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
        "thresholds": [_threshold(spec, each) for each in spec.thresholds],
        "submission": spec.submission,
        "submission_points": spec.submission_points,
        "submission_zero_at": spec.submission_zero_at,
    }
    return {
        **_runtime_texts((*SHARED, *GRADING), "checking"),
        # The grader's own, whatever the student has made of the other.
        f"checking/{CLASSES}.py": scores,
        "grade.py": _runtime_text("grade"),
        "README.md": grader_readme(spec, name, allowed),
        **_case_texts("cases", cases),
        "grading.json": _json(plan),
    }


def _threshold(spec: AssignmentSpec, threshold: ThresholdSpec) -> dict[str, Any]:
    """A threshold, with the functions that must be the student's own in the run that reaches it."""
    library = {each.known_as: each.function for _, each in spec.functions()}
    return {**threshold.model_dump(), "uses": used_functions(spec.recipes[threshold.recipe], library)}


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


def _case_texts(folder: str, cases: dict[str, list]) -> dict[str, str]:
    # One case to a line: a diff shows which has changed.
    lines = {name: ",\n".join(json.dumps(case, allow_nan=False) for case in own) for name, own in cases.items()}
    return {f"{folder}/{name}.json": f"[\n{text}\n]\n" for name, text in lines.items()}


def _runtime_texts(names: tuple[str, ...], folder: str) -> dict[str, str]:
    first = {f"{folder}/__init__.py": '"""How functions are tried and judged."""\n'}
    return first | {f"{folder}/{name}.py": _runtime_text(name) for name in names}


def _runtime_text(name: str) -> str:
    return (RUNTIME / f"{name}.py").read_text(encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
