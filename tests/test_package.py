"""The package as a whole: cheap to import, its names where they are promised, nothing from where it must not come."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trl_ext

PACKAGE = Path(trl_ext.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))


def test_importing_loads_no_heavy_library():
    heavy = "{'torch', 'trl', 'transformers', 'datasets', 'peft', 'accelerate', 'pydantic', 'numpy'}"
    code = f"import sys, trl_ext; dir(trl_ext); print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("name", trl_ext.__all__)
def test_public_name_loads(name):
    assert getattr(trl_ext, name) is not None


def test_trainers_are_all_public():
    from trl_ext import trainers

    trained_with = [{n for n in room.__all__ if n.endswith(("Config", "Trainer"))} for room in (trl_ext, trainers)]
    assert trained_with[0] == trained_with[1]


def test_promised_names():
    from trl_ext.data import PreferenceRow, PromptRow, load_benchmark, truncate_pair  # noqa: F401
    from trl_ext.evaluation import PairwiseJudge, diagnose_generations, win_rate  # noqa: F401
    from trl_ext.losses import (  # noqa: F401
        PreferenceScores,
        aot,
        aot_paired,
        apo_down,
        apo_zero,
        cdpo,
        cpo,
        dpo,
        dpop,
        hinge,
        ipo,
        nca,
        orpo,
        repo,
        robust_dpo,
        simpo,
        sppo,
    )

    assert callable(win_rate), "the name of a module as well"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'NopeTrainer'"):
        trl_ext.NopeTrainer  # noqa: B018


def _imports(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


def test_nothing_experimental_and_trl_only_where_it_belongs():
    for path in SOURCES:
        modules = {module for module in _imports(path) if module.split(".")[0] == "trl"}
        assert not any("experimental" in module for module in modules), path
        if path.parent.name not in ("trainers", "models"):
            assert not modules, f"{path} imports {modules}"


# From the bottom of the house to its top; a room imports from its own level and below.
ROOMS = [
    {"registry", "files"},
    {"losses"},
    {"advantages"},
    {"algorithms"},
    {"toy"},
    {"data"},
    {"models"},
    {"rewards"},
    {"rollouts"},
    {"evaluation"},
    {"trainers"},
    {"course"},
    {"assignment"},
    {"cli"},
    {"__main__"},
]


def test_imports_point_down():
    level = {room: index for index, rooms in enumerate(ROOMS) for room in rooms}
    for path in SOURCES:
        if path.parent == PACKAGE and path.stem == "__init__":
            continue
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in _imports(path):
            parts = module.split(".")
            if parts[0] == "trl_ext" and len(parts) > 1:
                assert level[parts[1]] <= level[room], f"{path} imports {module}, which stands above it"


def test_the_trainer_repeats_no_two_lines_of_trl():
    """The README says so: TRL's methods are called, and not copied."""
    import inspect

    from trl.trainer import dpo_trainer

    def pairs_of_lines(text: str) -> set[tuple[str, str]]:
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        return set(zip(lines, lines[1:], strict=False))

    own = pairs_of_lines((PACKAGE / "trainers" / "preference.py").read_text())
    assert len(own) > 200
    assert not own & pairs_of_lines(inspect.getsource(dpo_trainer))


def test_files_can_be_read_in_one_sitting():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 400, path
