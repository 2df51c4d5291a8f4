"""The folder of a run: what the first of several processes decides, its settings, its lines, and its engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest
import yaml
from accelerate.utils import DistributedType

from trl_ext import PreferenceConfig, processes
from trl_ext.runs import RECIPES, arguments, folder, training_run
from trl_ext.runs.engine import engine_in_force
from trl_ext.runs.folder import check_same_settings, config_text, settings_digest
from trl_ext.runs.loading import ResponseArguments
from trl_ext.trainers import callbacks


def test_every_process_goes_by_the_first(monkeypatch):
    """The first one sends its checkpoint or its error; the second does not look, as its disk may show nothing yet."""
    sent = []

    def broadcast(values: list) -> None:
        if os.environ["RANK"] == "0":
            sent[:] = values
        values[:] = sent

    def fails():
        raise FileNotFoundError("no checkpoint to resume")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(training_run, "broadcast_object_list", broadcast)
    for rank, find in (("0", lambda: "checkpoint-3"), ("1", pytest.fail)):
        monkeypatch.setenv("RANK", rank)
        assert training_run.of_first_process(find) == "checkpoint-3"
    for rank, find in (("0", fails), ("1", pytest.fail)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(FileNotFoundError, match="no checkpoint to resume"):
            training_run.of_first_process(find)


# ---- The settings of a resumed run ----

BEGUN = {"algorithm": "grpo", "seed": 42, "learning_rate": 5e-4, "save_steps": 2, "max_steps": 30}


@pytest.fixture
def check(tmp_path):
    """Check given settings against `BEGUN`."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(BEGUN))
    return lambda **settings: check_same_settings(config, yaml.safe_dump({**BEGUN, **settings}))


# Some of what does not change the parameters of a run's end, if the product of the batch's split stays.
MAY_CHANGE = "output_dir report_to save_steps eval_steps per_device_train_batch_size bf16 packing use_vllm"
# One of each kind whose name begins like another that may change, and some that a user is likely to change.
FIXED = """
seed data_seed learning_rate warmup_steps optim max_grad_norm dataset_name train_split beta loss generation_batch_size
dataloader_drop_last dataloader_in_order packing_strategy vllm_importance_sampling_cap vllm_structured_outputs_regex
load_best_model_at_end ignore_data_skip average_tokens_across_devices max_length model_name_or_path lora_r use_peft
"""


def test_each_field_of_each_recipe(tmp_path, check):
    """By exact name: `packing` may change, and `packing_strategy` may not."""
    classes = {kind for path in RECIPES.glob("*.py") for kind in arguments.argument_types(path.stem) or ()}
    classes -= {arguments.LaunchArguments}
    names = {field.name for kind in classes for field in dataclasses.fields(kind)}
    names -= {*folder._NOT_OF_THE_RUN, *folder._LENGTHS}
    allowed = set()
    for name in names:
        with contextlib.suppress(ValueError):
            check(**{name: "another"})
            allowed.add(name)
    assert allowed.issuperset(MAY_CHANGE.split())
    assert names.issuperset(FIXED.split()) and not allowed.intersection(FIXED.split())
    assert allowed <= folder._MAY_CHANGE, "a field of a later TRL or transformers is refused"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "dr_grpo"}, "begun with algorithm 'grpo', and now it is 'dr_grpo': resume it with its own"),
        ({"beta": 0.1}, "begun with beta None, and now it is 0.1"),
        # Of pairs, packing leaves out padding; of demonstrations, it puts several into one row.
        ({"packing": True, "packing_strategy": "bfd"}, "begun with packing None, and now it is True"),
    ],
)
def test_what_changes_it_is_refused(check, settings, message):
    with pytest.raises(ValueError, match=message):
        check(**settings)


# ---- Lines ----

