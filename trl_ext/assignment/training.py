"""Training runs on a student's functions: `python train.py --recipe dpo`, in the folder of an assignment.

The functions reach the library's trainers by the seams that everybody's do: a preference loss and a policy algorithm
are registered, an advantage is named in the algorithm, and a reward model's loss is the trainer's own step.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.assignment.catalog import task
from trl_ext.assignment.spec import RecipeSpec
from trl_ext.evaluation.command_line import CommandParser, one_line_errors
from trl_ext.files import read_yaml, write_json
from trl_ext.registry import nearest, policy_algorithm, preference_loss, preference_losses

LIBRARY = "library"


@dataclass
class Functions:
    """The functions of an assignment, the student's where the implementation has them, else the library's.

    Attributes:
        by_name: functions by name in the assignment.
        library: the name in the catalogue of each.
        own: names of those that are the student's.
    """

    by_name: dict[str, Callable]
    library: dict[str, str]
    own: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> Callable:
        if name not in self.by_name:
            raise ValueError(f"the assignment has no function {name!r}{nearest(name, list(self.by_name))}")
        return self.by_name[name]

    def of(self, library: str) -> Callable:
        """The function that stands for one of the catalogue, whatever it is called; the library's own if none does."""
        names = [name for name, known in self.library.items() if known == library]
        return self.by_name[names[0]] if names else task(library).function

    def describe(self, names: list[str]) -> str:
        """Whose the functions are."""
        whose = {True: "yours", False: "the library's"}
        return ", ".join(f"{name}: {whose[name in self.own]}" for name in names)


def load_functions(assignment: dict[str, Any], implementation: str) -> Functions:
    """The functions of an implementation.

    Args:
        assignment: what assignment.yaml holds.
        implementation: the package, one of its modules, any other module, or `library` for none.

    Raises:
        ValueError: there is no such module, or it has none of the functions.
    """
    listed = assignment["functions"]
    found = Functions(
        {name: task(entry["library"]).function for name, entry in listed.items()},
        {name: entry["library"] for name, entry in listed.items()},
    )
    if implementation == LIBRARY:
        return found
    for name, entry in listed.items():
        whole = implementation == assignment["package"]
        module = _import(f"{implementation}.{entry['module']}" if whole else implementation)
        function = vars(module).get(name)
        # What a module has from another one is not its own.
        if callable(function) and (whole or function.__module__ == module.__name__):
            found.by_name[name] = function
            found.own.add(name)
        elif whole:
            raise ValueError(f"{module.__file__} has no function {name!r}")
    if not found.own:
        raise ValueError(f"{implementation} has none of the assignment's functions: {', '.join(listed)}")
    return found


def _import(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"no module {name!r}: run this in the assignment's folder, or name another one") from None
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}: {error.msg}") from None


def register_preference_loss(functions: Functions, name: str) -> str:
    """Register a preference loss under its module's name, with what the library's needs; returns that name."""
    function = functions[name]
    entry = next(
        (preference_losses[known] for known in preference_losses if functions.library[name] == f"losses.{known}"), None
    )
    if entry is None:
        raise ValueError(f"{name!r} is no preference loss and cannot be trained on")
    registered = f"{function.__module__}.{name}"
    if registered not in preference_losses:
        needs = {"needs_reference": entry.needs_reference, "batch_coupled": entry.batch_coupled}
        preference_loss(registered, **needs, columns=entry.columns)(function)
    return registered


def register_policy_loss(functions: Functions, loss: str, advantage: str | None, max_new_tokens: int) -> str:
    """Register a whole policy loss and an advantage as an algorithm without a KL term; returns its name.

    The loss is a scalar, and an algorithm returns one for each response: it is the same for all of them, and their
    mean is the scalar again.
    """
    function = functions[loss]
    if not functions.library[loss].startswith("assignment."):
        raise ValueError(f"{loss!r} is no whole policy loss and cannot be trained on")
    options = {"max_new_tokens": max_new_tokens} if functions.library[loss].endswith("dr_grpo_loss") else {}

    def whole(scores):
        given = (scores.log_probs, scores.old_log_probs, scores.old_log_probs, scores.mask)
        scalar = function(*given, scores.advantages[:, 0], **options, kl_coef=0.0)
        return scalar.reshape(1, 1).expand(len(scores.mask), 1)

    whole.__name__ = whole.__qualname__ = f"{loss}_{max_new_tokens}"
    registered = f"{function.__module__}.{whole.__name__}"
    settings = {"advantage": functions[advantage]} if advantage else {}
    # Its name may be known from an earlier run in this process, and stand for the same.
    policy_algorithm(registered, ratio="token", aggregation="sequence_mean", beta=0.0, **settings)(whole)
    return registered


def known_score(prompts: list, completions: list, **columns: Any) -> list[float]:
    """The reward of the embedded benchmark: the known quality of each response."""
    from trl_ext.rewards.verified import completion_text
    from trl_ext.toy import score

    return [
        score(prompt[-1]["content"], completion_text(text)) for prompt, text in zip(prompts, completions, strict=True)
    ]


def _runner(recipe: RecipeSpec) -> Callable[..., dict[str, Any] | None]:
    if recipe.kind.endswith("loop"):
        from trl_ext.assignment.loops import run_loop

        return run_loop
    from trl_ext.assignment.trainer_runs import run_trainer

    return run_trainer


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, train, evaluate, and write the results."""
    parser = CommandParser(prog="train.py", description=__doc__)
    parser.add_argument(
        "--recipe", "--loss", "--algorithm", required=True, dest="recipe", help="a recipe of assignment.yaml"
    )
    parser.add_argument("--assignment", type=Path, default=Path("assignment.yaml"), help="default: assignment.yaml")
    parser.add_argument(
        "--implementation", help="default: the assignment's package; library for the library's functions"
    )
    parser.add_argument(
        "--output_dir", type=Path, help="default: runs/RECIPE, and runs/RECIPE-library for the library's"
    )
    parser.add_argument(
        "--reward_model", help="a folder to reward responses with; default: the benchmark's known score"
    )
    parser.add_argument("--eval_prompts", type=int, default=100, help="held-out prompts at the end; 0 for none")
    with one_line_errors():
        # Every other flag is a setting of the trainer.
        options, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
        assignment = read_yaml(options.assignment)
        recipes = assignment["recipes"]
        if options.recipe not in recipes:
            known = list(recipes)
            raise ValueError(f"no recipe {options.recipe!r}{nearest(options.recipe, known)} Known: {', '.join(known)}")
        sys.path.insert(0, str(options.assignment.resolve().parent))
        recipe = RecipeSpec.model_validate(recipes[options.recipe])
        functions = load_functions(assignment, options.implementation or assignment["package"])
        name = options.recipe if functions.own else f"{options.recipe}-{LIBRARY}"
        options.output_dir = options.output_dir or Path("runs") / name
        try:
            results = _runner(recipe)(recipe, functions, options, rest)
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        if results is not None:
            write_json(options.output_dir / "results.json", {"recipe": options.recipe, **results})
            print(f"{options.output_dir / 'results.json'}: {results['summary']}")


if __name__ == "__main__":
    main()
