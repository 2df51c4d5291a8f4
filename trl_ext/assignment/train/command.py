"""Training runs on a student's functions: `python train.py --recipe dpo`, in the folder of an assignment."""

from __future__ import annotations

import sys
from pathlib import Path

from trl_ext.assignment.train.functions import LIBRARY, load_functions
from trl_ext.assignment.train.recipe import USED_BY_LOOPS, RecipeSpec, check_known
from trl_ext.evaluation.command_line import CommandParser, one_line_errors
from trl_ext.files import read_yaml, write_json


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, train, evaluate, and write the results."""
    parser = CommandParser(prog="train.py", description=__doc__)
    parser.add_argument("--recipe", required=True, help="a recipe of assignment.yaml")
    parser.add_argument("--assignment", type=Path, default=Path("assignment.yaml"), help="default: assignment.yaml")
    parser.add_argument("--implementation", help="default: the assignment's package; library for the library's")
    parser.add_argument("--output_dir", type=Path, help="default: runs/RECIPE, and runs/RECIPE-library")
    parser.add_argument(
        "--reward_model", help="of a policy recipe: a folder to reward responses with; default: the known score"
    )
    parser.add_argument("--eval_prompts", type=int, default=100, help="held-out prompts at the end; 0 for none")
    with one_line_errors():
        # Every other flag is a setting of the trainer.
        options, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
        assignment = read_yaml(options.assignment)
        check_known("no recipe", options.recipe, assignment["recipes"])
        sys.path.insert(0, str(options.assignment.resolve().parent))
        recipe = RecipeSpec.model_validate(assignment["recipes"][options.recipe])
        if options.reward_model and recipe.kind != "policy":
            raise ValueError(
                "--reward_model is used by recipes of the kind policy, and "
                f"{options.recipe} is of the kind {recipe.kind}"
            )
        functions = load_functions(assignment, options.implementation or assignment["package"])
        name = options.recipe if functions.own else f"{options.recipe}-{LIBRARY}"
        options.output_dir = options.output_dir or Path("runs") / name
        if recipe.kind in USED_BY_LOOPS:
            from trl_ext.assignment.train.loops import run_loop as run
        else:
            from trl_ext.assignment.train.trainers import run_trainer as run
        try:
            results = run(recipe, functions, options, rest)
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        if results is not None:
            write_json(options.output_dir / "results.json", {"recipe": options.recipe, **results})
            print(f"{options.output_dir / 'results.json'}: {results['summary']}")


if __name__ == "__main__":
    main()
