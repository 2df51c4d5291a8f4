"""`python -m trl_ext.assignment`: write an assignment from a solved package."""

from __future__ import annotations

from pathlib import Path

from trl_ext.evaluation.command_line import CommandParser, one_line_errors

DESCRIPTION = "Write an assignment, OUT with functions to implement and visible tests, and its grader, OUT_grader."


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments and write the folders."""
    parser = CommandParser(prog="python -m trl_ext.assignment", description=DESCRIPTION)
    parser.add_argument("--spec", required=True, help="rlhf_project, reasoning, or a folder of your own like theirs")
    parser.add_argument("--out", type=Path, required=True, help="the starter's folder")
    parser.add_argument("--solution", action="store_true", help="write the functions solved")
    with one_line_errors():
        options = parser.parse_args(arguments)
        from trl_ext.assignment.write import HERE, write_assignment

        shipped = HERE / "packages" / options.spec
        source = shipped if shipped.is_dir() else Path(options.spec)
        if not (source / "assignment.yaml").is_file():
            raise ValueError(f"--spec {options.spec}: give rlhf_project, reasoning or a folder with assignment.yaml")
        starter, grader = write_assignment(source, options.out, solution=options.solution)
    print(f"{starter}: the functions {'solved' if options.solution else 'to implement'}, their tests, README.md")
    print(f"{grader}: hidden tests and grade.py")


if __name__ == "__main__":
    main()
