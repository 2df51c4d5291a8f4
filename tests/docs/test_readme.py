"""The README and the pages stay true: commands parse, Python runs, and links lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from tests.support import REPOSITORY, recipes
from tests.support.pages import README, TEXT, TEXTS, blocks, commands
from tools import results
from trl_ext import cli
from trl_ext.algorithms import algorithms
from trl_ext.evaluation.command_line import CommandParser
from trl_ext.losses import PreferenceObjective  # noqa: F401  the losses register before a test copies their table
from trl_ext.registry import preference_losses
from trl_ext.studies import study

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# Pages whose Python trains a model.
SLOW = ("docs/packing.md",)


COMMANDS = commands(TEXT)
CLUSTER_COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
# Commands with placeholders are not run.
TEMPLATES = [command for command in COMMANDS if re.search(r"\b(IN OUT|FOLDER|NAME|RECIPE|COMMAND)\b|\.\.\.$", command)]


def check_all(items, check, tmp_path, monkeypatch) -> None:
    """Checks every item in a folder and a state of its own, and names all that fail."""
    assert items, "the pages have none of these"
    failed = []
    for number, item in enumerate(items):
        folder = tmp_path / str(number)
        folder.mkdir()
        # The names that the pages register are free again for other items.
        with monkeypatch.context() as patch, mock.patch.dict(preference_losses), mock.patch.dict(algorithms):
            try:
                check(item, folder, patch)
            except (Exception, SystemExit, pytest.fail.Exception) as error:
                failed.append(f"{item}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def test_commands_are_valid(tmp_path, monkeypatch):
    commands = [command for command in COMMANDS if command not in TEMPLATES]
    assert CLUSTER_COMMANDS
    check_all([*commands, *CLUSTER_COMMANDS], _check_command, tmp_path, monkeypatch)


def _check_cluster_command(words, tmp_path, monkeypatch) -> None:
    at = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
    assert (REPOSITORY / words[at]).is_file()
    taken = 3 if "vllm" in words[at] else 2
    recipe, flags = words[at + 1], words[at + 1 + taken :]
    _check_command(shlex.join(["accelerate", "launch", f"recipes/{recipe}.py", *flags]), tmp_path, monkeypatch)


def _check_command(command, tmp_path, monkeypatch) -> None:
    words = shlex.split(command.removeprefix("time "))
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    elif words[0] == "pip":
        extra = re.fullmatch(r"\$\(ls trl_ext-\*\.whl\)\[(\w+)\]", words[2])
        assert extra[1] in PROJECT["optional-dependencies"]
    elif "sbatch" in words:
        _check_cluster_command(words, tmp_path, monkeypatch)
    elif words[0] == "trl-ext":
        _check_installed(words[1:], tmp_path, monkeypatch)
    elif words[:2] == ["python", "-m"]:
        _check_module(words[2], words[3:], monkeypatch)
    elif words[0] == "python" and Path(words[1]).stem in ("compare", "rlhf"):
        _check_study(Path(words[1]).stem, words[2:], tmp_path, monkeypatch)
    elif words[0] == "python" and words[1].startswith("tools/"):
        assert (REPOSITORY / words[1]).is_file()
    elif words[0] == "python":
        _check_launch(words[1:], tmp_path, monkeypatch)
    else:
        assert words[:2] == ["accelerate", "launch"]
        _check_launch(words[2:], tmp_path, monkeypatch)


def _check_installed(words: list[str], tmp_path, monkeypatch) -> None:
    """The `trl-ext` command: recipes are parsed as they are, other commands by their own parsers."""
    name, *rest = words
    if name == "train":
        if rest[0] != "--list":
            settings = [str(cli.CONFIGS / word) if word.endswith(".yaml") else word for word in rest[1:]]
            recipes.parse(monkeypatch, rest[0], *settings)
    elif name == "configs":
        assert not rest or (cli.CONFIGS / rest[0]).exists() or (cli.SCRIPTS / rest[0]).exists()
    elif name in cli.STUDIES:
        _check_study(name, rest, tmp_path, monkeypatch)
    else:
        _check_module(cli.MODULES[name][0], rest, monkeypatch)


def _check_module(name: str, arguments: list[str], monkeypatch) -> None:
    if name == "pytest":
        assert all((REPOSITORY / word).exists() for word in arguments if word.startswith("tests/"))
        return
    module = REPOSITORY / name.replace(".", "/")
    path = module.with_suffix(".py") if module.with_suffix(".py").is_file() else module / "__main__.py"
    assert path.is_file()
    if name.startswith(("public_eval", "trl_ext.evaluation", "trl_ext.assignment")):
        _check_flags(name, arguments, monkeypatch)
        return
    source = path.read_text()
    for word in arguments:
        if word.startswith("--"):
            assert f'"{word}"' in source or f'"{word.lstrip("-")}"' in source, f"{name} has no flag {word}"


def _check_study(script: str, given: list[str], tmp_path, monkeypatch) -> None:
    """What runs recipes itself: a dry run, in which the flags of every run are checked."""
    monkeypatch.chdir(REPOSITORY)
    if script == "rlhf":
        recipes.parse(monkeypatch, script, *given)
        return
    assert script == "compare"
    if "--output_dir" in given:
        at = given.index("--output_dir")
        given = [*given[:at], "--output_dir", str(tmp_path), *given[at + 2 :]]
    if "--runs" in given:  # Of finished runs, which a fresh clone has not.
        study.read_study(study.parse(given))
    else:
        study.main([*given, "--dry_run"])


def _check_launch(words: list[str], tmp_path, monkeypatch) -> None:
    if "-m" in words:
        at = words.index("-m")
        assert words[at + 1 : at + 3] == ["trl_ext", "train"]
        recipes.parse(monkeypatch, *words[at + 3 :])
        return
    at = next(index for index, word in enumerate(words) if word.startswith("recipes/"))
    launcher = launch_command_parser().parse_args([*words[:at], "script.py"])
    assert not launcher.config_file or (REPOSITORY / launcher.config_file).is_file()
    _write_own_functions(tmp_path)
    monkeypatch.chdir(tmp_path)
    of_clone = ("recipes/configs/", "recipes/own/")
    arguments = [str(REPOSITORY / word) if word.startswith(of_clone) else word for word in words[at + 1 :]]
    script = words[at].removeprefix("recipes/").removesuffix(".py")
    assert (recipes.RECIPES / f"{script}.py").is_file()
    if script.startswith(("one_file/", "own/")):
        assert not arguments, "its settings are constants"
        return
    recipes.parse(monkeypatch, script, *arguments)


def test_yaml_blocks_are_configurations(tmp_path, monkeypatch):
    check_all(blocks("yaml"), _check_yaml, tmp_path, monkeypatch)


def _check_yaml(block, tmp_path, monkeypatch) -> None:
    settings = yaml.safe_load(block)
    if "methods" in settings:
        path = tmp_path / "settings.yaml"
        path.write_text(block)
        _check_study("compare", ["--config", str(path)], tmp_path, monkeypatch)
        return
    _write_own_functions(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(block)
    _, _, training = recipes.parse(monkeypatch, "preference", "--config", "mine.yaml")
    assert training.build_objective().describe().startswith("readme_loss (beta 0.5, weighted by confidence")


def _write_own_functions(folder) -> None:
    """The loss, the algorithm and the configuration of the pages as the files that their commands name."""
    own_loss = next(block for block in blocks("python", README) if "@preference_loss" in block)
    (folder / "my_losses.py").write_text(own_loss.replace('"squared_hinge"', '"readme_loss"'))
    (folder / "mine.yaml").write_text(next(block for block in blocks("yaml") if "my_losses.py" in block))
    own_algorithm = next(block for block in blocks("python", TEXTS["docs/policy.md"]) if "@policy_algorithm" in block)
    (folder / "my_algorithm.py").write_text(own_algorithm.partition("policy_config =")[0])


class Parsed(Exception):
    """The arguments are valid."""


def _check_flags(name: str, arguments: list[str], monkeypatch) -> None:
    """Parse a command's arguments with its own parser, and no further."""

    def parse_args(self, *given):
        parse(self, *given)
        raise Parsed

    parse = CommandParser.parse_args
    monkeypatch.setattr(CommandParser, "parse_args", parse_args)
    package = (REPOSITORY / name.replace(".", "/")).is_dir()
    module = importlib.import_module(f"{name}.__main__" if package else name)
    with pytest.raises(Parsed):
        module.main(arguments)