# A row as each kind of trainer logs it, what else it logs left out, and its line. 3 of 10 steps took 6 seconds.
LINES = [
    (
        {"loss": 0.6923, "entropy": 1.3, "mean_token_accuracy": 0.6, "rewards/accuracies": 0.61}
        | {"rewards/margins": -0.02, "learning_rate": 3e-4},
        "step  3/10  loss  0.692  accuracy 0.610  margin -0.020  lr 3.0e-04  0:00:14 left",
    ),
    (
        {"loss": 0.0, "reward": 0.5, "kl": 0.00031, "entropy": 1.25, "completions/mean_length": 13.8}
        | {"completions/clipped_ratio": 0.25, "clip_ratio/region_mean": 0.01, "learning_rate": 1e-6},
        "step  3/10  reward  0.500  kl/token 0.0003  entropy 1.250  length  13.8  truncated 0.250  clip ratio 0.010  "
        "lr 1.0e-06  0:00:14 left",
    ),
    (
        {"score": 0.5, "win_rate": 0.6, "kl": 0.1, "completions/mean_length": 12.0, "distinct_2": 0.3},
        "step  3/10  held out:  score 0.500  win rate 0.600  kl/response 0.1000  length  12.0",
    ),
    ({"train_runtime": 3.0, "train_loss": 0.5, "reward": 0.5}, ""),
]


@pytest.mark.parametrize(("row", "line"), LINES)
def test_the_line_of_a_step(monkeypatch, capsys, row, line):
    """6 seconds for 3 steps are 14 for the 7 that are left."""
    lines = callbacks.StepLineCallback()
    state = SimpleNamespace(global_step=0, max_steps=10, is_world_process_zero=True)
    now = iter([100.0, 106.0])
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: next(now))
    lines.on_step_begin(None, state, None)
    state.global_step = 3
    lines.on_log(None, state, None, logs=row)
    assert capsys.readouterr().out.strip("\n") == line


def test_runs_of_one_method_may_have_rewards_of_their_seeds():
    first, second = (f"learning_rate: 0.1\nseed: {seed}\nreward_model: [rm-{seed}]\n" for seed in range(2))
    assert settings_digest(first) == settings_digest(second) != settings_digest(first.replace("0.1", "0.2"))


def test_a_warning_is_logged_once_and_again_in_another_training(monkeypatch, caplog):
    for _ in range(2):
        for message in ("rows are padded", "rows are padded", "bf16 is no faster", "rows are padded"):
            processes.warn_once_per_run(message)
        processes.begin_warnings()
    assert caplog.messages == ["rows are padded", "bf16 is no faster"] * 2
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    processes.warn_once_per_run("rows are padded")
    assert caplog.messages == []


# ---- The parallel engine ----


def test_fsdp_on_a_cpu_and_several_gpus_of_one_process_are_refused(monkeypatch, tmp_path):
    args = PreferenceConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert engine_in_force(args) == "none"
    monkeypatch.setattr(args, "_n_gpu", 2)
    with pytest.raises(ValueError, match="one process sees several GPUs: start it with `accelerate launch"):
        engine_in_force(args)
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="FSDP2 was asked for, and on a CPU or in one process .* nothing is sharded"):
        engine_in_force(args)
    # What accelerate makes of several processes on GPUs, before the trainer is created and after.
    for kind in (DistributedType.MULTI_GPU, DistributedType.FSDP):
        monkeypatch.setattr(args, "distributed_state", SimpleNamespace(distributed_type=kind, num_processes=2))
        assert engine_in_force(args) == "FSDP2"


def test_launch_flags_are_no_part_of_the_run(tmp_path, monkeypatch):
    """A run with them resumes without them: config.yaml must not hold them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["aot.py", "--doctor", "off"])
    kinds = ResponseArguments, PreferenceConfig
    run = training_run.begin_run(*kinds, config="aot", name=lambda training: training.loss)
    assert run.launch.doctor == "off"
    text = config_text(run.arguments, run.model, run.training)
    assert "doctor" not in text
