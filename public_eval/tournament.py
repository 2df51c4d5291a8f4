"""Judge many policies against one another and rate them."""

from __future__ import annotations

from pathlib import Path

from trl_ext.evaluation.command_line import format_table, one_line_errors, print_json
from trl_ext.evaluation.comparing.tournament import BASE, run_tournament
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.submissions import commands
from trl_ext.files import write_json

DESCRIPTION = """\
Bradley-Terry ratings with 95% intervals over prompts of any number of policies and their base, which is rated 1000.
Every pair is judged in both orders; what the two orders do not agree on is a tie, which counts as half a win.

cost    two questions per prompt and pair: k policies make k (k + 1) / 2 pairs with the base.
        ground_truth and reward_model cost computing time only; openai costs money: see `judge --estimate` first.
writes  tournament.json into --out, with the win rate of every pair; with openai, verdicts into --cache as they arrive.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, judge, rate and print."""
    parser = commands.make_parser("tournament", DESCRIPTION)
    parser.add_argument("files", nargs="+", metavar="FILE", help="files of responses; their names name the policies")
    out = "folder for the results" + commands.DEFAULT
    parser.add_argument("--out", type=Path, default=Path("tournament"), help=out)
    commands.add_data_arguments(parser, prefs=False)
    commands.add_judge_arguments(parser)
    with one_line_errors():
        options = parser.parse_args(arguments)
        prompts, base, policies = commands.load_systems(options, options.files)
        if BASE in policies:
            raise ValueError(f"{BASE}.jsonl: the base takes part anyway; give its file with --base_jsonl")
        systems = {BASE: base, **policies}
        judge = commands.make_judge(options, prompts)
        found = run_tournament(judge, prompts, systems, **commands.judging_options(options))
        summary = {"judge": commands.judge_settings(options), **found}
        write_json(options.out / "tournament.json", summary)
    if options.json:
        print_json(summary)
        return
    rows = []
    for row in found["ratings"]:
        expected = Estimate(row["expected_against_base"], row["expected_low"], row["expected_high"])
        rating = Estimate(row["rating"], row["low"], row["high"])
        rows.append((row["name"], f"{rating:.0f}", f"{expected:.3f}"))
    print(format_table(("policy", "rating", "expected against the base"), rows))
    if found["virtual_draws"]:
        print("somebody won or lost everything: a virtual draw was added to every pair, else ratings were infinite")
    print(commands.usage_line(summary["usage"]))


if __name__ == "__main__":
    main()
