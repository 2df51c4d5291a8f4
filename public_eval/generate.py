"""Generate a policy's greedy responses to the public prompts."""

from __future__ import annotations

from trl_ext.evaluation.command_line import at_least_one, format_table, one_line_errors, print_json
from trl_ext.evaluation.submissions.assets import default_max_new_tokens
from trl_ext.evaluation.submissions.commands import DEFAULT, add_data_arguments, make_parser
from trl_ext.evaluation.submissions.submission import generate_submission_file

DESCRIPTION = """\
Greedy responses of a policy to the public prompts, in the format of submissions.

cost    one generation per prompt on this machine; no key, no network but for a model on the hub. The embedded model
        takes seconds on a CPU.
writes  --out, in parts, and beside it NAME.settings.json, which records how its rows are made. The same command
        resumes, and refuses rows of another model or of other settings.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, generate and print."""
    parser = make_parser("generate", DESCRIPTION)
    parser.add_argument("--model", required=True, help="toy, a folder of a model or of an adapter, or a hub model")
    parser.add_argument("--out", required=True, help="such as submission/policy_generations/aot.jsonl")
    add_data_arguments(parser, base=False, prefs=False)
    parser.add_argument("--batch_size", type=at_least_one, default=32, help="prompts per batch" + DEFAULT)
    dtype = "of the weights: float32, bfloat16, float16, or auto, which is as saved" + DEFAULT
    parser.add_argument("--dtype", default="auto", help=dtype)
    with one_line_errors():
        options = vars(parser.parse_args(arguments))
        as_json = options.pop("json")
        rows = generate_submission_file(**options)
    tokens = [row["generated_num_tokens"] for row in rows]
    limit = options["max_new_tokens"] or default_max_new_tokens(options["prompts_jsonl"])
    summary = {
        "file": options["out"],
        "model": options["model"],
        "rows": len(rows),
        "mean_tokens": sum(tokens) / len(tokens),
        "at_the_limit": sum(count >= limit for count in tokens) / len(tokens),
        "empty": sum(not row["response_text"].strip() for row in rows),
    }
    if as_json:
        print_json(summary)
    else:
        print(format_table(tuple(summary), [tuple(summary.values())]))


if __name__ == "__main__":
    main()
