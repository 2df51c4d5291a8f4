"""The plan of a comparison of methods, read from its command line and files and checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.data.benchmark import EMBEDDED
from trl_ext.files import brief, read_yaml
from trl_ext.names import nearest
from trl_ext.runs import SCRIPTS
from trl_ext.runs.configs import read_config
from trl_ext.runs.studies.processes import launcher_options

PAIR_RECIPES = ("aot", "dpo", "ipo", "kto", "preference")
# Methods that learn from demonstrations.
DEMONSTRATION_RECIPES = ("sft",)
# Methods that need a reward model.
ONLINE_RECIPES = ("dr_grpo", "grpo", "gspo", "online", "online_preference", "ppo", "remax", "rloo")
# Methods that are evaluated on problems with known answers.
REASONING_RECIPES = ("expert_iteration", "grpo_math", "sft_math")
RECIPES = (*PAIR_RECIPES, *DEMONSTRATION_RECIPES, *ONLINE_RECIPES, *REASONING_RECIPES)
CONFIG_KEYS = ("baseline", "common", "reward_model", "methods")


@dataclass(frozen=True)
class Method:
    """A method of the comparison: its name, its recipe, and the arguments that all its seeds share."""

    name: str
    recipe: str
    arguments: dict[str, Any]

    @property
    def needs_reward_model(self) -> bool:
        return self.recipe in ONLINE_RECIPES and not {"reward_model", "reward_function"} & set(self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments, and what their configuration file adds."""
        config = read_config(self.arguments["config"]) if "config" in self.arguments else {}
        return {**config, **self.arguments}

    @property
    def evaluated_on(self) -> str:
        """`problems` with known answers, or `prompts`."""
        return "problems" if self.recipe in REASONING_RECIPES else "prompts"


@dataclass(frozen=True)
class Plan:
    """A comparison as requested; the runs of all methods share one folder."""

    methods: list[Method]
    baseline: str
    seeds: list[int]
    folder: Path
    reward_model: dict[str, Any] = field(default_factory=dict)
    launcher: list[str] = field(default_factory=list)
    metric: str | None = None


def read_plan(given) -> Plan:
    """The comparison that the command line and its files describe."""
    path = Path(given.config or "--methods")
    content = read_keys(given.config, CONFIG_KEYS) if given.config else {}
    known = content.get("methods") or {}
    if not isinstance(known, dict):
        raise ValueError(f"{path}: methods must hold `name: arguments` lines")
    common = read_arguments(path, "common", content.get("common") or {})
    if given.max_steps is not None:
        common = {**common, "max_steps": given.max_steps}
    names = given.methods.split(",") if given.methods else list(known)
    methods = [_method(path, name.strip(), known, common, to_run=not given.runs) for name in names]
    if not methods:
        raise ValueError("no methods: name some with --methods dpo,ipo, or in a file with --config")
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"--methods {given.methods}: a method is named twice")
    if not given.runs:  # Finished runs are checked by the prompts that they answered.
        _check_one_kind(methods)
    baseline = given.baseline or content.get("baseline") or names[0]
    choices = names if given.baseline else list(dict.fromkeys([*known, *names]))
    if baseline not in choices:
        raise ValueError(f"the baseline {baseline!r} is not among the methods: {', '.join(choices)}")
    reward_model = read_arguments(path, "common", content.get("reward_model") or {})
    return Plan(
        methods,
        baseline if baseline in names else names[0],  # A file's baseline may be none of those that --methods chose.
        read_seeds(given.seeds),
        Path(given.output_dir),
        reward_model=with_config_found(path, reward_model),
        launcher=launcher_options(given.accelerate_config),
        metric=given.metric,
    )


def read_seeds(text: str) -> list[int]:
    """Read `0-4` or `0,2,7` as numbers."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or dash and not last.isdecimal():
            raise ValueError(f"--seeds {text}: give numbers from 0, such as 0-4 or 0,2,7")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text}: {'a seed is given twice' if seeds else 'no seed is given'}")
    return seeds


def _check_one_kind(methods: Sequence[Method]) -> None:
    """Reject a mix of methods that share no kind of evaluation."""
    kinds = {method.evaluated_on: method.name for method in methods}
    if len(kinds) > 1:
        raise ValueError(
            f"{kinds['problems']} is evaluated on problems with known answers and {kinds['prompts']} on prompts: "
            "compare them apart"
        )


def check_metric(plan: Plan) -> None:
    """Raise ValueError for runs that leave no score: on other prompts than the embedded ones, without a metric."""
    for method in plan.methods:
        named = method.settings.get("dataset_name", "toy")
        if plan.metric is None and method.evaluated_on == "prompts" and named not in EMBEDDED:
            raise ValueError(
                f"{named} comes with no judge, so that runs on it leave no score to compare: name a number in their "
                "generations.jsonl with --metric, or run each seed alone with --array_index and judge the responses "
                "with python -m public_eval.judge"
            )


def _method(path: Path, name: str, known: dict[str, Any], common: dict[str, Any], *, to_run: bool) -> Method:
    if not name.isidentifier():
        raise ValueError(f"{name!r} cannot be a method's name: it is part of its folders'")
    own = known.get(name) or {}
    arguments = {**common, **(read_arguments(path, f"methods, {name}", own) if own else {})}
    recipe = str(arguments.pop("recipe", name))
    if to_run and recipe not in RECIPES:
        choices = list(RECIPES) if own else list(dict.fromkeys([*known, *RECIPES]))
        raise ValueError(f"no method {recipe!r}{nearest(recipe, choices)} Known: {', '.join(choices)}")
    return Method(name, recipe, with_config_found(path, arguments))


# ---- Files ----


def read_keys(path: str | Path, keys: Sequence[str]) -> dict[str, Any]:
    """The mapping in a YAML file."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold `key: value` lines")
    for key in content:
        if key not in keys:
            raise ValueError(f"{path}: unknown key {brief(key)!r}{nearest(brief(key), keys)} Known: {', '.join(keys)}")
    return content


def read_arguments(path: Path, what: str, value: Any) -> dict[str, Any]:
    """A mapping of a recipe's arguments, without those that a study sets itself."""
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {what} must hold `argument: value` lines, got {brief(repr(value), 100)}")
    for name in value:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{path}: {what}: {brief(repr(name))} is no argument")
        if name in ("output_dir", "overwrite_output_dir", "resume_from_checkpoint"):
            raise ValueError(f"{path}: {what}: {name} is set by the study: leave it out")
    return value


def with_config_found(path: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the path of their configuration resolved by `find_shipped`."""
    if "config" not in arguments:
        return arguments
    what = f"{path}: no configuration file {str(arguments['config'])!r}"
    return {**arguments, "config": str(find_shipped(arguments["config"], what))}


def find_shipped(name: str | Path, missing: str) -> Path:
    """Find a file relative to the working directory, or to the parent of the recipes' folder."""
    found = next((place for place in (Path(name), SCRIPTS / name) if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(missing)
    return found
