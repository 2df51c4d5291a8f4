"""Credentials in nothing that a run writes or prints, and nothing pickled is read."""

from __future__ import annotations

import copy
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import REPOSITORY, recipes
from trl_ext import ExpertIterationConfig, KTOConfig, PolicyConfig, PreferenceConfig, RewardConfig, SFTConfig
from trl_ext.resilience.secrets import arguments_without_secrets, without_secrets

PLANTED = {
    "HF_TOKEN": "hf_plantedInTheEnvironment",
    "OPENAI_API_KEY": "sk-plantedForTheJudge",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
}
HUB_TOKEN, MODEL_TOKEN = "hf_plantedHubToken", "hf_plantedModelToken"
SETTINGS = {"output_dir": "x", "use_cpu": True, "report_to": "none", "hub_token": HUB_TOKEN}
SETTINGS |= {"model_init_kwargs": {"token": MODEL_TOKEN, "use_cache": False}}
CONFIGS = (PreferenceConfig, RewardConfig, PolicyConfig, SFTConfig, ExpertIterationConfig, KTOConfig)

# ---- What a configuration leaves on the disk ----


def saved(args) -> bytes:
    """As transformers saves training_args.bin."""
    stream = io.BytesIO()
    torch.save(args, stream)
    return stream.getvalue()


@pytest.mark.parametrize("config", CONFIGS)
def test_no_configuration_writes_a_token_out(config):
    args = config(**SETTINGS)
    written = saved(args)
    assert b"planted" not in written
    assert args.hub_token == HUB_TOKEN and args.model_init_kwargs["token"] == MODEL_TOKEN
    assert "planted" not in str(args.to_dict()) and args.to_dict()["model_init_kwargs"] == {"use_cache": False}
    again = torch.load(io.BytesIO(written), weights_only=False)
    assert type(again) is config and again.hub_token is None
    assert again.learning_rate == args.learning_rate and again.model_init_kwargs == {"use_cache": False}
    # A copy can load a private model.
    made = copy.deepcopy(args)
    assert type(made) is config and (made.hub_token, made.model_init_kwargs["token"]) == (HUB_TOKEN, MODEL_TOKEN)
    assert made.model_init_kwargs is not args.model_init_kwargs
    assert b"planted" not in saved(made), "and what it writes is without them"


def test_what_is_a_secret():
    secrets = ("token", "hub_token", "HF_TOKEN", "api_key", "x-api-key", "Authorization", "password", "access_token")
    kept = {"pad_token": "a", "num_tokens": 3, "tokenizer": "b", "token_budget": 1, "betas": (0.9, 0.95)}
    given = {**kept, **dict.fromkeys(secrets, "x"), "in": [{"auth_token": "x", "b": 2}], "secret": ["x"]}
    assert without_secrets(given) == {**kept, "in": [{"b": 2}]}
    # Weights by name, a setting of generation, and `token=True`, which reads the stored login.
    kept = {"reward_weights": {"token": 0.5, "cookie": 2}, "secret": None, "model_init_kwargs": {"token": True}}
    assert without_secrets(kept) == kept


def test_a_command_line_without_secrets():
    given = ["--hub_token", "a", "--hub-token=b", "--pad_token=c", "--x", '{"token": "d", "y": 1}', "--z={", "e=f"]
    given += ["--w", '[{"token": "d", "y": 1}]', "--v=[1,2]", "--u", "{not: one}", "--api-key", "f"]
    shown = ["--hub_token", "***", "--hub-token=***", "--pad_token=c", "--x", "***", "--z={", "e=f"]
    shown += ["--w", "***", "--v=[1,2]", "--u", "{not: one}", "--api-key", "***"]
    assert arguments_without_secrets(given) == shown


# ---- What the recipes leave and print ----

