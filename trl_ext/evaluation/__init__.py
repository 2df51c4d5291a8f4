"""Evaluation: pairwise judges, win rates with intervals, diagnostics of generated text, and the report."""

from __future__ import annotations

from trl_ext.names import lazy_names

# Modules and their public names. A module loads when one of its names is first used.
_NAMES_BY_MODULE = {
    ".judging.cache": "CacheError VerdictCache",
    ".judging.openai_judge": "OpenAIJudge",
    ".judging.rubric": "RubricReward",
    ".judging.pairs": "JudgingResult TooManyErrors judge_pairs",
    ".judging.protocol": "JudgeError JudgeUnavailable Judgement PairwiseJudge Usage",
    ".judging.score_judges": "GroundTruthJudge RewardModelJudge",
    ".comparing.generations": "PolicyComparison compare_generations",
    ".comparing.preferences": "approximate_kl join_pair_scores preference_metrics",
    ".comparing.reward_models": "best_of_n best_of_n_curve reward_metrics true_order_metrics",
    ".comparing.tournament": "run_tournament",
    ".report": "write_report",
    ".reporting.plots": "plot_run",
    ".statistics.human_labels": "prediction_powered",
    ".statistics.intervals": "mean_with_interval wilson_interval",
    ".statistics.length_control": "length_controlled_win_rate",
    ".statistics.paired": "mcnemar paired_difference",
    ".statistics.ratings": "bradley_terry",
    ".statistics.win_rate": "Interval PairOutcome WinRate win_rate",
    ".submissions.candidates": "judge_candidate",
    ".submissions.grading": "grade_submission",
    ".submissions.submission": "generate_submission_file pack_submission score_submission_file",
    "trl_ext.rollouts.diagnostics": "diagnose_generations",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES_BY_MODULE)
