"""The parallel engine of a run: fallbacks that are refused or said, and flags that are no part of a run's settings."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType

from trl_ext import PreferenceConfig
from trl_ext.runs import training_run
from trl_ext.runs.engine import Engine, check_engine, engine_in_force
from trl_ext.runs.folder import config_text

COMMON = {"use_cpu": True, "report_to": "none", "save_strategy": "no"}


@pytest.mark.parametrize(("name", "phrase"), [("none", "nothing is sharded"), ("DDP", "DDP trains instead")])
def test_a_fallback_is_refused_or_said(name, phrase, caplog):
    engine = Engine(name, asked="FSDP2")
    with pytest.raises(ValueError, match=f"FSDP2 was asked for, and on a CPU {phrase}.*--allow_engine_fallback"):
        check_engine(engine, "cpu:0", allow_fallback=False)
    check_engine(engine, "cpu:0", allow_fallback=True)
    assert phrase in caplog.text
    check_engine(Engine("FSDP2", asked="FSDP2"), "cpu", allow_fallback=False)
    with pytest.raises(ValueError, match="one process sees several GPUs: start it with `accelerate launch"):
        check_engine(Engine("DataParallel", asked="DataParallel"), "cuda:0", allow_fallback=True)


def test_fsdp_on_a_cpu_is_a_fallback(monkeypatch, tmp_path):
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")):
        monkeypatch.setenv(name, value)
    args = PreferenceConfig(output_dir=str(tmp_path), **COMMON)
    assert engine_in_force(args) == ("none", "FSDP2")
    # What accelerate makes of several processes on GPUs, before the trainer is created and after.
    for kind in (DistributedType.MULTI_GPU, DistributedType.FSDP):
        monkeypatch.setattr(args, "distributed_state", SimpleNamespace(distributed_type=kind, num_processes=2))
        assert engine_in_force(args).name == "FSDP2"


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begin a run of AOT in an empty folder, by flags."""

    def begin(*flags: str):
        monkeypatch.setattr(sys, "argv", ["aot.py", *flags])
        from trl_ext.runs.offline import OfflineArguments

        return training_run.begin_run(
            OfflineArguments, PreferenceConfig, config="aot", description=None, name=lambda training: training.loss
        )

    monkeypatch.chdir(tmp_path)
    return begin


def test_launch_flags_are_no_part_of_the_run(begin):
    """A run with them resumes without them: config.yaml must not hold them."""
    run = begin("--allow_engine_fallback")
    assert run.launch.allow_engine_fallback
    text = config_text(run.arguments, run.model, run.training)
    assert "fallback" not in text and "doctor" not in text
