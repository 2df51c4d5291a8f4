"""What maintainers rely on: the workflow, the versions it tests, the citation, the templates and the pages."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import date

import pytest
import yaml

import trl_ext
from tests.recipes import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
WORKFLOW = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()


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
    assert wanted == ["lint", "test", "test-processors", "test-slow", "test-zero"]
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    assert {*wanted, "docs"} <= set(targets)


def test_the_matrix_is_generated_from_the_project():
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"] == "${{ fromJSON(needs.versions.outputs.matrix) }}"
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / ".ci" / "versions.py"), "matrix"], capture_output=True, text=True, check=True
    )
    jobs = json.loads(done.stdout)["include"]
    assert all(set(job) == {"python", "trl"} for job in jobs)
    classifiers = PROJECT["project"]["classifiers"]
    named = {name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.\d+$", name)}
    assert {job["python"] for job in jobs if job["trl"] == "pinned"} == named == {"3.11", "3.12", "3.13"}
    assert PROJECT["project"]["requires-python"] == f">={min(named)}"
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{min(named).replace('.', '')}"


@pytest.mark.parametrize(("bounds", "ends"), [("1.16,<1.17", ["newest"]), ("1.16,<1.18", ["oldest", "newest"])])
def test_a_new_release_of_trl_is_one_bound(bounds, ends, versions):
    path = versions.ROOT / "pyproject.toml"
    path.write_text(re.sub(r"trl>=[\d.]+,<[\d.]+", f"trl>={bounds}", path.read_text()))
    assert [job["trl"] for job in versions.matrix()["include"] if job["trl"] != "pinned"] == ends


@pytest.mark.parametrize(("which", "line"), [("oldest", "trl~=1.16.0"), ("newest", "trl>=1.16,<1.17")])
def test_another_trl_is_asked_for_in_the_constraints(which, line, versions):
    path = versions.ROOT / "constraints.txt"
    before = path.read_text().splitlines()
    versions.pin(which)
    after = path.read_text().splitlines()
    assert [new for old, new in zip(before, after, strict=True) if old != new] == [line]


def test_the_contract_tests_permit_what_the_project_permits(versions):
    oldest, below = versions.trl_bounds()
    for name in ("test_trl_contract.py", "test_policy_contract.py"):
        text = (REPOSITORY / "tests" / name).read_text()
        assert f'Version("{oldest}") <= ' in text and f' < Version("{below}")' in text, name


# ---- Texts ----


def test_changelog_has_this_version_first():
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    version, _, day = next(name for name in sections if name != "[Unreleased]").partition(" - ")
    assert version == f"[{trl_ext.__version__}]"
    assert day == "Unreleased" or date.fromisoformat(day)
    kinds = set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_contributing_names_what_exists():
    for path in set(
        re.findall(r"`((?:recipes|tests|trl_ext|docs|public_eval|\.ci|\.github)/[\w./-]*)`", CONTRIBUTING)
    ):
        assert (REPOSITORY / path).exists(), path
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in set(re.findall(r"^make ([\w-]+)", CONTRIBUTING, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


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
