"""The benchmarks of steps, of sampling and of GPUs: their arithmetic, and short runs on a CPU."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch

from benchmarks import rollouts, step
from benchmarks.gpu import __main__ as battery
from benchmarks.gpu import correctness, machine, steps, whole_runs
from trl_ext.files import read_json


@pytest.fixture
def as_before(monkeypatch):
    """Undo what a run sets for its whole process: the scoring of TRL's head, the precision, and the environment."""
    import trl.trainer.utils
    from accelerate.state import AcceleratorState

    monkeypatch.setattr(trl.trainer.utils, "_use_triton", trl.trainer.utils._use_triton)
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    AcceleratorState._reset_state()


# ---- benchmarks.step ----


def test_the_summary_is_of_totals_medians_and_range():
    """Stock 4, 6, 20 and packed 2, 2, 5 seconds: totals 30 / 9, medians 6 / 2, ratios 2, 3 and 4.

    300 padded tokens against 120 packed ones; 180 real tokens in 30 and in 9 seconds.
    """

    def row(stock: float, packed: float) -> dict:
        arms = {"stock": (stock, 2.0), "packed": (packed, 2.002)}
        figures = {a: {"seconds": s, "cpu_seconds": s, "gradient_norm": norm} for a, (s, norm) in arms.items()}
        return {"padded_tokens": 100, "packed_tokens": 40, "real_tokens": 60, **figures}

    summary = step.summarize([row(4, 2), row(6, 2), row(20, 5)])
    seconds = summary["seconds"]
    assert seconds["ratio_of_totals"] == pytest.approx(30 / 9)
    assert (seconds["ratio_of_medians"], seconds["range"]) == (3, [2, 4])
    assert summary["tokens"] == {"stock": 300, "packed": 120, "ratio": 2.5}
    assert summary["tokens_per_second"] == {"stock": 6, "packed": 20}
    assert summary["largest_gradient_norm_difference"] == pytest.approx(0.001)


def test_a_rollout_is_padded_as_the_trainer_pads_it():
    """Prompts on the left to 3, responses on the right to 4; every response of a group has its prompt; 2 pads."""
    from benchmarks._lengths import Group
    from benchmarks._step_arms import rollout

    batch = rollout([Group([7, 8], [[20], [21, 22]]), Group([9], [[23, 24, 25], [26]])], widest=3, longest=4)
    assert batch["prompt_ids"].tolist() == [[2, 7, 8], [2, 7, 8], [2, 2, 9], [2, 2, 9]]
    assert batch["prompt_mask"].tolist() == [[0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert batch["completion_ids"].tolist() == [[20, 2, 2, 2], [21, 22, 2, 2], [23, 24, 25, 2], [26, 2, 2, 2]]
    assert batch["completion_mask"].sum(1).tolist() == [1, 2, 3, 1]
    assert batch["num_items_in_batch"] == 7
    assert batch["advantages"].shape == (4,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer", [pytest.param(name, marks=[] if name == "policy" else pytest.mark.long) for name in step.TRAINERS]
)
def test_a_run_of_two_batches_writes_its_figures(trainer, tmp_path, capsys, as_before):
    argv = ["--trainer", trainer, "--lengths", "toy", "--pairs", "2", "--batch_size", "4"]
    step.main([*argv, "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert "wall seconds" in printed and "peak memory, MiB" in printed
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["backend"], result["left_padded"], len(result["batches"])) == ("sdpa", {}, 2)
    assert set(result["peak_bytes"]) == {"stock", "packed"} and min(result["peak_bytes"].values()) > 0
    for row in result["batches"]:
        assert 0 < row["packed_tokens"] < row["real_tokens"] < row["padded_tokens"]
        assert (row["labelled_tokens"] > 0) == (trainer != "reward")
        # The same step in both arms: otherwise it is not one that is compared.
        for name in ("loss", "gradient_norm"):
            assert math.isclose(row["stock"][name], row["packed"][name], rel_tol=1e-4, abs_tol=1e-6)
        assert row["stock"]["gradient_norm"] > 1e-3


def test_the_arms_are_compared_at_equal_weights(tmp_path, as_before, monkeypatch):
    """Each arm's first step is on its own largest batch, after which their weights differ."""
    from benchmarks import _step_arms

    seen = {"stock": [], "packed": []}
    original = _step_arms.Arm.step

    def noting(arm, batch):
        weights = torch.cat([p.detach().flatten() for p in arm.parameters])
        seen["stock" if arm.packing is None else "packed"].append(weights.clone())
        return original(arm, batch)

    monkeypatch.setattr(_step_arms.Arm, "step", noting)
    arguments = step.parse(["--trainer", "preference", "--lengths", "toy", "--pairs", "3", "--batch_size", "2"])
    result = step.measure(arguments, tmp_path)
    for stock, packed in list(zip(seen["stock"], seen["packed"], strict=True))[1:]:
        assert torch.equal(stock, packed)
    assert not torch.equal(seen["stock"][1], seen["stock"][2])
    assert result["summary"]["largest_gradient_norm_difference"] < 1e-3


# ---- benchmarks.rollouts ----


def test_a_run_on_the_embedded_model(tmp_path, capsys):
    path = tmp_path / "figures.json"
    arms = ["generate float32", "sampler float32"]
    rollouts.main(
        ["--size", "toy", "--prompts", "2", "--samples", "2", "--rounds", "1", "--arms", *arms, "--json", str(path)]
    )
    figures = read_json(path)
    assert list(figures["calls"]) == arms and all(len(calls) == 1 for calls in figures["calls"].values())
    # Four responses that end by themselves or after 96 tokens.
    assert all(4 < calls[0]["tokens"] <= 4 * 96 for calls in figures["calls"].values())
    printed = capsys.readouterr().out
    assert all(arm in printed for arm in arms)


# ---- benchmarks.gpu ----

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
        for name in [name for name in steps.VARIANTS if name not in steps.BASELINES]:
            rows = results[f"C/{workload}/24M/{name}"]
            stock, tuned, packed = (rows[arm] for arm in ("stock", "tuned", name))
            # Equal weights, equal windows, however they are padded, packed or divided.
            assert all(0 < row["gradient_difference"] < 1e-4 for row in rows.values())
            assert packed["encoded_tokens"] < stock["encoded_tokens"] <= tuned["encoded_tokens"]
            assert packed["packing"].startswith("packing: on") and stock["packing"] is None
            assert packed["activations_mib"] > 0 and stock["activations_mib"] is None
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
