"""The package: its imports and public names, the versions that it tests, and the pages."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trl_ext
from tests.support import REPOSITORY

PACKAGE = Path(trl_ext.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))


TRAINING = "torch transformers trl datasets"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("trl_ext", f"{TRAINING} peft accelerate pydantic numpy"),
        ("trl_ext.course", "trl transformers datasets peft"),
        ("trl_ext.data, trl_ext.evaluation", f"{TRAINING} matplotlib openai pydantic httpx2"),
        ("trl_ext.toy, trl_ext.instructions", TRAINING),
        ("trl_ext.models", "trl transformers datasets peft"),
    ],
)
def test_importing_loads_no_heavy_library(modules, heavy):
    code = f"import sys, {modules}; dir(trl_ext); print({{*{heavy.split()}}} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def _imports(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


# From the bottom of the house to its top; a room imports from its own level and below.
ROOMS = (
    "names files processes settings registry losses advantages algorithms toy instructions word_problems data models "
    "rewards rollouts resilience evaluation trainers held_out doctor runs studies course assignment cli __main__"
)


def test_imports_point_down():
    """And TRL is imported in four rooms, without what is experimental."""
    level = {room: index for index, room in enumerate(ROOMS.split())}
    for path in SOURCES:
        of_trl = {module for module in _imports(path) if module.split(".")[0] == "trl"}
        assert not any("experimental" in module for module in of_trl), path
        if path.relative_to(PACKAGE).parts[0] not in ("trainers", "models", "held_out", "runs"):
            assert not of_trl, f"{path} imports {of_trl}"
        if path.parent == PACKAGE and path.stem == "__init__":
            continue
        # A command stands above the room whose file it is.
        room = "cli" if path.name == "cli.py" else path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in _imports(path):
            parts = module.split(".")
            if parts[0] == "trl_ext" and len(parts) > 1:
                assert level[parts[1]] <= level[room], f"{path} imports {module}, which stands above it"


def test_the_trainers_repeat_no_two_lines_of_trl():
    """TRL's methods are called, and not copied."""
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


PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), flags=re.MULTILINE))


def test_the_extra_with_the_tested_versions_is_the_constraints():
    named = [re.match(r"[\w.-]+", line)[0] for line in PROJECT["project"]["dependencies"]]
    tested = [f"{name}=={PINS[name]}" for name in named if name in PINS]
    assert PROJECT["project"]["optional-dependencies"]["tested"] == tested


# ---- Pages ----


@pytest.mark.slow
def test_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    first = (tmp_path / "site" / "index.html").read_text()
    assert "What it adds to TRL" in first, "the README is the first page"
    reference = (tmp_path / "site" / "reference.html").read_text()
    assert 'id="trl_ext.trainers.preference.trainer.PreferenceTrainer"' in reference
    assert not (tmp_path / "site" / "links.py").exists()
