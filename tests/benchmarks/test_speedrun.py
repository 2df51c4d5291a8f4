"""The speedrun: what its runs must be, and when they are a record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import speedrun
from trl_ext.evaluation.methods.runs import read_method_run
from trl_ext.published import study_folder

SCORES = (0.45, 0.46, 0.44, 0.45, 0.47)


def write_runs(folder: Path, scores=SCORES, **changed) -> None:
    """Five finished runs `fast-{seed}` with these scores, whose settings are the rules' but for those given."""
    for seed, score in enumerate(scores):
        run = folder / f"fast-{seed}"
        run.mkdir(parents=True)
        about = {"model": "smollm2", "dataset": "instructions", "seed": seed, "training_seconds": 100.0 + seed}
        (run / "results.json").write_text(json.dumps({"run": about, "score": {"policy": score, "base": 0.37}}))
        (run / "config.yaml").write_text(yaml.safe_dump({**speedrun.RULES, **changed}))
        rows = [{"row_id": str(i), "prompt_text": "p", "response_text": "r"} for i in range(speedrun.PROMPTS)]
        (run / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def printed(folder: Path, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", ["speedrun", str(folder), "--method", "fast"])
    speedrun.main()
    return capsys.readouterr().out


def test_a_record(tmp_path, monkeypatch, capsys):
    write_runs(tmp_path)
    out = printed(tmp_path, monkeypatch, capsys)
    found = json.loads((tmp_path / "fast.json").read_text())
    # Student's t with four degrees of freedom: 2.776 standard errors of 0.0114 / 5 ** 0.5.
    assert found["score"]["mean"] == pytest.approx(0.454)
    assert found["score"]["low"] == pytest.approx(0.454 - 2.776 * 0.011402 / 5**0.5, abs=2e-3)
    assert found["reached"] and found["training_seconds"] == 102.0 and found["seconds"] == [100, 101, 102, 103, 104]
    assert "fast reaches the target" in out and "| fast | 102 | 0.454 [0.4" in out


def test_a_mean_above_the_target_may_be_luck(tmp_path, monkeypatch, capsys):
    write_runs(tmp_path, (0.36, 0.48, 0.42, 0.52, 0.40))
    assert "does not reach" in printed(tmp_path, monkeypatch, capsys)
    assert json.loads((tmp_path / "fast.json").read_text())["score"]["mean"] > speedrun.TARGET


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt_split": "validation_gen"}, ["prompt_split is validation_gen", "test_gen"]),
        ({"max_new_tokens": 256}, ["max_new_tokens is 256", "96"]),
        ({"train_split": "test_prefs"}, ["train_split is test_prefs", "train"]),
    ],
)
def test_runs_against_the_rules_are_refused(tmp_path, monkeypatch, capsys, changed, words):
    write_runs(tmp_path, **changed)
    with pytest.raises(SystemExit) as refused:
        printed(tmp_path, monkeypatch, capsys)
    assert all(word in str(refused.value) for word in ["error:", "fast-0", *words])


def test_an_online_method_can_make_a_record():
    runs = [study_folder("smollm2-instructions") / f"rloo-{seed}" for seed in speedrun.SEEDS]
    found = speedrun.record([read_method_run(run, "rloo", seed) for seed, run in enumerate(runs)])
    # The base's 0.3975 and the published gain of 0.063.
    assert found["score"]["mean"] == pytest.approx(0.4603, abs=1e-4)


def test_a_missing_run_is_named(tmp_path, monkeypatch, capsys):
    write_runs(tmp_path, SCORES[:4])
    with pytest.raises(SystemExit, match="fast-4"):
        printed(tmp_path, monkeypatch, capsys)
