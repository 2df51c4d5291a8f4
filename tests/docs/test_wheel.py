"""The library as a dependency: what a source distribution and a wheel hold, and what an installed wheel does.

The wheel is installed into an environment of its own, which sees the packages of this one but not its trl_ext, and is
used in a folder away from the repository.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.recipes import copy_repository

pytestmark = pytest.mark.slow
setuptools = pytest.importorskip("setuptools")

# What working in a folder of scripts may leave in it.
LEFT_BEHIND = (".env", "runs/x/model.safetensors", "runs/x/config.yaml", "wandb/run/config.yaml", "aot.py~")
LEFT_BEHIND += (".ipynb_checkpoints/one.ipynb", "__pycache__/aot.cpython-311.pyc", "configs/.secret.yaml", "nohup.out")
SHORT = ["--max_steps", "2", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1"]
SHORT += ["--num_eval_prompts", "8", "--max_new_tokens", "8", "--generation_eval_every", "0", "--eval_strategy", "no"]
SHORT += ["--disable_tqdm", "true", "--save_strategy", "no"]


class Built(NamedTuple):
    """What was built from a copy of the repository, and the files in both."""

    source: Path
    wheel: Path
    of_sdist: set[str]
    of_wheel: set[str]


def run(command: list[str], folder: Path, **environment: str) -> str:
    """The output of a command that must succeed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env={**inherited, **own}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    """A source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    copy_repository(source)
    # What must stay out of both.
    for name in ("runs/model.safetensors", *(f"recipes/{name}" for name in LEFT_BEHIND)):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"0" * 1000)
    make = "import setuptools.build_meta as backend, sys; print(backend.{}(sys.argv[1]))"
    run([sys.executable, "-c", make.format("build_sdist"), str(folder)], source)
    sdist = next(folder.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    unpacked = next((folder / "unpacked").iterdir())
    run([sys.executable, "-c", make.format("build_wheel"), str(folder)], unpacked)
    wheel = next(folder.glob("*.whl"))
    with tarfile.open(sdist) as source_files, zipfile.ZipFile(wheel) as files:
        of_sdist = {name.partition("/")[2] for name in source_files.getnames()}
        return Built(source, wheel, of_sdist, set(files.namelist()))


class Installed(NamedTuple):
    """An environment that the wheel is installed in, and a folder to work in."""

    python: Path
    folder: Path

    def __call__(self, *arguments: str, **environment: str) -> str:
        # -P: a folder of work is not where packages are imported from.
        return run([str(self.python), "-P", *arguments], self.folder, **environment)

    def command(self, *arguments: str) -> str:
        return run([str(self.python.with_name("trl-ext")), *arguments], self.folder)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Installed:
    folder = tmp_path_factory.mktemp("elsewhere")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    run([*pip, "--disable-pip-version-check", str(built.wheel)], folder)
    # After its own packages come this environment's, whose own .pth files, an editable trl_ext among them, are not
    # read from there.
    own = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (own / "others.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) + "\n")
    (folder / "work").mkdir()
    return Installed(python, folder / "work")


def test_wheel_holds_the_scripts_and_nothing_beside_the_package(built):
    files = built.of_wheel
    assert {name.split("/")[0] for name in files if ".dist-info/" not in name} == {"trl_ext"}
    for folder in ("recipes", "public_eval", "accelerate_configs"):
        found = [path.relative_to(built.source).as_posix() for path in (built.source / folder).rglob("*")]
        left_behind = {f"recipes/{name}" for name in LEFT_BEHIND}
        kept = [name for name in found if (built.source / name).is_file() and name not in left_behind]
        wanted = {f"trl_ext/scripts/{name}" for name in kept}
        assert wanted and wanted - files == set()
    own = {p.relative_to(built.source).as_posix() for p in (built.source / "trl_ext").rglob("*") if p.is_file()}
    # Notes for who changes the toy are left out.
    assert not [name for name in own - files if not name.endswith("README.md")]
    assert "trl_ext/toy/model/model.safetensors" in files and "trl_ext/py.typed" in files
    assert not [name for name in files if re.search("__pycache__|scripts/recipes/runs|^tests/", name)]
    assert not files & {f"trl_ext/scripts/recipes/{name}" for name in LEFT_BEHIND}


def test_source_distribution_builds_and_carries_no_runs(built):
    files = built.of_sdist
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= files
    assert "recipes/aot.py" in files and "recipes/configs/toy/aot.yaml" in files
    assert not [name for name in files if name.startswith(("runs", "tests", ".venv", "build/"))]
    assert not files & {f"recipes/{name}" for name in LEFT_BEHIND}


def test_editable_install_is_found_before_a_folder_of_its_name(built, tmp_path):
    """In the folder above a clone called trl_ext, Python takes the clone for a package without an `__init__.py`."""
    build = "import setuptools.build_meta as backend, sys; print(backend.build_editable(sys.argv[1]))"
    run([sys.executable, "-c", build, str(tmp_path)], built.source)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "above" / "trl_ext").mkdir(parents=True)
    code = "import site, sys; site.addsitedir(sys.argv[1]); import trl_ext; print(trl_ext.__file__)"
    found = run([sys.executable, "-S", "-c", code, str(tmp_path / "site")], tmp_path / "above").strip()
    assert Path(found) == built.source / "trl_ext" / "__init__.py"


def test_import_away_from_the_repository(installed):
    code = """
import importlib.util, json, trl_ext
from trl_ext import AOTTrainer, load_benchmark
top = [name for name in ("recipes", "public_eval", "tests") if importlib.util.find_spec(name)]
print(json.dumps([trl_ext.__file__, len(load_benchmark("toy")["test_gen"]), top]))
"""
    file, rows, top = json.loads(installed("-c", code).splitlines()[-1])
    assert (rows, top) == (400, []) and Path(file).is_relative_to(installed.python.parents[1])
    assert "toy/aot.yaml" in installed.command("train", "--list")
    config = Path(installed.command("configs", "toy/aot.yaml").strip())
    assert config.is_file() and config.is_relative_to(installed.python.parents[1])
    assert "usage: trl-ext grade" in installed.command("grade", "--help")


@pytest.mark.long
def test_trains_and_reports(installed):
    installed.command("train", "aot", "--config", "toy/aot.yaml", *SHORT)
    run_folder = installed.folder / "runs" / "aot-toy"
    results = json.loads((run_folder / "results.json").read_text())
    assert results["run"]["optimizer_steps"] == 2 and results["run"]["loss"] == "aot"
    assert "trl-ext train aot --config runs/aot-toy/config.yaml" in (run_folder / "README.md").read_text()

    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--mixed_precision", "no"]
    installed(*launch, "--num_machines", "1", "--dynamo_backend", "no", "-m", "trl_ext", "train", "dpo", *SHORT)
    installed.command("report", "runs", "--out", "report.html")
    report = (installed.folder / "report.md").read_text()
    assert "aot-toy" in report and "dpo-toy" in report
