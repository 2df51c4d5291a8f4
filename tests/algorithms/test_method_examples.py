"""Methods of 2024 to 2026 in numbers: each example gives values and a gradient, to six decimals.

An example is a function of a leaf tensor in float64. Its gradient, where there is one, is also compared with central
differences of its value, which know nothing of the code.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from trl_ext import DistillationConfig
from trl_ext.losses import (
    PreferenceScores,
    nash_md,
    xpo,
)
from trl_ext.rewards.shaping_steps import soft_overlong
from trl_ext.trainers.online_preference.second_sampler import MixtureWithReference


def tensor(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_second_sampler(loss, sums, second_is_chosen=0.0, probability=0.5, reference=(-22.0, -29.0), **options):
    """A loss of one pair, given the policy's log-probabilities of the chosen and the rejected response."""
    columns = {"second_is_chosen": tensor(second_is_chosen), "win_probability": tensor(probability)}
    ref_chosen, ref_rejected = tensor(*reference).split(1)
    return loss(PreferenceScores(*sums.split(1), ref_chosen, ref_rejected, columns=columns), beta=0.1, **options)


class Reference:
    """Has the same logits everywhere."""

    def _supports_logits_to_keep(self):
        return False

    def __call__(self, **_):
        return SimpleNamespace(past_key_values=None, logits=tensor(0.2, 1, 0.3).view(1, 1, 3))


def mixed(logits, weight) -> torch.Tensor:
    mixture = MixtureWithReference(lambda: nullcontext(Reference()), torch.ones(1, 1), weight)
    return mixture(torch.zeros(1, 1, dtype=torch.long), logits[None]).softmax(-1)


# Name -> function, leaf, values, gradient of their sum (None where there is none).
EXAMPLES = {
    # Token sums -1.8 and, of the reference, -1.9: -(0.7 - 0.5 - 0.1 * 0.1) (-1.8). The rejected response is not read.
    "Nash-MD": (
        lambda sums: of_second_sampler(nash_md, sums, probability=0.7, reference=(-1.9, -5.0)),
        (-1.8, -4.0),
        (0.342,),
        (-0.19, 0.0),
    ),
    "Nash-MD, the policy's response lost": (
        lambda sums: of_second_sampler(nash_md, sums, 1.0, probability=0.7, reference=(-5.0, -1.9)),
        (-4.0, -1.8),
        (0.342,),
        (0.0, -0.19),
    ),
    "Nash-MD, mixture": (lambda x: mixed(x, 0.5), (0.5, 0, -0.5), (0.357211, 0.415020, 0.227768), (0.0, 0.0, 0.0)),
    "Nash-MD, 1/8": (lambda x: mixed(x, 0.125), (0.5, 0, -0.5), (0.468240, 0.334113, 0.197647), (0.0, 0.0, 0.0)),
    # DPO of the margin 3 at beta 0.1, and alpha times -30.
    "XPO, no exploration": (
        lambda sums: of_second_sampler(xpo, sums, alpha=0.0),
        (-20, -30),
        (0.554355,),
        (-0.042556, 0.042556),
    ),
    "XPO, default": (lambda s: of_second_sampler(xpo, s), (-20, -30), (0.554055,), (-0.042556, 0.042566)),
    "XPO": (
        lambda sums: of_second_sampler(xpo, sums, alpha=0.1),
        (-20, -30),
        (-2.445645,),
        (-0.042556, 0.142556),
    ),
    "XPO, the reference's response won": (
        lambda sums: of_second_sampler(xpo, sums, 1.0, alpha=0.1),
        (-20, -30),
        (-1.445645,),
        (0.057444, 0.042556),
    ),
    "DAPO, punishment of long responses": (
        lambda lengths: soft_overlong(lengths, 100, 20),
        (50, 85, 100, 60),
        (0, -0.25, -1, 0),
        None,
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    function, leaf, values, gradient = EXAMPLES[name]
    point = tensor(*leaf).requires_grad_(gradient is not None)
    found = function(point)
    assert found.reshape(-1).tolist() == pytest.approx(values, abs=6e-7)
    assert found.requires_grad == (gradient is not None)
    if gradient is None:
        return
    (slope,) = torch.autograd.grad(found.sum(), point)
    assert slope.tolist() == pytest.approx(gradient, abs=6e-7)


# ---- Presets of distillation ----


@pytest.mark.parametrize(
    "preset, expected",
    [(None, ("full", 1.0)), ("gkd", ("full", 0.5)), ("opd", ("sampled_token", 1.0)), ("sdft", ("full", 1.0))],
)
def test_presets(preset, expected, tmp_path):
    args = DistillationConfig(str(tmp_path), report_to=[], preset=preset, teacher_prompt="hint")
    assert (args.divergence, args.beta) == expected
    assert ("preset" in args.build_objective().describe()) == (preset is not None)
    if expected[0] == "full":
        assert (
            DistillationConfig(str(tmp_path), report_to=[], preset=preset, teacher_prompt="hint", beta=0.1).beta == 0.1
        )


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"preset": "gkd", "divergence": "sampled_token"}, "preset gkd and divergence sampled_token contradict"),
        ({"preset": "opd", "divergence": "full"}, "it has divergence sampled_token"),
        ({"preset": "opsd", "teacher_prompt": "hint"}, "preset opsd needs --teacher_model_name_or_path MODEL"),
        ({"preset": "sdft"}, "preset sdft needs --teacher_prompt COLUMN"),
        ({"preset": "sdfd"}, "preset must be one of gkd, opd, opsd, sdft"),
    ],
)
def test_what_contradicts_a_preset(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DistillationConfig(str(tmp_path), report_to=[], **settings)
