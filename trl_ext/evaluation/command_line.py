"""Shared by the evaluation's commands: one-line errors, tables, and JSON for other programs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trl_ext.evaluation.judging.protocol import JudgeError
from trl_ext.names import nearest
from trl_ext.processes import quiet_when_closed


class CommandParser(argparse.ArgumentParser):
    """Raises ValueError for a wrong command line, with the nearest flag, instead of printing all the usage."""

    def __init__(self, **keywords: Any):
        # A command of the installed package shows its own name in --help.
        if sys.argv[0].startswith("trl-ext "):
            keywords["prog"] = sys.argv[0]
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)

    def parse_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        # Check this before argparse complains about a required flag that was misspelt.
        for argument in args:
            flag = argument.split("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                flags = [known[2:] for known in self._option_string_actions if known.startswith("--")]
                raise ValueError(f"unknown flag {flag}{nearest(flag[2:], flags)}")
        return super().parse_args(args, namespace)

    def error(self, message: str):
        raise ValueError(message)


def at_least_one(text: str) -> int:
    """The type of a flag that takes a count of one or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit with `error: ...` and code 2 on errors that a user can fix; TRL_EXT_TRACEBACK=1 shows the traceback."""
    try:
        with quiet_when_closed():
            yield
    except KeyboardInterrupt as interrupt:
        kept = str(interrupt) or "what was finished is kept, and the same command resumes from there"
        print(f"\ninterrupted: {kept}", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError, ImportError, JudgeError) as error:
        if os.environ.get("TRL_EXT_TRACEBACK"):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows under a header in aligned columns; numbers are right-aligned and have three decimals unless whole."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [all(_is_number(value) for value in column) for column in zip(*rows, strict=True)] or [False] * len(header)

    def line(values: Sequence[str]) -> str:
        pairs = zip(values, widths, right, strict=True)
        return "  ".join(v.rjust(w) if r else v.ljust(w) for v, w, r in pairs).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, cells)])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The same table in Markdown."""
    lines = [[*header], ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def print_json(value: Any) -> None:
    """Print a result for another program to read. NaN and infinities raise an error, since JSON has none."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=dataclasses.asdict))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
