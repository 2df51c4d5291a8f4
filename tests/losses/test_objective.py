"""`PreferenceObjective`: beta, options, columns, weightings, refusals, and losses from a user's own file."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from tests.support.preference_pairs import canonical
from trl_ext.losses import PreferenceObjective, PreferenceScores, confidence, dpo, wpo
from trl_ext.registry import preference_loss, preference_losses, preference_weighting

pytestmark = pytest.mark.usefixtures("own_tables")


@pytest.fixture
def scores() -> PreferenceScores:
    """Pairs with margins 3 and -2; h_w is 2 and -1."""
    return canonical("AB", requires_grad=True)


def test_beta_reaches_the_function(scores):
    """Hinge: 1 - 0.2 * 3, 1 + 0.2 * 2; and with its own 0.05: 1 - 0.15, 1 + 0.1. A loss need not take beta, or have
    a default."""
    assert PreferenceObjective("hinge", beta=0.2)(scores).tolist() == pytest.approx([0.4, 1.4])
    assert PreferenceObjective("hinge")(scores).tolist() == pytest.approx([0.85, 1.1])
    preference_loss("margin_only")(lambda scores: -scores.margin)
    assert PreferenceObjective("margin_only")(scores).tolist() == pytest.approx([-3.0, 2.0])
    preference_loss("linear")(lambda scores, *, beta: -beta * scores.margin)
    assert PreferenceObjective("linear").beta == 0.1


def test_options_reach_the_function(scores):
    """SPPO at beta 0.1 with targets 3 and -2: ((2 - 3)^2 + (-1 + 2)^2) / 2 and ((-1 - 3)^2 + (1 + 2)^2) / 2."""
    options = {"chosen_win_probability": 0.8, "rejected_win_probability": 0.3}
    objective = PreferenceObjective("sppo", beta=0.1, loss_options=options)
    assert objective(scores).tolist() == pytest.approx([1.0, 12.5])


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


def test_a_description_tells_the_loss_and_weightings_with_their_options():
    """Two runs that differ in an option must not read the same in a report."""
    assert PreferenceObjective("simpo", beta=2.5, loss_options={"gamma": 1.375}).describe() == (
        "simpo (beta 2.5, gamma 1.375)"
    )
    options = {"floor": 0.45, "column": "certainty"}
    described = PreferenceObjective("dpo", weightings=["wpo", "confidence"], weighting_options=options).describe()
    for part in ("dpo (beta 0.1", "weighted by wpo", "weighted by confidence", "0.45", "certainty"):
        assert part in described


# ---- Weightings ----


# Three pairs with reference-corrected margins 3, -2, -2, whose DPO losses at beta 0.1 are l(0.3), l(-0.2), l(-0.2).
DPO_LOSSES = (0.554355, 0.798139, 0.798139)
CONFIDENCES = (0.9, 0.5, 0.2)


def float64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def three_pairs(**columns) -> PreferenceScores:
    columns = {name: float64(*values) for name, values in columns.items()}
    return replace(canonical(requires_grad=True), columns=columns)


def rows(scores: PreferenceScores, index: slice) -> PreferenceScores:
    tensors = {name: value[index] for name, value in vars(scores).items() if isinstance(value, torch.Tensor)}
    return replace(scores, **tensors, columns={name: value[index] for name, value in scores.columns.items()})


def policy_weight(distributions, tokens) -> torch.Tensor:
    """WPO's weight of one response, `exp(mean_t(log p(y_t) - log sum_v p(v)^2))`, as a float64 tensor of shape [1]."""
    logs = [
        math.log(p[token]) - math.log(sum(q * q for q in p)) for p, token in zip(distributions, tokens, strict=True)
    ]
    return float64(math.exp(sum(logs) / len(logs)))


