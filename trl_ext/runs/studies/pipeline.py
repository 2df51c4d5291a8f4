"""The pipeline's plan: its arguments, and its stages in order, each a recipe run in its own folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from trl_ext.files import brief
from trl_ext.names import nearest
from trl_ext.studies.processes import Run, launcher_options
from trl_ext.studies.study import ONLINE_RECIPES, PAIR_RECIPES, find_shipped, read_arguments
from trl_ext.trainers.defaults import check_at_least, parse_json_option

SFT, REWARD_MODEL, WEAK_REWARD_MODEL = "sft", "reward_model", "reward_model_weak"
_OWN_ARGUMENTS = ("sft", "reward_model", "weak_reward_model", "policy", "methods")


@dataclass
class RLHFArguments:
    """SFT, two reward models, policies that start from the SFT model, and an evaluation of all of them."""

    model_name_or_path: str = HfArg(default="toy", help="toy, smollm2, a folder, a GGUF file, or a hub model.")
    dataset_name: str = HfArg(default="toy", help="toy, or a folder of {split}.jsonl.")
    sft_dataset_name: str | None = HfArg(default=None, help="Demonstrations. Default: dataset_name.")
    configs: str = HfArg(
        default="recipes/configs/toy",
        help="Folder of the stages' configurations: rlhf_sft.yaml, reward_model.yaml, {method}.yaml.",
    )
    policy_methods: str = HfArg(
        default="ppo,dpo", help="Recipes with commas; `ppo:weak` is rewarded by the weak reward model."
    )
    sft: dict[str, Any] | str | None = HfArg(default=None, help="Arguments of the SFT stage, as JSON.")
    reward_model: dict[str, Any] | str | None = HfArg(default=None, help="Arguments of both reward models, as JSON.")
    weak_reward_model: dict[str, Any] | str | None = HfArg(
        default=None, help="Arguments of the weak one beside these: fewer pairs, noise on their labels."
    )
    policy: dict[str, Any] | str | None = HfArg(default=None, help="Arguments of every policy, as JSON.")
    methods: dict[str, Any] | str | None = HfArg(
        default=None, help="Arguments by method, as JSON; {sft} and {reward_model} in a value name these folders."
    )
    prompt_split: str = HfArg(default="test_gen", help="Held-out prompts, of dataset_name.")
    eval_split: str = HfArg(default="test_prefs", help="Held-out pairs, of dataset_name.")
    adversarial_prompts: str | None = HfArg(
        default=None, help="JSONL of prompts, each with its family and, for toy, graded_as. None: none."
    )
    num_eval_prompts: int | None = HfArg(default=None, help="The first so many. Default: all.")
    max_prompt_tokens: int = HfArg(default=700, help="Longer prompts lose their beginning.")
    max_new_tokens: int = HfArg(default=256, help="Longest response of the evaluation.")
    eval_batch_size: int = HfArg(default=32, help="Prompts per batch of the evaluation.")
    num_samples: int = HfArg(default=10, help="Prompts whose responses the report shows.")
    num_mistakes: int = HfArg(default=10, help="Worst mistakes of each reward model in the report.")
    seed: int = HfArg(default=0, help="Of every stage and of the sampling.")
    output_dir: str = HfArg(default="runs/rlhf", help="Folder of the stages' folders and the report.")
    accelerate_config: str | None = HfArg(default=None, help="For accelerate launch --config_file.")
    dry_run: bool = HfArg(default=False, help="Print the stages' commands and run nothing.")

    def __post_init__(self):
        for name in _OWN_ARGUMENTS:
            # On the command line it is given as JSON.
            value = parse_json_option(name, getattr(self, name)) or {}
            setattr(self, name, value if name == "methods" else read_arguments(Path("rlhf"), name, value))
        counts = ("num_eval_prompts", "max_prompt_tokens", "max_new_tokens", "eval_batch_size", "num_samples")
        check_at_least(self, {**dict.fromkeys(counts, 1), "num_mistakes": 0})


@dataclass(frozen=True)
class Pipeline:
    """The stages in order, and the folders of policies (base and SFT first) and of reward models by name."""

    stages: list[Run]
    policies: dict[str, str]
    reward_models: dict[str, str]


def plan_pipeline(given: RLHFArguments) -> Pipeline:
    """The stages for these arguments."""
    names = [name.strip() for name in given.policy_methods.split(",") if name.strip()]
    _check_names(names, given)
    folder = Path(given.output_dir)
    launcher = launcher_options(given.accelerate_config)

    def stage(name: str, recipe: str, arguments: dict[str, Any], after: Sequence[Run] = ()) -> Run:
        path = Path(given.configs) / f"{recipe}.yaml"
        config = find_shipped(path, f"no configuration {path} for the stage of recipes/{recipe}.py: see --configs")
        arguments = {"config": str(config), **arguments, "seed": given.seed}
        return Run(recipe, folder / name, arguments, launcher, tuple(after))

    model, data = given.model_name_or_path, given.dataset_name
    demonstrations = {"dataset_name": given.sft_dataset_name or data, "model_name_or_path": model}
    demonstrations["prompt_split"] = given.prompt_split
    sft = stage(SFT, "rlhf_sft", {**demonstrations, **given.sft})
    start = {"dataset_name": data, "model_name_or_path": str(folder / SFT)}
    rewarding = {**start, "eval_split": given.eval_split, **given.reward_model}
    stages = [sft, stage(REWARD_MODEL, "reward_model", rewarding, [sft])]
    if given.weak_reward_model:
        stages.append(stage(WEAK_REWARD_MODEL, "reward_model", {**rewarding, **given.weak_reward_model}, [sft]))
    reward_stages = {one.name: one for one in stages[1:]}
    policies = {"base": model, SFT: str(folder / SFT)}
    for name in names:
        recipe, _, weak = name.partition(":")
        arguments, after = {**start, "prompt_split": given.prompt_split}, [sft]
        rewards = reward_stages[WEAK_REWARD_MODEL if weak else REWARD_MODEL]
        if recipe in ONLINE_RECIPES:
            arguments["reward_model"] = str(rewards.folder)
            after.append(rewards)
        else:
            arguments["eval_split"] = given.eval_split
        own = {**given.policy, **given.methods.get(recipe, {}), **given.methods.get(name, {})}
        for key, value in own.items():
            if isinstance(value, str):
                value = value.replace("{sft}", str(folder / SFT)).replace("{reward_model}", str(rewards.folder))
            arguments[key] = value
        stages.append(stage(name.replace(":", "-"), recipe, arguments, after))
        policies[stages[-1].name] = str(stages[-1].folder)
    return Pipeline(stages, policies, {name: str(one.folder) for name, one in reward_stages.items()})


def _check_names(names: Sequence[str], given: RLHFArguments) -> None:
    known = (*PAIR_RECIPES, *ONLINE_RECIPES)
    if not names:
        raise ValueError(f"policy_methods: name one or more of {', '.join(known)}")
    for name in names:
        recipe, colon, which = name.partition(":")
        if recipe not in known:
            raise ValueError(f"policy_methods: no method {recipe!r}{nearest(recipe, known)} Known: {', '.join(known)}")
        if colon and (which != "weak" or recipe in PAIR_RECIPES or not given.weak_reward_model):
            raise ValueError(
                f"policy_methods: {name!r}: only :weak may follow, only a method with rewards, and only beside "
                "weak_reward_model, the arguments that make it weak"
            )
        if names.count(name) > 1:
            raise ValueError(f"policy_methods: {name!r} is named twice")
    for name, arguments in given.methods.items():
        if name.partition(":")[0] not in known:
            raise ValueError(f"methods: no method {brief(name)!r}{nearest(brief(name), known)}")
        read_arguments(Path("methods"), name, arguments)
