"""The specification of an assignment: a YAML file, checked key by key."""

from __future__ import annotations

import builtins
import keyword
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from trl_ext.assignment.catalog.catalog import task
from trl_ext.assignment.train.recipe import RecipeSpec, check_measure, check_recipe
from trl_ext.files import brief, read_yaml
from trl_ext.registry import nearest

SPECS = Path(__file__).parents[1] / "specs"
SHIPPED = ("rlhf_project", "reasoning")
# Names used by other files of the package and its folder.
RESERVED = ("scores", "tests", "train")
# A package with one of these names would shadow another.
TAKEN = (*RESERVED, *sys.stdlib_module_names, "trl_ext", "torch", "trl", "transformers", "checking", "conftest")


def _no_name_of_python(value: str) -> str:
    if keyword.iskeyword(value) or value in dir(builtins):
        raise ValueError(f"{value!r} is a word of Python's; choose another")
    return value


Name = Annotated[
    str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=40), AfterValidator(_no_name_of_python)
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FunctionSpec(_Strict):
    """A function to implement: its name in the catalogue, its points, and its name in the assignment."""

    function: str
    name: Name | None = None
    points: float = Field(gt=0, allow_inf_nan=False)
    hint: str = ""

    @field_validator("function")
    @classmethod
    def _known(cls, value: str) -> str:
        task(value)
        return value

    @property
    def known_as(self) -> str:
        return self.name or task(self.function).short_name


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
    nan_padding: bool = True
    seconds: float = Field(30, gt=0, le=600)
    partial_credit: bool = False
    imports: Literal["zero", "ignore"] = "zero"


class ThresholdSpec(_Strict):
    """A threshold for a trained run: a figure in its results.json, given by a path of keys.

    With `zero_at`, points rise linearly from none at that figure to all at `at_least`.
    """

    recipe: str
    measure: str
    at_least: float = Field(allow_inf_nan=False)
    zero_at: float | None = Field(None, allow_inf_nan=False)
    points: float = Field(gt=0, allow_inf_nan=False)


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
    submission_points: float = Field(5, gt=0, allow_inf_nan=False)
    submission_zero_at: float | None = Field(None, allow_inf_nan=False)

    @field_validator("package")
    @classmethod
    def _imported_by_no_other(cls, value: str) -> str:
        if value in TAKEN:
            raise ValueError(f"{value!r} is the name of something else, which would be imported; choose another")
        return value

    @model_validator(mode="after")
    def _consistent(self):
        seen: dict[str, str] = {}
        for module, content in self.modules.items():
            if module in RESERVED:
                raise ValueError(f"modules: {module!r} is the name of another file; choose another")
            for each in content.functions:
                if each.known_as in seen:
                    raise ValueError(
                        f"modules.{module}: {each.known_as!r} is also in {seen[each.known_as]}; give one of them "
                        "another name"
                    )
                seen[each.known_as] = module
        library = {each.known_as: each.function for _, each in self.functions()}
        for name, recipe in self.recipes.items():
            _placed(f"recipes.{name}: ", check_recipe, recipe, library)
        for index, threshold in enumerate(self.thresholds):
            if threshold.recipe not in self.recipes:
                near = nearest(threshold.recipe, list(self.recipes))
                raise ValueError(f"thresholds[{index}]: no recipe {threshold.recipe!r}{near}")
            _placed(f"thresholds[{index}].", _check_zero, threshold.zero_at, threshold.at_least)
            kind = self.recipes[threshold.recipe].kind
            _placed(f"thresholds[{index}].measure: ", check_measure, threshold.measure, kind)
        if self.submission:
            _placed("submission: ", _check_submission, self.submission, list(self.recipes))
            _placed("submission_", _check_zero, self.submission_zero_at, min(self.submission.values()))
        return self

    def functions(self) -> list[tuple[str, FunctionSpec]]:
        """Pairs of module and function, in order."""
        return [(module, each) for module, content in self.modules.items() for each in content.functions]


def _placed(place: str, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None


def _check_zero(zero_at: float | None, at_least: float) -> None:
    if zero_at is not None and zero_at >= at_least:
        raise ValueError(f"zero_at must be below {at_least:g}, which earns all points, got {zero_at:g}")


def _check_submission(thresholds: dict[str, float], recipes: list[str]) -> None:
    from trl_ext.evaluation.submissions.assets import load_thresholds
    from trl_ext.evaluation.submissions.submission import METHODS, PART_TWO, REWARD_MODEL

    known = list(dict.fromkeys([*METHODS, *PART_TWO, REWARD_MODEL, *recipes]))
    for name in load_thresholds(thresholds):
        if name not in known:
            raise ValueError(f"no method {name!r}{nearest(name, known)} Known: {', '.join(known)}")


def load_spec(name: str | Path) -> AssignmentSpec:
    """Load a specification from a file, or a built-in one by its name.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the specification is invalid; the message names the file, the key, and the allowed values.
    """
    path = SPECS / f"{name}.yaml" if str(name) in SHIPPED else Path(name)
    if not path.is_file() and not path.suffix:
        raise ValueError(
            f"no specification {str(name)!r}{nearest(str(name), list(SHIPPED))} Shipped: {', '.join(SHIPPED)}"
        )
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold `key: value` lines")
    try:
        return AssignmentSpec.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{path}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    # Report an unknown key first, because it explains a missing one.
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"no such key{_keys_near(first['loc'])}"
    elif "input" in first and not isinstance(first["input"], (dict, list)) and first["type"] != "value_error":
        message += f", got {brief(repr(first['input']), 60)}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {message}{more}" if place else f"{message}{more}"


def _keys_near(location: tuple) -> str:
    """The keys that are allowed at the position of an unknown one."""
    model: Any = AssignmentSpec
    inner = {"modules": ModuleSpec, "functions": FunctionSpec, "tests": TestsSpec, "recipes": RecipeSpec}
    for part in location[:-1]:
        model = {**inner, "thresholds": ThresholdSpec}.get(part, model)
    allowed = list(model.model_fields)
    return f"{nearest(str(location[-1]), allowed)} Allowed: {', '.join(allowed)}"
