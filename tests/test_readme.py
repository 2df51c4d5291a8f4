"""The README and the pages it links to stay true: commands parse, Python runs, and the files they name exist."""

from __future__ import annotations

import importlib
import re
import shlex

import pytest

from tests import recipes
from trl_ext import PolicyTrainer, PreferenceTrainer
from trl_ext.losses import PreferenceObjective  # noqa: F401  the losses register before a test copies their table
from trl_ext.registry import policy_algorithms, preference_losses

README = (recipes.REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = sorted((recipes.REPOSITORY / "docs").glob("*.md"))
TEXT = "\n".join([README, *(page.read_text(encoding="utf-8") for page in PAGES)])


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


COMMANDS = [
    line.partition("  #")[0].strip() for block in blocks("bash") for line in block.splitlines() if line.strip()
]
COMMANDS += re.findall(r"`(accelerate launch [^`]*recipes/[^`]*)`", TEXT)
COMMANDS += re.findall(r"`(python (?:-m|recipes/)[^`]*)`", TEXT)


CLUSTER_COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("command", CLUSTER_COMMANDS)
def test_cluster_command_names_what_exists(command, tmp_path, monkeypatch):
    words = shlex.split(command)
    at = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
    assert "sbatch" in words[:at]
    assert (recipes.REPOSITORY / words[at]).is_file()
    taken = 3 if "vllm" in words[at] else 2
    recipe, flags = words[at + 1], words[at + 1 + taken :]
    test_command_is_valid(shlex.join(["accelerate", "launch", f"recipes/{recipe}.py", *flags]), tmp_path, monkeypatch)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_valid(command, tmp_path, monkeypatch):
    _forget_names_afterwards(monkeypatch)
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (recipes.REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
        return
    if words[0] == "python" and words[1] in ("recipes/sweep.py", "recipes/compare.py"):
        monkeypatch.syspath_prepend(str(recipes.RECIPES))
        monkeypatch.chdir(recipes.REPOSITORY)
        # Finished runs are not there to be compared in a fresh clone.
        given = words[2 : words.index("--runs")] if "--runs" in words else words[2:]
        importlib.import_module(words[1][len("recipes/") : -len(".py")]).main([*given, "--dry_run"])
        return
    if words[0] == "python":
        assert words[1] == "-m"
        module = recipes.REPOSITORY / words[2].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
        if words[2].startswith(("public_eval", "trl_ext.evaluation")):
            _check_flags(words[2], words[3:], monkeypatch)
        return
    assert words[:2] == ["accelerate", "launch"]
    at = next(index for index, word in enumerate(words) if word.startswith("recipes/"))
    _check_launcher(words[2:at])
    _write_own_functions(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = [
        str(recipes.REPOSITORY / word) if word.startswith("recipes/configs/") else word for word in words[at + 1 :]
    ]
    script = words[at].removeprefix("recipes/").removesuffix(".py")
    assert (recipes.RECIPES / f"{script}.py").is_file()
    recipes.parse(monkeypatch, script, *arguments)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml_is_a_configuration(block, tmp_path, monkeypatch):
    _forget_names_afterwards(monkeypatch)
    _write_own_functions(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(block)
    _, _, training = recipes.parse(monkeypatch, "preference", "--config", "mine.yaml")
    assert training.build_objective().describe().startswith("readme_loss (beta 0.5, weighted by confidence")


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"<!--|TODO|TESTTIME|LINES", TEXT)


def _forget_names_afterwards(monkeypatch) -> None:
    """The names that the README registers are free again for other tests."""
    for table in (preference_losses, policy_algorithms):
        monkeypatch.setattr(table, "_entries", dict(table._entries))


def _write_own_functions(folder) -> None:
    """The README's own loss and algorithm as the files that its commands name."""
    own_loss = next(block for block in blocks("python") if "@preference_loss" in block)
    text = own_loss.partition("config =")[0].replace('"squared_hinge"', '"readme_loss"')
    (folder / "my_losses.py").write_text(text)
    own_algorithm = next(block for block in blocks("python") if "@policy_algorithm" in block)
    (folder / "my_algorithm.py").write_text(own_algorithm.partition("policy_config =")[0])


def _check_flags(name: str, arguments: list[str], monkeypatch) -> None:
    """Parse a command's arguments with its own parser, and no further."""
    from trl_ext.evaluation.command_line import CommandParser

    class Parsed(Exception):
        pass

    def parse_args(self, *given):
        parse(self, *given)
        raise Parsed

    parse = CommandParser.parse_args
    monkeypatch.setattr(CommandParser, "parse_args", parse_args)
    package = (recipes.REPOSITORY / name.replace(".", "/")).is_dir()
    module = importlib.import_module(f"{name}.__main__" if package else name)
    with pytest.raises(Parsed):
        module.main(arguments)


def _check_launcher(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    parsed = launch_command_parser().parse_args([*words, "script.py"])
    if parsed.config_file:
        assert (recipes.REPOSITORY / parsed.config_file).is_file()


@pytest.mark.slow
def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _forget_names_afterwards(monkeypatch)
    namespace: dict = {"__name__": "readme"}
    for block in blocks("python"):
        exec(block, namespace)
    assert namespace["trainer"].state.global_step == 2
    assert namespace["config"].beta == 0.5


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:recipes|tests|accelerate_configs|trl_ext|docs|benchmarks)/[\w./-]*)`", TEXT)))
)
def test_named_path_exists(path):
    assert (recipes.REPOSITORY / path).exists()


def test_every_loss_and_trainer_is_in_the_table():
    import trl_ext.losses
    import trl_ext.trainers

    table = README.partition("## Losses")[2].partition("## ")[0]
    own = [
        name
        for name in preference_losses
        if preference_losses[name].function.__module__ == "trl_ext.losses.preference"
    ]
    assert len(own) == 16
    for name in own:
        assert f"`{name}`" in table
    for name in trl_ext.trainers.__all__:
        if name.endswith("Trainer") and issubclass(getattr(trl_ext.trainers, name), PreferenceTrainer):
            assert f"`{name}`" in table or name == "PreferenceTrainer"


def test_every_algorithm_and_trainer_is_in_the_table():
    import trl_ext.trainers
    from trl_ext.algorithms import algorithms

    section = README.partition("### Algorithms")[2].partition("\n### ")[0]
    own = [name for name in algorithms if algorithms[name].surrogate != "own"]
    assert len(own) == 17
    for name in own:
        assert f"`{name}`" in section
    for name in trl_ext.trainers.__all__:
        if name.endswith("Trainer") and issubclass(getattr(trl_ext.trainers, name), PolicyTrainer):
            assert f"`{name}`" in section
