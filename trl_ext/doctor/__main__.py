"""`trl-ext doctor`: why nothing is learned, from a recipe's configuration or the folder of a run.

`trl-ext doctor --recipe dpo --config run.yaml` builds the recipe's trainer with its data, and examines it. Further
flags are the recipe's own. `--steps 3` trains three steps in a temporary folder as well. `trl-ext doctor FOLDER` reads
what a run wrote. The exit code is 0 if no fault is found, 1 if one is, and 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence


def parser(*, of_recipe: bool) -> argparse.ArgumentParser:
    """The flags for one of the two forms; a recipe has flags of its own beside them."""
    parser = argparse.ArgumentParser(
        prog="trl-ext doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if not of_recipe:
        parser.add_argument("folder", help="folder of a finished or stuck run")
    parser.add_argument("--recipe", help="build the trainer of this recipe, such as dpo; other flags are passed on")
    parser.add_argument("--config", help="with --recipe: YAML file of its arguments")
    parser.add_argument("--steps", type=int, default=0, help="with --recipe: steps to train and watch, such as 3")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    of_recipe = any(word.partition("=")[0] == "--recipe" for word in arguments)
    flags, passed = parser(of_recipe=of_recipe).parse_known_args(arguments)
    if not of_recipe and (passed or flags.config or flags.steps):
        parser(of_recipe=False).error("a folder takes no flag but --json; a configuration needs its --recipe")
    # Imported only now, so that --help and a wrong command line take no time.
    from trl_ext.doctor.sources import examine_folder, examine_recipe

    try:
        # What recipes print must not mix with the report.
        with contextlib.redirect_stdout(sys.stderr):
            if of_recipe:
                given = ["--config", flags.config] if flags.config else []
                report = examine_recipe(flags.recipe, [*given, *passed], steps=flags.steps)
            else:
                report = examine_folder(flags.folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2) if flags.json else report.text(color=sys.stdout.isatty()))
    return 0 if report.healthy else 1


if __name__ == "__main__":
    raise SystemExit(main())
