"""Grading a submission: every method's figure against its threshold, and all faults in its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.evaluation.comparing.reward_models import ALL_TIED, reward_metrics
from trl_ext.evaluation.judging.pairs import TooManyErrors
from trl_ext.evaluation.judging.protocol import Usage
from trl_ext.evaluation.statistics.paired import chance_below
from trl_ext.evaluation.statistics.win_rate import RULES, Rule, row_credits
from trl_ext.evaluation.submissions.assets import (
    TokenCounter,
    default_max_new_tokens,
    load_base,
    load_prompts,
    load_thresholds,
)
from trl_ext.evaluation.submissions.candidates import CandidateResult, judge_candidate, known_score_judge
from trl_ext.evaluation.submissions.submission import PART_TWO, REWARD_MODEL, read_submission, submission_file
from trl_ext.names import check_choice


@dataclass(frozen=True)
class FileGrade:
    """The grade of one file.

    Attributes:
        method: the method that the file belongs to.
        file: path within the submission.
        passed: whether its figure reaches the threshold.
        reason: why there is no figure (`missing`, or the fault); None if there is one.
        threshold: the figure to reach.
        measure: `win rate` or `accuracy`.
        figure, low, high, n: the graded rate, its Wilson 95% interval, and the rows in its denominator.
        n_total: all rows; a policy can raise its figure by turning losses into rows that do not count.
        half: the win rate with ties as half, `rate`, `low`, `high`, `n`; None for a reward model.
        agreement_rate, position_bias: as in `WinRate`; None for a reward model, for which order does not matter.
        chance_below: the probability that the figure of another sample of `n` rows falls below the threshold, given
            this measurement; None without a figure.
        problems: rows that cannot be graded, one sentence each; any of them fails the file.
        warnings: unusual findings that do not prevent grading, such as empty responses.
        details: all other measurements.
    """

    method: str
    file: str
    passed: bool
    reason: str | None
    threshold: float
    measure: str
    figure: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    n_total: int = 0
    half: dict[str, Any] | None = None
    agreement_rate: float | None = None
    position_bias: float | None = None
    chance_below: float | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    details: dict[str, Any] | None = None


@dataclass(frozen=True)
class SubmissionGrade:
    """The grades of a submission.

    Attributes:
        grades: one for each threshold, in their order.
        rule: the rule for win rates: `agreed`, the course's, or `half`.
        part_two: whether part two is passed, for which one of its two files suffices; None if it has no threshold.
        usage: total calls and tokens of judging; None if nothing was judged.
    """

    grades: list[FileGrade]
    rule: Rule
    part_two: bool | None
    usage: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**dataclasses.asdict(self), "passed": sum(grade.passed for grade in self.grades)}


def grade_submission(
    folder: str | Path,
    thresholds: Mapping[str, float] | str | Path,
    *,
    judge: Any = None,
    prompts_jsonl: str | Path | None = None,
    base_jsonl: str | Path | None = None,
    prefs_jsonl: str | Path | None = None,
    max_new_tokens: int | None = None,
    count_tokens: TokenCounter | None = None,
    rule: Rule = "agreed",
    **judging: Any,
) -> SubmissionGrade:
    """Grade every file that has a threshold; a missing file fails, and so does one with rows that cannot count.

    A reward model is graded by the share of pairs in which its score of the chosen response is strictly higher. A
    policy is graded by its win rate against the base. By default, it is taken over the prompts on which both orders
    agree, the judge called the comparison usable, and the response is not empty.

    Args:
        folder: the submission.
        thresholds: threshold by method, or a JSON file of them; see `submission_file` for the methods' files.
        judge: decides between responses; None for the known score, which only the embedded task has.
        base_jsonl: the base's responses; None for the embedded ones.
        prompts_jsonl, prefs_jsonl, max_new_tokens, count_tokens: as in `read_submission`.
        rule: `agreed` or `half`.
        judging: keyword arguments of `judge_pairs`: `cache`, `max_concurrency`, `max_error_fraction`, `progress`.

    Raises:
        FileNotFoundError: the folder, or a file of prompts, base responses, pairs or thresholds does not exist.
        ValueError: those files have malformed rows, or there is no judge for the prompts.
        TooManyErrors: too many comparisons could not be judged; the cache holds the verdicts so far.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: make its files with the commands generate and score")
    check_choice("rule", rule, RULES)
    thresholds = load_thresholds(thresholds)
    checks = {"prefs_jsonl": prefs_jsonl, "count_tokens": count_tokens}
    files = read_submission(folder, thresholds, prompts_jsonl=prompts_jsonl, max_new_tokens=max_new_tokens, **checks)
    prompts = load_prompts(prompts_jsonl)
    judge = known_score_judge(prompts) if judge is None else judge
    limit = max_new_tokens or default_max_new_tokens(prompts_jsonl)
    base = load_base(prompts, base_jsonl, max_new_tokens=limit)
    usages: list[Usage] = []

    def grade(name: str, threshold: float) -> FileGrade:
        measure = "accuracy" if name == REWARD_MODEL else "win rate"
        known = {"method": name, "file": submission_file(name), "threshold": threshold, "measure": measure}
        if name not in files:
            return FileGrade(**known, passed=False, reason="missing")
        rows, problems = files[name]
        fatal = [str(problem) for problem in problems if problem.fatal]
        known |= {"problems": fatal, "warnings": [str(problem) for problem in problems if not problem.fatal]}
        if fatal:
            return FileGrade(**known, passed=False, reason=f"{len(fatal)} bad row" + "s" * (len(fatal) > 1))
        if name == REWARD_MODEL:
            return _grade_reward_model(known, rows)
        try:
            result = judge_candidate(judge, name, rows, prompts, base, **judging)
        except TooManyErrors as error:
            usages.append(error.result.usage)
            return FileGrade(**known, passed=False, reason=str(error))
        usages.append(result.usage)
        return _grade_policy(known, result, rule)

    grades = [grade(name, threshold) for name, threshold in thresholds.items()]
    part_two = [one.passed for one in grades if one.method in PART_TWO]
    return SubmissionGrade(
        grades=grades,
        rule=rule,
        part_two=any(part_two) if part_two else None,
        usage=sum(usages, Usage()).to_dict() if usages else None,
    )


