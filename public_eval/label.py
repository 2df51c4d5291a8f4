"""Label pairs of responses by hand, blind, in the terminal or in a browser; and the agreement of two people."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation.command_line import format_interval, one_line_errors, print_json
from trl_ext.evaluation.statistics.agreement import cohen_kappa
from trl_ext.evaluation.submissions.assets import default_max_new_tokens, load_base, load_prompts
from trl_ext.evaluation.submissions.commands import add_prompt_arguments, make_parser
from trl_ext.evaluation.submissions.labelling import LabelSession, make_pairs, read_uncertainty
from trl_ext.evaluation.submissions.rows import read_human_labels, read_responses, refuse_fatal
from trl_ext.files import existing_file, write_text

DESCRIPTION = """\
Shows a candidate's and the base's response to one prompt after another, in a random order and without their names, and
asks which is better: 1, 2, t (tie), s (skip), u (undo) or q (quit). The labels are for `judge --human_labels`.

writes  every label into --out at once: the same command goes on from there. With --page instead one HTML file, in
        which a browser collects the labels by the same keys and downloads them.
order   random; stop whenever you want, but not because of the labels. With --verdicts of a judge, rows on which it is
        uncertain tend to come first, and the labels have weights that keep the win rate unbiased.
"""
CHOICES = {"1": "1", "2": "2", "t": "tie", "tie": "tie", "s": "skip", "skip": "skip", "u": "undo", "undo": "undo"}


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, and label, write the page, or compare two files."""
    parser = make_parser("label", DESCRIPTION)
    parser.add_argument("--candidate", metavar="FILE", help="file of responses")
    add_prompt_arguments(parser)
    parser.add_argument("--out", default="labels.jsonl", help="the labels (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="write an HTML file to label in, and do not ask here")
    parser.add_argument("--seed", type=int, default=0, help="of the order (default: %(default)s)")
    parser.add_argument("--verdicts", nargs="+", default=[], metavar="FILE", help="files of `judge --verdicts`")
    parser.add_argument("--agreement", nargs=2, metavar="FILE", help="compare two files of labels: Cohen's kappa")
    with one_line_errors():
        options = parser.parse_args(arguments)
        if bool(options.agreement) == bool(options.candidate):
            raise ValueError("give a --candidate to label, or two files of labels to --agreement")
        if options.agreement:
            compare(*options.agreement, options.json)
            return
        session = open_session(options)
        if options.page:
            write_text(options.page, session.page("Which response is better?"))
            print(f"open {options.page} in a browser: {len(session.pairs)} pairs")
            return
        # With --json, only the result goes to standard output.
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            ask(session)
        found = [row["outcome"] for row in session.rows()]
    if options.json:
        print_json({"out": options.out, "n": len(found), **{name: found.count(name) for name in sorted({*found})}})
    else:
        print(f"{len(found)} labels in {options.out}")


def open_session(options: Any) -> LabelSession:
    """The session that the flags describe.

    Raises:
        ValueError, FileNotFoundError: a file is missing or wrong.
    """
    prompts = load_prompts(options.prompts_jsonl)
    limit = options.max_new_tokens or default_max_new_tokens(options.prompts_jsonl)
    base = load_base(prompts, options.base_jsonl, max_new_tokens=limit)
    responses, problems = read_responses(existing_file(options.candidate), prompts, max_new_tokens=limit)
    refuse_fatal(problems)
    row_ids, name = [row["row_id"] for row in prompts], Path(options.candidate).stem
    sizes = read_uncertainty(options.verdicts, name, row_ids) if options.verdicts else None
    path = None if options.page else options.out
    return LabelSession(make_pairs(prompts, responses, base), path, seed=options.seed, sizes=sizes)


def ask(session: LabelSession) -> None:
    """Ask about one pair after another, until the last or `q`."""
    while (pair := session.next()) is not None:
        parts = {"prompt": pair.prompt}
        parts |= {str(place): getattr(pair, system) for place, system in enumerate(session.shown(pair.row_id), 1)}
        for title, text in parts.items():
            print(f"\n---- {title} ----\n{printable(text) or '(empty)'}")
        done = len(session.rows())
        print(f"\n{done} labelled, {len(session.pairs) - len(session.labels)} left")
        choice = ""
        while choice not in CHOICES:
            try:
                choice = input("better: 1, 2, t(ie), s(kip), u(ndo), q(uit)? ").strip().lower()
            except EOFError:
                choice = "q"
            if choice in ("q", "quit"):
                return
        if CHOICES[choice] == "undo":
            session.undo() or print("there is nothing to take back")
        else:
            session.label(pair.row_id, CHOICES[choice])


def printable(text: str) -> str:
    """A response without control characters, which could change what the terminal shows."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text.strip())


def compare(first: str, second: str, as_json: bool) -> None:
    """Print the agreement of two people on the rows that both labelled.

    Raises:
        ValueError, FileNotFoundError: a file is missing or wrong, or they share no row.
    """
    files = []
    for path in (first, second):
        row_ids = [str(row.get("row_id")) for _, row in read_jsonl(path).rows]
        files.append(read_human_labels(path, row_ids))
    shared = [row_id for row_id in files[0] if row_id in files[1]]
    if not shared:
        raise ValueError(f"{first} and {second} share no row_id")
    found = cohen_kappa(*([labels[row_id].outcome for row_id in shared] for labels in files))
    if as_json:
        print_json(found.to_dict())
        return
    kappa = format_interval(found.kappa, found.low, found.high)
    print(f"kappa {kappa} over {found.n} rows; agreed on {found.observed:.3f}, {found.by_chance:.3f} by chance")


if __name__ == "__main__":
    main()
