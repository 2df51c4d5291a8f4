"""The package as a whole: cheap to import, its names where they are promised, nothing from where it must not come."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import trl_ext

PACKAGE = Path(trl_ext.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))


TRAINING = "torch transformers trl datasets"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("trl_ext", f"{TRAINING} peft accelerate pydantic numpy"),
        ("trl_ext.course", "trl transformers datasets pydantic peft"),
        ("trl_ext.data, trl_ext.evaluation", f"{TRAINING} matplotlib openai pydantic httpx2"),
        ("trl_ext.toy, trl_ext.instructions", TRAINING),
        ("trl_ext.models.tokenization", "trl transformers datasets"),
    ],
)
def test_importing_loads_no_heavy_library(modules, heavy):
    code = f"import sys, {modules}; dir(trl_ext); print({{*{heavy.split()}}} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_public_names_load():
    """What scripts for TRL import is TRL's own."""
    import trl

    assert [name for name in trl_ext.__all__ if getattr(trl_ext, name) is None] == []
    for name in ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config"):
        assert getattr(trl_ext, name) is getattr(trl, name)


def test_one_trainer_does_not_load_the_others():
    code = "import sys; from trl_ext import GRPOTrainer; print(*[m for m in sys.modules if m.startswith('trl_ext')])"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert not loaded & {
        f"trl_ext.trainers.{name}" for name in ("ppo.trainer", "preference.trainer", "reward.trainer", "sft", "kto")
    }


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
        if path.relative_to(PACKAGE).parts[0] not in ("trainers", "models", "held_out", "runs"):
            assert not modules, f"{path} imports {modules}"


# From the bottom of the house to its top; a room imports from its own level and below.
ROOMS = (
    "names files processes settings registry losses advantages algorithms toy instructions word_problems data models "
    "rewards rollouts resilience evaluation trainers held_out doctor runs course assignment cli __main__"
)


def test_imports_point_down():
    level = {room: index for index, room in enumerate(ROOMS.split())}
    for path in SOURCES:
        if path.parent == PACKAGE and path.stem == "__init__":
            continue
        # A command stands above the room whose file it is.
        room = "cli" if path.name == "cli.py" else path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in _imports(path):
            parts = module.split(".")
            if parts[0] == "trl_ext" and len(parts) > 1:
                assert level[parts[1]] <= level[room], f"{path} imports {module}, which stands above it"


def test_no_circle_of_imports():
    """Inside functions too; `from package import module` imports the module."""
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in SOURCES}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    modules, graph = {*names.values()}, {}
    for path, name in names.items():
        froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        found = [{f"{node.module}.{alias.name}" for alias in node.names} & modules or {node.module} for node in froms]
        graph[name] = (set().union(*found) & modules) - {name}
    TopologicalSorter(graph).prepare()


def test_trainers_know_of_evaluation_only_how_to_ask_a_judge():
    allowed = {"trl_ext.evaluation.judging.protocol", "trl_ext.evaluation.judging.pairs"}
    for path in (PACKAGE / "trainers").rglob("*.py"):
        found = {module for module in _imports(path) if module.startswith(("trl_ext.evaluation", "trl_ext.runs"))}
        assert found <= allowed, path


@pytest.mark.slow
def test_every_trainer_imports_without_what_windows_lacks():
    code = (
        "import os, signal, sys, trl_ext\n"
        "import datasets, random, peft\n"
        "from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer\n"
        "sys.modules['fcntl'] = None\n"
        "for name in ('SIGUSR1', 'SIGHUP', 'SIGALRM', 'setitimer', 'ITIMER_REAL'): delattr(signal, name)\n"
        "del os.register_at_fork\n"
        "for name in trl_ext.__all__: getattr(trl_ext, name)\n"
        "import trl_ext.runs.training_run, trl_ext.runs.studies.processes"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tests_and_benchmarks_share_through_support_alone():
    """No test module imports another, `tests.support` imports no test and no benchmark, and benchmarks no test."""
    for path in [*PACKAGE.parent.glob("tests/**/*.py"), *PACKAGE.parent.glob("benchmarks/**/*.py")]:
        found = _imports(path)
        assert not [module for module in found if ".test_" in module], path
        if path.parts[-2] == "support":
            assert not [module for module in found if module.split(".")[0] == "benchmarks"], path
        if path.is_relative_to(PACKAGE.parent / "benchmarks"):
            assert all(m.startswith("tests.support") for m in found if m.split(".")[0] == "tests"), path


def test_the_trainers_repeat_no_two_lines_of_trl():
    """The README says so: TRL's methods are called, and not copied."""
    import transformers
    from trl.trainer import dpo_trainer, grpo_trainer, kto_trainer

    def is_code(line: str) -> bool:
        # Closing brackets, imports, single keywords, and the signature of what is overridden are nobody's code.
        return any(map(str.isalpha, line)) and not re.match(r"(import|from|def) |\w+[,:]?$", line)

    def pairs_of_lines(text: str) -> set[tuple[str, str]]:
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        return {pair for pair in zip(lines, lines[1:], strict=False) if all(map(is_code, pair))}

    paths = [path for path in SOURCES if {"trainers", "resilience"} & set(path.relative_to(PACKAGE).parts)]
    own = {pair for path in paths for pair in pairs_of_lines(path.read_text())}
    assert len(own) > 2000
    for module in (dpo_trainer, grpo_trainer, kto_trainer, transformers.trainer):
        assert not own & pairs_of_lines(inspect.getsource(module)), module.__name__
