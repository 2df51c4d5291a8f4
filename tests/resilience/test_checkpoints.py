"""A checkpoint is complete once it has its marker, incomplete ones are passed over, and the right ones are deleted."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.faults_once import At
from tests.support.tiny import pairs
from tests.support.train_once import build, train
from trl_ext.resilience import checkpoints
from trl_ext.resilience.checkpoints import MARKER, check_checkpoint, delete_old, is_complete, last_checkpoint
from trl_ext.resilience.preemption import Preemption

ARGUMENTS = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 1, "max_steps": 3}


BEST = {"save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}


@pytest.fixture(scope="module")
def spec(tiny_model_path) -> dict:
    return {"model": tiny_model_path, "pairs": 6, "args": {"loss": "simpo", **ARGUMENTS}}


@pytest.fixture(scope="module")
def saved(spec, tmp_path_factory) -> Path:
    """The output folder of three steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    build(spec, str(folder)).train()
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def steps_in(folder: Path) -> list[int]:
    return [checkpoints.step_of(path) for path in checkpoints.checkpoints_in(folder)]


# ---- What a run resumes from ----


def test_a_checkpoint_without_its_marker_is_passed_over(run):
    assert last_checkpoint(run) == run / "checkpoint-3"
    (run / "checkpoint-3" / MARKER).unlink()
    assert last_checkpoint(run) == run / "checkpoint-2"


@pytest.mark.parametrize(
    ("removed", "error"), [("trainer_state.json", FileNotFoundError), ("scheduler.pt", ValueError)]
)
def test_a_checkpoint_of_stock_trainers_has_no_marker(removed, error, run):
    """One that is named is accepted all the same, unless a file is missing; one of this library's needs its marker."""
    folder = run / "checkpoint-3"
    (folder / MARKER).unlink()
    with pytest.raises(ValueError, match="checkpoint-3 was not written to its end"):
        check_checkpoint(folder)
    (folder / "progress_0.pt").unlink()
    check_checkpoint(folder)
    (folder / removed).unlink()
    with pytest.raises(error, match="checkpoint-3"):
        check_checkpoint(folder)


# ---- What is deleted ----


@pytest.mark.parametrize(
    ("there", "newest", "limit", "best", "left"),
    [
        ([1, 2, 3, 4], 4, 2, None, [3, 4]),
        ([1, 2, 3, 4], 4, None, None, [1, 2, 3, 4]),
        ([1, 2, 3, 4], 4, -1, None, [1, 2, 3, 4]),
        # As with transformers, the best one counts, and with one allowed there are two.
        ([1, 2, 3, 4], 4, 2, 1, [1, 4]),
        ([1, 2, 3, 4], 4, 1, 2, [2, 4]),
        # 9 and 12 were there when the run was resumed from 3: they go before 2, which is older.
        ([2, 3, 4, 9, 12], 4, 4, None, [2, 3, 4, 12]),
        ([2, 3, 4, 9, 12], 4, 2, None, [3, 4]),
    ],
)
def test_which_are_deleted(there, newest, limit, best, left, tmp_path):
    for step in there:
        (tmp_path / f"checkpoint-{step}").mkdir()
    delete_old(tmp_path / f"checkpoint-{newest}", limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert steps_in(tmp_path) == left


# ---- How one comes to be ----


@pytest.mark.parametrize("limit", [1, None])
def test_the_marker_is_written_last_and_the_earlier_checkpoint_deleted_after_it(limit, spec, tmp_path, monkeypatch):
    """Also where the step's checkpoint was left incomplete by a run that was killed."""
    left = tmp_path / "checkpoint-2" / "left.txt"
    left.parent.mkdir()
    left.touch()
    seen = []

    def mark_complete(checkpoint: Path, optimizer_batch: int) -> None:
        files = {path.name for path in checkpoint.iterdir()}
        needed = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "progress_0.pt"}
        assert {*needed, "trainer_state.json"} < files and not {MARKER, "left.txt"} & files
        seen.append(steps_in(tmp_path))
        (checkpoint / MARKER).touch()

    monkeypatch.setattr(checkpoints, "mark_complete", mark_complete)
    trainer, pushed = build({**spec, "args": {**spec["args"], "save_total_limit": limit}}, str(tmp_path)), []
    trainer.args.push_to_hub = True
    trainer._push_from_checkpoint = lambda folder: pushed.append((Path(folder) / MARKER).is_file())
    trainer.train()
    assert pushed == [True] * 3
    assert seen == ([[1, 2], [1, 2], [2, 3]] if limit else [[1, 2], [1, 2], [1, 2, 3]])
    assert steps_in(tmp_path) == ([3] if limit else [1, 2, 3])
    assert trainer.args.save_total_limit == limit


@pytest.mark.parametrize("limit", [1, 2])
def test_a_run_that_has_ended_needs_its_best_checkpoint_alone(limit, spec, tmp_path):
    """As transformers leaves it; at a learning rate of 0, the first is best."""
    arguments = {**spec["args"], **BEST, "save_total_limit": limit, "learning_rate": 0.0}
    train({**spec, "held_out": pairs(4, seed=9), "args": arguments}, str(tmp_path))
    assert steps_in(tmp_path) == [1, 3][:limit]


