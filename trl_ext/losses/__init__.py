"""Losses as pure functions of tensors; none of them knows a trainer."""

from trl_ext.losses.objective import PreferenceObjective
from trl_ext.losses.preference import (
    PreferenceScores,
    aot,
    aot_paired,
    apo_down,
    apo_zero,
    cdpo,
    cpo,
    dpo,
    dpop,
    hinge,
    ipo,
    nca,
    orpo,
    repo,
    robust_dpo,
    simpo,
    sppo,
)
from trl_ext.losses.weighting import confidence, wpo

__all__ = [
    "PreferenceObjective",
    "PreferenceScores",
    "aot",
    "aot_paired",
    "apo_down",
    "apo_zero",
    "cdpo",
    "confidence",
    "cpo",
    "dpo",
    "dpop",
    "hinge",
    "ipo",
    "nca",
    "orpo",
    "repo",
    "robust_dpo",
    "simpo",
    "sppo",
    "wpo",
]
