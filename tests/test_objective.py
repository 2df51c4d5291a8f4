"""`PreferenceObjective`: beta, options, refusals before training, columns, and its one-line description."""

from __future__ import annotations

import math

import pytest
import torch

from trl_ext.losses import PreferenceObjective, PreferenceScores, hinge
from trl_ext.registry import preference_loss, preference_losses, preference_weighting, preference_weightings


@pytest.fixture(autouse=True)
def own_tables(monkeypatch):
    for table in (preference_losses, preference_weightings):
        monkeypatch.setattr(table, "_entries", dict(table._entries))


@pytest.fixture
def scores() -> PreferenceScores:
    """Pairs with margins 3 and -2; h_w is 2 and -1."""
    return PreferenceScores(
        chosen=torch.tensor([-20.0, -15.0], dtype=torch.float64).requires_grad_(),
        rejected=torch.tensor([-30.0, -12.0], dtype=torch.float64).requires_grad_(),
        ref_chosen=torch.tensor([-22.0, -14.0], dtype=torch.float64),
        ref_rejected=torch.tensor([-29.0, -13.0], dtype=torch.float64),
        chosen_length=torch.tensor([8, 6]),
        rejected_length=torch.tensor([10, 5]),
    )


class TestBeta:
    @pytest.mark.parametrize("beta", [0, 0.0, -0.1, math.inf, -math.inf, math.nan])
    def test_must_be_positive_and_finite(self, beta):
        with pytest.raises(ValueError, match=f"beta must be positive, got {beta}"):
            PreferenceObjective("dpo", beta=beta)

    def test_default_without_one_in_the_function(self):
        @preference_loss("linear")
        def linear(scores, *, beta):
            return -beta * scores.margin

        assert PreferenceObjective("linear").beta == 0.1

    def test_reaches_the_function(self, scores):
        """Hinge: 1 - 0.2 * 3, 1 + 0.2 * 2; and with its own 0.05: 1 - 0.15, 1 + 0.1."""
        assert PreferenceObjective("hinge", beta=0.2)(scores).tolist() == pytest.approx([0.4, 1.4])
        assert PreferenceObjective("hinge")(scores).tolist() == pytest.approx([0.85, 1.1])
        torch.testing.assert_close(PreferenceObjective("hinge")(scores), hinge(scores))

    def test_a_loss_need_not_take_beta(self, scores):
        @preference_loss("margin_only")
        def margin_only(scores):
            return -scores.margin

        assert PreferenceObjective("margin_only")(scores).tolist() == pytest.approx([-3.0, 2.0])


class TestOptions:
    def test_reach_the_function(self, scores):
        """SPPO at beta 0.1 with targets 3 and -2: ((2 - 3)^2 + (-1 + 2)^2) / 2 and ((-1 - 3)^2 + (1 + 2)^2) / 2."""
        options = {"chosen_win_probability": 0.8, "rejected_win_probability": 0.3}
        objective = PreferenceObjective("sppo", beta=0.1, loss_options=options)
        assert objective(scores).tolist() == pytest.approx([1.0, 12.5])

    def test_each_weighting_gets_its_own_options(self):
        objective = PreferenceObjective(
            "dpo", weightings=["wpo", "confidence"], weighting_options={"max_weight": 2.0, "floor": 0.1}
        )
        assert [(w.name, options) for w, options in objective.weightings] == [
            ("wpo", {"max_weight": 2.0}),
            ("confidence", {"floor": 0.1}),
        ]


