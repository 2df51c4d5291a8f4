"""`benchmarks.gpu`: all of it on a CPU, its table of arms, its budget, and what it does at the end of memory."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu import __main__ as battery
from benchmarks.gpu import correctness, machine, steps, whole_runs

QUICK = ["--device", "cpu", "--size", "24M", "--quick", "--budget_seconds", "3000"]


def run(path, *flags: str) -> dict:
    battery.main([*QUICK, "--json", str(path), *flags])
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
def test_all_of_it_on_a_cpu(tmp_path, capsys, monkeypatch):
    report = run(tmp_path / "gpu.json")
    printed = capsys.readouterr().out
    assert report["left"] == []
    assert {row["state"] for row in report["arms"].values()} == {"done"}, report
    results = {name: row["result"] for name, row in report["arms"].items()}
    # In float32, errors are rounding; the failed comparisons of bfloat16 depend on the shapes.
    assert results["B/attention"]["sdpa, float32"]["worst"]["packed"] < 1e-5
    assert results["B/attention"]["sdpa, bfloat16"]["worst"]["packed"] < 0.05
    passes = results["B/passes"]["rows"]
    assert len(passes) == 2 * 18
    for row in passes:
        assert 0 < row["packed"] < (1e-5 if row["precision"] == "float32" else 0.1)
        assert row["packed_tokens"] == passes[0]["packed_tokens"]
    for workload in ("grpo", "dpo"):
        for name in ("packed", "packed-no-checkpointing", "packed-in-one-pass", "packed-in-one-pass-compiled"):
            rows = results[f"C/{workload}/24M/{name}"]
            stock, tuned, packed = (rows[arm] for arm in ("stock", "tuned", name))
            # Equal weights, equal windows, however they are padded, packed or divided.
            assert all(0 < row["gradient_difference"] < 1e-4 for row in rows.values())
            assert packed["encoded_tokens"] < stock["encoded_tokens"] <= tuned["encoded_tokens"]
            assert packed["packing"].startswith("packing: on") and stock["packing"] is None
            assert tuned["micro_batch"] == 2 * stock["micro_batch"]
            assert packed["micro_batch"] == steps.VARIANTS[name].factor * stock["micro_batch"]
            for baseline in ("stock", "tuned"):
                pairs = zip(rows[baseline]["seconds"], packed["seconds"], strict=True)
                ratios = [one / other for one, other in pairs]
                assert packed[f"ratio_to_{baseline}"] == pytest.approx(
                    {"median": sum(ratios) / 2, "least": min(ratios), "most": max(ratios)}
                )
        assert results[f"F/{workload}/24M/trl_ext"]["trl_ext"]["packing"].startswith("packing: on")
    assert results["G/24M"]["float32, packed"]["difference_to_float32"] < 1e-4
    assert 0 < results["G/24M"]["bfloat16, packed"]["difference_to_float32"] < 0.2
    assert (tmp_path / "gpu.md").read_text() in printed

    # What is finished is kept; what is missing is measured.
    missing = report["arms"].pop("A/machine")
    (tmp_path / "partial.json").write_text(json.dumps(report))
    monkeypatch.setattr(machine, "measure", lambda *_: missing["result"])
    for part in ("attention", "passes"):
        monkeypatch.setattr(correctness, part, lambda *_: pytest.fail("it ran again"))
    again = run(tmp_path / "again.json", "--resume", str(tmp_path / "partial.json"))
    assert again["left"] == [] and again["arms"]["C/dpo/24M/packed"] == report["arms"]["C/dpo/24M/packed"]


@pytest.fixture
def instant(monkeypatch):
    """Every arm returns at once."""
    monkeypatch.setattr(machine, "measure", lambda *_: {})
    for module, name in ((correctness, "attention"), (correctness, "passes"), (whole_runs, "score")):
        monkeypatch.setattr(module, name, lambda *_: {})
    monkeypatch.setattr(whole_runs, "train", lambda *_: {"run": {"seconds": [1.0, 2.0, 3.0]}})
    monkeypatch.setattr(steps.Setup, "profile", lambda *_: {})
    monkeypatch.setattr(steps.Setup, "compare", lambda *_: {})


@pytest.mark.usefixtures("as_before", "instant")
def test_an_arm_that_fails_does_not_end_the_battery(tmp_path, monkeypatch, capsys):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(steps.Setup, "profile", no_memory)
    monkeypatch.setattr(correctness, "attention", lambda *_: 1 / 0)
    monkeypatch.setattr(whole_runs, "score", lambda *_: {"bfloat16": {"seconds": 1.0, "difference_to_float32": 1e999}})
    report = run(tmp_path / "gpu.json")
    states = {name: row["state"] for name, row in report["arms"].items()}
    assert states["B/attention"] == "failed" and "ZeroDivisionError" in report["arms"]["B/attention"]["result"]
    assert states["D/grpo/24M"] == states["D/dpo/24M"] == "out of memory"
    assert states["F/dpo/24M/trl_ext"] == "done"
    assert report["arms"]["G/24M"]["result"]["bfloat16"]["difference_to_float32"] == "Infinity"
    assert "| D/dpo/24M | out of memory |" in capsys.readouterr().out
    # A second call tries again what failed, and not what does not fit.
    monkeypatch.setattr(correctness, "attention", lambda *_: {})
    monkeypatch.setattr(steps.Setup, "profile", lambda *_: pytest.fail("it ran again"))
    report = run(tmp_path / "gpu.json", "--resume", str(tmp_path / "gpu.json"))
    assert report["arms"]["B/attention"]["state"] == "done"


@pytest.mark.usefixtures("as_before", "instant")
def test_only_what_fits_into_the_budget_starts(tmp_path):
    """Predicted: A 3 s, B 6 and 16 s; with 4 s, only what takes less starts."""
    report = run(tmp_path / "gpu.json", "--only", "A", "B", "--budget_seconds", "4")
    assert list(report["arms"]) == ["A/machine"] and report["left"] == ["B/attention", "B/passes"]
    assert "| B/passes | not started |" in (tmp_path / "gpu.md").read_text()


def test_a_smaller_micro_batch_where_memory_ends(monkeypatch, tmp_path):
    tried = []

    class Arm:
        def __init__(self, setup, variant, factor):
            tried.append(factor)
            if factor == 4:
                raise torch.OutOfMemoryError
            if factor == 2:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
            self.factor = factor

    monkeypatch.setattr(steps, "TimedArm", Arm)
    monkeypatch.setitem(steps.VARIANTS, "tuned", steps.VARIANTS["tuned"]._replace(factor=4))
    setup = steps.Setup("grpo", "24M", "cpu", True, tmp_path)
    assert setup.arm("tuned").factor == 1 and tried == [4, 2, 1]
    assert setup.arm("tuned").factor == 1 and len(tried) == 3


def test_the_busy_share_is_of_the_union_of_kernels():
    """Kernels at 0 to 4, 2 to 6 and 8 to 10 microseconds: 8 of 16; the times of all add up to 10."""
    rows = [
        ("kernel", "flash_fwd_kernel", 2, 4),
        ("kernel", "gemm", 0, 4),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 8, 2),
        ("gpu_user_annotation", "Optimizer.step#AdamW.step", 0, 16),
        ("user_annotation", "Optimizer.step#AdamW.step", 0, 16),
        ("cpu_op", "aten::_local_scalar_dense", 0, 1),
        ("cuda_runtime", "cudaStreamSynchronize", 0, 1),
    ]
    events = [dict(zip(("cat", "name", "ts", "dur"), row, strict=True)) for row in rows]
    found = machine.summarize(events, "cuda", 16e-6)
    assert found["busy"] == pytest.approx(0.5) and sum(found["longest"].values()) == pytest.approx(10e-6)
    assert found["kernels"] == 3 and found["waits"] == 1
    assert found["copies"] == {"Memcpy DtoH (Device -> Pageable)": 1}
    assert list(found["attention"]) == ["flash_fwd_kernel"]
