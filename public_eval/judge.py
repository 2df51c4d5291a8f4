"""Judge candidates' responses against the base's, and candidates against one another."""

from __future__ import annotations

import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import format_table, one_line_errors, print_json
from trl_ext.evaluation.judging.pairs import distinct_questions, make_questions, open_cache
from trl_ext.evaluation.judging.protocol import Usage
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.statistics.paired import paired_difference
from trl_ext.evaluation.submissions import commands
from trl_ext.evaluation.submissions.assets import read_human_labels
from trl_ext.evaluation.submissions.candidates import CandidateResult, both_systems, judge_candidate
from trl_ext.files import write_json_lines

DESCRIPTION = """\
Win rates of candidates against the base under a judge: every pair in both orders, ties dropped and ties as half, at
equal lengths, and with several candidates the paired differences between them on the same prompts.

cost    two questions per prompt and candidate. ground_truth and reward_model cost computing time only; openai costs
        money: see --estimate first. Its key is read from OPENAI_API_KEY.
writes  with openai, every verdict into --cache as it arrives: the same command resumes and pays for nothing twice.
"""
HEADER = ("candidate", "win rate, ties dropped", "ties as half", "at equal lengths", "tokens", "of the base")
HEADER += ("agreement", "position bias", "length bias", "errors")


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, judge and print."""
    parser = commands.make_parser("judge", DESCRIPTION)
    parser.add_argument("--candidate", nargs="+", required=True, metavar="FILE", help="files of responses")
    commands.add_data_arguments(parser, prefs=False)
    commands.add_judge_arguments(parser)
    parser.add_argument("--estimate", action="store_true", help="count questions and tokens, and send nothing")
    parser.add_argument("--verdicts", type=Path, help="write what the judge said on every row as JSONL")
    labels = "of a random part of the prompts, for a win rate without the judge's bias: JSONL with row_id and outcome"
    parser.add_argument("--human_labels", metavar="FILE", help=labels + " (candidate, base or tie)")
    with one_line_errors():
        options = parser.parse_args(arguments)
        prompts, base, systems = commands.load_systems(options, options.candidate)
        if (labels := options.human_labels) is not None:
            if len(systems) > 1:
                raise ValueError("--human_labels are of one --candidate: judge each alone")
            labels = read_human_labels(labels, [row["row_id"] for row in prompts])
        judge = commands.make_judge(options, prompts)
        if options.estimate:
            _estimate(options, judge, prompts, base, systems)
            return
        judging = commands.judging_options(options)
        results = [
            judge_candidate(judge, name, responses, prompts, base, human_labels=labels, **judging)
            for name, responses in systems.items()
        ]
        summary = {
            "judge": commands.judge_settings(options),
            "candidates": [result.to_dict() for result in results],
            "differences": [
                {"candidates": [a.name, b.name], **paired_difference(a.outcomes, b.outcomes).to_dict()}
                for a, b in itertools.combinations(results, 2)
            ],
            "usage": vars(sum((result.usage for result in results), Usage())),
        }
        if options.verdicts:
            rows = [{"candidate": result.name, **row} for result in results for row in result.verdicts]
            write_json_lines(options.verdicts, rows)
    if options.json:
        print_json(summary)
        return
    print(format_table(HEADER, [_row(result) for result in results]))
    if found := results[0].human_labels:
        print(
            f"human labels and judge: {Estimate(found.rate, found.low, found.high):.3f}, like "
            f"{found.effective_n:.0f} labels; {found.n_labels} labels alone: "
            f"{commands.interval_cell(vars(found.labels_only))}; "
            f"judge alone: {found.judge_rate:.3f} over {found.n_labels + found.n_unlabelled} prompts"
        )
    for row in summary["differences"]:
        difference = f"{Estimate(row['difference'], row['low'], row['high']):.3f}, paired over {row['n']} prompts"
        p_value = f"McNemar p {row['mcnemar']['p_value']:.4f}"
        print(f"{' minus '.join(row['candidates'])}, ties dropped: {difference}; {p_value}")
    print(commands.usage_line(summary["usage"]))


def _estimate(options: Namespace, judge: Any, prompts: list, base: list, systems: dict[str, list]) -> None:
    """Print how many questions judging would ask, how many the cache has, and their tokens, a quarter of the bytes."""
    counts = []
    for name, responses in systems.items():
        questions = distinct_questions(make_questions(judge, prompts, **both_systems(responses, base)))
        with open_cache(judge, options.cache if Path(options.cache).is_file() else None) as cache:
            missing = [one for one in questions if cache is None or cache.get(one.key) is None]
        tokens = getattr(judge, "estimate_tokens", lambda *_: 0)
        asked = sum(tokens(one.prompt, one.response_a, one.response_b) for one in missing)
        counts.append((name, len(missing), len(questions) - len(missing), asked))
    header = ("candidate", "calls", "cached", "input_tokens")
    if options.json:
        print_json([dict(zip(header, row, strict=True)) for row in counts])
    else:
        print(f"{format_table(header, counts)}\nnothing was sent; an answer has about 150 tokens, more with reasoning")


def _row(result: CandidateResult) -> tuple:
    rates, controlled = result.win_rate, result.length_controlled
    return (
        result.name,
        commands.interval_cell(vars(rates.agreed)),
        commands.interval_cell(vars(rates.half)),
        "-" if controlled is None else f"{Estimate(controlled.rate, controlled.low, controlled.high):.3f}",
        result.mean_tokens,
        result.base_mean_tokens,
        rates.agreement_rate,
        rates.position_bias,
        controlled and controlled.length_coefficient,
        rates.n_errors,
    )


if __name__ == "__main__":
    main()
