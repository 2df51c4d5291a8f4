"""Grade a submission against the thresholds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from public_eval import THRESHOLDS
from trl_ext.data.rows import first_few
from trl_ext.evaluation.command_line import format_table, one_line_errors, print_json
from trl_ext.evaluation.submissions import commands
from trl_ext.evaluation.submissions.assets import load_prompts, load_thresholds
from trl_ext.evaluation.submissions.grading import grade_submission

DESCRIPTION = """\
Every method of a submission against its threshold: the figure with its interval, and PASS or FAIL. A missing file is
a failure, and so is one with rows that cannot count; they are named by file and row_id.

exit    0 whatever the grades, for missing files too; 2 if a file that is there cannot be used, such as one with a NaN,
        which `pack` refuses as well.
cost    two questions to the judge per prompt and policy file. ground_truth and reward_model cost computing time only;
        openai costs money where its verdicts are not in --cache yet: see `judge --estimate`.
writes  with openai, verdicts into --cache as they arrive.
"""
HEADER = ("method", "grade", "measure", "figure", "ties as half", "threshold", "agreement", "position bias")


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, grade and print."""
    parser = commands.make_parser("grade", DESCRIPTION)
    parser.add_argument("folder", help="the submission, such as submission/")
    parser.add_argument("--thresholds", default=THRESHOLDS, help="JSON of method: threshold (default: the course's)")
    commands.add_data_arguments(parser)
    commands.add_judge_arguments(parser)
    with one_line_errors():
        options = parser.parse_args(arguments)
        data, methods = commands.data_options(options), load_thresholds(options.thresholds)
        judge = commands.make_judge(options, load_prompts(options.prompts_jsonl))
        data |= {"base_jsonl": options.base_jsonl, **commands.judging_options(options)}
        result = grade_submission(options.folder, methods, judge=judge, **data)
    if options.json:
        print_json({"judge": commands.judge_settings(options), **result})
    else:
        print(format_table(HEADER, [_row(grade) for grade in result["grades"]]))
        for grade in result["grades"]:
            for label, lines in (("cannot be graded", grade["problems"]), ("warning", grade["warnings"])):
                if lines:
                    print(f"{label}: {Path(options.folder) / grade['file']}: {first_few(lines)}")
        part_two = "" if result["part_two"] is None else f"; part two, by either file: {_word(result['part_two'])}"
        print(f"{result['passed']} of {len(result['grades'])} passed{part_two}; n: rows that count, of all rows")
        if result["usage"] is not None:
            print(commands.usage_line(result["usage"]))
    if any(grade["problems"] for grade in result["grades"]):
        raise SystemExit(2)


def _row(grade: dict[str, Any]) -> tuple:
    return (
        grade["method"],
        _word(grade["passed"]),
        grade["measure"],
        grade["reason"] or f"{commands.interval_cell({**grade, 'rate': grade['figure']})} of {grade['n_total']}",
        commands.interval_cell(grade["half"]),
        f"{grade['threshold']:.2f}",
        grade["agreement_rate"],
        grade["position_bias"],
    )


def _word(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


if __name__ == "__main__":
    main()
