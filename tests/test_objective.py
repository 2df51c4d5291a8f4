"""`PreferenceObjective`: beta, options, refusals before training, columns, and its one-line description."""

from __future__ import annotations

import math

import pytest
import torch

from trl_ext.losses import PreferenceObjective, PreferenceScores, dpo, dpop, hinge, sppo
from trl_ext.registry import preference_loss, preference_losses, preference_weighting, preference_weightings

# Paper defaults, stated here again.
DEFAULT_BETAS = {
    "dpo": 0.1,
    "cdpo": 0.1,
    "robust_dpo": 0.1,
    "ipo": 0.1,
    "hinge": 0.05,
    "dpop": 0.3,
    "apo_zero": 0.1,
    "apo_down": 0.1,
    "nca": 0.01,
    "sppo": 1e-3,
    "aot": 0.01,
    "aot_paired": 0.01,
    "simpo": 2.0,
    "repo": 1.0,
    "cpo": 0.1,
    "orpo": 0.1,
}


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

    @pytest.mark.parametrize("name", DEFAULT_BETAS)
    def test_default_is_that_of_the_function(self, name):
        assert PreferenceObjective(name).beta == DEFAULT_BETAS[name]

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

    def test_defaults_are_those_of_the_function(self, scores):
        for name, function in (("sppo", sppo), ("dpop", dpop), ("dpo", dpo)):
            torch.testing.assert_close(PreferenceObjective(name)(scores), function(scores))

    def test_the_dictionary_given_is_not_kept(self, scores):
        options = {"penalty": 5.0}
        objective = PreferenceObjective("dpop", loss_options=options)
        options["penalty"] = 50.0
        torch.testing.assert_close(objective(scores), dpop(scores, penalty=5.0))

    def test_unknown_option(self):
        with pytest.raises(ValueError, match="'dpop' has no option 'lambda': it takes penalty"):
            PreferenceObjective("dpop", loss_options={"lambda": 5.0})

    def test_missing_option(self):
        @preference_loss("shifted")
        def shifted(scores, *, beta, shift):
            return beta * (shift - scores.margin)

        with pytest.raises(ValueError, match="'shifted' needs the option 'shift'"):
            PreferenceObjective("shifted")

    @pytest.mark.parametrize(
        "loss, options, message",
        [
            ("cdpo", {"label_smoothing": 0.5}, "label_smoothing must lie in"),
            ("simpo", {"gamma": 1.0, "gamma_beta_ratio": 0.5}, "gamma or gamma_beta_ratio, not both"),
        ],
    )
    def test_a_wrong_value_shows_before_training(self, loss, options, message):
        with pytest.raises(ValueError, match=message):
            PreferenceObjective(loss, loss_options=options)

    def test_unknown_weighting(self):
        with pytest.raises(ValueError, match="unknown preference weighting 'confidense'; did you mean 'confidence'"):
            PreferenceObjective("dpo", weightings=["confidense"])

    def test_unknown_weighting_option(self):
        with pytest.raises(
            ValueError, match="unknown weighting option 'flor': it takes column, floor, power; did you mean 'floor'"
        ):
            PreferenceObjective("dpo", weightings=["confidence"], weighting_options={"flor": 0.1})

    def test_weighting_option_without_a_weighting(self):
        with pytest.raises(ValueError, match="unknown weighting option 'floor': no weighting is on"):
            PreferenceObjective("dpo", weighting_options={"floor": 0.1})

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

    def test_one_side_is_enough_for_a_gradient(self):
        @preference_loss("chosen_only")
        def chosen_only(scores, *, beta):
            return -beta * scores.chosen_log_ratio

        assert PreferenceObjective("chosen_only").needs_reference

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

    def test_made_without_gradients(self):
        """As when a model is evaluated: the check for a gradient must not take this for a constant loss."""
        with torch.no_grad():
            assert PreferenceObjective("dpo").beta == 0.1


class TestWhatItNeeds:
    @pytest.mark.parametrize(
        "name, reference, coupled",
        [("dpo", True, False), ("aot", True, True), ("simpo", False, False)],
    )
    def test_follows_the_registry(self, name, reference, coupled):
        objective = PreferenceObjective(name)
        assert (objective.needs_reference, objective.batch_coupled) == (reference, coupled)
        assert not objective.normalizes
        assert not objective.needs_policy_weights
        assert objective.columns == ()

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

    def test_a_loss_without_options(self):
        @preference_loss("margin_only")
        def margin_only(scores):
            return -scores.margin

        assert PreferenceObjective("margin_only").describe() == "margin_only"


class TestNormalisedWeightings:
    """A weighting that is divided by its mean is known from columns alone, before the batch has been trained on."""

    def test_a_loss_that_standardises_a_column_is_accepted(self):
        @preference_loss("standardised", columns=("strength",))
        def standardised(scores, *, beta):
            strength = scores.columns["strength"]
            return -beta * scores.margin * (strength - strength.mean()) / strength.std()

        assert PreferenceObjective("standardised").columns == ("strength",)

    def test_one_without_a_column_is_constant(self):
        @preference_weighting("flat", normalize=True)
        def flat(scores):
            return torch.full_like(scores.chosen, 3.0)

        assert PreferenceObjective("dpo", weightings=["flat"]).columns == ()
