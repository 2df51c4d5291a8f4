"""What maintainers rely on: the workflow, the versions it tests, the citation, the templates and the pages."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import date

import pytest
import yaml

import trl_ext
from tests.support import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
WORKFLOW = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())


@pytest.fixture
def versions(tmp_path):
    """`.ci/versions.py` on a copy of the files that it reads."""
    (tmp_path / ".ci").mkdir()
    for name in (".ci/versions.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    spec = importlib.util.spec_from_file_location("ci_versions", tmp_path / ".ci" / "versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- The workflow ----


def test_the_workflow_does_what_ci_run_does():
    wanted = re.findall(r"^make ([\w-]+)$", (REPOSITORY / ".ci" / "run").read_text(), flags=re.MULTILINE)
    # A step with a condition is of the weekly run alone.
    steps = [step.get("run", "") for step in WORKFLOW["jobs"]["test"]["steps"] if "if" not in step]
    assert [step.split()[1] for step in steps if step.startswith("make ")] == wanted
    assert wanted == ["lint", "test", "test-processors", "test-slow", "test-zero", "test-oldest", "test-newest"]
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    assert {*wanted, "docs"} <= set(targets)


def test_the_pythons_are_those_of_the_project(versions):
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"] == {
        "python": "${{ fromJSON(needs.versions.outputs.pythons) }}"
    }
    pythons = versions.pythons()
    assert pythons == ["3.11", "3.12", "3.13"]
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{pythons[0].replace('.', '')}"


def test_both_ends_of_every_range(versions):
    """`>=4.7` asks for 4.7.*, `>=4` for 4.0.*; torch is the pinned one at both ends."""
    path = versions.ROOT / "pyproject.toml"
    path.write_text(re.sub(r'"peft>=[\d.]+"', '"peft>=7"', path.read_text()))
    oldest = versions.constraints("oldest")
    pinned = next(
        line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line.startswith("torch=")
    )
    assert oldest[0] == pinned and versions.constraints("newest") == [pinned]
    assert {"trl==1.16.*", "transformers==5.17.*", "datasets==4.7.*", "peft==7.0.*", "openai==3.0.*"} <= set(oldest)
    named = {re.match(r"[\w.-]+", line)[0] for line in PROJECT["project"]["dependencies"]}
    assert named <= {line.split("==")[0] for line in oldest}


def test_the_extra_with_the_tested_versions_is_the_constraints():
    pins = dict(
        line.split(" ")[0].split("==")
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#") and " ; " not in line
    )
    named = [re.match(r"[\w.-]+", line)[0] for line in PROJECT["project"]["dependencies"]]
    assert PROJECT["project"]["optional-dependencies"]["tested"] == [
        f"{name}=={pins[name]}" for name in named if name in pins
    ]


# ---- Texts ----


def test_changelog_has_this_version_first():
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    version, _, day = next(name for name in sections if name != "[Unreleased]").partition(" - ")
    assert version == f"[{trl_ext.__version__}]"
    assert day == "Unreleased" or date.fromisoformat(day)
    kinds = set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# ---- Pages ----


def test_every_room_has_a_page_of_the_reference():
    package = REPOSITORY / "trl_ext"
    rooms = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    pages = {path.stem: path.read_text() for path in (REPOSITORY / "docs" / "reference").glob("*.md")}
    assert rooms - {"__init__", "__main__", "cli", "files", "names", "processes", "runs"} == set(pages)
    for name, text in pages.items():
        assert f"\n::: trl_ext.{name}\n" in text


@pytest.mark.slow
def test_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    first = (tmp_path / "site" / "index.html").read_text()
    assert "What differs from stock TRL" in first, "the README is the first page"
    trainers = (tmp_path / "site" / "reference" / "trainers.html").read_text()
    assert 'id="trl_ext.trainers.preference.trainer.PreferenceTrainer"' in trainers
    assert not (tmp_path / "site" / "links.py").exists()
