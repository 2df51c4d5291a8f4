"""`python -m trl_ext.assignment`: write an assignment from a specification."""

from __future__ import annotations

from pathlib import Path

from trl_ext.evaluation.command_line import CommandParser, format_table, one_line_errors

DESCRIPTION = """\
Writes an assignment: OUT with the functions to implement and their visible tests, and OUT_grader with the hidden ones.
SPEC is a YAML file, or rlhf_project or reasoning, which are shipped.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments and write the folders."""
    parser = CommandParser(prog="python -m trl_ext.assignment", description=DESCRIPTION)
    parser.add_argument("--spec", help="a YAML file, rlhf_project or reasoning")
    parser.add_argument("--out", type=Path, help="the starter's folder")
    parser.add_argument("--solution", action="store_true", help="write the functions solved")
    parser.add_argument(
        "--replace", action="store_true", help="write anew an assignment that is there, which is kept: NAME.old-1"
    )
    parser.add_argument("--list", action="store_true", help="list the functions that a specification can name")
    with one_line_errors():
        options = parser.parse_args(arguments)
        if options.list:
            from trl_ext.assignment.catalog.catalog import TASKS

            print(format_table(("function", "kind", "task"), [(x.name, x.kind, x.summary) for x in TASKS.values()]))
            return
        if options.spec is None or options.out is None:
            raise ValueError("give --spec and --out, or --list")
        from trl_ext.assignment.builder.spec import load_spec
        from trl_ext.assignment.builder.writing import grader_folder, write_assignment
        from trl_ext.assignment.train.recipe import check_settings

        spec = load_spec(options.spec)
        check_settings(spec.recipes)
        kept = write_assignment(spec, options.out, solution=options.solution, replace=options.replace)
    what = "solved" if options.solution else "to implement"
    print(f"{options.out}: {len(spec.functions())} functions {what}, their tests, README.md")
    print(f"{grader_folder(options.out)}: hidden tests and grade.py")
    for folder in kept:
        print(f"{folder}: what was there before")


if __name__ == "__main__":
    main()
