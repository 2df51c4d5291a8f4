"""KTO's loss against values worked by hand, its weights, and pairs taken apart.

Log-ratios are those of the pairs A and B of `test_preference_losses`: chosen 2 and -1, rejected -1 and 1.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from trl_ext.data.unpaired import pairs_to_unpaired
from trl_ext.losses import kto

LOG_RATIO = torch.tensor([2.0, -1.0, -1.0, 1.0], dtype=torch.float64)
DESIRABLE = torch.tensor([True, True, False, False])
# Mean 0.2.
KL = torch.tensor([0.5, -0.1, 0.3, 0.1], dtype=torch.float64)


def test_values():
    """z = 0.2. 1 - s(0.1 (2 - 0.2)) = s(-0.18) = 0.455121; s(0.12) = 0.529964; s(0.1 (-1 - 0.2)) = 0.470036;
    s(0.08) = 0.519989. Their mean is 0.493778, and with the last two times 1.5, 0.617531."""
    losses = kto(LOG_RATIO, DESIRABLE, KL)
    assert losses.tolist() == pytest.approx([0.455121, 0.529964, 0.470036, 0.519989], abs=1e-6)
    assert losses.mean().item() == pytest.approx(0.493778, abs=1e-6)
    assert kto(LOG_RATIO, DESIRABLE, KL, undesirable_weight=1.5).mean().item() == pytest.approx(0.617531, abs=1e-6)


def test_weights_are_in_the_precision_of_the_log_ratios():
    """1.1 and 0.7 have no finite binary form: taken through float32 they would be off by 2e-8 relative."""
    zeros = torch.zeros(2, dtype=torch.float64)
    losses = kto(zeros, DESIRABLE[1:3], zeros, desirable_weight=1.1, undesirable_weight=0.7)
    assert losses.tolist() == pytest.approx([0.55, 0.35], rel=1e-15)


def test_the_mean_is_clamped_and_not_its_terms():
    """Mean of -0.5, -0.1, 0.3, 0.1 is -0.05, so z = 0; clamped terms would average 0.1."""
    negative = torch.tensor([-0.5, -0.1, 0.3, 0.1], dtype=torch.float64)
    expected = kto(LOG_RATIO, DESIRABLE, torch.zeros(1, dtype=torch.float64))
    assert torch.equal(kto(LOG_RATIO, DESIRABLE, negative), expected)
    # s(-0.2) = 0.450166.
    assert expected[0].item() == pytest.approx(0.450166, abs=1e-6)


def test_gradient():
    """Of the desirable A: -beta s(u) (1 - s(u)) at u = 0.18, -0.1 x 0.544879 x 0.455121; none through z."""
    log_ratio, kl = LOG_RATIO.clone().requires_grad_(), KL.clone().requires_grad_()
    kto(log_ratio, DESIRABLE, kl).sum().backward()
    assert log_ratio.grad[0].item() == pytest.approx(-0.1 * 0.544879 * 0.455121, abs=1e-7)
    assert (log_ratio.grad[:2] < 0).all() and (log_ratio.grad[2:] > 0).all()
    assert kl.grad is None


def test_wrong_loss_arguments():
    with pytest.raises(ValueError, match="kl_log_ratio, and it is empty"):
        kto(LOG_RATIO, DESIRABLE, torch.zeros(0))
    with pytest.raises(ValueError, match="undesirable_weight must be positive"):
        kto(LOG_RATIO, DESIRABLE, KL, undesirable_weight=0)


# ---- Pairs taken apart ----


def pairs(count: int) -> Dataset:
    return Dataset.from_list(
        [
            {"row_id": f"row{i}", "prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}", "bonus": i}
            for i in range(count)
        ]
    )


@pytest.mark.parametrize("count", [4, 5, 9])
def test_labels_alternate_and_neighbours_answer_other_prompts(count):
    rows = list(pairs_to_unpaired(pairs(count)))
    assert [row["label"] for row in rows] == [True, False] * count
    for row in rows:
        assert row["completion"] == ("c" if row["label"] else "r") + row["prompt"][1:]
        assert row["row_id"] == f"row{row['bonus']}"
    assert sorted(row["completion"] for row in rows) == sorted(f"{side}{i}" for i in range(count) for side in "cr")
    assert all(one["prompt"] != other["prompt"] for one, other in zip(rows, rows[1:], strict=False))


def test_wrong_pairs():
    with pytest.raises(ValueError, match="'rejected' is missing"):
        pairs_to_unpaired(pairs(2).remove_columns("rejected"))
    with pytest.raises(ValueError, match="no pairs"):
        pairs_to_unpaired(pairs(2).select([]))