class TestWPO:
    """A chosen response of two tokens and a rejected one of one, over a vocabulary of three.

    chosen:   (.5, .3, .2) token 0: log .5 - log(.25 + .09 + .04) = log(.5 / .38) = 0.274437
              (.6, .2, .2) token 1: log .2 - log(.36 + .04 + .04) = log(.2 / .44) = -0.788457; mean -0.257010
    rejected: (.7, .2, .1) token 2: log .1 - log(.49 + .04 + .01) = log(.1 / .54) = -1.686399
    The weight of the pair is exp(-0.257010 - 1.686399) = exp(-1.943409) = 0.143215.
    """

    CHOSEN = [(0.5, 0.3, 0.2), (0.6, 0.2, 0.2)]
    REJECTED = [(0.7, 0.2, 0.1)]

    def pair(self, chosen_tokens=(0, 1), rejected_tokens=(2,)) -> PreferenceScores:
        return PreferenceScores(
            chosen=float64(math.log(0.5) + math.log(0.2)).requires_grad_(),
            rejected=float64(math.log(0.1)).requires_grad_(),
            ref_chosen=float64(-3.0),
            ref_rejected=float64(-2.0),
            chosen_policy_weight=policy_weight(self.CHOSEN, chosen_tokens).requires_grad_(),
            rejected_policy_weight=policy_weight(self.REJECTED, rejected_tokens).requires_grad_(),
        )

    def test_hand_example(self):
        scores = self.pair()
        assert scores.chosen_policy_weight.log().item() == pytest.approx(-0.257010, abs=1e-6)
        assert scores.rejected_policy_weight.log().item() == pytest.approx(-1.686399, abs=1e-6)
        assert wpo(scores).tolist() == pytest.approx([0.143215], abs=1e-6)

    def test_clamped_at_one_as_the_authors_do(self):
        """Greedy tokens: sqrt(.5/.38 * .6/.44) = 1.339512 and .7/.54 = 1.296296; their product is 1.736388."""
        greedy = self.pair(chosen_tokens=(0, 0), rejected_tokens=(0,))
        assert wpo(greedy, max_weight=None).tolist() == pytest.approx([1.736388], abs=1e-6)
        assert wpo(greedy).tolist() == [1.0]
        assert wpo(greedy, max_weight=1.5).tolist() == [1.5]

    def test_no_gradient_flows_through_the_weight(self):
        """d/d chosen = 0.143215 * -0.1 s(-0.1) = 0.143215 * -0.1 * 0.475021 = -0.006803."""
        scores = self.pair()
        assert not wpo(scores).requires_grad
        PreferenceObjective("dpo", beta=0.1, weightings=["wpo"])(scores).sum().backward()
        assert scores.chosen.grad.item() == pytest.approx(-0.006803, abs=1e-6)
        assert scores.chosen_policy_weight.grad is None
        assert scores.rejected_policy_weight.grad is None


class TestConfidence:
    @pytest.mark.parametrize(
        "options, expected",
        [
            ({"floor": 0.0}, (0.9, 0.5, 0.2)),
            ({"floor": 0.6}, (0.9, 0.6, 0.6)),
            ({"power": 2.0, "floor": 0.0}, (0.81, 0.25, 0.04)),
            ({"power": 2.0}, (0.81, 0.3, 0.3)),  # the floor applies after the power
            ({"power": 0.0}, (1.0, 1.0, 1.0)),
        ],
    )
    def test_power_and_floor(self, options, expected):
        weights = confidence(three_pairs(avg_confidence=CONFIDENCES), **options)
        assert weights.tolist() == pytest.approx(expected, abs=1e-12)


