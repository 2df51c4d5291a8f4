"""The Bradley-Terry loss against values worked by hand, its gradient, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset

from trl_ext.data.unpaired import pairs_to_unpaired
from trl_ext.losses import bradley_terry, kto


@pytest.mark.parametrize(
    "options, expected",
    [
        # l(u) = log(1 + exp(-u)). Scores 1.2 and 0.4: l(0.8) = log(1 + 0.449329).
        ({}, 0.371101),
        # l(0.8 - 1) = l(-0.2) = 0.2 + log(1 + 0.818731).
        ({"margin": 1.0}, 0.798139),
        # l(0.8 - 1/3) = l(0.466667).
        ({"margin": 1 / 3}, 0.486793),
        # 0.9 l(0.8) + 0.1 l(-0.8) = 0.371101 + 0.1 * 0.8, as l(-u) = l(u) + u.
        ({"label_smoothing": 0.1}, 0.451101),
        # A judge that agrees with probability 0.7: 0.371101 + 0.3 * 0.8.
        ({"label_smoothing": 0.3}, 0.611101),
        # 0.371101 + 0.01 (1.2 + 0.4)^2.
        ({"centering": 0.01}, 0.396701),
        # l(-0.2) + 0.1 * -0.2 with the margin inside both logistics, + 0.01 * 2.56.
        ({"margin": 1.0, "label_smoothing": 0.1, "centering": 0.01}, 0.798139 - 0.02 + 0.0256),
    ],
    ids=str,
)
def test_values(options, expected):
    losses = bradley_terry(torch.tensor([1.2]), torch.tensor([0.4]), **options)
    assert losses.tolist() == pytest.approx([expected], abs=1e-6)


def test_gradient():
    """d/d chosen of (1-e) l(d) + e l(-d) is sigmoid(d) - (1 - e); of the centering 2 c (chosen + rejected).
    sigmoid(0.3) = 0.574443 with d = 0.8 - 0.5."""
    chosen, rejected = torch.tensor([1.2], requires_grad=True), torch.tensor([0.4], requires_grad=True)
    bradley_terry(chosen, rejected, margin=0.5, label_smoothing=0.1, centering=0.01).sum().backward()
    slope, pull = 1 / (1 + math.exp(-0.3)) - 0.9, 2 * 0.01 * 1.6
    assert chosen.grad.item() == pytest.approx(slope + pull, abs=1e-6)
    assert rejected.grad.item() == pytest.approx(-slope + pull, abs=1e-6)


def test_far_scores_stay_finite():
    """l(-2000) = 2000, l(2000) = 0."""
    losses = bradley_terry(torch.tensor([-1000.0, 1000.0]), torch.tensor([1000.0, -1000.0]))
    assert losses.tolist() == [2000.0, 0.0]


# ---- KTO, and pairs taken apart ----


LOG_RATIO = torch.tensor([2.0, -1.0, -1.0, 1.0], dtype=torch.float64)
DESIRABLE = torch.tensor([True, True, False, False])
# Mean 0.2.
KL = torch.tensor([0.5, -0.1, 0.3, 0.1], dtype=torch.float64)


def test_kto_values():
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


def test_kto_gradient():
    """Of the desirable A: -beta s(u) (1 - s(u)) at u = 0.18, -0.1 x 0.544879 x 0.455121; none through z."""
    log_ratio, kl = LOG_RATIO.clone().requires_grad_(), KL.clone().requires_grad_()
    kto(log_ratio, DESIRABLE, kl).sum().backward()
    assert log_ratio.grad[0].item() == pytest.approx(-0.1 * 0.544879 * 0.455121, abs=1e-7)
    assert (log_ratio.grad[:2] < 0).all() and (log_ratio.grad[2:] > 0).all()
    assert kl.grad is None


# ---- Pairs taken apart ----


def pairs(count: int) -> Dataset:
    names = {"row_id": "row", "prompt": "p", "chosen": "c", "rejected": "r"}
    return Dataset.from_list([{n: f"{text}{i}" for n, text in names.items()} | {"bonus": i} for i in range(count)])


@pytest.mark.parametrize("count", [4, 5, 9])
def test_labels_alternate_and_neighbours_answer_other_prompts(count):
    rows = list(pairs_to_unpaired(pairs(count)))
    assert [row["label"] for row in rows] == [True, False] * count
    for row in rows:
        assert row["completion"] == ("c" if row["label"] else "r") + row["prompt"][1:]
        assert row["row_id"] == f"row{row['bonus']}"
    assert sorted(row["completion"] for row in rows) == sorted(f"{side}{i}" for i in range(count) for side in "cr")
    assert all(one["prompt"] != other["prompt"] for one, other in zip(rows, rows[1:], strict=False))


ZEROS = torch.zeros(2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: bradley_terry(ZEROS, ZEROS, label_smoothing=0.5), r"label_smoothing must lie in \[0, 0.5\), got 0.5"),
        (lambda: bradley_terry(ZEROS, ZEROS, centering=-1.0), "centering must be a number from 0 up"),
        (lambda: bradley_terry(ZEROS, ZEROS[:, None]), r"shapes \[2\] for chosen and \[2, 1\] for rejected"),
        (lambda: kto(LOG_RATIO, DESIRABLE, torch.zeros(0)), "kl_log_ratio, and it is empty"),
        (lambda: kto(LOG_RATIO, DESIRABLE, KL, undesirable_weight=0), "undesirable_weight must be positive"),
        (lambda: pairs_to_unpaired(pairs(2).remove_columns("rejected")), "'rejected' is missing"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
