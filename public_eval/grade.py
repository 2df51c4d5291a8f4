"""Grade a submission against the thresholds."""

from __future__ import annotations

from pathlib import Path

from public_eval._common import (
    THRESHOLDS,
    add_judge_arguments,
    add_prompt_arguments,
    interval_cell,
    judging_options,
    make_judge,
    make_parser,
    show_estimates,
    usage_line,
)
from trl_ext.evaluation.command_line import format_interval, format_table, one_line_errors, print_json
from trl_ext.evaluation.submissions.assets import (
    default_max_new_tokens,
    load_base,
    load_prompts,
    load_thresholds,
    token_counter,
)
from trl_ext.evaluation.submissions.candidates import estimate_cost
from trl_ext.evaluation.submissions.grading import FileGrade, SubmissionGrade, grade_submission
from trl_ext.evaluation.submissions.submission import REWARD_MODEL, check_submission_file, submission_file
from trl_ext.files import write_json

DESCRIPTION = """\
Every method of a submission against its threshold: the figure with its interval, PASS or FAIL, and how likely the
figure of another sample of prompts would fall under the threshold. A missing file is a failure, and so is one with
rows that cannot count; they are named by file and row_id. The exit code is 0 whatever the grades.

cost    two questions to the judge per prompt and policy file. ground_truth and reward_model cost computing time only;
        openai costs money where its verdicts are not in --cache yet: see --estimate.
writes  with openai, verdicts into --cache as they arrive; with --out the grades as JSON.
"""
SHOWN_PROBLEMS = 5


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, grade and print."""
    parser = make_parser("grade", DESCRIPTION)
    parser.add_argument("folder", help="the submission, such as submission/")
    parser.add_argument(
        "--thresholds", default=str(THRESHOLDS), help="JSON of method: threshold (default: the course's)"
    )
    add_prompt_arguments(parser)
    parser.add_argument("--prefs_jsonl", help="the course's pairs (default: the embedded ones)")
    parser.add_argument(
        "--tokenizer", help="counts the responses' tokens (default: the embedded one's, for the embedded prompts)"
    )
    add_judge_arguments(parser)
    parser.add_argument("--out", type=Path, help="write the grades as JSON")
    with one_line_errors():
        options = parser.parse_args(arguments)
        prompts = load_prompts(options.prompts_jsonl)
        judge = make_judge(options, prompts)
        if options.estimate:
            _estimate(options, judge, prompts)
            return
        tokenizer = options.tokenizer or (None if options.prompts_jsonl else "toy")
        result = grade_submission(
            options.folder,
            options.thresholds,
            judge=judge,
            prompts_jsonl=options.prompts_jsonl,
            base_jsonl=options.base_jsonl,
            prefs_jsonl=options.prefs_jsonl,
            max_new_tokens=options.max_new_tokens,
            count_tokens=token_counter(tokenizer) if tokenizer else None,
            rule=options.rule,
            **judging_options(options),
        )
        if options.out:
            write_json(options.out, result.to_dict())
    if options.json:
        print_json(result.to_dict())
    else:
        _print(result)


def _estimate(options, judge, prompts: list[dict]) -> None:
    """What judging the files that are there and can be graded would cost."""
    limit = options.max_new_tokens or default_max_new_tokens(options.prompts_jsonl)
    base = load_base(prompts, options.base_jsonl, max_new_tokens=limit if options.base_jsonl else None)
    names, pairs = [], []
    for name in load_thresholds(options.thresholds):
        if name != REWARD_MODEL and (Path(options.folder) / submission_file(name)).is_file():
            rows, problems = check_submission_file(
                options.folder, name, prompts=prompts, pairs=[], max_new_tokens=limit
            )
            if not any(problem.fatal for problem in problems):
                names.append(name)
                pairs.append((rows, base))
    if not names:
        raise ValueError(f"{options.folder} holds no policy's file that could be judged")
    show_estimates(names, estimate_cost(judge, prompts, pairs, options.cache), options.json)


def _print(result: SubmissionGrade) -> None:
    header = ("method", "grade", "measure", f"figure, {result.rule}", "ties as half", "threshold", "chance under it")
    print(format_table(header, [_row(grade) for grade in result.grades]))
    for grade in result.grades:
        for label, lines in (("cannot be graded", grade.problems), ("warning", grade.warnings)):
            for line in lines[:SHOWN_PROBLEMS]:
                print(f"{label}: {line}")
            if len(lines) > SHOWN_PROBLEMS:
                print(f"{label}: {grade.file}: and {len(lines) - SHOWN_PROBLEMS} more")
    passed = sum(grade.passed for grade in result.grades)
    part_two = "" if result.part_two is None else f"; part two, by either file: {_word(result.part_two)}"
    print(f"{passed} of {len(result.grades)} passed{part_two}")
    print("chance under it: of another sample of as many rows, if the measured rate is the true one (", end="")
    print("binomial for dropped ties and accuracy, normal for ties as half)")
    if result.usage is not None:
        print(usage_line(result.usage))


def _row(grade: FileGrade) -> tuple:
    figure = "-" if grade.figure is None else format_interval(grade.figure, grade.low, grade.high) + f"  n {grade.n}"
    chance = "-" if grade.chance_below is None else f"{grade.chance_below:.4f}"
    return (
        grade.method,
        _word(grade.passed),
        grade.measure,
        grade.reason or figure,
        interval_cell(grade.half),
        f"{grade.threshold:.2f}",
        chance,
    )


def _word(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


if __name__ == "__main__":
    main()
