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
from trl_ext.evaluation.statistics.win_rate import Interval
from trl_ext.evaluation.submissions.assets import default_max_new_tokens, load_base, load_prompts, load_thresholds
from trl_ext.evaluation.submissions.candidates import judge_candidate, known_score_judge
from trl_ext.evaluation.submissions.submission import PART_TWO, REWARD_MODEL, read_submission, submission_file


@dataclass(frozen=True)
class FileGrade:
    """The grade of one file.

    Attributes:
        method, file: the method that the file belongs to, and the path within the submission.
        passed: whether its figure reaches the threshold.
        reason: why there is no figure (`missing`, or the fault); None if there is one.
        threshold: the figure to reach.
        measure: `win rate` or `accuracy`.
        figure, low, high, n: the graded rate, its Wilson 95% interval, and the rows in its denominator.
        n_total: all rows; a policy can raise its figure by turning losses into rows that do not count.
        half: the win rate with ties as half; None for a reward model.
        agreement_rate, position_bias: as in `WinRate`; None for a reward model, for which order does not matter.
        problems: rows that cannot be graded, one sentence each; any of them fails the file.
        warnings: unusual findings that do not prevent grading, such as empty responses.
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
    half: Interval | None = None
    agreement_rate: float | None = None
    position_bias: float | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class SubmissionGrade:
    """The grades of a submission.

    Attributes:
        grades: one for each threshold, in their order.
        part_two: whether part two is passed, for which one of its two files suffices; None if it has no threshold.
        usage: calls and tokens of judging the graded files; None if there is none.
    """

    grades: list[FileGrade]
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
    **judging: Any,
) -> SubmissionGrade:
    """Grade every file that has a threshold; a missing file fails, and so does one with rows that cannot count.

    A reward model is graded by the share of pairs in which its score of the chosen response is strictly higher. A
    policy is graded by its win rate against the base over the prompts on which both orders agree, the judge called the
    comparison usable, and the response is not empty.

    Args:
        folder: the submission.
        thresholds: threshold by method, or a JSON file of them; see `submission_file` for the methods' files.
        judge: decides between responses; None for the known score, which only the embedded task has.
        base_jsonl: the base's responses; None for the embedded ones.
        prompts_jsonl, prefs_jsonl, max_new_tokens: as in `read_submission`.
        judging: keyword arguments of `judge_pairs`: `cache`, `max_concurrency`, `max_error_fraction`, `progress`.

    Raises:
        FileNotFoundError: the folder, or a file of prompts, base responses, pairs or thresholds does not exist.
        ValueError: those files have malformed rows, or there is no judge for the prompts.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: make its files with the commands generate and score")
    thresholds = load_thresholds(thresholds)
    data = {"prompts_jsonl": prompts_jsonl, "prefs_jsonl": prefs_jsonl, "max_new_tokens": max_new_tokens}
    files = read_submission(folder, thresholds, **data)
    prompts = load_prompts(prompts_jsonl)
    judge = known_score_judge(prompts) if judge is None else judge
    base = load_base(prompts, base_jsonl, max_new_tokens=max_new_tokens or default_max_new_tokens(prompts_jsonl))
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
            return _grade_reward_model(known, *rows)
        try:
            result = judge_candidate(judge, name, rows, prompts, base, **judging)
        except TooManyErrors as error:
            return FileGrade(**known, passed=False, reason=str(error))
        usages.append(result.usage)
        rates, figure = result.win_rate, result.win_rate.agreed
        return FileGrade(
            **known,
            passed=bool(figure.n) and figure.rate >= threshold,
            reason=None if figure.n else "no comparison counts",
            figure=figure.rate if figure.n else None,
            low=figure.low,
            high=figure.high,
            n=figure.n,
            n_total=rates.n_total,
            half=rates.half,
            agreement_rate=rates.agreement_rate,
            position_bias=rates.position_bias,
        )

    grades = [grade(name, threshold) for name, threshold in thresholds.items()]
    part_two = [one.passed for one in grades if one.method in PART_TWO]
    return SubmissionGrade(
        grades=grades,
        part_two=any(part_two) if part_two else None,
        usage=sum(usages, Usage()).to_dict() if usages else None,
    )


def _grade_reward_model(known: dict[str, Any], chosen: list[float], rejected: list[float]) -> FileGrade:
    metrics = reward_metrics(chosen, rejected)
    accuracy, n = metrics["accuracy"], metrics["n"]
    if metrics["ties"] == n:
        known["warnings"].append(ALL_TIED % n)
    figures = {"figure": accuracy, "low": metrics["low"], "high": metrics["high"], "n": n, "n_total": n}
    return FileGrade(**known, passed=accuracy >= known["threshold"], reason=None, **figures)
