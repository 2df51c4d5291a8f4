"""Judge candidates' responses against the base's, and candidates against one another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import format_table, one_line_errors, print_json
from trl_ext.evaluation.judging.protocol import Usage
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.statistics.win_rate import System
from trl_ext.evaluation.submissions.candidates import CandidateResult, compare_candidates, judge_candidate
from trl_ext.evaluation.submissions.commands import (
    add_judge_arguments,
    add_prompt_arguments,
    check_judge_arguments,
    interval_cell,
    judge_settings,
    judging_options,
    load_systems,
    make_judge,
    make_parser,
    show_estimates,
    usage_line,
)
from trl_ext.evaluation.submissions.rows import read_human_labels
from trl_ext.files import write_json, write_json_lines
from trl_ext.names import check_choice

DESCRIPTION = """\
Win rates of candidates against the base under a judge: every pair in both orders, ties dropped and ties as half, at
equal lengths, and with several candidates the paired differences between them on the same prompts. With --human_labels
of a random part of the prompts, also a win rate without the judge's bias.

cost    two questions per prompt and candidate. ground_truth and reward_model cost computing time only; openai costs
        money: see --estimate first. Its key is read from OPENAI_API_KEY.
writes  with openai, every verdict into --cache as it arrives: the same command goes on from there and pays for nothing
        twice. With --out the figures as JSON, with --verdicts what the judge said on every row.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, judge and print."""
    parser = make_parser("judge", DESCRIPTION)
    parser.add_argument("--candidate", nargs="+", required=True, metavar="FILE", help="files of responses")
    add_prompt_arguments(parser)
    add_judge_arguments(parser)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--verdicts", type=Path, help="write what the judge said on every row as JSONL")
    parser.add_argument(
        "--human_labels",
        nargs="+",
        default=[],
        metavar="[NAME=]FILE",
        help="JSONL with row_id and outcome: candidate, base or tie; NAME is a candidate's file without .jsonl",
    )
    with one_line_errors():
        options = parser.parse_args(arguments)
        check_judge_arguments(options)
        prompts, base, systems = load_systems(options, options.candidate)
        labels = _load_labels(options, list(systems), [row["row_id"] for row in prompts])
        judge = make_judge(options, prompts)
        if options.estimate:
            pairs = {name: (responses, base) for name, responses in systems.items()}
            show_estimates(options, judge, prompts, pairs)
            return
        judging = judging_options(options)
        results = [
            judge_candidate(judge, name, rows, prompts, base, human_labels=labels.get(name), **judging)
            for name, rows in systems.items()
        ]
        usage = sum((result.usage for result in results), Usage()).to_dict()
        summary = {
            "judge": judge_settings(options, judge),
            "rule": options.rule,
            "candidates": [result.to_dict() for result in results],
            "differences": compare_candidates(results, options.rule),
            "usage": usage,
        }
        if options.out:
            write_json(options.out, summary)
        if options.verdicts:
            rows = [{"candidate": result.name, **row} for result in results for row in result.verdicts]
            write_json_lines(options.verdicts, rows)
    if options.json:
        print_json(summary)
        return
    _print(results, summary)
    print(usage_line(usage, options.judge))


def _print(results: list[CandidateResult], summary: dict) -> None:
    header = ("candidate", "win rate, ties dropped", "ties as half", "at equal lengths", "tokens", "of the base")
    header += ("agreement", "position bias", "length bias", "errors")
    print(format_table(header, [_row(result) for result in results]))
    for row in summary["candidates"]:
        if row["human_labels"]:
            print(f"{row['name']}, {_labels_line(row['human_labels'])}")
    for row in summary["differences"]:
        first, second = row["candidates"]
        if row["difference"] is None:
            print(f"{first} minus {second}, {row['rule']}: no comparison counts for one of them")
            continue
        difference = f"{Estimate(row['difference'], row['low'], row['high']):.3f}"
        print(
            f"{first} minus {second}, {row['rule']}: {difference}, paired over {row['n']} prompts; "
            f"McNemar p {row['mcnemar']['p_value']:.4f}"
        )


def _row(result: CandidateResult) -> tuple:
    figures, controlled = result.win_rate.to_dict(), result.length_controlled
    return (
        result.name,
        interval_cell(figures["agreed"]),
        interval_cell(figures["half"]),
        "-" if controlled is None else f"{Estimate(controlled.rate, controlled.low, controlled.high):.3f}",
        result.mean_tokens,
        result.base_mean_tokens,
        figures["agreement_rate"],
        figures["position_bias"],
        controlled and controlled.length_coefficient,
        figures["n_errors"],
    )


def _load_labels(
    options: argparse.Namespace, names: Sequence[str], row_ids: Sequence[str]
) -> dict[str, dict[str, System]]:
    """The labels of `--human_labels` by name, each by row_id. A single name need not be given."""
    found: dict[str, dict[str, System]] = {}
    for given in options.human_labels:
        name, equals, path = given.partition("=")
        if not equals or Path(given).is_file():
            name, path = names[0], given
            if len(names) > 1:
                raise ValueError(f"--human_labels {given}: say whose labels they are, such as {name}={given}")
        check_choice("human_labels", name, names)
        if name in found:
            raise ValueError(f"--human_labels: two files for {name}: give one")
        found[name] = read_human_labels(path, row_ids)
    return found


def _labels_line(found: dict[str, Any]) -> str:
    """A win rate from human labels and a judge, beside the labels' own and the judge's."""
    return (
        f"human labels and judge: {Estimate(found['rate'], found['low'], found['high']):.3f}, like "
        f"{found['effective_n']:.0f} labels; {found['n_labels']} labels alone: {interval_cell(found['labels_only'])}; "
        f"judge alone: {found['judge_rate']:.3f} over {found['n_labels'] + found['n_unlabelled']} prompts"
    )


if __name__ == "__main__":
    main()
