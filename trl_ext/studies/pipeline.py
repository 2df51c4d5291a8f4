"""The stages of RLHF as runs of recipes, their evaluation on held-out and adversarial prompts, and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from trl_ext.data import load_benchmark
from trl_ext.data.benchmark import known_score
from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.report import write_report
from trl_ext.evaluation.reporting.tables import Table
from trl_ext.evaluation.stages import compare_stages, summarize_samples
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.submissions.assets import load_prompts
from trl_ext.files import brief, write_json, write_json_lines
from trl_ext.names import nearest
from trl_ext.rollouts import SamplingSettings
from trl_ext.runs.loading import optional_split
from trl_ext.studies.processes import Run, launcher_options
from trl_ext.studies.study import ONLINE_RECIPES, PAIR_RECIPES, find_shipped, read_arguments
from trl_ext.trainers.defaults import check_at_least, parse_json_option

SFT, REWARD_MODEL, WEAK_REWARD_MODEL = "sft", "reward_model", "reward_model_weak"
STAGES = ("sft", "reward_models", "policies", "evaluation")
HELD_OUT, ADVERSARIAL = "held_out", "adversarial"
TITLES = {HELD_OUT: "Held-out prompts", ADVERSARIAL: "Adversarial prompts"}
TRUE_SCORE, FAMILIES = "true score", "stages-families"
SAMPLED = (
    "One response per prompt, sampled at temperature 1. Brackets hold 95% intervals, std is over responses. KL is the "
    "approximate divergence from the SFT model in nats per response."
)


@dataclass
class RLHFArguments:
    """SFT, two reward models, policies that start from the SFT model, and an evaluation of all of them."""

    model_name_or_path: str = HfArg(default="toy", help="toy, smollm2, a folder, a GGUF file, or a hub model.")
    dataset_name: str = HfArg(default="toy", help="toy, or a folder of {split}.jsonl.")
    sft_dataset_name: str | None = HfArg(default=None, help="Demonstrations. Default: dataset_name.")
    stages: str = HfArg(
        default=",".join(STAGES), help="The stages to run, with commas; those left out must be finished already."
    )
    configs: str = HfArg(
        default="recipes/configs/toy",
        help="Folder of the stages' configurations: sft.yaml, reward_model.yaml, {method}.yaml.",
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
        default=None, help="Arguments by method, as JSON; {reward_model} in a value names its folder."
    )
    prompt_split: str = HfArg(default="test_gen", help="Held-out prompts, of dataset_name.")
    eval_split: str = HfArg(default="test_prefs", help="Held-out pairs, of dataset_name.")
    adversarial_prompts: str | None = HfArg(
        default=None, help="JSONL of prompts, each with its family and, for toy, graded_as. None: none."
    )
    num_eval_prompts: int | None = HfArg(default=None, help="Use only the first N prompts. Default: all.")
    max_prompt_tokens: int = HfArg(default=700, help="Longer prompts lose their beginning.")
    max_new_tokens: int = HfArg(default=256, help="Longest response of the evaluation.")
    eval_batch_size: int = HfArg(default=32, help="Prompts per batch of the evaluation.")
    num_samples: int = HfArg(default=10, help="Prompts whose responses the report shows.")
    seed: int = HfArg(default=0, help="Seed of every stage and of the sampling.")
    output_dir: str = HfArg(default="runs/rlhf", help="Folder of the stages' folders and the report.")
    accelerate_config: str | None = HfArg(default=None, help="For accelerate launch --config_file.")
    dry_run: bool = HfArg(default=False, help="Print the stages' commands and run nothing.")

    def __post_init__(self):
        for name in ("sft", "reward_model", "weak_reward_model", "policy", "methods"):
            # On the command line it is given as JSON.
            setattr(self, name, read_arguments(f"rlhf: {name}", parse_json_option(name, getattr(self, name)) or {}))
        counts = ("num_eval_prompts", "max_prompt_tokens", "max_new_tokens", "eval_batch_size", "num_samples")
        check_at_least(self, dict.fromkeys(counts, 1))
        for stage in self.stages.split(","):
            if stage not in STAGES:
                raise ValueError(f"stages: no stage {stage!r}{nearest(stage, STAGES)} Known: {', '.join(STAGES)}")


# ---- The stages ----


@dataclass(frozen=True)
class Pipeline:
    """The runs in order, and the folders of policies (base and SFT first) and of reward models by name."""

    runs: list[Run]
    policies: dict[str, str]
    reward_models: dict[str, str]

    def asked_for(self, stages: str) -> list[Run]:
        """The runs of these stages; those of the others must be finished."""
        stage_of = {SFT: "sft", REWARD_MODEL: "reward_models", WEAK_REWARD_MODEL: "reward_models"}
        asked = [run for run in self.runs if stage_of.get(run.name, "policies") in stages.split(",")]
        missing = [run.name for run in self.runs if run not in asked and not run.finished]
        if missing:
            raise ValueError(f"the stage {missing[0]} is not finished, and --stages {stages} leaves it out")
        return asked


def plan_pipeline(given: RLHFArguments) -> Pipeline:
    """The runs for these arguments."""
    folder, launcher = Path(given.output_dir), launcher_options(given.accelerate_config)
    names = [name.strip() for name in given.policy_methods.split(",") if name.strip()]
    _check_names(names, given)

    def run(name: str, recipe: str, arguments: dict[str, Any], after: Sequence[Run] = ()) -> Run:
        path = Path(given.configs) / f"{recipe}.yaml"
        config = find_shipped(path, f"no configuration {path} for the stage of recipes/{recipe}.py: see --configs")
        arguments = {"config": str(config), **arguments, "seed": given.seed}
        return Run(recipe, folder / name, arguments, launcher, tuple(after))

    model, data = given.model_name_or_path, given.dataset_name
    demonstrations = {"dataset_name": given.sft_dataset_name or data, "model_name_or_path": model}
    sft = run(SFT, "sft", {**demonstrations, "prompt_split": given.prompt_split, **given.sft})
    start = {"dataset_name": data, "model_name_or_path": str(folder / SFT)}
    rewarding = {**start, "eval_split": given.eval_split, **given.reward_model}
    reward_models = {REWARD_MODEL: run(REWARD_MODEL, "reward_model", rewarding, [sft])}
    if given.weak_reward_model:
        weaker = {**rewarding, **given.weak_reward_model}
        reward_models[WEAK_REWARD_MODEL] = run(WEAK_REWARD_MODEL, "reward_model", weaker, [sft])
    runs, policies = [sft, *reward_models.values()], {"base": model, SFT: str(folder / SFT)}
    for name in names:
        recipe, _, weak = name.partition(":")
        rewards = reward_models[WEAK_REWARD_MODEL if weak else REWARD_MODEL]
        arguments, after = {**start, "prompt_split": given.prompt_split}, [sft]
        if recipe in ONLINE_RECIPES:
            arguments["reward_model"] = str(rewards.folder)
            after.append(rewards)
        else:
            arguments["eval_split"] = given.eval_split
        for key, value in {**given.policy, **given.methods.get(recipe, {}), **given.methods.get(name, {})}.items():
            if isinstance(value, str):
                value = value.replace("{reward_model}", str(rewards.folder))
            arguments[key] = value
        runs.append(run(name.replace(":", "-"), recipe, arguments, after))
        policies[runs[-1].name] = str(runs[-1].folder)
    return Pipeline(runs, policies, {name: str(one.folder) for name, one in reward_models.items()})


def _check_names(names: Sequence[str], given: RLHFArguments) -> None:
    known = (*PAIR_RECIPES, *ONLINE_RECIPES)
    for name in [*names, *given.methods]:
        recipe, colon, which = name.partition(":")
        if recipe not in known:
            raise ValueError(f"no method {brief(recipe)!r}{nearest(recipe, known)} Known: {', '.join(known)}")
        if colon and (which != "weak" or recipe in PAIR_RECIPES or not given.weak_reward_model):
            raise ValueError(f"policy_methods: {name!r}: only :weak may follow, a method with rewards")
    for name, arguments in given.methods.items():
        read_arguments(f"methods: {name}", arguments)


# ---- The evaluation ----


def check_evaluation(given: RLHFArguments) -> None:
    """Check, before anything is trained, that the evaluation's data exists; nothing is sampled."""
    load_benchmark(given.dataset_name, splits=given.prompt_split)
    optional_split(load_benchmark(given.dataset_name), "eval_split", given, "no held-out pairs")
    if given.adversarial_prompts:
        find_adversarial(given.adversarial_prompts)


