"""Judge many policies against one another and rate them."""

from __future__ import annotations

import itertools
from pathlib import Path

from trl_ext.evaluation.command_line import format_table, one_line_errors, print_json
from trl_ext.evaluation.comparing.tournament import BASE, run_tournament
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.submissions.commands import (
    DEFAULT,
    add_judge_arguments,
    add_prompt_arguments,
    check_judge_arguments,
    judge_settings,
    judging_options,
    load_systems,
    make_judge,
    make_parser,
    show_estimates,
    usage_line,
)
from trl_ext.files import write_json

DESCRIPTION = """\
Bradley-Terry ratings with 95% intervals over prompts, and the win rates, of any number of policies and their
base, which is rated 1000. Every pair is judged in both orders; what the two orders do not agree on is a tie, which
counts as half a win.

cost    two questions per prompt and pair: k policies make k (k + 1) / 2 pairs with the base.
        ground_truth and reward_model cost computing time only; openai costs money: see --estimate first.
writes  tournament.json into --out; with openai, verdicts into --cache as they arrive.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, judge, rate and print."""
    parser = make_parser("tournament", DESCRIPTION)
    parser.add_argument("files", nargs="+", metavar="FILE", help="files of responses; their names name the policies")
    parser.add_argument("--out", type=Path, default=Path("tournament"), help="folder for the results" + DEFAULT)
    add_prompt_arguments(parser)
    add_judge_arguments(parser, rule=False)
    with one_line_errors():
        options = parser.parse_args(arguments)
        check_judge_arguments(options)
        prompts, base, policies = load_systems(options, options.files)
        if BASE in policies:
            raise ValueError(f"{BASE}.jsonl: the base takes part anyway; give its file with --base_jsonl")
        systems = {BASE: base, **policies}
        judge = make_judge(options, prompts)
        if options.estimate:
            pairs = {f"{a} - {b}": (systems[a], systems[b]) for a, b in itertools.combinations(systems, 2)}
            show_estimates(options, judge, prompts, pairs)
            return
        tournament = run_tournament(judge, prompts, systems, **judging_options(options))
        summary = {"judge": judge_settings(options, judge), **tournament.to_dict()}
        write_json(options.out / "tournament.json", summary)
    if options.json:
        print_json(summary)
        return
    rows = []
    for row in tournament.table():
        rating = f"{Estimate(row['rating'], row['low'], row['high']):.0f}"
        expected = (row["expected_against_base"], row["expected_low"], row["expected_high"])
        rows.append((row["name"], rating, f"{Estimate(*expected):.3f}"))
    print(format_table(("policy", "rating", "expected against the base"), rows))
    rates = {(match["first"], match["second"]): match["rate"] for match in tournament.matches}
    rates |= {(second, first): None if rate is None else 1 - rate for (first, second), rate in rates.items()}
    names = [name for name, *_ in rows]
    cells = [(name, *(rates.get((name, other)) for other in names)) for name in names]
    print(f"\nWin rate of the row against the column, ties as half:\n\n{format_table(('', *names), cells)}\n")
    if tournament.ratings.virtual_draws:
        print("somebody won or lost everything: a virtual draw was added to every pair, else ratings were infinite")
    print(usage_line(summary["usage"], options.judge))
    print(f"in {options.out}: tournament.json")


if __name__ == "__main__":
    main()