class TestNormalization:
    """Weights 0.9, 0.5, 0.3 have mean 1.7 / 3, so the mean of the weighted losses is sum(w l) / sum(w) =
    (0.9 * 0.554355 + 0.5 * 0.798139 + 0.3 * 0.798139) / 1.7 = (0.498919 + 0.638511) / 1.7 = 0.669077."""

    OBJECTIVE_OPTIONS = {"beta": 0.1, "weightings": ["confidence"]}

    def test_a_split_batch_gives_the_total_of_the_whole(self):
        """The mean of the weights over the optimizer batch, 1.7 / 3, given to each of its two parts."""
        objective = PreferenceObjective("dpo", **self.OBJECTIVE_OPTIONS)
        scores = three_pairs(avg_confidence=CONFIDENCES)
        by_hand = [w * l / (1.7 / 3) for w, l in zip((0.9, 0.5, 0.3), DPO_LOSSES, strict=True)]
        assert objective(scores).tolist() == pytest.approx(by_hand, abs=1e-6)
        assert objective(scores).mean().item() == pytest.approx(0.669077, abs=1e-6)
        mean = objective.raw_weights(scores).mean()
        assert mean.item() == pytest.approx(1.7 / 3, abs=1e-12)

        parts = [rows(scores, slice(0, 1)), rows(scores, slice(1, 3))]
        split = torch.cat([objective(part, mean_raw_weight=mean) for part in parts])
        torch.testing.assert_close(split, objective(scores), rtol=0, atol=1e-12)
        # Normalised within each part, the single pair of the first would count fully: 0.554355 against 0.880446.
        alone = torch.cat([objective(part) for part in parts])
        assert alone[0].item() == pytest.approx(0.554355, abs=1e-6)
        assert split[0].item() == pytest.approx(0.554355 * 0.9 * 3 / 1.7, abs=1e-6)

    def test_a_batch_of_weight_zero_counts_for_nothing(self):
        """0 / 0 would make every loss NaN and end the run without a word."""
        scores = three_pairs(avg_confidence=(0.0, 0.0, 0.0))
        losses = PreferenceObjective("dpo", **self.OBJECTIVE_OPTIONS, weighting_options={"floor": 0.0})(scores)
        losses.mean().backward()
        assert losses.tolist() == [0.0, 0.0, 0.0]
        assert scores.chosen.grad.tolist() == [0.0, 0.0, 0.0]

    def test_wpo_is_not_normalised_and_composes(self):
        """l(0.3) * 0.5 * 0.9 * 3 / 1.7, l(-0.2) * 0.25 * 0.5 * 3 / 1.7, l(-0.2) * 0.1 * 0.3 * 3 / 1.7."""
        scores = replace(
            three_pairs(avg_confidence=CONFIDENCES),
            chosen_policy_weight=float64(1.0, 0.5, 0.2),
            rejected_policy_weight=float64(0.5, 0.5, 0.5),
        )
        objective = PreferenceObjective("dpo", beta=0.1, weightings=["wpo", "confidence"])
        assert objective(scores).tolist() == pytest.approx([0.440223, 0.176060, 0.042254], abs=1e-6)
        assert objective.raw_weights(scores).tolist() == pytest.approx([0.9, 0.5, 0.3], abs=1e-12)


# ---- Losses from a file ----


LOSS_FILE = '''
import torch
from trl_ext import preference_loss

@preference_loss("squared_hinge", needs_reference=True)
def squared_hinge(scores, *, beta):
    """Squared hinge on the reference-corrected margin; per-pair losses, shape [B]."""
    return torch.relu(1 - beta * scores.margin).square()
'''


