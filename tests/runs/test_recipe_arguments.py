"""The arguments of the recipes and the `trl-ext` command: what is refused in one line, and what config.yaml holds."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys

import pytest
import yaml

from tests.support import REPOSITORY, recipes
from tests.support.files import labelled, read_rows, write_rows
from tests.support.recipes import refused, write_labelled_pairs, write_rewards
from tests.support.refusals import assert_one_line
from trl_ext import cli
from trl_ext.losses import PreferenceObjective  # noqa: F401  the losses register before a test copies their table
from trl_ext.runs.configs import read_config, toy_config
from trl_ext.runs.folder import clear_run_folder, config_text, open_run_folder

# By recipe: flags, and what the line says, with ` ... ` between its parts.
KNOWN = "--reward_function=my_rewards.py:known"
DATA = {"not_boolean": labelled(9, label="yes"), "all_good": labelled(8, label=True), "labelled": labelled(4)}
REFUSED = {
    "kto": [
        (["--dataset_name=not_boolean.jsonl"], "9 bad rows: line 1: row_id r0: label: must be true"),
        (["--dataset_name=all_good.jsonl"], "KTO needs responses of both labels"),
    ],
    "dpo": [
        (["--dataset_name=labelled.jsonl"], "train_dataset has no column 'chosen'"),
        *(([f"--{name}=nope"], f"no split 'nope' ... --{name}") for name in ("train_split", "eval_split")),
    ],
    "preference": [(["--loss=simpo", '--loss_kwargs={"gama": 1}'], "no option 'gama' ... did you mean 'gamma'?")],
    "aot": [
        (["--bta=1"], "unknown flag --bta; did you mean 'beta'?"),
        (["--model_name_or_path=./no-such-model"], "no model folder './no-such-model'"),
        (["--model_name_or_path=nobody/no-model"], "'nobody/no-model' could not be loaded"),
        (["--config=no.yaml"], "no configuration file 'no.yaml'"),
        (["--resume_from_checkpoint", "--output_dir=empty"], "empty has no checkpoint to resume"),
        (["--train_split=test_gen"], "train_dataset has no column 'chosen' ... name another split"),
    ],
    "reward_model": [
        (["--max_length=64"], "max_length is not used by RewardConfig"),
        (["--margin_column=strength"], "the margin_column 'strength' is not in the train"),
        (["--selection_split=test_gen"], "selection_split has no column 'chosen'"),
    ],
    "grpo": [
        ([], "--reward_model FOLDER"),
        (["--reward_model", "toy"], "no score head"),
        (["--reward_function", "my_rewards.py:unknown"], "no reward function 'unknown'"),
        ([KNOWN, "--num_generations", "1"], "num_generations 1"),
        ([KNOWN, "--num_generations", "7"], "must be divisible by num_generations (7)"),
        ([KNOWN, "--max_completion_length", "4000"], "--max_completion_length"),
        ([KNOWN, "--calibrate_rewards", "true"], "several --reward_model"),
        ([KNOWN, "--reward_shaping", '["clip"]'], "reward_shaping: clip: "),
    ],
    "sft_math": [
        (["--reward", "r1"], "reward must be one of"),
        (["--reward", "countdown"], "needs problems with nums and target"),
        (["--num_examples", "400"], "has 293 problems, and 400 were asked for: lower --num_examples"),
        (["--train_split", "test"], "has no response or solution to train on"),
        (["--reward", "question_only"], "filter_correct: no response of 'train' verifies"),
    ],
    "grpo_math": [(["--algorithm", "grpoo"], "grpoo"), (["--validation_split", "nope"], "nope")],
    "best_of_n": [
        ([], "nothing to reward responses with: give --reward_model FOLDER"),
        (["--n", "4", "--num_samples", "2"], "num_samples 2 is less than the largest n, 4"),
        (["--temperature", "0"], "best-of-n at temperature 0 or top_k 1 would pick from equal responses"),
        ([KNOWN, "--reward_function", "builtins:len", "my_rewards.py:known"], "ranked by one reward"),
    ],
}


@pytest.mark.parametrize(
    ("recipe", "flags", "phrase"), [(recipe, *row) for recipe, rows in REFUSED.items() for row in rows]
)
def test_wrong_arguments_end_in_one_line(recipe, flags, phrase, tmp_path, monkeypatch, capsys):
    """Before any training."""
    monkeypatch.chdir(tmp_path)
    write_rewards(tmp_path)
    for name, rows in DATA.items():
        write_rows(tmp_path / f"{name}.jsonl", rows)
    message = refused(monkeypatch, capsys, recipe, *flags)
    assert all(part in message for part in phrase.split(" ... ")), message
    assert not list(tmp_path.glob("runs/*/*.jsonl"))


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("lerning_rate: 1.0e-4", ["unknown key 'lerning_rate'; did you mean 'learning_rate'?"]),
        ("learning_rate: fast", ["--learning_rate", "invalid float value: 'fast'"]),
        ("beta: [0.1, 0.2]", ["0.2"]),
        ("bf16: maybe", ["--bf16", "got maybe"]),
        ("", ["must hold `key: value` lines, and is empty"]),
        ("a: [", ["is not valid YAML"]),
        ("no_disable_dropout: true", ["unknown key 'no_disable_dropout'"]),
    ],
)
def test_wrong_configuration_ends_in_one_line(text, phrases, tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    message = refused(monkeypatch, capsys, "aot", "--config", str(path))
    assert "config.yaml" in message and all(phrase in message for phrase in phrases), message


def test_secrets_are_not_written(monkeypatch):
    model = '--model_init_kwargs={"token": "hf_secret", "deep": [{"api_key": "hf_secret"}], "use_cache": false}'
    flags = ["--hub_token=hf_secret", model, "--pad_token=<|endoftext|>"]
    text = config_text(*recipes.parse(monkeypatch, "aot", *flags))
    assert "hf_secret" not in text
    written = yaml.safe_load(text)
    assert written["pad_token"] == "<|endoftext|>"
    assert written["model_init_kwargs"] == {"deep": [{}], "use_cache": False}


@pytest.mark.parametrize(
    ("recipe", "text", "expected"),
    [
        # An explicit null must not come back as the default of 512.
        ("aot", "max_prompt_tokens: null", {"max_prompt_tokens": None}),
        ("ipo", "loss_type: [ipo]", {"loss_type": ["ipo"]}),
        ("kto", "loss_type: apo_zero_unpaired", {"loss_type": "apo_zero_unpaired"}),
        ("ipo", "beta: 0.3\nlearning_rate: 1e-5\noutput_dir: x", {"beta": 0.4, "learning_rate": 1e-5}),
    ],
)
def test_what_is_written_reads_back(recipe, text, expected, monkeypatch, tmp_path):
    """And flags override the file."""
    (tmp_path / "one.yaml").write_text(text + "\n")
    flags = [f"--beta={expected['beta']}"] if "beta" in expected else []
    *_, training = recipes.parse(monkeypatch, recipe, "--config", str(tmp_path / "one.yaml"), *flags)
    (tmp_path / "two.yaml").write_text(config_text(training))
    *_, again = recipes.parse(monkeypatch, recipe, "--config", str(tmp_path / "two.yaml"))
    for one in (training, again):
        assert {name: getattr(one, name) for name in expected} == expected


@pytest.mark.parametrize("place", [".", "checkpoint-7"])
def test_the_model_to_train_is_not_overwritten(place, tmp_path, monkeypatch, capsys):
    """Training on from an earlier run into its own folder would delete what is trained."""
    from tests.support.tiny import save_tiny_model

    save_tiny_model(tmp_path / place)
    arguments = [f"--model_name_or_path={tmp_path / place}", f"--output_dir={tmp_path}", "--overwrite_output_dir"]
    assert "choose another --output_dir" in refused(monkeypatch, capsys, "dpo", *arguments)
    assert (tmp_path / place / "model.safetensors").is_file()


def test_overwriting_leaves_no_other_model_behind(tmp_path, monkeypatch):
    """An adapter beside a whole model would be loaded on top of it."""

    for name in ("adapter_config.json", "adapter_model.safetensors", "model.safetensors", "results.json", "mine.txt"):
        (tmp_path / name).write_text("x")
    clear_run_folder(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_faulty_own_loss_ends_in_one_line(tmp_path, monkeypatch, capsys, registries_as_before):
    (tmp_path / "mine.py").write_text("def faulty(scores, *, beta):\n    return 1 -\n")
    monkeypatch.chdir(tmp_path)
    message = refused(monkeypatch, capsys, "preference", "--loss=mine.py:faulty")
    assert "invalid syntax" in message and "mine.py, line" in message


def test_a_start_that_failed_does_not_block_the_next(tmp_path):
    """Only arguments are there: no earlier run to lose."""
    (tmp_path / "config.yaml").write_text("beta: 1\n")
    (tmp_path / "metrics.jsonl").write_text("")
    assert open_run_folder(str(tmp_path), overwrite=False, resume_from_checkpoint=None) is None


def test_bad_data_is_caught_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    """The model does not exist: if it were looked for first, that would be the error."""
    write_labelled_pairs(tmp_path / "pairs.jsonl", 3)
    rows = read_rows(tmp_path / "pairs.jsonl")
    rows[1]["rejected_text"] = rows[1]["chosen_text"]
    write_rows(tmp_path / "pairs.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    message = refused(monkeypatch, capsys, "aot", "--dataset_name=pairs.jsonl", "--model_name_or_path=./none")
    assert "pairs.jsonl" in message and "row1" in message and "line 2" in message


@pytest.mark.parametrize("recipe", ["aot", "reward_model", "ppo", "expert_iteration"])
def test_help_is_the_recipes_own_flags_with_the_values_of_the_default_file(recipe, monkeypatch, capsys):
    """TRL's own flags stand behind --help_all."""
    for flag in ("--help", "--help_all"):
        with pytest.raises(SystemExit) as ended:
            recipes.run(monkeypatch, recipe, flag)
        assert ended.value.code == 0
    short, full = capsys.readouterr().out.split("usage: ")[1:]
    assert full.count("\n") > 800 and "--adam_beta1" in full and "--adam_beta1" not in short
    assert short.count("\n") < 300
    for name, value in read_config(toy_config(recipe)).items():
        if not isinstance(value, (list, dict, bool, float)):
            assert f"  --{name} {value}" in short, name


