"""The `trl-ext` command: what it finds, what it hands on, and what it says of names that are not there."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys

import pytest

import trl_ext
from tests.support import REPOSITORY, recipes
from trl_ext import cli


@pytest.fixture
def ran(monkeypatch):
    """Scripts and modules that the command would run, each with its command line."""
    calls = []
    monkeypatch.setattr(runpy, "run_path", lambda path, run_name: calls.append((path, run_name, sys.argv)))
    monkeypatch.setattr(runpy, "run_module", lambda module, run_name: calls.append((module, run_name, sys.argv)))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["trl-ext"])
    return calls


def refused(capsys, *arguments: str) -> str:
    """The one line that a command line is refused with."""
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    output = capsys.readouterr()
    assert end.value.code == 2 and output.out == ""
    assert output.err.startswith("error: ") and output.err.count("\n") == 1
    return output.err


def test_it_loads_nothing_heavy():
    heavy = "{'torch', 'trl', 'transformers', 'datasets', 'accelerate', 'pydantic', 'numpy', 'yaml'}"
    code = f"import sys, trl_ext.cli as c; c.main(['train', '--list']); print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=REPOSITORY)
    assert out.splitlines()[-1] == "[]"


def test_every_recipe_is_listed_and_only_recipes(capsys):
    scripts = {
        path.stem
        for path in recipes.RECIPES.glob("*.py")
        if any(isinstance(node, ast.If) and "__main__" in ast.dump(node) for node in ast.parse(path.read_text()).body)
    }
    assert set(cli.recipes()) == scripts - {"compare"}
    assert {"aot", "ppo", "kto", "sft", "reward_model"} <= scripts
    cli.main(["train", "--list"])
    shown = capsys.readouterr().out
    for name, described in cli.recipes().items():
        assert name in shown and described in shown and described
    assert "toy/aot.yaml, wildchat/aot.yaml" in shown


def test_a_recipe_runs_as_the_script_that_it_is(ran):
    cli.main(["train", "aot", "--beta", "0.2"])
    script = str(recipes.RECIPES / "aot.py")
    assert ran == [(script, "__main__", [script, "--beta", "0.2"])]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--config", "toy/aot.yaml"], ["--config", "{configs}/toy/aot.yaml"]),
        (["--config=toy/aot.yaml", "--seed=1"], ["--config={configs}/toy/aot.yaml", "--seed=1"]),
        (["--config", "recipes/configs/toy/aot.yaml"], ["--config", "{configs}/toy/aot.yaml"]),
        (["--config", "mine.yaml", "--seed", "1"], ["--config", "mine.yaml", "--seed", "1"]),
        (["--output_dir", "toy/aot.yaml"], ["--output_dir", "toy/aot.yaml"]),
    ],
)
def test_configurations_that_come_along_are_found(given, found, ran, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    cli.main(["train", "aot", *given])
    assert ran[0][2][1:] == [word.format(configs=cli.CONFIGS) for word in found]


def test_studies_and_modules_are_commands(ran):
    cli.main(["compare", "--config", "compare/toy_sft.yaml", "--dry_run"])
    config = str(cli.CONFIGS / "compare" / "toy_sft.yaml")
    script = str(recipes.RECIPES / "compare.py")
    assert ran.pop() == (script, "__main__", [script, "--config", config, "--dry_run"])
    for command, (module, _) in cli.MODULES.items():
        cli.main([command, "--json"])
        assert ran.pop() == (module, "__main__", [f"trl-ext {command}", "--json"])


def test_help_of_a_module_names_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "trl_ext", "judge", "--help"], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout.startswith("usage: trl-ext judge ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["trian"], "no command 'trian'; did you mean 'train'?"),
        (["train", "aott"], "no recipe 'aott'; did you mean 'aot'?"),
        (["train", "compare"], "no recipe 'compare'"),
        (["train", "common"], "no recipe 'common'"),
        (["train", "../evil"], "no recipe '../evil'"),
        (["train", "aot", "--config", "toy/aott.yaml"], "no file 'toy/aott.yaml'"),
        (["configs", "toy/dpoo.yaml"], "did you mean 'toy/dpo.yaml'?"),
    ],
)
def test_what_is_not_there_is_one_line(given, said, capsys):
    assert said in refused(capsys, *given)


def test_configs_prints_paths_for_other_programs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.main(["configs", "toy/aot.yaml"])
    assert capsys.readouterr().out == f"{cli.CONFIGS / 'toy' / 'aot.yaml'}\n"
    cli.main(["configs", "accelerate_configs/cpu.yaml"])
    assert capsys.readouterr().out == f"{REPOSITORY / 'accelerate_configs' / 'cpu.yaml'}\n"
    cli.main(["configs"])
    shown = {line.strip() for line in capsys.readouterr().out.splitlines()}
    assert {"toy/aot.yaml", "compare/toy_sft.yaml", "accelerate_configs/multi_gpu.yaml"} <= shown


def test_help_and_version(capsys):
    cli.main([])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("train", "configs", *cli.STUDIES, *cli.MODULES))
    cli.main(["--version"])
    assert capsys.readouterr().out == f"trl_ext {trl_ext.__version__}\n"


def test_a_reader_that_closes_the_output_is_no_error():
    """As with `trl-ext train --list | head -1`."""
    command = [sys.executable, "-m", "trl_ext", "train", "--list"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY)
    program.stdout.close()
    assert program.stderr.read() == b"" and program.wait() == 1
