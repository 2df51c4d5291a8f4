"""The plan of a comparison of methods, read from its command line and files and checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.data.benchmark import EMBEDDED
from trl_ext.files import brief, read_yaml
from trl_ext.registry import nearest
from trl_ext.runs.studies import sweep
from trl_ext.runs.studies.processes import launcher_options

PAIR_RECIPES = ("aot", "dpo", "ipo", "kto", "preference")
# Methods that learn from demonstrations.
DEMONSTRATION_RECIPES = ("rlhf_sft",)
# Methods that need a reward model.
ONLINE_RECIPES = ("dr_grpo", "grpo", "gspo", "online_preference", "policy", "ppo", "remax", "rloo")
# Methods that are evaluated on problems with known answers.
REASONING_RECIPES = ("expert_iteration", "grpo_math", "sft")
RECIPES = (*PAIR_RECIPES, *DEMONSTRATION_RECIPES, *ONLINE_RECIPES, *REASONING_RECIPES)
CONFIG_KEYS = ("baseline", "common", "reward_model", "methods")
SWEEP_KEYS = ("seeds", "validation", "grid", "methods")
# The split on which settings are chosen, by kind of evaluation.
VALIDATION = {
    "prompts": {"prompt_split": "validation_gen", "eval_split": "validation_prefs"},
    "problems": {"eval_split": "validation"},
}
# The data on which a method is compared: its flag, and the default.
COMPARED_ON = {"prompts": ("prompt_split", "test_gen"), "problems": ("eval_split", "test")}


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
        config = read_yaml(self.arguments["config"]) if "config" in self.arguments else None
        # The recipe itself reports a malformed file.
        return {**(config if isinstance(config, dict) else {}), **self.arguments}

    @property
    def evaluated_on(self) -> str:
        """`problems` with known answers, or `prompts`."""
        return "problems" if self.recipe in REASONING_RECIPES else "prompts"


@dataclass(frozen=True)
class Tuning:
    """The settings tried for each method, on separate seeds and on the validation split."""

    settings: dict[str, list[dict[str, Any]]]
    seeds: list[int]
    validation: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A comparison as requested; the runs of all methods share one folder."""

    methods: list[Method]
    baseline: str
    seeds: list[int]
    folder: Path
    reward_model: dict[str, Any] = field(default_factory=dict)
    tuning: Tuning | None = None
    launcher: list[str] = field(default_factory=list)
    metric: str | None = None


def read_plan(given) -> Plan:
    """The comparison that the command line and its files describe.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is malformed, a method is unknown, or seeds are not numbers.
    """
    path = Path(given.config or "--methods")
    content = sweep.read_keys(given.config, CONFIG_KEYS) if given.config else {}
    known = content.get("methods") or {}
    if not isinstance(known, dict):
        raise ValueError(f"{path}: methods must hold `name: arguments` lines")
    common = sweep.read_arguments(path, "common", content.get("common") or {})
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
    reward_model = sweep.read_arguments(path, "common", content.get("reward_model") or {})
    seeds = read_seeds(given.seeds)
    return Plan(
        methods,
        baseline if baseline in names else names[0],  # A file's baseline may be none of those that --methods chose.
        seeds,
        Path(given.output_dir),
        reward_model=sweep.with_config_found(path, reward_model),
        tuning=read_tuning(given.sweep, methods, seeds) if given.sweep else None,
        launcher=launcher_options(given.accelerate_config),
        metric=given.metric,
    )


def read_seeds(text: str) -> list[int]:
    """Read `0-4` or `0,2,7` as numbers.

    Raises:
        ValueError: the text has another form, or a seed is repeated.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or dash and not last.isdecimal():
            raise ValueError(f"--seeds {text}: give numbers from 0, such as 0-4 or 0,2,7")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text}: {'a seed is given twice' if seeds else 'no seed is given'}")
    return seeds


def read_tuning(path: str, methods: Sequence[Method], seeds: Sequence[int]) -> Tuning:
    """The settings to choose from.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is malformed, or would choose on the comparison's own seeds or prompts.
    """
    content = sweep.read_keys(path, SWEEP_KEYS)
    own = content.get("methods") or {}
    grid = sweep.read_arguments(Path(path), "common", content.get("grid") or {})
    names = [method.name for method in methods]
    if not isinstance(own, dict):
        raise ValueError(f"{path}: methods must hold `name: grid` lines")
    for name in own:
        sweep.read_arguments(Path(path), f"methods, {name}", own[name])
        if name not in (*names, *RECIPES):
            raise ValueError(f"{path}: methods: no method {brief(name)!r}{nearest(brief(name), names)}")
    tuning_seeds = content.get("seeds", [100])
    if not isinstance(tuning_seeds, list) or not all(isinstance(seed, int) for seed in tuning_seeds):
        raise ValueError(f"{path}: seeds must be a list of numbers, got {brief(repr(tuning_seeds))}")
    if set(tuning_seeds) & set(seeds):
        raise ValueError(f"{path}: seeds: settings are chosen on other seeds than --seeds, which would flatter them")
    kind = methods[0].evaluated_on
    validation = {**VALIDATION[kind], **sweep.read_arguments(Path(path), "common", content.get("validation") or {})}
    split, default = COMPARED_ON[kind]
    for method in methods:
        if validation[split] == method.arguments.get(split, default):
            raise ValueError(f"{path}: validation: {split} is the one that {method.name} is compared on")
    settings = {name: sweep.combinations(Path(path), {**grid, **own.get(name, {})}) for name in names}
    return Tuning(settings, tuning_seeds, validation)


def _check_one_kind(methods: Sequence[Method]) -> None:
    """Reject a mix of methods that share no kind of evaluation."""
    kinds = {method.evaluated_on: method for method in methods}
    if len(kinds) > 1:
        problems, prompts = kinds["problems"], kinds["prompts"]
        raise ValueError(
            f"{problems.name} is evaluated on problems with known answers and {prompts.name} on prompts, so that no "
            "response of one can stand beside one of the other: compare them apart"
        )


def check_metric(plan: Plan) -> None:
    """Reject runs that could not be compared afterwards: only the embedded benchmark and problems have scores.

    Raises:
        ValueError: the prompts are from another benchmark, and no metric is named.
    """
    for method in plan.methods:
        named = method.settings.get("dataset_name", "toy")
        if plan.metric is None and method.evaluated_on == "prompts" and named not in EMBEDDED:
            raise ValueError(
                f"{named} comes with no judge, so that runs on it leave no score and no outcome to compare: name a "
                "number in their generations.jsonl with --metric, or make the runs alone, with --stage reward_models "
                "and --stage runs, and judge their responses with python -m public_eval.judge"
            )


def _method(path: Path, name: str, known: dict[str, Any], common: dict[str, Any], *, to_run: bool) -> Method:
    if not name.isidentifier():
        raise ValueError(f"{name!r} cannot be a method's name: it is part of its folders'")
    own = known.get(name) or {}
    arguments = sweep.read_arguments(path, f"methods, {name}", own) if own else {}
    recipe = str(arguments.get("recipe", name))
    if to_run and recipe not in RECIPES:
        choices = list(RECIPES) if own else list(dict.fromkeys([*known, *RECIPES]))
        raise ValueError(f"no method {recipe!r}{nearest(recipe, choices)} Known: {', '.join(choices)}")
    arguments = {key: value for key, value in arguments.items() if key != "recipe"}
    return Method(name, recipe, sweep.with_config_found(path, {**common, **arguments}))
