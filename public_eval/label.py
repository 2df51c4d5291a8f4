"""Label pairs of responses by hand, blind, in the terminal or in a browser; and the agreement of two people."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from trl_ext.data.formats import plain_prompt
from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation.command_line import format_interval, one_line_errors, print_json
from trl_ext.evaluation.statistics.agreement import cohen_kappa
from trl_ext.evaluation.submissions.commands import add_prompt_arguments, load_systems, make_parser
from trl_ext.evaluation.submissions.labelling import LabelSession, read_uncertainty
from trl_ext.evaluation.submissions.rows import read_human_labels
from trl_ext.files import write_text

DESCRIPTION = """\
Shows a candidate's and the base's response to one prompt after another, in a random order and without their names, and
asks which is better: 1, 2, t (tie), s (skip), u (undo) or q (quit). The labels are for `judge --human_labels`.

writes  every label into --out at once: the same command goes on from there. With --page instead one HTML file, in
        which a browser collects the labels by the same keys and downloads them.
order   random; stop whenever you want, but not because of the labels. With --verdicts of a judge, rows on which it is
        uncertain tend to come first, and the labels have weights that keep the win rate unbiased.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, and label, write the page, or compare two files."""
    parser = make_parser("label", DESCRIPTION)
    parser.add_argument("--candidate", metavar="FILE", help="file of responses")
    add_prompt_arguments(parser)
    parser.add_argument("--out", default="labels.jsonl", help="the labels (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="write an HTML file to label in, and do not ask here")
    parser.add_argument("--seed", type=int, default=0, help="of the order (default: %(default)s)")
    parser.add_argument("--verdicts", nargs="+", metavar="FILE", help="files of `judge --verdicts`")
    parser.add_argument("--agreement", nargs=2, metavar="FILE", help="compare two files of labels: Cohen's kappa")
    with one_line_errors():
        options = parser.parse_args(arguments)
        if bool(options.agreement) == bool(options.candidate):
            raise ValueError("give a --candidate to label, or two files of labels to --agreement")
        if options.agreement:
            found = agreement(*options.agreement)
            kappa = format_interval(found["kappa"], found["low"], found["high"])
            told = f"kappa {kappa} over {found['n']} rows; they agree on {found['observed']:.3f}"
        else:
            session = open_session(options)
            if options.page:
                write_text(options.page, session.page("Which response is better?"))
            else:
                # With --json, only the result goes to standard output.
                with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
                    ask(session)
            labels, pairs, out = len(session.rows()), len(session.pairs), str(options.page or options.out)
            found, told = {"labels": labels, "pairs": pairs, "out": out}, f"{labels} of {pairs} pairs labelled; {out}"
    print_json(found) if options.json else print(told)


def open_session(options) -> LabelSession:
    """The session that the flags describe; ValueError or FileNotFoundError if a file is wrong or missing."""
    prompts, base, systems = load_systems(options, [options.candidate])
    [(name, responses)] = systems.items()
    pairs = {}
    for row, own, other in zip(prompts, responses, base, strict=True):
        alone = isinstance(row["prompt"], str) or len(row["prompt"]) == 1
        asked = row["prompt_text"] if alone else plain_prompt(row["prompt"]).strip()
        pairs[row["row_id"]] = {"prompt": asked, "candidate": own.text, "base": other.text}
    sizes = read_uncertainty(options.verdicts, name, list(pairs)) if options.verdicts else None
    if sizes:
        # That equal responses tie is known without a label.
        equal = [row_id for row_id, pair in pairs.items() if pair["candidate"] == pair["base"]]
        sizes |= dict.fromkeys(equal, min(sizes.values()))
    return LabelSession(pairs, None if options.page else options.out, seed=options.seed, sizes=sizes)


def ask(session: LabelSession) -> None:
    """Ask about one pair after another, until the last or `q`."""
    while (row_id := session.next()) is not None:
        shown = dict(zip(("prompt", "1", "2"), ("prompt", *session.shown(row_id)), strict=True))
        for title, name in shown.items():
            print(f"\n---- {title} ----\n{printable(session.pairs[row_id][name]) or '(empty)'}")
        print(f"\n{len(session.rows())} labelled, {len(session.pairs) - len(session.labels)} left")
        choice = ""
        while choice not in ("1", "2", "t", "s", "u", "q"):
            try:
                choice = input("better: 1, 2, t(ie), s(kip), u(ndo), q(uit)? ").strip().lower()
            except EOFError:
                choice = "q"
        if choice == "q":
            return
        session.undo() if choice == "u" else session.label(row_id, choice)


def printable(text: str) -> str:
    """A response without control characters, which could change what the terminal shows."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text.strip())


def agreement(*paths: str) -> dict[str, float | None]:
    """`cohen_kappa` on the rows that both labelled; ValueError or FileNotFoundError if there are none."""
    files = [read_human_labels(path, [str(row.get("row_id")) for _, row in read_jsonl(path).rows]) for path in paths]
    shared = [row_id for row_id in files[0] if row_id in files[1]]
    if not shared:
        raise ValueError(f"{' and '.join(paths)} share no row_id")
    return cohen_kappa(*([labels[row_id].outcome for row_id in shared] for labels in files))


if __name__ == "__main__":
    main()
