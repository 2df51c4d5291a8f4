"""Grade a submission against the thresholds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from public_eval import THRESHOLDS
from trl_ext.data.rows import SHOWN_PROBLEMS
from trl_ext.evaluation.command_line import format_table, one_line_errors, print_json
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.submissions.assets import load_base, load_prompts, load_thresholds
from trl_ext.evaluation.submissions.commands import (
    add_check_arguments,
    add_judge_arguments,
    add_prompt_arguments,
    check_judge_arguments,
    data_options,
    how_to_fill,
    interval_cell,
    judge_settings,
    judging_options,
    make_judge,
    make_parser,
    show_estimates,
    usage_line,
)
from trl_ext.evaluation.submissions.grading import FileGrade, SubmissionGrade, grade_submission
from trl_ext.evaluation.submissions.rows import in_one_line
from trl_ext.evaluation.submissions.submission import REWARD_MODEL, PublicData, submission_file
from trl_ext.files import write_json

DESCRIPTION = """\
Every method of a submission against its threshold: the figure with its interval, PASS or FAIL, and how likely the
figure of another sample of prompts would fall under the threshold. A missing file is a failure, and so is one with
rows that cannot count; they are named by file and row_id.

exit    0 whatever the grades, for missing files too; 2 if a file that is there cannot be used, such as one with a NaN,
        which `pack` refuses as well. The others are graded, printed and written nevertheless.

cost    two questions to the judge per prompt and policy file. ground_truth and reward_model cost computing time only;
        openai costs money where its verdicts are not in --cache yet: see --estimate.
writes  with openai, verdicts into --cache as they arrive; with --out the grades as JSON.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, grade and print."""
    parser = make_parser("grade", DESCRIPTION)
    parser.add_argument("folder", help="the submission, such as submission/")
    parser.add_argument(
        "--thresholds", default=str(THRESHOLDS), help="JSON of method: threshold (default: the course's)"
    )
    add_prompt_arguments(parser)
    add_check_arguments(parser)
    add_judge_arguments(parser)
    parser.add_argument("--out", type=Path, help="write the grades as JSON")
    with one_line_errors():
        options = parser.parse_args(arguments)
        check_judge_arguments(options)
        if not Path(options.folder).is_dir():
            raise FileNotFoundError(f"no folder {options.folder}: {how_to_fill(options.folder)}")
        data = data_options(options)
        prompts = load_prompts(options.prompts_jsonl)
        policies = [name for name in load_thresholds(options.thresholds) if name != REWARD_MODEL]
        judge = make_judge(options, prompts)
        if options.estimate:
            _estimate(options, judge, policies, data)
            return
        result = grade_submission(
            options.folder,
            options.thresholds,
            judge=judge,
            base_jsonl=options.base_jsonl,
            rule=options.rule,
            **data,
            **judging_options(options),
        )
        summary = {"judge": judge_settings(options, judge), **result.to_dict()}
        if options.out:
            write_json(options.out, summary)
    if options.json:
        print_json(summary)
    else:
        _print(result, options)
    if any(grade.problems for grade in result.grades):
        raise SystemExit(2)


def _estimate(options, judge, policies: list[str], data: dict[str, Any]) -> None:
    """Print what judging the existing, gradable files would cost."""
    public = PublicData.load(policies, **data)
    base = load_base(public.prompts, options.base_jsonl, max_new_tokens=public.max_new_tokens)
    there = [name for name in policies if (Path(options.folder) / submission_file(name)).is_file()]
    read = {name: public.read(options.folder, name) for name in there}
    pairs = {name: (rows, base) for name, (rows, found) in read.items() if not any(one.fatal for one in found)}
    if not pairs:
        advice = how_to_fill(options.folder)
        raise ValueError(f"{options.folder} holds no policy's file that could be judged: {advice}")
    show_estimates(options, judge, public.prompts, pairs)


def _print(result: SubmissionGrade, options: argparse.Namespace) -> None:
    header = ("method", "grade", "measure", f"figure, {result.rule}", "ties as half", "threshold", "chance under it")
    header += ("agreement", "position bias")
    print(format_table(header, [_row(grade) for grade in result.grades]))
    for grade in result.grades:
        for label, lines in (("cannot be graded", grade.problems), ("warning", grade.warnings)):
            if len(lines) > SHOWN_PROBLEMS:
                lines = [in_one_line(str(Path(options.folder) / grade.file), lines)]
            for line in lines:
                print(f"{label}: {line}")
    if any(grade.reason == "missing" for grade in result.grades):
        print(f"missing: {how_to_fill(options.folder)}")
    passed = sum(grade.passed for grade in result.grades)
    part_two = "" if result.part_two is None else f"; part two, by either file: {_word(result.part_two)}"
    print(f"{passed} of {len(result.grades)} passed{part_two}")
    print("n: rows that count, of all rows")
    print("chance under it: of another n rows, given those measured, under Jeffreys' prior")
    if result.usage is not None:
        print(usage_line(result.usage, options.judge))


def _row(grade: FileGrade) -> tuple:
    figure = f"{Estimate(grade.figure, grade.low, grade.high):.3f}"
    if grade.figure is not None:
        figure += f"  n {grade.n} of {grade.n_total}"
    return (
        grade.method,
        _word(grade.passed),
        grade.measure,
        grade.reason or figure,
        interval_cell(grade.half),
        f"{grade.threshold:.2f}",
        "-" if grade.chance_below is None else f"{grade.chance_below:.4f}",
        grade.agreement_rate,
        grade.position_bias,
    )


def _word(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


if __name__ == "__main__":
    main()
