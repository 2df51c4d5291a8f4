"""Evaluation: pairwise judges, win rates with intervals, diagnostics of generated text, and the report."""

from __future__ import annotations

import importlib

from trl_ext.evaluation.diagnostics import GenerationDiagnostics, diagnose_generations
from trl_ext.evaluation.judge import GroundTruthJudge, JudgeError, Judgement, PairwiseJudge, compare

# `win_rate` must be bound here and not on first use: importing the submodule of that name sets the same attribute.
from trl_ext.evaluation.win_rate import Interval, PairOutcome, WinRate, wilson_interval, win_rate

# These import torch, so they load when they are first used.
_MODULE_OF_NAME = {
    "PolicyComparison": "trl_ext.evaluation.comparison",
    "approximate_kl": "trl_ext.evaluation.preferences",
    "best_of_n": "trl_ext.evaluation.reward_models",
    "compare_generations": "trl_ext.evaluation.comparison",
    "join_pair_scores": "trl_ext.evaluation.preferences",
    "plot_reward_run": "trl_ext.evaluation.reward_plots",
    "plot_run": "trl_ext.evaluation.plots",
    "preference_metrics": "trl_ext.evaluation.preferences",
    "reward_metrics": "trl_ext.evaluation.reward_models",
    "reward_mistakes": "trl_ext.evaluation.reward_models",
    "true_order_metrics": "trl_ext.evaluation.reward_models",
}

__all__ = [
    "GenerationDiagnostics",
    "GroundTruthJudge",
    "Interval",
    "JudgeError",
    "Judgement",
    "PairOutcome",
    "PairwiseJudge",
    "WinRate",
    "compare",
    "diagnose_generations",
    "wilson_interval",
    "win_rate",
    *_MODULE_OF_NAME,
]


def __getattr__(name: str):
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'trl_ext.evaluation' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
