"""The report on any number of runs: `python -m trl_ext.evaluation.report runs/ --out report.html`.

It compares the runs found in and below the folders in one self-contained HTML file with tables, charts and the models'
responses side by side. It also writes the tables as Markdown. It only reads files and does not load any model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import CommandParser, one_line_errors
from trl_ext.evaluation.reporting.page import render_page
from trl_ext.evaluation.reporting.runs import find_runs
from trl_ext.evaluation.reporting.summary import summarize
from trl_ext.evaluation.reporting.tables import Table, render_markdown
from trl_ext.files import write_text

MAX_PROMPTS = 1000


def write_report(
    run_folders: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    max_prompts: int = MAX_PROMPTS,
    stages: Sequence[Table] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Write the report on runs as HTML, and its tables as Markdown.

    Args:
        run_folders: one or several folders; the runs in and below them are found by their `results.json`.
        out: the HTML file; the Markdown file has the same name with `.md`. Both are replaced atomically.
        max_prompts: maximum number of prompts in the browser of generations; the page says how many are left out.
        stages: additional tables, which come first in both files.

    Returns:
        Rows of `policies` and `reward_models`, whose `figures` by title and `tasks` hold an `Estimate` each; of
        `incomplete` runs; and of `problems`, the unreadable parts of a `file` of a `run`.

    Raises:
        FileNotFoundError: a folder does not exist.
        ValueError: there is no finished run, or `out` does not end in `.html`.
    """
    out = Path(out)
    if out.suffix != ".html":
        raise ValueError(f"--out {out}: must end in .html, so that the Markdown beside it has a name of its own")
    runs, incomplete = find_runs([run_folders] if isinstance(run_folders, (str, Path)) else run_folders)
    page = render_page(runs, incomplete, max_prompts=max_prompts, stages=stages)
    write_text(out, page)
    write_text(out.with_suffix(".md"), render_markdown(runs, incomplete, stages))
    return summarize(runs, incomplete)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. It exits with code 2 and one line if there is nothing to report."""
    with one_line_errors():
        parser = CommandParser(
            prog="python -m trl_ext.evaluation.report",
            description="Compare runs in one HTML file that needs no network, and their tables in a Markdown file.\n"
            "Reads the runs' files alone: it loads no model, asks no judge and costs nothing.",
        )
        parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folders that hold runs, at any depth")
        parser.add_argument(
            "--out", default="report.html", help="HTML file; the Markdown goes beside it (%(default)s)"
        )
        given = parser.parse_args(arguments)
        for row in write_report(given.folders, given.out)["incomplete"]:
            print(f"left out: {row['run']}: {row['reason']}")
        print(f"{given.out} and {Path(given.out).with_suffix('.md')}")


if __name__ == "__main__":
    main()
