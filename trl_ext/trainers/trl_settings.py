"""Translates TRL's loss settings into this library's, and rejects those without an equivalent.

A setting that is not given is None and means this library's default. A given setting has TRL's meaning or is rejected.
`sppo_hard` is the exception: it selects the paper's loss, which is half of TRL's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

Settings = dict[str, Any]

_SAMPLE_STD = {"std_ddof": 1, "advantage_eps": 1e-4}
# Field of TRL's configuration -> value -> our settings.
_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "nca_pair": "nca", "robust": "robust_dpo", "sppo_hard": "sppo"}
_LOSSES |= {"aot": "aot_paired", "aot_unpaired": "aot", "apo_zero": "apo_zero", "apo_down": "apo_down"}
PREFERENCE_SETTINGS: dict[str, dict[Any, Settings]] = {
    "loss_type": {
        "ipo": {"loss": "ipo", "length_normalized": True},
        **{name: {"loss": loss} for name, loss in _LOSSES.items()},
    },
}
POLICY_SETTINGS: dict[str, dict[Any, Settings]] = {
    "loss_type": {
        "grpo": {"surrogate": "clip", "aggregation": "sequence_mean"},
        "dapo": {"surrogate": "clip", "aggregation": "token_mean"},
        "dr_grpo": {"surrogate": "clip", "aggregation": "constant"},
        "luspo": {"surrogate": "clip", "aggregation": "sum"},
        "cispo": {"surrogate": "cispo", "aggregation": "token_mean"},
        "sapo": {"surrogate": "sapo", "aggregation": "sequence_mean"},
    },
    "importance_sampling_level": {"token": {"ratio": "token"}, "sequence": {"ratio": "sequence"}},
    "scale_rewards": {
        "group": {"advantage": "group_normalized", **_SAMPLE_STD},
        "batch": {"advantage": "batch_normalized", **_SAMPLE_STD},
        "none": {"advantage": "group_centered"},
    },
    "multi_objective_aggregation": {"sum_then_normalize": {}},
    "use_bias_correction_kl": {True: {"kl_ratio_correction": True}, False: {"kl_ratio_correction": False}},
}


def translate(args: Any, table: Mapping[str, Mapping[Any, Settings]]) -> dict[str, Settings]:
    """Our settings by TRL's that are given, such as `loss_type 'ipo'`; a ValueError for one without an equivalent."""
    found = {}
    for name, equivalents in table.items():
        value = getattr(args, name)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else tuple(value)
        if value is None:
            continue
        if value not in equivalents:
            known = ", ".join(map(str, equivalents))
            raise ValueError(f"{name} {value!r} has no equivalent here, only {known}: train TRL's own trainer for it")
        found[f"{name} {value!r}"] = equivalents[value]
    return found


def merge(given: Settings, translated: Mapping[str, Settings]) -> Settings:
    """Combine settings given under our names and under TRL's; a ValueError if the two contradict each other."""
    merged = dict(given)
    for source, settings in translated.items():
        for name, value in settings.items():
            if merged.get(name) not in (None, value):
                raise ValueError(f"{source} selects {name} {value}, which conflicts with {name} {merged[name]}")
            merged[name] = value
    return merged


def refuse_given(args: Any, instead: Mapping[str, str]) -> None:
    """Raise ValueError for fields of a configuration that are given and have no effect; `instead` has what to use."""
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(args)}
    for name, use in instead.items():
        # A run's config.yaml holds 0 where a setting that was not given is off.
        off = defaults[name] is None and getattr(args, name) == 0
        if getattr(args, name) != defaults[name] and not off:
            raise ValueError(f"{name} is not used by {type(args).__name__}: {use}")
