"""Evaluation: pairwise judges, win rates with intervals, diagnostics of generated text, and the report."""

from __future__ import annotations

import importlib

from trl_ext.evaluation.diagnostics import GenerationDiagnostics, diagnose_generations

# `win_rate` must be bound here and not on first use: importing the submodule of that name sets the same attribute.
from trl_ext.evaluation.intervals import wilson_interval
from trl_ext.evaluation.judge import (
    GroundTruthJudge,
    JudgeError,
    Judgement,
    JudgeUnavailable,
    PairwiseJudge,
    compare,
)
from trl_ext.evaluation.win_rate import Interval, PairOutcome, WinRate, win_rate

# These import torch or other large libraries, so they load when they are first used.
_MODULE_OF_NAME = {
    "CacheError": "trl_ext.evaluation.judging.cache",
    "Estimate": "trl_ext.evaluation.judging.cost",
    "JudgingResult": "trl_ext.evaluation.judging.pairs",
    "OpenAIJudge": "trl_ext.evaluation.judging.openai_judge",
    "RewardModelJudge": "trl_ext.evaluation.judging.reward_judge",
    "TooManyErrors": "trl_ext.evaluation.judging.pairs",
    "Usage": "trl_ext.evaluation.judging.prices",
    "VerdictCache": "trl_ext.evaluation.judging.cache",
    "estimate": "trl_ext.evaluation.judging.cost",
    "judge_pairs": "trl_ext.evaluation.judging.pairs",
    "load_prices": "trl_ext.evaluation.judging.prices",
    "PolicyComparison": "trl_ext.evaluation.comparison",
    "bradley_terry": "trl_ext.evaluation.ratings",
    "build_submission": "trl_ext.evaluation.submissions.submission",
    "compare_candidates": "trl_ext.evaluation.submissions.candidates",
    "compare_stages": "trl_ext.evaluation.stages",
    "generate_submission_file": "trl_ext.evaluation.submissions.submission",
    "grade_submission": "trl_ext.evaluation.submissions.grading",
    "judge_candidate": "trl_ext.evaluation.submissions.candidates",
    "length_controlled_win_rate": "trl_ext.evaluation.length_control",
    "mean_with_interval": "trl_ext.evaluation.comparison",
    "mcnemar": "trl_ext.evaluation.paired",
    "pack_submission": "trl_ext.evaluation.submissions.submission",
    "paired_difference": "trl_ext.evaluation.paired",
    "plot_tournament": "trl_ext.evaluation.tournament",
    "run_tournament": "trl_ext.evaluation.tournament",
    "score_submission_file": "trl_ext.evaluation.submissions.submission",
    "approximate_kl": "trl_ext.evaluation.preferences",
    "best_of_n": "trl_ext.evaluation.reward_models",
    "best_of_n_curve": "trl_ext.evaluation.overoptimization",
    "compare_generations": "trl_ext.evaluation.comparison",
    "join_pair_scores": "trl_ext.evaluation.preferences",
    "plot_best_of_n": "trl_ext.evaluation.overoptimization",
    "plot_reward_run": "trl_ext.evaluation.reward_plots",
    "plot_run": "trl_ext.evaluation.plots",
    "preference_metrics": "trl_ext.evaluation.preferences",
    "reward_metrics": "trl_ext.evaluation.reward_models",
    "reward_mistakes": "trl_ext.evaluation.reward_models",
    "true_order_metrics": "trl_ext.evaluation.reward_models",
    "write_report": "trl_ext.evaluation.report",
}

__all__ = [
    "GenerationDiagnostics",
    "GroundTruthJudge",
    "Interval",
    "JudgeError",
    "JudgeUnavailable",
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
