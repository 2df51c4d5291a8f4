"""Evaluation of reasoning by verified answers: categories, several samples per problem, and resumable runs."""

from trl_ext.evaluation.reasoning.samples import majority_at_k, pass_at_k
from trl_ext.evaluation.reasoning.summary import accuracy_gain, summarize_reasoning
from trl_ext.rewards.verified import CATEGORIES, Grader, category_of, count_categories, grader
from trl_ext.rollouts.graded import evaluate_reasoning

__all__ = [
    "CATEGORIES",
    "Grader",
    "accuracy_gain",
    "category_of",
    "count_categories",
    "evaluate_reasoning",
    "grader",
    "majority_at_k",
    "pass_at_k",
    "summarize_reasoning",
]