# ---- The command `trl-ext` ----


@pytest.fixture
def ran(monkeypatch):
    """Scripts and modules that the command would run, each with its command line."""
    calls = []
    monkeypatch.setattr(runpy, "run_path", lambda path, run_name: calls.append((path, run_name, sys.argv)))
    monkeypatch.setattr(runpy, "run_module", lambda module, run_name: calls.append((module, run_name, sys.argv)))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["trl-ext"])
    return calls


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["trian"], "no command 'trian'; did you mean 'train'?"),
        (["train", "aott"], "no recipe 'aott'; did you mean 'aot'?"),
        (["train", "../evil"], "no recipe '../evil'"),
        (["train", "aot", "--config", "toy/aott.yaml"], "no file 'toy/aott.yaml'"),
        (["configs", "toy/dpoo.yaml"], "did you mean 'toy/dpo.yaml'?"),
    ],
)
def test_what_is_not_there_is_one_line(given, said, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(given)
    output = capsys.readouterr()
    assert end.value.code == 2 and output.out == "" and output.err.startswith("error: ")
    assert_one_line(output.err, [said])


def test_configs_prints_paths_for_other_programs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.main(["configs", "toy/aot.yaml"])
    assert capsys.readouterr().out == f"{cli.CONFIGS / 'toy' / 'aot.yaml'}\n"
    cli.main(["configs", "accelerate_configs/cpu.yaml"])
    assert capsys.readouterr().out == f"{REPOSITORY / 'accelerate_configs' / 'cpu.yaml'}\n"
    cli.main(["configs"])
    shown = {line.strip() for line in capsys.readouterr().out.splitlines()}
    assert {"toy/aot.yaml", "compare/toy_sft.yaml", "accelerate_configs/multi_gpu.yaml"} <= shown


def test_on_and_off_in_a_file_are_words(monkeypatch, tmp_path):
    (tmp_path / "own.yaml").write_text(
        "doctor: off\npacking: off\ntokens_per_pass: off\nkeep_groups: on\nbf16: false\n"
    )
    given = ["--reward_function=builtins:len", f"--config={tmp_path / 'own.yaml'}"]
    _, _, training = recipes.parse(monkeypatch, "grpo", *given)
    assert (training.packing, training.tokens_per_pass, training.keep_groups) == ("off", "off", "on")
    assert training.bf16 is False