def find_adversarial(path: str) -> Path:
    """The file of adversarial prompts, relative to the working directory or to the repository, each with a family."""
    found = find_shipped(path, f"no file --adversarial_prompts {path}")
    for row in load_prompts(found):
        if not isinstance(row.get("family"), str):
            raise ValueError(f"{found}, row_id {row['row_id']}: every adversarial prompt must say its family")
    return found


def evaluate_pipeline(given: RLHFArguments, pipeline: Pipeline) -> dict[str, Any]:
    """Sample, score and measure; write the samples and evaluation.json, which holds what is returned.

    By set of prompts: its `models`, its `families` (of the adversarial set) and the `samples` that the report shows.
    """
    folder = Path(given.output_dir) / "evaluation"
    # Some datasets have no file of prompts.
    prompts = list(load_benchmark(given.dataset_name, splits=given.prompt_split)[given.prompt_split])
    rows = [{"row_id": row["row_id"], "prompt": row["prompt"]} for row in prompts[: given.num_eval_prompts]]
    files = {HELD_OUT: folder / "prompts.jsonl"}
    write_json_lines(files[HELD_OUT], rows)
    if given.adversarial_prompts:
        files[ADVERSARIAL] = find_adversarial(given.adversarial_prompts)
    summary = {name: _evaluate_prompts(given, pipeline, name, load_prompts(path)) for name, path in files.items()}
    write_json(folder / "evaluation.json", summary)
    return summary


