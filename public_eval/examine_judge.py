"""Examine a judge on pairs whose better response people have named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import (
    format_interval,
    format_table,
    markdown_table,
    one_line_errors,
    print_json,
)
from trl_ext.evaluation.judging.cost import estimate
from trl_ext.evaluation.methods.judge_examination import ask_judge, examine_judge
from trl_ext.evaluation.submissions.commands import (
    add_judge_arguments,
    interval_cell,
    judge_settings,
    judging_options,
    make_judge,
    make_parser,
    show_estimates,
    usage_line,
)
from trl_ext.evaluation.submissions.labelled_pairs import (
    LabelledPair,
    RecordedVerdict,
    read_labelled_pairs,
    read_recorded_verdicts,
)
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
HEADER = (
    *("agreement", "where both orders agree", "same in both orders", "position bias"),
    *("minus the longer one", "pull to length"),
)


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, ask, compare and print."""
    parser = make_parser("examine_judge", DESCRIPTION)
    parser.add_argument(
        "--pairs",
        required=True,
        help="JSONL with prompt, response_a, response_b, label (A, B or tie) and perhaps row_id and kind; or the "
        "folder or file of LLMBar or PandaLM",
    )
    parser.add_argument(
        "--verdicts",
        help="recorded verdicts: JSONL with row_id, judge, shown_first and verdict (A or B) and perhaps confidence; "
        "or LLMBar's or PandaLM's file",
    )
    parser.add_argument("--judge_name", help="one judge of --verdicts (default: all of them)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--save_verdicts", type=Path, help="write what the judge said as JSONL")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
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
            judges = _ask(options, pairs, summary)
            if judges is None:
                return
        summary["judges"] = {name: examine_judge(pairs, verdicts) for name, verdicts in judges.items()}
        if options.out:
            write_json(options.out, summary)
        if options.save_verdicts:
            rows = [verdict.model_dump() for verdicts in judges.values() for verdict in verdicts]
            write_json_lines(options.save_verdicts, rows)
    if options.json:
        print_json(summary)
    else:
        _print(summary, options.markdown)


def _ask(options, pairs: list[LabelledPair], summary: dict) -> dict[str, list[RecordedVerdict]] | None:
    """The verdicts of the judge that the flags select; None if only their cost was asked for."""
    if options.judge_name is not None:
        raise ValueError("--judge_name is for --verdicts: the judge to ask is given by --judge and --model")
    rows = [{"row_id": pair.row_id, "prompt": pair.messages} for pair in pairs]
    judge = make_judge(options, rows)
    if options.estimate:
        responses = [pair.response_a for pair in pairs], [pair.response_b for pair in pairs]
        show_estimates({"once": estimate(judge, rows, *responses, options.cache)}, options.json)
        return None
    name = options.model or options.judge
    verdicts, usage = ask_judge(judge, pairs, name=name, **judging_options(options))
    summary |= {"judge": judge_settings(options, judge), "usage": usage.to_dict()}
    return {name: verdicts}


def _print(summary: dict[str, Any], markdown: bool) -> None:
    table = markdown_table if markdown else format_table
    judges = summary["judges"]
    print(table(("judge", "pairs", *HEADER), [_row(name, found["all"]) for name, found in judges.items()]).rstrip())
    kinds = list(dict.fromkeys(kind for found in judges.values() for kind in found.get("kinds", ())))
    if kinds:
        print("\nagreement, mean of the orders, by kind\n")
        rows = [
            (name, *(interval_cell(found.get("kinds", {}).get(kind, {}).get("both")) for kind in kinds))
            for name, found in judges.items()
        ]
        print(table(("judge", *kinds), rows).rstrip())
    if markdown:
        return
    if len(judges) == 1:
        [found] = judges.values()
        print("\n".join(["", *_details(found["all"])]))
    print("agreement: 1/2 is chance; a tie, or an answer without a verdict, counts as half")
    if "usage" in summary:
        print(usage_line(summary["usage"], summary["judge"]["kind"]))


def _row(name: str, found: dict[str, Any]) -> tuple:
    rates = [_rate(found[key]) for key in ("both", "agreed", "order_agreement")]
    return name, found["n"], *rates, *(_mean(found[key]) for key in ("position_bias", "minus_longer", "length_pull"))


def _details(found: dict[str, Any]) -> list[str]:
    lines = [
        f"response A first: {interval_cell(found['a_first'])}; B first: {interval_cell(found['b_first'])}; the longer "
        f"one as a judge: {interval_cell(found['longer'])}",
        f"where people prefer the longer response: {interval_cell(found['longer_right'])}; the shorter: "
        f"{interval_cell(found['shorter_right'])}; difference {_mean(found['longer_minus_shorter'])}",
    ]
    if found["without_verdict"]:
        lines.append(f"answers without a verdict: {found['without_verdict']}")
    if found["self_agreement"]:
        lines.append(f"two answers to one question agree: {interval_cell(found['self_agreement'])}")
    if told := found["calibration"]:
        lines.append(
            f"confidence {told['confidence']:.3f}, right {told['correct']:.3f}; Brier score {_mean(told['brier'])} "
            f"(always 1/2: {told['brier_chance']:.3f}; always its share of right ones: {told['brier_constant']:.3f}); "
            f"calibration error {told['ece']:.3f} (if calibrated: {told['ece_chance']:.3f}, below "
            f"{told['ece_chance_high']:.3f} in 95%)"
        )
    return lines


def _rate(figure: dict[str, float] | None) -> str:
    return "-" if figure is None else format_interval(figure["rate"], figure["low"], figure["high"], digits=2)


def _mean(figure: dict[str, float] | None) -> str:
    return "-" if figure is None else format_interval(figure["mean"], figure["low"], figure["high"], digits=2)


if __name__ == "__main__":
    main()
