"""Faults of the machine while a model trains: how a run ends, what it says, and that what it leaves is whole."""

from __future__ import annotations

import errno
import importlib.util
import json
import resource
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from safetensors import SafetensorError

from tests.support import train_once
from tests.support.faults_once import At, build, end_of_processes
from tests.support.recipes import RECIPES, environment
from tests.support.tiny import pairs
from tests.support.train_once import largest_difference, launch, parameters
from trl_ext.resilience.checkpoints import checkpoints_in, last_checkpoint
from trl_ext.resilience.faults import TrainingFault, plain_faults

TRAINERS = ["PolicyTrainer", "PreferenceTrainer", "RewardTrainer", "SFTTrainer"]


@pytest.fixture
def spec(tiny_model_path, policy_path):
    """A specification for `build`."""

    def make(trainer: str, **keys) -> dict:
        return {"trainer": trainer, "model": policy_path if trainer == "PolicyTrainer" else tiny_model_path, **keys}

    return make


# ---- A full disk ----


@contextmanager
def files_of_at_most(size: int):
    """A write beyond this many bytes of a file fails, as on a full disk, with an error number of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


SAVING = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "max_steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "size"), [("PolicyTrainer", 20_000), ("PreferenceTrainer", 20_000), ("PreferenceTrainer", 100_000)]
)
def test_a_full_disk_ends_the_run_and_leaves_the_earlier_checkpoint(trainer, size, spec, tmp_path):
    """The language model's 13,040 numbers take 52 kB and Adam's two moments 104 kB; checkpoint-1 is written before."""
    straight = build(spec(trainer, args=SAVING), str(tmp_path / "straight"))
    straight.train()
    with files_of_at_most(size) as limit:
        stopped = build(spec(trainer, args=SAVING), str(tmp_path / "run"))
        stopped.add_callback(At("on_step_begin", 1, limit))
        with pytest.raises(TrainingFault) as caught:
            stopped.train()
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{tmp_path / 'run' / 'checkpoint-2'} could not be written, and ")
    assert "MiB are free there: make room" in message
    assert checkpoints_in(tmp_path / "run") == [tmp_path / "run" / "checkpoint-1"]
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-1"
    resumed = build(spec(trainer, args=SAVING), str(tmp_path / "run"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert largest_difference(parameters(resumed), parameters(straight)) == 0.0


# ---- Out of memory ----


@pytest.mark.parametrize(
    ("trainer", "step", "args", "flags"),
    [
        ("PreferenceTrainer", 3, {"per_device_train_batch_size": 4}, "2 --gradient_accumulation_steps 2"),
        # A rollout of 8 in one micro-batch.
        ("PolicyTrainer", 1, {}, "4 --gradient_accumulation_steps 2 --generation_batch_size 8"),
    ],
)
def test_out_of_memory_is_told_with_the_flags(trainer, step, args, flags, spec, tmp_path):
    with pytest.raises(TrainingFault) as caught:
        build(spec(trainer, args=args, fault="OutOfMemory", step=step), str(tmp_path)).train()
    start = f"out of memory in step {step}: try --per_device_train_batch_size {flags} (the same optimizer batch), "
    assert str(caught.value).startswith(start) and str(caught.value).endswith("Tried to allocate 2.00 GiB.)")


def test_the_search_of_transformers_is_refused(spec, tmp_path):
    with pytest.raises(ValueError, match="auto_find_batch_size changes the optimizer batch"):
        build(spec("PreferenceTrainer", args={"auto_find_batch_size": True}), str(tmp_path))


# ---- Functions that do not come back ----


HANGS = {"reward_timeout": 0.5, "beta": 0.0}


def test_a_reward_function_that_hangs_is_named_with_its_rows(spec, tmp_path):
    def judge(completion_ids, **_):
        time.sleep(60)

    async def judge_later(completion_ids, **_):
        import asyncio

        await asyncio.sleep(60)

    for function in (judge, judge_later):
        trainer = build(spec("PolicyTrainer", args=HANGS), str(tmp_path), reward_funcs=[function])
        begun = time.monotonic()
        with pytest.raises(TrainingFault) as caught:
            trainer.train()
        assert time.monotonic() - begun < 10
        assert f"{function.__name__!r} did not come back within 0.5 seconds (reward_timeout)" in str(caught.value)
        assert "given row_id 'row0', row_id 'row1' " in str(caught.value)


def test_a_reward_function_that_hangs_can_be_skipped(spec, tmp_path):
    """At the second of three steps all 8 responses are without a reward: no advantage, and the others train."""
    calls = []

    def judge(completion_ids, **_):
        calls.append(len(completion_ids))
        if len(calls) == 2:
            time.sleep(60)
        return [float(len(ids)) for ids in completion_ids]

    args = {**HANGS, "reward_errors": "skip", "max_steps": 3}
    trainer = build(spec("PolicyTrainer", args=args), str(tmp_path), reward_funcs=[judge])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["reward_errors"] for entry in logged] == [0.0, 8.0, 0.0]
    assert [entry["unscorable"] for entry in logged] == [0.0, 1.0, 0.0]
    assert logged[1]["grad_norm"] == 0.0 < logged[0]["grad_norm"]
    assert calls == [8, 8, 8], "the rows of a call without an end are not tried one by one"


# ---- Several processes ----


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_process_is_skipped_on_both(spec, tmp_path):
    """The second process's loss is NaN at the second step of four; stock trainers go on with parameters of NaN.

    In the last run it is NaN from the second step on, and two in a row stop it: at its third step, with a checkpoint.
    """
    specs = [spec(trainer, fault="NotANumber", steps=[1]) for trainer in TRAINERS]
    specs.append(spec("trl.DPOTrainer", fault="NotANumber", steps=[1]))
    args = {"max_skipped_updates": 2, "save_strategy": "no"}
    specs.append(spec("RewardTrainer", fault="NotANumber", steps=[1, 2, 3], args=args))
    ends = end_of_processes(specs, tmp_path)
    assert [end.code for end in ends] == [0, 0], ends[0].text[-4000:]
    for first, second in zip(*(end.runs for end in ends), strict=True):
        assert first["parameters"] == second["parameters"]
    *own, stock, stopped = ends[0].runs
    for run in own:
        assert run["error"] is None and run["finite"] and run["step"] == 4
        assert run["skipped"] == {"reward": 0, "loss": 1, "gradient": 0}
        assert run["logged"] == [0.0, 1.0, 1.0, 1.0]
    assert not stock["finite"] and stock["losses"][2:] == [0.0, 0.0]
    assert stopped["finite"]
    for end in ends:
        assert end.runs[-1]["error"].startswith("FloatingPointError: stopped at step 3: 2 updates in a row were not")
    assert (tmp_path / f"{len(specs) - 1}-run" / "checkpoint-3" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra: trl_ext[deepspeed]")
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_deepspeed_skips_by_itself_and_is_counted(engine, spec, tmp_path):
    specs = [spec("PreferenceTrainer", fault="NotANumber", steps=[1])]
    (tmp_path / "specs.json").write_text(json.dumps(specs))
    command = ["-m", "tests.support.faults_once", str(tmp_path / "specs.json"), str(tmp_path)]
    launched = launch(engine, command, tmp_path)
    assert launched.returncode == 0, launched.stderr[-4000:]
    for rank in (0, 1):
        (run,) = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert run["error"] is None and run["finite"] and run["step"] == 4
        assert run["skipped"] == {"reward": 0, "loss": 1, "gradient": 0}


@pytest.mark.slow
def test_a_killed_process_ends_the_other(spec, tmp_path):
    """Without a launcher, which would end it anyway, and with a checkpoint to go on from."""
    keys = {"kill_at": 2, "last": True, "args": {"save_strategy": "steps", "save_steps": 1}}
    survivor, killed = end_of_processes([spec("PreferenceTrainer", **keys)], tmp_path)
    assert killed.code == -9 and survivor.code == 2
    assert survivor.seconds - killed.seconds < 60
    assert survivor.runs[0]["error"] and last_checkpoint(tmp_path / "0-run") == tmp_path / "0-run" / "checkpoint-2"


@pytest.mark.slow
def test_a_reward_function_that_hangs_on_one_process_ends_both(spec, tmp_path):
    """Both groups of four: rows 0 and 1 are the first process's, 2 and 3 the second's, whose function never ends."""
    args = {"reward_timeout": 2.0}
    keys = {"rewards": ["hangs_on_the_last_rank"], "last": True, "args": args}
    waiting, hanging = end_of_processes([spec("PolicyTrainer", **keys)], tmp_path)
    assert (waiting.code, hanging.code) == (2, 2)
    assert abs(waiting.seconds - hanging.seconds) < 60
    assert "'hangs_on_the_last_rank' did not come back within 2 seconds" in hanging.runs[0]["error"]
    assert "given row_id 'row2', row_id 'row3' " in hanging.runs[0]["error"]
    assert waiting.runs[0]["error"]


# ---- Recipes ----

QUICK = ["--use_cpu", "true", "--generation_eval_every", "0", "--num_eval_prompts", "4", "--packing", "off"]
QUICK += ["--save_strategy", "steps", "--save_steps", "1", "--max_steps", "12", "--eval_strategy", "no"]


@pytest.mark.slow
def test_a_recipe_says_in_one_line_that_the_disk_is_full(tmp_path):
    """No file of more than 100 kB can be written: the first checkpoint fails, at its weights."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, str(RECIPES / "preference.py"), *QUICK, "--output_dir", "run", "--loss", "dpo"]
    options = {"cwd": tmp_path, "env": {**environment(), "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    ended = subprocess.run(command, preexec_fn=limit, timeout=300, **options)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: run/checkpoint-1 could not be written, and ")
    assert checkpoints_in(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("redis: connection refused"), None),
        (RuntimeError("prompt.txt: file too large for the tokenizer"), None),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.jsonl"), None),
        (OSError(errno.ENOSPC, "No space left on device", "a.jsonl"), "^a.jsonl could not be written"),
        # Of reading, too.
        (SafetensorError("Error while deserializing header: incomplete metadata"), None),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "^a file could not be written, and .* MiB"),
    ],
)
def test_a_full_disk_is_told_and_an_error_of_the_users_own_code_passes_unchanged(error, said):
    with pytest.raises(TrainingFault if said else type(error), match=said) as caught, plain_faults():
        raise error
    assert said or caught.value is error


