"""Settings of online algorithms, from which table rows, command-line flags and checks of values are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from trl_ext.names import check_choice


@dataclass(frozen=True)
class Setting:
    """A setting of online algorithms, which defines an attribute of rows, a flag, and checks of its values.

    Attributes:
        type: type of its values.
        meaning: help text of its flag.
        default: its value if a row names none; None if the function that reads it has the default.
        choices: its values, if they are names; empty for `advantage`, which may be a function.
        within: the test that a number must pass, and its description.
        option: the parameter of the advantage or of the surrogate that it sets.
    """

    type: type
    meaning: str
    default: Any = None
    choices: tuple[str, ...] = ()
    within: tuple[Callable[[Any], bool], str] | None = None
    option: str | None = None

    @property
    def help(self) -> str:
        """The help text of its flag."""
        return self.meaning if "Default: " in self.meaning else f"{self.meaning} Default: the algorithm's own."

    def check(self, flag: str, value: Any) -> None:
        """Raise ValueError, naming the flag, for a name that is no choice or a number not finite or out of range."""
        if self.choices:
            check_choice(flag, value, self.choices)
        if self.within is not None:
            permitted, description = self.within
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not permitted(value):
                raise ValueError(f"--{flag} must be {description}, got {value!r}")


_POSITIVE = (lambda value: value > 0, "positive")
_FROM_0 = (lambda value: value >= 0, "a number from 0 up")
_DDOF = (lambda value: value in (0, 1), "0 (population) or 1 (sample)")
_ABOVE_1 = (lambda value: value > 1, "above 1, where it would cut off the unclipped loss")
_FROM_1 = (lambda value: value >= 1, "at least 1: it is the cap itself and not its distance from 1")

ADVANTAGE_SETTINGS = {
    "advantage": Setting(
        str, "How rewards become advantages, e.g. group_normalized, leave_one_out.", "group_normalized"
    ),
    "std_ddof": Setting(
        int, "0 for the population's standard deviation, 1 for the sample's (TRL's).", within=_DDOF, option="std_ddof"
    ),
    "advantage_eps": Setting(float, "Added to the standard deviation.", within=_FROM_0, option="eps"),
    "advantage_clip": Setting(float, "Advantages are clipped to plus and minus this.", within=_POSITIVE),
}
LOSS_SETTINGS = {
    "surrogate": Setting(
        str,
        "clip, no_clip, cispo, reinforce, sapo or gmpo.",
        choices=("clip", "no_clip", "cispo", "reinforce", "sapo", "gmpo"),
    ),
    "ratio": Setting(str, "Importance ratio: token, sequence or none.", "token", ("token", "sequence", "none")),
    "aggregation": Setting(
        str,
        "sequence_mean, token_mean, constant or sum.",
        "sequence_mean",
        ("sequence_mean", "token_mean", "constant", "sum"),
    ),
    "epsilon": Setting(float, "The ratio is clipped below 1 - epsilon.", within=_FROM_0, option="clip_low"),
    "epsilon_high": Setting(float, "The ratio is clipped above 1 + epsilon_high.", within=_FROM_0, option="clip_high"),
    "dual_clip": Setting(
        float, "Cap on the loss where the advantage is negative, in advantages.", within=_ABOVE_1, option="dual_clip"
    ),
    "ratio_cap": Setting(float, "Cap on the ratio of cispo.", within=_FROM_1, option="ratio_cap"),
    "loss_constant": Setting(
        float, "Tokens that `constant` divides by. Default: max_completion_length, the token budget.", within=_POSITIVE
    ),
    "beta": Setting(float, "Coefficient of the KL divergence to the reference; 0 loads none.", 0.0, within=_FROM_0),
    "kl_estimator": Setting(str, "k1, k2 or k3.", "k3", ("k1", "k2", "k3")),
    "kl_in": Setting(str, "Where the KL term goes: loss or reward.", "loss", ("loss", "reward")),
    "kl_ratio_correction": Setting(bool, "Multiply the KL term in the loss by the ratio, as TRL does.", False),
    "kl_aggregation": Setting(
        str, "token_mean to average the KL term apart from the surrogate.", None, ("inside", "token_mean")
    ),
}
SETTINGS = {**ADVANTAGE_SETTINGS, **LOSS_SETTINGS}


def _fields(name: str, settings: dict[str, Setting]) -> type:
    """A dataclass with a field for each setting, None by default."""
    described = [(n, s.type | None, field(default=None, metadata={"help": s.help})) for n, s in settings.items()]
    return make_dataclass(name, described)


AdvantageFields = _fields("AdvantageFields", ADVANTAGE_SETTINGS)
LossFields = _fields("LossFields", LOSS_SETTINGS)