def _grade_reward_model(known: dict[str, Any], scores: tuple[list[float], list[float]]) -> FileGrade:
    metrics = reward_metrics(*scores)
    accuracy, n = metrics["accuracy"], metrics["n"]
    if metrics["ties"] == n:
        known["warnings"].append(ALL_TIED % n)
    return FileGrade(
        **known,
        passed=accuracy >= known["threshold"],
        reason=None,
        figure=accuracy,
        low=metrics["low"],
        high=metrics["high"],
        n=n,
        n_total=n,
        chance_below=chance_below(round(accuracy * n), n, known["threshold"]),
        details=metrics,
    )


def _grade_policy(known: dict[str, Any], result: CandidateResult, rule: Rule) -> FileGrade:
    figure, threshold, details = getattr(result.win_rate, rule), known["threshold"], result.to_dict()
    credits = [credit for credit in row_credits(result.outcomes, rule) if credit is not None]
    ties = None if rule == "agreed" else credits.count(0.5)
    return FileGrade(
        **known,
        passed=bool(credits) and figure.rate >= threshold,
        reason=None if credits else "no comparison counts",
        figure=figure.rate if credits else None,
        low=figure.low,
        high=figure.high,
        n=figure.n,
        n_total=result.win_rate.n_total,
        half=dataclasses.asdict(result.win_rate.half),
        agreement_rate=result.win_rate.agreement_rate,
        position_bias=result.win_rate.position_bias,
        chance_below=chance_below(credits.count(1.0), len(credits), threshold, ties=ties),
        details=details,
    )