# ---- Python ----


PYTHON = [name for name, text in TEXTS.items() if blocks("python", text)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PYTHON])
@pytest.mark.usefixtures("registries_as_before")
def test_python_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    for block in blocks("python", TEXTS[name]):
        exec(block, namespace)
    if "trainer" in namespace:
        assert namespace["trainer"].state.global_step == 2


# ---- Paths and links ----


NAMED_PATH = r"`((?:recipes|tests|accelerate_configs|trl_ext|docs|benchmarks|public_eval|\.ci|\.github)/[\w./-]*)`"


def _prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", _prose(text)))


def _anchors(path: Path) -> set[str]:
    """Where a page's headings are, as GitHub and the built documentation name them."""
    headings = re.findall(r"^#+ +(.+)$", _prose(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_paths_and_links_lead_somewhere():
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(NAMED_PATH, TEXT + contributing))
    assert len(named) > 20
    assert sorted(path for path in named if not (REPOSITORY / path).exists()) == []
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"^make ([\w-]+)", contributing, flags=re.MULTILINE)
    assert targets and [one for one in targets if f"\n{one}:" not in makefile] == []
    broken = []
    for name, text in TEXTS.items():
        for link in {link for link in _links(text) if "://" not in link}:
            path, _, anchor = link.partition("#")
            target = (REPOSITORY / name).parent / path if path else REPOSITORY / name
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append(f"{name}: {link}")
    assert broken == []


# ---- Tables of results ----


def test_the_tables_are_those_of_the_files(tmp_path):
    page = results.PAGE.read_text(encoding="utf-8")
    for folder in results.studies():
        assert results.with_table(page, folder) == page, "run python tools/results.py"
    results.draw(tmp_path / "results.png")
    assert results.CHART.is_file() and (tmp_path / "results.png").is_file()
    results.unpack(results.DATA / "smollm2-word_problems", tmp_path)
    rows = results.read(tmp_path / "sft-1" / "generations.jsonl")
    assert len(rows) == 300 and sum("response_text" in row for row in rows) == 10
