"""Grading a submission: every method's figure against its threshold, and all faults in its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_ext.evaluation.comparing.reward_models import ALL_TIED, reward_metrics
from trl_ext.evaluation.judging.pairs import TooManyErrors
from trl_ext.evaluation.judging.protocol import Usage
from trl_ext.evaluation.submissions.assets import default_max_new_tokens, load_base, load_prompts
from trl_ext.evaluation.submissions.candidates import judge_candidate, known_score_judge
from trl_ext.evaluation.submissions.submission import PART_TWO, REWARD_MODEL, read_submission, submission_file

# A grade until there is a figure.
UNGRADED = dict.fromkeys(("reason", "figure", "low", "high", "half", "agreement_rate", "position_bias"))


def grade_submission(
    folder: str | Path,
    thresholds: Mapping[str, float],
    *,
    judge: Any = None,
    prompts_jsonl: str | Path | None = None,
    base_jsonl: str | Path | None = None,
    prefs_jsonl: str | Path | None = None,
    max_new_tokens: int | None = None,
    **judging: Any,
) -> dict[str, Any]:
    """Grade every file that has a threshold; a missing file fails, and so does one with rows that cannot count.

    A reward model is graded by the share of pairs in which its score of the chosen response is strictly higher. A
    policy is graded by its win rate against the base over the prompts on which both orders agree, the judge called the
    comparison usable, and the response is not empty.

    Args:
        folder: the submission; `submission_file` names the methods' files.
        thresholds: threshold by method.
        judge: decides between responses; None for the known score, which only the embedded task has.
        base_jsonl: the base's responses; None for the embedded ones.
        prompts_jsonl, prefs_jsonl, max_new_tokens: as in `read_submission`.
        judging: keyword arguments of `judge_pairs`.

    Returns:
        `grades`, one for each threshold in their order, and how many `passed`; `part_two`, whether one of its two
        files passed, None without a threshold; `usage` of judging the graded files, None without any. A grade has:

        - `method`, `file`, `threshold`, `measure` (`win rate` or `accuracy`) and `passed`.
        - `figure`, `low`, `high`, `n`: the graded rate, its Wilson 95% interval, and the rows in its denominator.
        - `n_total`: all rows; a policy can raise its figure by turning losses into rows that do not count.
        - `half`, `agreement_rate`, `position_bias`: as in `WinRate`; None for a reward model.
        - `reason`: why there is no figure (`missing`, or the fault); None if there is one.
        - `problems`: rows that cannot be graded, any of which fails the file; `warnings`, such as empty responses.

    Raises:
        FileNotFoundError: the folder, or a file of prompts, base responses or pairs does not exist.
        ValueError: those files have malformed rows, or there is no judge for the prompts.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: make its files with the commands generate and score")
    data = {"prompts_jsonl": prompts_jsonl, "prefs_jsonl": prefs_jsonl, "max_new_tokens": max_new_tokens}
    files = read_submission(folder, thresholds, **data)
    prompts = load_prompts(prompts_jsonl)
    judge = known_score_judge(prompts) if judge is None else judge
    base = load_base(prompts, base_jsonl, max_new_tokens=max_new_tokens or default_max_new_tokens(prompts_jsonl))
    usages: list[Usage] = []

    def figures(name: str, threshold: float) -> dict[str, Any]:
        if name not in files:
            return {"reason": "missing"}
        rows, problems, warnings = files[name]
        told = {"problems": problems, "warnings": warnings}
        if problems:
            return {**told, "reason": f"{len(problems)} bad row" + "s" * (len(problems) > 1)}
        if name == REWARD_MODEL:
            metrics = reward_metrics(*rows)
            accuracy, n = metrics["accuracy"], metrics["n"]
            told["warnings"] += [ALL_TIED % n] if metrics["ties"] == n else []
            told |= {"figure": accuracy, "low": metrics["low"], "high": metrics["high"], "n": n, "n_total": n}
            return {**told, "passed": accuracy >= threshold}
        try:
            result = judge_candidate(judge, name, rows, prompts, base, **judging)
        except TooManyErrors as error:
            return {**told, "reason": str(error)}
        usages.append(result.usage)
        rates, figure = result.win_rate, result.win_rate.agreed
        return {
            **told,
            "passed": bool(figure.n) and figure.rate >= threshold,
            "reason": None if figure.n else "no comparison counts",
            "figure": figure.rate if figure.n else None,
            "low": figure.low,
            "high": figure.high,
            "n": figure.n,
            "n_total": rates.n_total,
            "half": vars(rates.half),
            "agreement_rate": rates.agreement_rate,
            "position_bias": rates.position_bias,
        }

    grades = []
    for name, threshold in thresholds.items():
        measure = "accuracy" if name == REWARD_MODEL else "win rate"
        known = {"method": name, "file": submission_file(name), "threshold": threshold, "measure": measure}
        nothing = {"passed": False, **UNGRADED, "n": 0, "n_total": 0, "problems": [], "warnings": []}
        grades.append({**known, **nothing, **figures(name, threshold)})
    part_two = [one["passed"] for one in grades if one["method"] in PART_TWO]
    return {
        "grades": grades,
        "passed": sum(one["passed"] for one in grades),
        "part_two": any(part_two) if part_two else None,
        "usage": vars(sum(usages, Usage())) if usages else None,
    }
