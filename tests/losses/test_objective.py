"""`PreferenceObjective`: beta, options, refusals before training, columns, and its one-line description."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from trl_ext.losses import PreferenceObjective, PreferenceScores
from trl_ext.registry import preference_loss, preference_weighting

pytestmark = pytest.mark.usefixtures("registries_as_before")


@pytest.fixture
def scores() -> PreferenceScores:
    """Pairs with margins 3 and -2; h_w is 2 and -1."""
    return PreferenceScores(
        chosen=torch.tensor([-20.0, -15.0], dtype=torch.float64).requires_grad_(),
        rejected=torch.tensor([-30.0, -12.0], dtype=torch.float64).requires_grad_(),
        ref_chosen=torch.tensor([-22.0, -14.0], dtype=torch.float64),
        ref_rejected=torch.tensor([-29.0, -13.0], dtype=torch.float64),
    )


# ---- Beta and options ----


@pytest.mark.parametrize("beta", [0, -0.1, math.inf, math.nan])
def test_beta_must_be_positive_and_finite(beta):
    with pytest.raises(ValueError, match=f"beta must be positive, got {beta}"):
        PreferenceObjective("dpo", beta=beta)


def test_beta_reaches_the_function(scores):
    """Hinge: 1 - 0.2 * 3, 1 + 0.2 * 2; and with its own 0.05: 1 - 0.15, 1 + 0.1. A loss need not take beta."""
    assert PreferenceObjective("hinge", beta=0.2)(scores).tolist() == pytest.approx([0.4, 1.4])
    assert PreferenceObjective("hinge")(scores).tolist() == pytest.approx([0.85, 1.1])
    preference_loss("margin_only")(lambda scores: -scores.margin)
    assert PreferenceObjective("margin_only")(scores).tolist() == pytest.approx([-3.0, 2.0])


def test_default_beta_without_one_in_the_function():
    preference_loss("linear")(lambda scores, *, beta: -beta * scores.margin)
    assert PreferenceObjective("linear").beta == 0.1


def test_options_reach_the_function(scores):
    """SPPO at beta 0.1 with targets 3 and -2: ((2 - 3)^2 + (-1 + 2)^2) / 2 and ((-1 - 3)^2 + (1 + 2)^2) / 2."""
    options = {"chosen_win_probability": 0.8, "rejected_win_probability": 0.3}
    objective = PreferenceObjective("sppo", beta=0.1, loss_options=options)
    assert objective(scores).tolist() == pytest.approx([1.0, 12.5])


# ---- Refusals ----


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda s, *, beta: -s.margin.mean(), r"shape \[\]"),
        (lambda s, *, beta: -s.margin[:, None], r"shape \[2, 1\]"),
        (lambda s, *, beta: 1.0, "a float"),
    ],
)
def test_a_loss_returns_one_value_per_pair(scores, function, got):
    preference_loss("own")(function)
    with pytest.raises(ValueError, match=rf"'own' returned {got} for 2 pairs; it must return one value per pair"):
        PreferenceObjective("own")(scores)


def test_the_reference_must_be_declared(scores):
    preference_loss("undeclared", needs_reference=False)(lambda scores, *, beta: -beta * scores.margin)
    with pytest.raises(ValueError, match="register it with needs_reference=True"):
        PreferenceObjective("undeclared")(replace(scores, ref_chosen=None, ref_rejected=None))


def test_a_normalised_weighting_reads_columns_alone(scores):
    """It is divided by its mean over the batch, which must be known before the batch has been trained on."""
    preference_weighting("own", normalize=True)(lambda scores: scores.chosen.detach().exp())
    with pytest.raises(AttributeError):
        PreferenceObjective("dpo", weightings=["own"])(scores)


# ---- Columns ----


def test_columns_of_the_loss_and_of_the_weightings(scores):
    """The loss -margin times strength 2 and 3; weights 0.5 and 1.5 have mean 1: -3 * 2 * 0.5, 2 * 3 * 1.5."""

    @preference_loss("by_strength", columns=("strength", "agreement"))
    def by_strength(scores):
        return -scores.margin * scores.columns["strength"]

    def columns_with(**options):
        return PreferenceObjective("by_strength", weightings=["confidence"], weighting_options=options).columns

    assert PreferenceObjective("by_strength").columns == ("strength", "agreement")
    assert columns_with() == ("strength", "agreement", "avg_confidence")
    assert columns_with(column="certainty") == ("strength", "agreement", "certainty")
    assert columns_with(column="agreement") == ("strength", "agreement")

    scores.columns = {"strength": torch.tensor([2.0, 3.0]), "agreement": torch.tensor([0.5, 1.5])}
    objective = PreferenceObjective(
        "by_strength", weightings=["confidence"], weighting_options={"column": "agreement"}
    )
    assert objective(scores).tolist() == pytest.approx([-3.0, 9.0])


# ---- Descriptions ----


@pytest.mark.parametrize(
    "arguments, description",
    [
        ({"loss": "dpo"}, "dpo (beta 0.1)"),
        ({"loss": "aot", "beta": 0.2}, "aot (beta 0.2)"),
        ({"loss": "cdpo"}, "cdpo (beta 0.1, label_smoothing 0.1)"),
        ({"loss": "simpo", "beta": 2.5, "loss_options": {"gamma": 1.375}}, "simpo (beta 2.5, gamma 1.375)"),
    ],
)
def test_a_description_names_the_loss_and_its_options(arguments, description):
    assert PreferenceObjective(**arguments).describe() == description


def test_a_description_tells_weightings_with_their_options():
    """Two runs that differ in a weighting's option must not read the same in a report."""
    options = {"floor": 0.45, "column": "certainty"}
    described = PreferenceObjective("dpo", weightings=["wpo", "confidence"], weighting_options=options).describe()
    assert described.startswith("dpo (beta 0.1")
    for part in ("weighted by wpo", "weighted by confidence", "0.45", "certainty"):
        assert part in described