@pytest.mark.parametrize("trainer", ["PreferenceTrainer", "SFTTrainer"])
def test_a_full_disk_at_the_last_save_is_told(trainer, tiny_model_path, tmp_path):
    """No file of more than 20 kB can be written, and no checkpoint was."""
    trainer = train_once.build({"trainer": trainer, "model": tiny_model_path, "pairs": 4}, str(tmp_path))
    with (
        files_of_at_most(20_000) as limit,
        pytest.raises(TrainingFault, match=f"^{tmp_path} could not be written, and"),
    ):
        limit()
        trainer.save_model()


# ---- Nothing to train on ----


@pytest.mark.parametrize("trainer", ["PreferenceTrainer", "SFTTrainer", "RewardTrainer", "KTOTrainer"])
def test_fewer_rows_than_a_batch_are_refused_before_training(trainer, tiny_model_path, tmp_path):
    """transformers would save the model as it came. Without `dataloader_drop_last`, 3 rows are a smaller batch."""
    args = {"per_device_train_batch_size": 4, "dataloader_drop_last": True}
    rows = pairs(3)
    if trainer == "KTOTrainer":
        rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in enumerate(rows)]
    spec = {"trainer": trainer, "model": tiny_model_path, "dtype": None, "rows": rows, "args": args}
    with pytest.raises(ValueError, match="^the training data has 3 rows, too few for a batch"):
        train_once.build(spec, str(tmp_path))
    args["dataloader_drop_last"] = False
    built = train_once.build(spec, str(tmp_path))
    built.train()
    assert built.state.global_step == 1


def test_a_rollout_needs_no_row_for_each_response(policy_path, tmp_path):
    """Two prompts are a batch of eight responses."""
    args = {"dataloader_drop_last": True}
    spec = {"trainer": "PolicyTrainer", "model": policy_path, "prompts": 2, "args": args}
    trainer = train_once.build(spec, str(tmp_path))
    trainer.train()
    assert trainer.state.global_step == 1