# ---- What a run leaves that is stopped ----


@pytest.fixture
def signals():
    """Whoever handles signals now does so again after the training."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    assert handlers == {number: signal.getsignal(number) for number in handlers}


def stopped(spec: dict, folder: Path, **arguments):
    """A trainer of 3 steps to an epoch that a notice in the fifth ends; at a learning rate of 0, the first is best."""
    arguments = {**spec["args"], "learning_rate": 0.0, "max_steps": 9, **arguments}
    trainer = build({**spec, "held_out": pairs(4, seed=9), "args": arguments}, str(folder))
    trainer.add_callback(At("on_step_begin", 4, lambda: signal.raise_signal(signal.SIGTERM)))
    trainer.add_callback(Preemption(trainer))
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 143
    return trainer


def test_the_checkpoint_of_a_notice_stays_beside_the_best(spec, tmp_path, signals):
    """The notice is in the fifth step, of an epoch that ends at the sixth."""
    trainer = stopped(spec, tmp_path, **BEST)
    assert steps_in(tmp_path) == [1, 5] and trainer.state.best_global_step == 1
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-5"


def test_weights_alone_are_nothing_to_go_on_from(spec, tmp_path, signals):
    """`save_only_model` at steps 2 and 4; a notice in the fifth step is for going on, and saved in full."""
    stopped(spec, tmp_path, save_only_model=True, save_steps=2)
    assert not is_complete(tmp_path / "checkpoint-4")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-5"
    with pytest.raises(ValueError, match="checkpoint-4 was not written to its end, or has no optimizer"):
        check_checkpoint(tmp_path / "checkpoint-4")


# ---- What is taken up ----


@pytest.mark.parametrize("event", ["on_step_begin", "on_save"])
def test_a_notebook_that_is_interrupted_resumes_with_the_same_trainer(event, saved, spec, tmp_path):
    """Without `Preemption`, `train` ends at once; the second checkpoint is written or not when it does."""
    trainer = build(spec, str(tmp_path))
    trainer.add_callback(At(event, 2, lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert steps_in(tmp_path) == [1, 2]
    trainer.train(resume_from_checkpoint=True)
    ended, straight = (load_file(folder / "checkpoint-3" / "model.safetensors") for folder in (tmp_path, saved))
    assert all(straight[name].equal(ended[name]) for name in straight)


@pytest.mark.parametrize(("rows", "accumulation"), [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_the_split_of_an_optimizer_batch_may_change_and_the_batch_may_not(rows, accumulation, spec, run):
    """It was begun with 2 pairs to an update."""
    split = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    trainer = build({**spec, "args": {**spec["args"], **split}}, str(run))
    if rows * accumulation == 2:
        trainer.train(resume_from_checkpoint=True)
        return
    expected = f"checkpoint-3 is of a run with 2 examples to an update, and now it is {rows * accumulation}"
    for wanted in (True, str(run / "checkpoint-3")):
        with pytest.raises(ValueError, match=expected):
            trainer.train(resume_from_checkpoint=wanted)


def test_a_finished_run_takes_no_further_step(spec, run):
    """3 steps of 6 pairs are one epoch and no more; with 4 pairs, the end lies in the middle of an epoch."""
    for rows in (6, 4):
        trainer = build({**spec, "pairs": rows}, str(run))
        trainer.add_callback(At("on_step_begin", 3, lambda: pytest.fail("a further step")))
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 3


def test_the_recipes_checkpoint_to_resume(run, spec, tmp_path, monkeypatch, capsys):
    """The last sound one; and before the first, where a run has begun, none: by the same command it begins anew."""
    from trl_ext.runs.folder import open_run_folder

    def resume(folder: Path, wanted: str = "last") -> str | None:
        return open_run_folder(str(folder), overwrite=False, resume_from_checkpoint=wanted)

    (run / "checkpoint-3" / MARKER).unlink()
    (run / "checkpoint-3" / "scheduler.pt").unlink()
    assert resume(run) == str(run / "checkpoint-2")
    for wanted in (resume, lambda _, named: build(spec, str(run)).train(resume_from_checkpoint=named)):
        with pytest.raises(ValueError, match="checkpoint-3 was not written to its end, or has no optimizer"):
            wanted(run, str(run / "checkpoint-3"))
    begun = tmp_path / "begun"
    begun.mkdir()
    with pytest.raises(FileNotFoundError, match="has no checkpoint to resume: leave out"):
        resume(begun)
    for name in ("config.yaml", "metrics.jsonl"):
        (begun / name).write_text("{}")
        assert resume(begun) is None
    assert "has no checkpoint yet: its run begins anew" in capsys.readouterr().out
    # What has ended without a checkpoint is not trained a second time.
    (begun / "results.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="has no checkpoint to resume"):
        resume(begun)
