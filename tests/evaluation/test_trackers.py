"""Tables of generations reach the trackers, each at its step, none replacing another; metrics carry their time."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.support import recipes
from tests.support.recipes import SHORT_PREFERENCE

pytestmark = pytest.mark.slow
ARGUMENTS = [*SHORT_PREFERENCE, "--eval_strategy=no", "--save_strategy=no", "--max_steps=4"]


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipes.run(monkeypatch, "dpo", *ARGUMENTS, "--report_to=wandb", f"--output_dir={tmp_path / 'run'}")
    import wandb

    wandb.finish()
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/samples/generation_table_*.table.json"))
    steps = [json.loads(path.read_text())["data"][0][0] for path in tables]
    assert sorted(steps) == [0, 2, 4]
    for path in tables:
        table = json.loads(path.read_text())
        assert table["columns"][:4] == ["step", "row_id", "prompt_text", "response_text"]
        assert len(table["data"]) == 3


def test_wandb_without_a_login_is_one_line(tmp_path):
    """It would otherwise end in the middle of the start, after the model and the data were prepared."""
    environment = {name: value for name, value in recipes.environment().items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "RANK": "0"}
    arguments = ["--report_to=wandb", f"--output_dir={tmp_path / 'run'}"]
    command = [sys.executable, str(recipes.RECIPES / "dpo.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: --report_to wandb has no login: run `wandb login`, or set WANDB_MODE=offline" in done.stderr


def test_nothing_is_reported_unless_asked(monkeypatch):
    _, _, training = recipes.parse(monkeypatch, "aot")
    assert training.report_to == []


def test_metrics_carry_the_seconds_of_training_and_a_resumed_run_counts_on(tmp_path, monkeypatch):
    """The clock stands at 100 when training begins: logs at 102.5 and 104 are at 2.5 and 4 seconds.

    The run resumes from step 2, last logged at 2.5 seconds, when the clock stands at 900: a log at 901 is at 3.5.
    """
    from trl_ext.trainers import callbacks

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def train(start: int, began: float, *logs: tuple[int, float]) -> None:
        callback = callbacks.MetricsFileCallback(tmp_path / "metrics.jsonl")
        # The checkpoint of a step holds what had been logged when it was written: one line of its own step.
        log_history = [{"step": start}] if start else []
        state = SimpleNamespace(is_world_process_zero=True, global_step=start, log_history=log_history)
        clock.now = began
        callback.on_train_begin(None, state, None)
        for state.global_step, clock.now in logs:
            callback.on_log(None, state, None, logs={"loss": 1.0})

    def seconds() -> list[tuple[int, float]]:
        return [(row["step"], row["seconds"]) for row in callbacks.read_metrics(tmp_path / "metrics.jsonl")]

    train(0, 100.0, (2, 102.5), (4, 104.0))
    assert seconds() == [(2, 2.5), (4, 4.0)]
    train(2, 900.0, (4, 901.0))
    assert seconds() == [(2, 2.5), (4, 3.5)]
