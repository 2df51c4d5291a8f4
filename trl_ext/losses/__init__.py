"""Losses as pure functions of tensors, independent of any trainer."""

from trl_ext.losses.kl import kl_estimate
from trl_ext.losses.masking import aggregate, masked_mean, masked_normalize, masked_sum
from trl_ext.losses.objective import PreferenceObjective, confidence, wpo
from trl_ext.losses.policy import (
    PolicyScores,
    cispo,
    clipped_surrogate,
    gmpo,
    reinforce,
    sapo,
    sequence_log_ratio,
    token_log_ratio,
    unclipped_surrogate,
)
from trl_ext.losses.policy_objective import PolicyLoss
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
from trl_ext.losses.reward import bradley_terry
from trl_ext.losses.unpaired import kto
from trl_ext.losses.value import clipped_value_loss, explained_variance, whiten

__all__ = [
    "PolicyLoss",
    "PolicyScores",
    "PreferenceObjective",
    "PreferenceScores",
    "aggregate",
    "aot",
    "aot_paired",
    "apo_down",
    "apo_zero",
    "bradley_terry",
    "cdpo",
    "cispo",
    "clipped_surrogate",
    "clipped_value_loss",
    "confidence",
    "cpo",
    "dpo",
    "dpop",
    "explained_variance",
    "gmpo",
    "hinge",
    "ipo",
    "kl_estimate",
    "kto",
    "masked_mean",
    "masked_normalize",
    "masked_sum",
    "nca",
    "orpo",
    "reinforce",
    "repo",
    "robust_dpo",
    "sapo",
    "sequence_log_ratio",
    "simpo",
    "sppo",
    "token_log_ratio",
    "unclipped_surrogate",
    "whiten",
    "wpo",
]
