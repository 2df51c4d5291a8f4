"""`benchmarks.step`: its arguments, the arithmetic of its summary, and a run of two batches on the embedded model."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import step


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
