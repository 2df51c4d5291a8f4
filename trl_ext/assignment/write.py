"""Write an assignment: the starter with stripped solutions and visible tests, and the grader with hidden ones."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

from trl_ext.assignment.cases import TASKS, build_cases
from trl_ext.assignment.mistakes import mistakes_of
from trl_ext.files import read_yaml

HERE = Path(__file__).parent
# Of the entry `tests`. Without a `hidden_seed`, one is drawn.
DEFAULTS = {"visible": 4, "hidden": 8, "visible_seed": 1, "seconds": 30}
SOLUTION = re.compile(r"(?ms)^( *)### BEGIN SOLUTION\n(.*?)^\1### END SOLUTION\n")


def strip(text: str, file: str) -> str:
    """A file's text with errors in the place of solutions, which say what to implement, and without their helpers."""

    def blank(match: re.Match) -> str:
        name = re.findall(r"(?m)^def (\w+)", text[: match.start()])[-1]
        return f'{match[1]}raise NotImplementedError("implement {name} in {file}")\n' if match[1] else ""

    return re.sub(r"\n{4,}", "\n\n\n", SOLUTION.sub(blank, text))


def write_assignment(source: Path, out: Path, *, solution: bool = False) -> tuple[Path, Path]:
    """Write the starter, or with `solution` the solved version, into `out`, and the grader next to it; both folders.

    `source` is a folder with `assignment.yaml` and a package with markers, as those in `packages`.

    Raises:
        ValueError: a folder exists, the specification names an unknown function or recipe, or the hidden cases are
            too few to reveal every known mistake.
    """
    starter = out.resolve()
    grader = starter.with_name(f"{starter.name}_grader")
    for folder in (starter, grader):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is there already: give another --out")
    spec = {"recipes": {}, "thresholds": [], "tests": {}} | read_yaml(source / "assignment.yaml")
    package, points, tests = spec["package"], spec["points"], DEFAULTS | spec.pop("tests")
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted((source / package).glob("*.py"))}
    modules = {name: f"{package}.{file[:-3]}" for file in texts for name in re.findall(r"(?m)^def (\w+)", texts[file])}
    unknown = [name for name in points if name not in TASKS or name not in modules]
    unknown += [each["recipe"] for each in spec["thresholds"] if each["recipe"] not in spec["recipes"]]
    if unknown:
        raise ValueError(f"{source}: unknown {', '.join(unknown)}; there are tests of {', '.join(TASKS)}")
    known = [{"name": name, "module": modules[name], "points": points[name]} for name in points]
    visible = [each | {"cases": build_cases(each["name"], tests["visible_seed"], tests["visible"])} for each in known]
    hidden = [each | {"cases": _hidden_cases(each["name"], tests)} for each in known]
    compiled = shutil.ignore_patterns("__pycache__")
    for kind, folder, tested, cases in (("starter", starter, "tests", visible), ("grader", grader, "", hidden)):
        shutil.copytree(HERE / kind, folder, ignore=compiled, dirs_exist_ok=True)
        shutil.copy(HERE / "checking.py", folder / tested)
        torch.save(cases, folder / tested / "cases.pt")
    (starter / package).mkdir()
    for file, text in texts.items():
        text = SOLUTION.sub(r"\2", text) if solution else strip(text, f"{package}/{file}")
        (starter / package / file).write_text(text, encoding="utf-8")
    (starter / "assignment.yaml").write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    # With the functions that a run must take from the student.
    goals = [each | {"uses": spec["recipes"][each["recipe"]]["functions"]} for each in spec["thresholds"]]
    plan = tests | {"title": spec["title"], "thresholds": goals}
    (grader / "grading.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    return starter, grader


def _hidden_cases(name: str, tests: dict[str, Any]) -> list[dict[str, Any]]:
    # Try several random seeds: the cases of one may not reveal every mistake.
    for seed in [tests["hidden_seed"]] if "hidden_seed" in tests else [secrets.randbelow(2**31) for _ in range(5)]:
        cases = build_cases(name, seed, tests["hidden"])
        missed = {says for says, _ in mistakes_of(name)} - {says for case in cases for says, _ in case["mistakes"]}
        if not missed:
            return cases
    raise ValueError(f"tests.hidden: {tests['hidden']} cases of {name} do not show the mistake {missed.pop()!r}")
