"""Check a submission and pack it into an archive."""

from __future__ import annotations

from public_eval import THRESHOLDS
from trl_ext.evaluation.command_line import format_table, one_line_errors, print_json
from trl_ext.evaluation.submissions.assets import load_thresholds
from trl_ext.evaluation.submissions.commands import DEFAULT, add_data_arguments, data_options, make_parser
from trl_ext.evaluation.submissions.submission import pack_submission

DESCRIPTION = """\
Check the files of a submission as `grade` does and pack them, and no others, into an archive.

cost    seconds; nothing is judged and nothing is sent.
writes  --out. The same files give the same archive, byte for byte. Rows that would not be graded are named and
        refused; files that are missing are named, and packed without.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, pack and print."""
    parser = make_parser("pack", DESCRIPTION)
    parser.add_argument("folder", help="the submission, such as submission/")
    parser.add_argument("--out", default="submission.zip", help="the archive" + DEFAULT)
    parser.add_argument("--thresholds", default=THRESHOLDS, help="JSON whose keys are the methods of a submission")
    add_data_arguments(parser, base=False)
    with one_line_errors():
        options = parser.parse_args(arguments)
        methods = load_thresholds(options.thresholds)
        packed = pack_submission(options.folder, options.out, methods, **data_options(options))
    if options.json:
        print_json({"archive": options.out, **packed})
        return
    rows = [*packed["files"].items(), *((file, None) for file in packed["missing"])]
    print(format_table(("file", "bytes"), rows))
    for warning in packed["warnings"]:
        print(f"warning: {warning}")
    files = f"{len(packed['files'])} files, {len(packed['missing'])} missing"
    print(f"{options.out}: {files}, {packed['bytes']} bytes, SHA-256 {packed['sha256']}")


if __name__ == "__main__":
    main()
