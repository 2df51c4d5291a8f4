"""Tables of generations reach the trackers, each at its step, and none replaces an earlier one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import recipes
from tests.test_recipes import SHORT

pytestmark = pytest.mark.slow
ARGUMENTS = [*SHORT, "--eval_strategy=no", "--save_strategy=no", "--max_steps=4"]


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


def test_tensorboard(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    recipes.run(monkeypatch, "dpo", *ARGUMENTS, "--report_to=tensorboard", f"--output_dir={tmp_path / 'run'}")
    events = EventAccumulator(str(next(tmp_path.glob("**/events.out.tfevents.*")).parent))
    events.Reload()
    texts = events.Tensors("samples/generation_table/text_summary")
    assert [event.step for event in texts] == [0, 2, 4]
    assert all(event.tensor_proto.string_val[0].count(b"\n") == 4 for event in texts), "header, rule, three rows"
    assert [event.step for event in events.Scalars("train/kl")] == [0, 2, 4]


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