class TestRefusals:
    @pytest.mark.parametrize(
        "reduce, shape",
        [
            (lambda losses: losses.mean(), r"\[\]"),
            (lambda losses: losses.sum(dim=0, keepdim=True), r"\[1\]"),
            (lambda losses: losses[:, None], r"\[8, 1\]"),
        ],
    )
    def test_a_loss_must_not_reduce(self, reduce, shape):
        @preference_loss("reduced")
        def reduced(scores, *, beta):
            return reduce(-beta * scores.margin)

        with pytest.raises(
            ValueError, match=f"'reduced' returned shape {shape} for 8 pairs; it must return one value"
        ):
            PreferenceObjective("reduced")

    @pytest.mark.parametrize("value", [1.0, None, [1.0, 1.0, 1.0, 1.0]])
    def test_a_loss_must_return_a_tensor(self, value):
        @preference_loss("not_a_tensor")
        def not_a_tensor(scores, *, beta):
            return value

        with pytest.raises(ValueError, match="'not_a_tensor'.*one value per pair"):
            PreferenceObjective("not_a_tensor")

    @pytest.mark.parametrize("detach", [lambda scores: scores.margin.detach(), lambda scores: scores.ref_chosen])
    def test_a_loss_must_have_a_gradient(self, detach):
        @preference_loss("constant")
        def constant(scores, *, beta):
            return -beta * detach(scores)

        with pytest.raises(ValueError, match=r"'constant' has no gradient: .*scores\.chosen or scores\.rejected"):
            PreferenceObjective("constant")

    def test_the_reference_must_be_declared(self):
        @preference_loss("undeclared", needs_reference=False)
        def undeclared(scores, *, beta):
            return -beta * scores.margin

        with pytest.raises(ValueError, match="register it with needs_reference=True"):
            PreferenceObjective("undeclared")

    def test_a_column_must_be_declared(self):
        @preference_loss("undeclared_column")
        def undeclared_column(scores, *, beta):
            return -beta * scores.margin * scores.columns["strength"]

        with pytest.raises(ValueError, match="strength.*columns"):
            PreferenceObjective("undeclared_column")


class TestWhatItNeeds:
    def test_columns_of_the_loss_and_of_the_weightings(self, scores):
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

    def test_two_weightings_that_share_an_option(self):
        @preference_weighting("by_column", column_option="column")
        def by_column(scores, *, column="other"):
            return scores.columns[column]

        pair = ["confidence", "by_column"]
        assert PreferenceObjective("dpo", weightings=pair).columns == ("avg_confidence", "other")
        shared = PreferenceObjective("dpo", weightings=pair, weighting_options={"column": "x"})
        assert shared.columns == ("x",)


class TestDescribe:
    @pytest.mark.parametrize(
        "arguments, description",
        [
            ({"loss": "dpo"}, "dpo (beta 0.1)"),
            ({"loss": "aot", "beta": 0.2}, "aot (beta 0.2)"),
            ({"loss": "cdpo"}, "cdpo (beta 0.1, label_smoothing 0.1)"),
            ({"loss": "simpo", "beta": 2.5, "loss_options": {"gamma": 1.375}}, "simpo (beta 2.5, gamma 1.375)"),
        ],
    )
    def test_names_the_loss_and_its_options(self, arguments, description):
        assert PreferenceObjective(**arguments).describe() == description

    def test_names_the_weightings(self):
        described = PreferenceObjective("dpo", weightings=["wpo", "confidence"]).describe()
        assert described.startswith("dpo (beta 0.1")
        assert "weighted by wpo" in described
        assert "weighted by confidence" in described

    def test_tells_the_options_of_the_weightings(self):
        """Two runs that differ in a weighting's option must not read the same in a report."""
        described = PreferenceObjective(
            "dpo", weightings=["confidence"], weighting_options={"floor": 0.45, "column": "certainty"}
        ).describe()
        assert "0.45" in described
        assert "certainty" in described


class TestNormalisedWeightings:
    """A weighting that is divided by its mean is known from columns alone, before the batch has been trained on."""

    def test_one_that_reads_scores_is_refused(self):
        @preference_weighting("by_score", normalize=True)
        def by_score(scores):
            return scores.chosen.detach().exp()

        with pytest.raises(ValueError, match=r"may read scores\.columns only"):
            PreferenceObjective("dpo", weightings=["by_score"])

    def test_one_that_compares_scores_is_refused(self):
        """A comparison is finite whatever is compared, so that no NaN would show it."""

        @preference_weighting("by_order", normalize=True)
        def by_order(scores):
            return torch.where(scores.chosen > scores.rejected, 2.0, 1.0)

        with pytest.raises(ValueError, match=r"may read scores\.columns only"):
            PreferenceObjective("dpo", weightings=["by_order"])

    def test_a_loss_that_standardises_a_column_is_accepted(self):
        @preference_loss("standardised", columns=("strength",))
        def standardised(scores, *, beta):
            strength = scores.columns["strength"]
            return -beta * scores.margin * (strength - strength.mean()) / strength.std()

        assert PreferenceObjective("standardised").columns == ("strength",)
