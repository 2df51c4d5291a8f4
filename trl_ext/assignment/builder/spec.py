"""The specification of an assignment: a YAML file, checked key by key."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from trl_ext.assignment.catalog.catalog import task
from trl_ext.assignment.train.recipe import MEASURES, RecipeSpec, check_known, check_recipe
from trl_ext.files import brief, read_yaml
from trl_ext.registry import nearest

SPECS = Path(__file__).parents[1] / "specs"
SHIPPED = ("rlhf_project", "reasoning")
# A package with one of these names would shadow another.
TAKEN = {*sys.stdlib_module_names, "trl_ext", "torch", "trl", "transformers", "checking", "conftest", "tests", "train"}

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Points = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FunctionSpec(_Strict):
    """A function to implement: its name in the catalogue, its points, and a hint for its docstring."""

    function: str
    points: Points
    hint: str = ""

    @field_validator("function")
    @classmethod
    def _known(cls, value: str) -> str:
        return task(value).name

    @property
    def name(self) -> str:
        """Its name in the assignment."""
        return task(self.function).short_name


class ModuleSpec(_Strict):
    """A file of the package."""

    description: str
    functions: list[FunctionSpec] = Field(min_length=1)


class TestsSpec(_Strict):
    """The number of cases for each function, in addition to special ones, and their seeds.

    With `partial_credit` a function earns points in proportion to its hidden cases that pass, otherwise all or none.
    Without a `hidden_seed` each written assignment has different hidden cases. `imports: ignore` permits imports of
    the library.
    """

    visible: int = Field(4, ge=1, le=50)
    hidden: int = Field(8, ge=1, le=50)
    visible_seed: int = Field(1, ge=0, lt=2**31)
    hidden_seed: int | None = Field(None, ge=0, lt=2**31)
    seconds: float = Field(30, gt=0, le=600)
    partial_credit: bool = False
    imports: Literal["zero", "ignore"] = "zero"


class ThresholdSpec(_Strict):
    """A threshold for a trained run: a figure in its results.json, given by a path of keys.

    With `zero_at`, points rise linearly from none at that figure to all at `at_least`.
    """

    recipe: str
    measure: str
    at_least: Finite
    zero_at: Finite | None = None
    points: Points


class AssignmentSpec(_Strict):
    """An assignment.

    `submission` maps methods to thresholds for submitted responses, in the format of the public evaluation. The
    responses are judged, and each threshold reached earns `submission_points`. `submission_zero_at` works for all of
    them as `zero_at` does for a run.
    """

    title: str = Field(min_length=1)
    package: Name
    docstring: Literal["full", "shapes"] = "full"
    modules: dict[Name, ModuleSpec] = Field(min_length=1)
    tests: TestsSpec = TestsSpec()
    recipes: dict[Name, RecipeSpec] = {}
    thresholds: list[ThresholdSpec] = []
    submission: dict[str, float] = {}
    submission_points: Points = 5
    submission_zero_at: Finite | None = None

    @model_validator(mode="after")
    def _consistent(self):
        for name in {self.package} & TAKEN | set(self.modules) & {"scores"}:
            raise ValueError(f"{name!r} is the name of something else; choose another")
        library: dict[str, str] = {}
        for module, each in self.functions():
            if each.name in library:
                raise ValueError(f"modules.{module}: {each.function} has the name of {library[each.name]}")
            library[each.name] = each.function
        for name, recipe in self.recipes.items():
            check_recipe(name, recipe, library)
        for index, threshold in enumerate(self.thresholds):
            check_known(f"thresholds[{index}]: no recipe", threshold.recipe, self.recipes)
            measures = MEASURES[self.recipes[threshold.recipe].kind]
            check_known(f"thresholds[{index}].measure: no figure", threshold.measure, measures)
            _check_zero(f"thresholds[{index}].zero_at", threshold.zero_at, threshold.at_least)
        if self.submission:
            _check_submission(self.submission, list(self.recipes))
            _check_zero("submission_zero_at", self.submission_zero_at, min(self.submission.values()))
        return self

    def functions(self) -> list[tuple[str, FunctionSpec]]:
        """Pairs of module and function, in order."""
        return [(module, each) for module, content in self.modules.items() for each in content.functions]


def _check_zero(key: str, zero_at: float | None, at_least: float) -> None:
    if zero_at is not None and zero_at >= at_least:
        raise ValueError(f"{key} must be below {at_least:g}, which earns all points, got {zero_at:g}")


def _check_submission(thresholds: dict[str, float], recipes: list[str]) -> None:
    from trl_ext.evaluation.submissions.assets import load_thresholds
    from trl_ext.evaluation.submissions.submission import METHODS, PART_TWO, REWARD_MODEL

    known = list(dict.fromkeys([*METHODS, *PART_TWO, REWARD_MODEL, *recipes]))
    for name in load_thresholds(thresholds):
        check_known("submission: no method", name, known)


def load_spec(name: str | Path) -> AssignmentSpec:
    """Load a specification from a file, or a built-in one by its name.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the specification is invalid; the message names the file, the key, and the allowed values.
    """
    path = SPECS / f"{name}.yaml" if str(name) in SHIPPED else Path(name)
    if not path.is_file() and not path.suffix:
        near = nearest(str(name), list(SHIPPED))
        raise ValueError(f"no specification {str(name)!r}{near} Shipped: {', '.join(SHIPPED)}")
    try:
        return AssignmentSpec.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ValueError(f"{path}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    # Report an unknown key first, because it explains a missing one.
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        models = (AssignmentSpec, ModuleSpec, FunctionSpec, TestsSpec, RecipeSpec, ThresholdSpec)
        allowed = sorted({name for model in models for name in model.model_fields})
        message = f"no such key{nearest(str(first['loc'][-1]), allowed)}"
    elif isinstance(first["input"], (str, int, float)) and first["type"] != "value_error":
        message += f", got {brief(repr(first['input']), 60)}"
    return f"{place}: {message}" if place else message