def write(folder, text, name="my_losses.py"):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("place", ["my_file:", "my_file.py:", "my_package.losses:", "{folder}/my_file.py:"])
def test_a_loss_of_ones_own(place, scores, tmp_path, monkeypatch):
    """From a file beside the command, a module on the path, and an absolute path: (1 - 0.3)^2 and (1 + 0.2)^2."""
    write(tmp_path / "my_package", LOSS_FILE, "losses.py")
    write(tmp_path, LOSS_FILE, "my_file.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # A script that imports the file as well does not define another loss.
    __import__("my_file")
    objective = PreferenceObjective(place.format(folder=tmp_path) + "squared_hinge")
    assert (objective.beta, objective.needs_reference, objective.batch_coupled) == (0.1, True, False)
    assert objective(scores).tolist() == pytest.approx([0.49, 1.44], abs=1e-6)


def test_a_weighting_from_a_file(scores, tmp_path):
    """l(0.3) * 2 and l(-0.2) * 2."""
    path = write(
        tmp_path,
        "from trl_ext import preference_weighting\n\n"
        "@preference_weighting('double')\ndef double(scores):\n    return 2 * (scores.chosen < 0)\n",
    )
    losses = PreferenceObjective("dpo", beta=0.1, weightings=[f"{path}:double"])(scores)
    assert losses.tolist() == pytest.approx([1.108709, 1.596278], abs=1e-5)


def test_files_of_one_name_and_names_of_one_function(tmp_path):
    """By the function's name and by the registered one; and two files of one name in two folders."""
    texts = {name: LOSS_FILE.replace('"squared_hinge"', f'"{name}"') for name in ("first", "second")}
    paths = {name: write(tmp_path / name, text) for name, text in texts.items()}
    for name, path in paths.items():
        by_function = preference_losses.find(f"{path}:squared_hinge")
        assert by_function.name == name
        assert preference_losses.find(f"{path}:{name}") is preference_losses.find(name) is by_function


def test_a_notebook_cell_may_run_twice_and_a_name_is_given_once():
    def run_cell(factor):
        @preference_loss("linear")
        def linear(scores, *, beta):
            return -factor * beta * scores.margin

        return linear

    run_cell(1.0)
    second = run_cell(2.0)
    assert preference_losses["linear"].function is second
    with pytest.raises(ValueError, match="'linear' is already defined"):
        preference_loss("linear")(functools.partial(dpo))


def test_a_syntax_error_names_the_file_and_is_gone_once_mended(tmp_path):
    path = write(tmp_path, "def broken(:\n    pass\n")
    with pytest.raises(SyntaxError) as error:
        preference_losses.find(f"{path}:squared_hinge")
    assert (error.value.filename, error.value.lineno) == (str(path), 1)
    write(tmp_path, LOSS_FILE)
    assert preference_losses.find(f"{path}:squared_hinge").name == "squared_hinge"


# ---- Refusals ----


PLAIN = "def plain(scores, *, beta):\n    return -beta * scores.margin\n"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (PLAIN, "my_losses.py:plain", r"decorate it with @trl_ext\.preference_loss\('plain'\)"),
        (LOSS_FILE, "my_losses.py:squared_hing", "did you mean 'squared_hinge'"),
        ("", "absent.py:f", r"no file 'absent\.py'"),
        ("", "absent_module:f", r"no file 'absent_module\.py' and no module 'absent_module'"),
        (LOSS_FILE.replace('"squared_hinge"', '"dpo"'), "my_losses.py:squared_hinge", "'dpo' is already defined"),
        ("", "robust_dop", "unknown preference loss 'robust_dop'; did you mean 'robust_dpo'"),
    ],
)
def test_what_a_name_does_not_give(text, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        preference_losses.find(name)
    assert preference_losses["dpo"].function is dpo


def own(function, **options):
    preference_loss("own")(function)
    return PreferenceObjective("own", loss_options=options)


def weighted(**columns):
    return confidence(three_pairs(**columns))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda scores: PreferenceObjective("dpo", beta=math.nan), "beta must be positive, got nan"),
        (lambda scores: PreferenceObjective("dpo", weightings=["dpo"]), "unknown preference weighting 'dpo'"),
        (lambda scores: own(lambda s, *, beta: -s.margin.mean())(scores), r"'own' returned shape \[\] for 2 pairs"),
        (lambda scores: own(lambda s, *, beta: -s.margin[:, None])(scores), r"'own' returned shape \[2, 1\]"),
        (lambda scores: own(lambda s, *, beta: 1.0)(scores), "'own' returned a float"),
        (lambda scores: own(lambda s, *, beta, shift: s.margin), "needs the option 'shift'"),
        (lambda scores: own(lambda s, *, beta, shift=0.0: s.margin, shfit=1.0), "did you mean 'shift'"),
        (lambda scores: PreferenceObjective("dpo", loss_options={"gamma": 0.1}), "no option 'gamma': it takes none"),
        (
            lambda scores: PreferenceObjective("sppo", loss_options={"chosen_win_probability": "p"})(scores),
            "reads the column 'p': register it",
        ),
        (lambda scores: wpo(scores), "wpo reads chosen_policy_weight and rejected_policy_weight"),
        (lambda scores: weighted(strength=CONFIDENCES), "'avg_confidence', which the dataset does not have"),
        (lambda scores: weighted(avg_confidence=(0.9, -0.1, 0.2)), "holds values that are negative"),
        # One such weight, normalised, would make every loss of the batch NaN.
        (lambda scores: weighted(avg_confidence=(0.9, math.nan, 0.2)), "negative or not finite"),
        # Their mean over the optimizer batch is known only once the batch has been trained on.
        (
            lambda scores: preference_weighting("both", normalize=True, needs_policy_weights=True)(dpo),
            "cannot both read policy weights and be normalised",
        ),
    ],
)
def test_refusals(refused, message, scores):
    with pytest.raises(ValueError, match=message):
        refused(scores)


def test_a_normalised_weighting_reads_columns_alone(scores):
    """It is divided by its mean over the batch, which must be known before the batch has been trained on."""
    preference_weighting("own", normalize=True)(lambda scores: scores.chosen.detach().exp())
    with pytest.raises(AttributeError):
        PreferenceObjective("dpo", weightings=["own"])(scores)
