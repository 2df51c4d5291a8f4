"""Score the public preference pairs with a reward model."""

from __future__ import annotations

from trl_ext.evaluation.command_line import at_least_one, format_table, one_line_errors, print_json
from trl_ext.evaluation.comparing.reward_models import reward_metrics
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.submissions.commands import DEFAULT, make_parser
from trl_ext.evaluation.submissions.submission import score_submission_file

DESCRIPTION = """\
A reward model's scores of both responses of every public pair, in the format of submissions, and its accuracy.

cost    two forward passes per pair on this machine; no key, no network but for a model on the hub. The embedded pairs
        take seconds on a CPU.
writes  --out, in place of an earlier file.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, score and print."""
    parser = make_parser("score", DESCRIPTION)
    parser.add_argument("--reward_model", required=True, help="folder or hub name of a reward model or its adapter")
    parser.add_argument("--out", required=True, help="such as submission/reward_model/public_test_pref_scores.jsonl")
    parser.add_argument("--prefs_jsonl", help="the course's pairs (default: the embedded ones)")
    parser.add_argument("--batch_size", type=at_least_one, default=16, help="responses per forward pass" + DEFAULT)
    parser.add_argument("--dtype", default="float32", help="of the weights: float32, bfloat16 or float16" + DEFAULT)
    with one_line_errors():
        options = vars(parser.parse_args(arguments))
        as_json = options.pop("json")
        rows = score_submission_file(**options)
        metrics = reward_metrics([row["chosen_score"] for row in rows], [row["rejected_score"] for row in rows])
    if as_json:
        print_json({"file": options["out"], "model": options["reward_model"], **metrics})
        return
    accuracy = f"{Estimate(metrics['accuracy'], metrics['low'], metrics['high']):.3f}"
    row = (options["out"], metrics["n"], accuracy, metrics["ties"], metrics["margin"], metrics["ece"])
    print(format_table(("file", "pairs", "accuracy", "ties", "mean margin", "ECE"), [row]))


if __name__ == "__main__":
    main()