def _evaluate_prompts(given: RLHFArguments, pipeline: Pipeline, name: str, prompts: list) -> dict[str, Any]:
    limits = {"max_prompt_tokens": given.max_prompt_tokens, "max_new_tokens": given.max_new_tokens}
    models, samples_of = compare_stages(
        pipeline.policies,
        prompts,
        SamplingSettings(**limits, stop=(), batch_size=given.eval_batch_size),
        reference=SFT,
        reward_models=pipeline.reward_models,
        score_function=known_score(given.dataset_name),
        seed=given.seed,
        progress=True,
    )
    for model, samples in samples_of.items():
        write_json_lines(Path(given.output_dir) / "evaluation" / f"samples_{name}_{model}.jsonl", samples)
    families = {}
    for family in dict.fromkeys(row["family"] for row in prompts) if name == ADVERSARIAL else ():
        families[family] = [
            {"name": model, **summarize_samples([sample for sample in samples if sample["family"] == family])}
            for model, samples in samples_of.items()
        ]
    # The first prompt of every family, then the second of every family, and so on.
    family_of = [row.get("family") for row in prompts]
    first = sorted(range(len(prompts)), key=lambda index: family_of[:index].count(family_of[index]))
    first = first[: given.num_samples]
    shown = {model: [samples[index] for index in first] for model, samples in samples_of.items()}
    return {"models": models, "families": families, "samples": shown}


# ---- The report ----


def write_pipeline_report(given: RLHFArguments, pipeline: Pipeline, summary: Mapping[str, Any]) -> list[str]:
    """Write report.html and report.md into the pipeline's folder; return the names of what was written."""
    tables = [*_model_tables(summary), *_sample_tables(summary)]
    write_report([run.folder for run in pipeline.runs], Path(given.output_dir) / "report.html", stages=tables)
    return ["report.html", "report.md", "evaluation/"]


def print_tables(summary: Mapping[str, Any]) -> None:
    """Print the models' figures on both sets of prompts; families are too many for a terminal."""
    for table in _model_tables(summary):
        if table.name != FAMILIES:
            print(f"\n{table.title}\n{format_table(table.columns, table.texts())}")


def _model_tables(summary: Mapping[str, Any]) -> list[Table]:
    tables = []
    for name, found in summary.items():
        rows = [
            {"model": row["name"], **_figures(row), "KL to SFT (nats per response)": _estimate(row["kl"])}
            for row in found["models"]
        ]
        tables.append(Table(f"stages-{name}", TITLES[name], SAMPLED, rows))
        rows = [
            {"family": family, "model": row["name"], **_figures(row)}
            for family, models in found["families"].items()
            for row in models
        ]
        if rows:
            note = f"{SAMPLED} The true score is that of the benchmark's instruction in the prompt, if there is one."
            tables.append(Table(FAMILIES, "Adversarial prompts by family", note, rows))
    return tables


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a model by column."""
    figures = {"n": row["n"]}
    for name, one in row["rewards"].items():
        figures |= {f"reward, {name}": _estimate(one), f"std, {name}": one["std"]}
    true = row["true_score"]
    return figures | {TRUE_SCORE: _estimate(true), "n graded": true and true["n"], "tokens": row["tokens"]["mean"]}


def _estimate(found: Mapping[str, Any] | None) -> Estimate | None:
    return found and Estimate(found["mean"], found["low"], found["high"])


def _sample_tables(summary: Mapping[str, Any]) -> list[Table]:
    tables = []
    for name, found in summary.items():
        rows = [
            {"prompt": sample["prompt_text"], "model": model, "response": sample["response_text"]}
            | {f"reward, {key}": value for key, value in sample["rewards"].items()}
            | {TRUE_SCORE: sample["true_score"]}
            for samples in zip(*found["samples"].values(), strict=True)
            for model, sample in zip(found["samples"], samples, strict=True)
        ]
        note = f"All of them are in evaluation/samples_{name}_*.jsonl."
        tables.append(Table(f"stages-samples-{name}", f"Samples, {TITLES[name].lower()}", note, rows))
    return tables