RECIPES = """
import runpy, sys
sys.path.insert(0, {recipes!r})
for script, *arguments in {calls!r}:
    sys.argv = [script + ".py", *arguments]
    try:
        runpy.run_path({recipes!r} + "/" + script + ".py", run_name="__main__")
    except SystemExit as stopped:
        print("ended:", script, stopped.code)
"""
SHORT = ["--max_steps=2", "--per_device_train_batch_size=4", "--logging_steps=1", "--save_steps=1", "--use_cpu=true"]
SECRETS = [f"--hub_token={HUB_TOKEN}", f'--model_init_kwargs={{"token": "{MODEL_TOKEN}"}}']
EVALUATED = ["--num_eval_prompts=2", "--generation_eval_every=1", "--num_generation_prompts=2"]


def files_with(folder: Path, texts: list[str]) -> dict[str, list[str]]:
    """By text, the files that hold it, also within archives, which are stored as they are."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {text: [str(path) for path in files if text.encode() in path.read_bytes()] for text in texts}


@pytest.mark.slow
def test_no_run_leaves_or_prints_a_credential(tmp_path):
    """Three runs, two that are refused, and the report; with both trackers that write files."""
    reward = ["--output_dir=reward", "--report_to=tensorboard", "--eval_split=none", "--selection_split=test_prefs"]
    reward += ["--eval_steps=1"]
    aot = ["--max_new_tokens=4", "--eval_split=none", "--output_dir=aot", "--report_to=wandb"]
    grpo = ["--reward_model=reward", "--max_completion_length=8", "--num_generations=4", "--output_dir=grpo"]
    common = [*SHORT, *SECRETS]
    calls = [
        ["reward_model", *common, *reward],
        ["aot", *common, *EVALUATED, *aot],
        ["grpo", *common, *EVALUATED, *grpo],
        ["aot", *common, "--output_dir=aot"],
        ["dpo", *common, "--model_name_or_path=nobody/no-model", "--output_dir=failed"],
    ]
    (tmp_path / "program.py").write_text(RECIPES.format(recipes=str(recipes.RECIPES), calls=calls))
    homes = {name: str(tmp_path / "caches") for name in ("HOME", "HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")}
    environment = {**os.environ, **homes, **PLANTED, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "WANDB_DIR": str(tmp_path), "PYTHONPATH": ""}
    ran = run([sys.executable, "program.py"], tmp_path, environment)
    report = run([sys.executable, "-m", "trl_ext.evaluation.report", "aot", "grpo"], tmp_path, environment)
    # Written by the test itself.
    (tmp_path / "program.py").unlink()
    printed = ran.stdout + ran.stderr + report.stdout + report.stderr
    assert (ran.returncode, report.returncode) == (0, 0), printed[-4000:]
    assert printed.count("ended: ") == 2, printed[-4000:]
    for name in ("aot/training_args.bin", "aot/checkpoint-2/training_args.bin", "grpo/README.md", "grpo/results.json"):
        assert (tmp_path / name).is_file(), name
    assert list(tmp_path.rglob("*tfevents*")) and list(tmp_path.rglob("*.wandb"))
    planted = [*PLANTED.values(), HUB_TOKEN, MODEL_TOKEN]
    assert files_with(tmp_path, planted) == {text: [] for text in planted}
    assert [text for text in planted if text in printed] == []
    # The search finds what is there.
    assert files_with(tmp_path, ["aot-toy", "per_device_train_batch_size"])["per_device_train_batch_size"]


def run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


# ---- Nothing pickled ----

UNSAFE = re.compile(
    r"^\s*(?:import|from) (?:c?[pP]ickle|_pickle|dill|cloudpickle|joblib|shelve|marshal)\b"
    r"|torch\.load\((?!.*weights_only=True)|(?:allow_pickle|trust_remote_code)=True|weights_only=False",
    re.MULTILINE,
)


def test_nothing_reads_what_is_pickled():
    folders = ("trl_ext", "recipes", "public_eval", "benchmarks")
    sources = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    assert len(sources) > 100
    assert [path for path in sources if UNSAFE.search(path.read_text())] == []
    for line in ("import pickle", "torch.load(path)", "np.load(path, allow_pickle=True)"):
        assert UNSAFE.search(line)
