"""Examine a judge on pairs whose better response people have named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import format_interval, format_table, markdown_table, one_line_errors, print_json
from trl_ext.evaluation.judging.cost import estimate
from trl_ext.evaluation.methods.judge_examination import ask_judge, examine_judge
from trl_ext.evaluation.submissions.commands import (
    add_judge_arguments,
    judge_settings,
    judging_options,
    make_judge,
    make_parser,
    show_estimates,
    usage_line,
)
from trl_ext.evaluation.submissions.labelled_pairs import read_labelled_pairs, read_recorded_verdicts
from trl_ext.files import write_json, write_json_lines
from trl_ext.names import check_choice

DESCRIPTION = """\
How often a judge agrees with human labels, in each order of the responses and where both orders agree, against the
longer response as a judge; its position bias and its pull to length; whether it agrees with itself; and whether its
confidence is right. 1/2 is chance. The judge is asked about every pair of --pairs, or --verdicts has its answers.

cost    two questions per pair, none with --verdicts; openai costs money: see --estimate first.
writes  with openai, every verdict into --cache as it arrives; with --out the figures as JSON, with --save_verdicts
        what the judge said, which --verdicts reads.
"""
COLUMNS = {
    "both": "agreement",
    "agreed": "where both orders agree",
    "order_agreement": "same in both orders",
    "position_bias": "position bias",
    "minus_longer": "minus the longer one",
    "length_pull": "pull to length",
}
DETAILS = {
    "longer": "the longer one as a judge",
    "longer_right": "where people prefer the longer response",
    "shorter_right": "where people prefer the shorter response",
    "self_agreement": "two answers to one question agree",
}


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, ask, compare and print."""
    parser = make_parser("examine_judge", DESCRIPTION)
    parser.add_argument(
        "--pairs",
        required=True,
        help="JSONL with prompt, response_a, response_b, label (A, B or tie) and perhaps row_id and kind; or LLMBar's "
        "or PandaLM's folder",
    )
    parser.add_argument(
        "--verdicts",
        help="JSONL with row_id, judge, shown_first and verdict (A or B) and perhaps confidence; or LLMBar's or "
        "PandaLM's file of verdicts",
    )
    parser.add_argument("--judge_name", help="one judge of --verdicts (default: all of them)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--save_verdicts", type=Path, help="write what the judge said as JSONL")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    add_judge_arguments(parser, rule=False)
    with one_line_errors():
        options = parser.parse_args(arguments)
        pairs = read_labelled_pairs(options.pairs)
        summary: dict[str, Any] = {"pairs": str(options.pairs)}
        if options.verdicts is not None:
            judges = read_recorded_verdicts(options.verdicts, pairs)
            if options.judge_name is not None:
                check_choice("judge_name", options.judge_name, tuple(judges))
                judges = {options.judge_name: judges[options.judge_name]}
        else:
            rows = [{"row_id": pair.row_id, "prompt": pair.messages} for pair in pairs]
            judge, name = make_judge(options, rows), options.judge_name or options.model or options.judge
            if options.estimate:
                responses = [pair.response_a for pair in pairs], [pair.response_b for pair in pairs]
                show_estimates({name: estimate(judge, rows, *responses, options.cache)}, options.json)
                return
            verdicts, usage = ask_judge(judge, pairs, name=name, **judging_options(options))
            judges = {name: verdicts}
            summary |= {"judge": judge_settings(options, judge), "usage": usage.to_dict()}
        summary["judges"] = {name: examine_judge(pairs, verdicts) for name, verdicts in judges.items()}
        if options.out:
            write_json(options.out, summary)
        if options.save_verdicts:
            write_json_lines(options.save_verdicts, [row.model_dump() for rows in judges.values() for row in rows])
    if options.json:
        print_json(summary)
    else:
        _print(summary["judges"], markdown_table if options.markdown else format_table)
        if "usage" in summary:
            print(usage_line(summary["usage"], options.judge))


def _print(judges: dict[str, dict[str, Any]], table: Any) -> None:
    rows = [
        (name, found["all"]["n"], *(_cell(found["all"][key]) for key in COLUMNS)) for name, found in judges.items()
    ]
    print(table(("judge", "pairs", *COLUMNS.values()), rows).rstrip())
    kinds = list(dict.fromkeys(kind for found in judges.values() for kind in found.get("kinds", ())))
    if kinds:
        rows = [
            (name, *(_cell(found["kinds"][kind]["both"]) if kind in found.get("kinds", ()) else "-" for kind in kinds))
            for name, found in judges.items()
        ]
        print(f"\nAgreement by kind:\n\n{table(('judge', *kinds), rows).rstrip()}")
    if len(judges) > 1:
        return
    [found] = (found["all"] for found in judges.values())
    print("\n" + "\n".join(f"{text}: {_cell(found[key])}" for key, text in DETAILS.items() if found[key]))
    if told := found["calibration"]:
        print(
            f"confidence {told['confidence']:.3f}, right {told['correct']:.3f}; Brier score {_cell(told['brier'])} "
            f"(always 1/2: 0.25); calibration error {told['ece']:.3f} (if calibrated {told['ece_chance']:.3f}, "
            f"below {told['ece_chance_high']:.3f} in 95%)"
        )
    print(f"answers without a verdict, which count as half: {found['without_verdict']}")


def _cell(figure: dict[str, float] | None) -> str:
    if figure is None:
        return "-"
    return format_interval(figure.get("rate", figure.get("mean")), figure["low"], figure["high"], digits=2)


if __name__ == "__main__":
    main()
