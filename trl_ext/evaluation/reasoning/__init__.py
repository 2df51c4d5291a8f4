"""Evaluation of reasoning by verified answers: categories, several samples to a problem, and runs that resume."""

from trl_ext.evaluation.reasoning.categories import CATEGORIES, category_of, count_categories
from trl_ext.evaluation.reasoning.grading import Grader, grader
from trl_ext.evaluation.reasoning.run import evaluate_reasoning
from trl_ext.evaluation.reasoning.samples import majority_at_k, pass_at_k
from trl_ext.evaluation.reasoning.summary import accuracy_gain, summarize_reasoning

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
