"""The arguments of the recipes: what is refused in one line, what config.yaml holds, and what it reads back."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.support import recipes
from tests.support.recipes import refused, write_labelled_pairs
from trl_ext.losses import PreferenceObjective  # noqa: F401  the losses register before a test copies their table
from trl_ext.runs.arguments import toy_config
from trl_ext.runs.folder import clear_run_folder, config_text, open_run_folder

# Flags that name a split of the benchmark, by recipe.
SPLITS = {
    "kto": ("train_split", "eval_split", "prompt_split"),
    "dpo": ("train_split", "eval_split", "prompt_split"),
    "rlhf_sft": ("train_split", "eval_split", "prompt_split"),
    "reward_model": ("train_split", "eval_split", "selection_split"),
    "grpo": ("train_split", "prompt_split"),
}
REWARD = {"grpo": ["--reward_function=builtins:len"]}


@pytest.mark.parametrize(
    ("script", "arguments", "phrases"),
    [
        ("preference", ["--loss=dpoo"], ["did you mean 'dpo'?"]),
        ("aot", ["--beta=0"], ["beta must be positive, got 0.0", "would not depend on the policy"]),
        ("aot", ["--bta=1"], ["unknown flag --bta; did you mean 'beta'?"]),
        ("aot", ["--loss=dpo"], ["AOTConfig is the loss 'aot' and cannot be 'dpo'"]),
        ("aot", ["--label_smoothing=0.1"], ["'aot' has no label smoothing", "cdpo"]),
        ("aot", ["--max_prompt_tokens=0"], ["max_prompt_tokens must be at least 1"]),
        ("preference", ["--loss=simpo", '--loss_kwargs={"gama": 1}'], ["no option 'gama'", "did you mean 'gamma'?"]),
        ("preference", ["--loss=simpo", "--loss_kwargs=gamma"], ["loss_kwargs must be a JSON object"]),
        ("aot", ["--dataset_name=./no-such-folder"], ["no-such-folder"]),
        ("aot", ["--model_name_or_path=./no-such-model"], ["no model folder './no-such-model'"]),
        ("aot", ["--config=no.yaml"], ["no configuration file 'no.yaml'"]),
        ("aot", ["--resume_from_checkpoint", "--output_dir=empty"], ["empty has no checkpoint to resume"]),
        ("aot", ["--train_split=nope"], ["no split 'nope'", "train_prefs"]),
        *(
            (recipe, [f"--{flag}=nope", *REWARD.get(recipe, [])], ["toy has no split 'nope'", f"--{flag}"])
            for recipe, flags in SPLITS.items()
            for flag in flags
        ),
        (
            "aot",
            ["--train_split=test_gen"],
            ["train_dataset holds prompts and no pairs", "name another --train_split"],
        ),
        (
            "aot",
            ["--eval_split=test_gen"],
            ["eval_dataset holds prompts and no pairs", "name another --eval_split"],
        ),
        ("aot", ["--per_device_train_batch_size=0"], ["per_device_train_batch_size must be at least 1, got 0"]),
        ("aot", ["--num_eval_prompts=0"], ["num_eval_prompts must be at least 1, got 0"]),
        ("aot", ["--learning_rate", "-1e-3"], ["learning_rate must be a number from 0 up, got -0.001"]),
        ("aot", ["--max_steps=0"], ["max_steps must be at least 1, got 0"]),
        ("preference", ["--loss=mine.py"], ["'mine.py' is a file", "mine.py:function"]),
        (
            "aot",
            ["--model_name_or_path=nobody/no-model"],
            ["'nobody/no-model' could not be loaded", "give a copy's folder"],
        ),
    ],
)
def test_wrong_arguments_end_in_one_line(script, arguments, phrases, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    message = refused(monkeypatch, capsys, script, *arguments)
    assert all(phrase in message for phrase in phrases), message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("lerning_rate: 1.0e-4", ["unknown key 'lerning_rate'; did you mean 'learning_rate'?"]),
        ("learning_rate: fast", ["learning_rate does not take 'fast'"]),
        ("beta: [0.1, 0.2]", ["beta takes one value"]),
        ("bf16: maybe", ["bf16 does not take 'maybe'"]),
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


def test_naming_the_default_changes_nothing(monkeypatch):
    """`--dataset_name toy` is the run without arguments."""
    plain, named = recipes.parse(monkeypatch, "aot"), recipes.parse(monkeypatch, "aot", "--dataset-name", "toy")
    for one, other in zip(plain[:2], named[:2], strict=True):
        assert one == other
    assert plain[2].learning_rate == named[2].learning_rate == 3e-4


def test_secrets_are_not_written(monkeypatch):
    parsed = recipes.parse(
        monkeypatch,
        "aot",
        "--hub_token=hf_secret",
        '--model_init_kwargs={"token": "hf_secret", "deep": [{"api_key": "hf_secret"}], "use_cache": false}',
        "--pad_token=<|endoftext|>",
    )

    text = config_text(*parsed)
    assert "hf_secret" not in text
    written = yaml.safe_load(text)
    assert written["pad_token"] == "<|endoftext|>"
    assert written["model_init_kwargs"] == {"deep": [{}], "use_cache": False}


def test_no_limit_is_written_as_such(monkeypatch, tmp_path):
    """An explicit null must not come back as the default of 512."""
    (tmp_path / "one.yaml").write_text("max_prompt_tokens: null\nmax_response_tokens: 9\n")
    parsed = recipes.parse(monkeypatch, "aot", "--config", str(tmp_path / "one.yaml"))

    (tmp_path / "two.yaml").write_text(config_text(*parsed))
    _, _, again = recipes.parse(monkeypatch, "aot", "--config", str(tmp_path / "two.yaml"))
    assert (again.max_prompt_tokens, again.max_response_tokens) == (None, 9)


@pytest.mark.parametrize(("recipe", "name"), [("ipo", "ipo"), ("kto", "apo_zero_unpaired")])
def test_a_loss_by_its_name_in_trl_is_written(recipe, name, monkeypatch, tmp_path):
    *_, training = recipes.parse(monkeypatch, recipe, f"--loss_type={name}")

    (tmp_path / "one.yaml").write_text(config_text(training))
    *_, again = recipes.parse(monkeypatch, recipe, "--config", str(tmp_path / "one.yaml"))
    assert name in again.loss_type
    assert again.loss_type == training.loss_type


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


@pytest.mark.parametrize(
    ("body", "phrases"),
    [
        ("return torch.relu(1 - beta * scores.margn)", ["fails on 8 made-up pairs", "no attribute 'margn'"]),
        ("return scores.margin * float('nan')", ["returns [nan, nan", "for made-up pairs"]),
        ("return scores.margin.mean()", ["one value per pair"]),
        ("return 1 -", ["invalid syntax", "mine.py, line"]),
    ],
)
def test_faulty_own_loss_ends_in_one_line(body, phrases, tmp_path, monkeypatch, capsys, registries_as_before):
    source = "import torch\nfrom trl_ext import preference_loss\n\n@preference_loss('faulty_of_a_test')\n"
    (tmp_path / "mine.py").write_text(source + f"def faulty(scores, *, beta):\n    {body}\n")
    monkeypatch.chdir(tmp_path)
    message = refused(monkeypatch, capsys, "preference", "--loss=mine.py:faulty")
    assert all(phrase in message for phrase in phrases), message


def test_output_dir_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").write_text("a file")
    message = refused(monkeypatch, capsys, "aot", f"--output_dir={tmp_path / 'taken'}")
    assert "is a file: name a folder" in message


def test_a_start_that_failed_does_not_block_the_next(tmp_path, monkeypatch):
    """Only arguments are there: no earlier run to lose."""

    (tmp_path / "config.yaml").write_text("beta: 1\n")
    (tmp_path / "metrics.jsonl").write_text("")
    assert open_run_folder(str(tmp_path), overwrite=False, resume_from_checkpoint=None) is None


def test_flags_override_the_configuration(monkeypatch, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("beta: 0.3\nlearning_rate: 1e-5\noutput_dir: x\nloss_kwargs: {length_normalized: true}\n")
    _, _, training = recipes.parse(monkeypatch, "ipo", "--config", str(path), "--beta", "0.4")
    assert (training.beta, training.learning_rate) == (0.4, 1e-5)


def test_bad_data_is_caught_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    """The model does not exist: if it were looked for first, that would be the error."""
    write_labelled_pairs(tmp_path / "pairs.jsonl", 3)
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    row = json.loads(lines[1])
    row["rejected_text"] = row["chosen_text"]
    lines[1] = json.dumps(row)
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    message = refused(monkeypatch, capsys, "aot", "--dataset_name=pairs.jsonl", "--model_name_or_path=./none")
    assert "pairs.jsonl" in message and "row1" in message and "line 2" in message


@pytest.mark.parametrize("recipe", ["aot", "kto", "reward_model", "grpo", "ppo", "sft", "expert_iteration"])
def test_help_is_the_recipes_own_flags_with_the_values_of_the_default_file(recipe, monkeypatch, capsys):
    """TRL's own flags stand behind --help_all."""
    for flag in ("--help", "--help_all"):
        with pytest.raises(SystemExit) as ended:
            recipes.run(monkeypatch, recipe, flag)
        assert ended.value.code == 0
    short, full = capsys.readouterr().out.split("usage: ")[1:]
    assert full.count("\n") > 800 and "--adam_beta1" in full and "--adam_beta1" not in short
    assert short.count("\n") < 300
    for name, value in yaml.safe_load(toy_config(recipe).read_text()).items():
        if not isinstance(value, (list, dict, bool, float)):
            assert f"  --{name} {value}" in short, name


def test_explain_names_its_command(monkeypatch, capsys):
    assert "python -m trl_ext.algorithms --explain NAME" in refused(monkeypatch, capsys, "grpo", "--explain", "grpo")
