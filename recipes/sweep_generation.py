"""A sweep over how responses are generated: decoding, length, prompt template and few-shot examples."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import common
from accelerate import Accelerator
from generation_prompts import CHAT, PromptBuilder, check_template
from reward_sources import only_reward
from run_folder import config_text, settings_digest
from sampling import (
    JUDGE_CACHE,
    SampledArguments,
    judge_against,
    kept_when_interrupted,
    load_engine,
    load_judge,
    load_prompts,
    open_folder,
    response_ids,
)
from training import ModelArguments

from trl_ext import toy
from trl_ext.evaluation.command_line import format_interval, format_table, markdown_table
from trl_ext.evaluation.generation_sweep import (
    DIAGNOSTICS,
    figure_of,
    paired_gain,
    plot_heat_map,
    summarize_setting,
)
from trl_ext.files import write_json, write_text
from trl_ext.rollouts import BestOfN, SamplingSettings, best_of_n, end_processes, map_over_ranks
from trl_ext.trainers.defaults import runs_on_cpu

# Axis -> the flag that lists its values.
AXES = {
    "temperature": "temperatures",
    "top_p": "top_ps",
    "top_k": "top_ks",
    "repetition_penalty": "repetition_penalties",
    "no_repeat_ngram_size": "no_repeat_ngram_sizes",
    "max_new_tokens": "lengths",
    "template": "templates",
    "few_shot": "few_shots",
}
_OF_PROMPTS = ("template", "few_shot")
METRICS = ("score", "reward", "win_rate", *DIAGNOSTICS)
FILES = ("config.yaml", "results.json", "sweep.md", "heat_map.png", JUDGE_CACHE)
SAMPLES = "samples/*.jsonl"


def _axis(help_text: str, default: list):
    return field(default_factory=lambda: list(default), metadata={"help": help_text})


@dataclass
class SweepArguments(SampledArguments):
    """The values of each axis; every combination of them is sampled."""

    temperatures: list[float] = _axis("Temperatures; 0 for greedy decoding.", [1.0])
    top_ps: list[float] = _axis("Nucleus sampling.", [1.0])
    top_ks: list[int] = _axis("Most likely tokens to sample from; 0 for all.", [0])
    repetition_penalties: list[float] = _axis("Above 1 makes tokens less likely to come again.", [1.0])
    no_repeat_ngram_sizes: list[int] = _axis("n-grams of this length occur once at most; 0 for no limit.", [0])
    lengths: list[int] | None = field(
        default=None, metadata={"help": "Longest responses, in tokens. Default: max_new_tokens."}
    )
    templates: list[str] = _axis(
        "chat for the model's chat template; r1_zero, question_only, alpaca_sft or a text file with {question} for "
        "plain text; chat+NAME for the template within a chat.",
        [CHAT],
    )
    few_shots: list[int] = _axis("Numbers of examples before the prompt.", [0])
    few_shot_split: str = field(
        default="train_gen",
        metadata={"help": "Where examples are from: reference responses, or chosen ones of pairs."},
    )
    samples_per_prompt: int = field(default=1, metadata={"help": "Responses to each prompt; 1 for greedy decoding."})
    heat_map: list[str] | None = field(
        default=None, metadata={"help": "Two axes of heat_map.png. Default: the first two with several values."}
    )
    heat_metric: str | None = field(
        default=None,
        metadata={"help": f"What it shows: {', '.join(METRICS)}. Default: score on toy, else reward, else win_rate."},
    )

    def __post_init__(self):
        super().__post_init__()
        self.lengths = [self.max_new_tokens] if self.lengths is None else self.lengths
        for flag in AXES.values():
            values = list(dict.fromkeys(getattr(self, flag)))
            if not values:
                raise ValueError(f"--{flag} needs at least one value")
            setattr(self, flag, values)
        if self.samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt must be at least 1, got {self.samples_per_prompt}")
        for setting in self.settings():
            self.sampling(setting)
        for template in self.templates:
            check_template(template)
        if min(self.few_shots) < 0:
            raise ValueError(f"few_shots must be at least 0, got {min(self.few_shots)}")
        self._check_heat_map()
        if self.output_dir is None:
            self.output_dir = f"runs/sweep-generation-{Path(self.dataset_name).absolute().stem}"

    def _check_heat_map(self) -> None:
        if self.heat_map is None:
            several = [axis for axis, flag in AXES.items() if len(getattr(self, flag)) > 1]
            self.heat_map = [*several, *(axis for axis in AXES if axis not in several)][:2]
        wrong = [axis for axis in self.heat_map if axis not in AXES]
        if wrong or len(self.heat_map) != 2 or self.heat_map[0] == self.heat_map[1]:
            raise ValueError(f"heat_map takes two of {', '.join(AXES)}, got {' '.join(self.heat_map)}")
        if self.heat_metric is None:
            rewarded = self.reward_model or self.reward_function
            self.heat_metric = "score" if self.has_ground_truth else "reward" if rewarded else "win_rate"
        if self.heat_metric not in METRICS:
            raise ValueError(f"heat_metric must be one of {', '.join(METRICS)}, got {self.heat_metric!r}")

    def combinations(self) -> list[dict[str, Any]]:
        """Every combination of values."""
        values = product(*(getattr(self, flag) for flag in AXES.values()))
        return [dict(zip(AXES, combination, strict=True)) for combination in values]

    def settings(self) -> list[dict[str, Any]]:
        """The combinations that differ: those that are greedy are equal whatever they would sample from."""
        found = {tuple(as_sampled(setting).values()): as_sampled(setting) for setting in self.combinations()}
        return list(found.values())

    def sampling(self, setting: dict[str, Any]) -> SamplingSettings:
        own = {name: value for name, value in setting.items() if name not in _OF_PROMPTS}
        return SamplingSettings(
            **own, stop=(), max_prompt_tokens=self.max_prompt_tokens, batch_size=self.generation_batch_size
        )


def main() -> None:
    """Read the arguments, sample every setting, and write the run folder; go on where an earlier call stopped."""
    with kept_when_interrupted():
        _run()


def _run() -> None:
    started = time.time()
    with common.one_line_errors():
        arguments, model = common.parse_arguments(
            (SweepArguments, ModelArguments),
            default_config=common.RECIPES / "configs" / "toy" / "sweep_generation.yaml",
            description="Compare settings of generation.",
        )
        settings, resolved = arguments.settings(), config_text(arguments, model)
        rewarded = bool(arguments.reward_model or arguments.reward_function)
        reward = only_reward(arguments, arguments.reward_batch_size) if rewarded else no_reward
        judge, prompts = load_judge(arguments), load_prompts(arguments)
        builder = PromptBuilder(arguments, prompts)
        folder = Path(arguments.output_dir)
        accelerator = Accelerator(cpu=runs_on_cpu(arguments.use_cpu))
        if accelerator.is_main_process:
            open_folder(folder, resolved, overwrite=arguments.overwrite_output_dir, files=FILES, responses=SAMPLES)
            print(f"{len(settings)} settings on {len(prompts)} prompts")
        accelerator.wait_for_everyone()
        baseline = SamplingSettings(
            arguments.max_new_tokens,
            temperature=0.0,
            stop=(),
            max_prompt_tokens=arguments.max_prompt_tokens,
            batch_size=arguments.generation_batch_size,
        )
        engine, tokenizer = load_engine(arguments, model, baseline, accelerator)
        builder.check(tokenizer)
        base = map_over_ranks(lambda rows: engine([row["prompt"] for row in rows]), prompts, accelerator)
        sampled = [
            _sample(arguments, setting, number, prompts, builder, engine, reward, folder, accelerator)
            for number, setting in enumerate(settings, start=1)
        ]
        if accelerator.is_main_process:
            if arguments.has_ground_truth:
                for row in (row for result in sampled for row in result.rows):
                    row["score"] = toy.score(row["prompt_text"], row["response_text"], finished=row["finished"])
            results = {
                "run": _describe(arguments, model, reward if rewarded else None, resolved, accelerator),
                "sweep": [
                    {"setting": setting, **_figures(result, prompts, base, judge, tokenizer, folder)}
                    for setting, result in zip(settings, sampled, strict=True)
                ],
            }
            results["best"] = _best(results["sweep"], sampled)
            results["run"]["total_seconds"] = round(time.time() - started, 1)
            _write(arguments, results, folder)
            _print(arguments, results, folder)
    end_processes(accelerator)


def as_sampled(setting: dict[str, Any]) -> dict[str, Any]:
    """The setting; a greedy one without what would be sampled from."""
    return setting | ({"top_p": 1.0, "top_k": 0} if setting["temperature"] == 0 else {})


def no_reward(completions, **columns: Any) -> list[None]:
    """Stands in where no reward is asked for."""
    return [None] * len(completions)


def _sample(arguments, setting, number: int, prompts, builder, engine, reward, folder: Path, accelerator) -> BestOfN:
    """Responses to one setting, with their rewards, which are of the prompts without template and examples."""
    engine.settings = arguments.sampling(setting)

    def ask(shown: list, *, seed: int, progress: str | None):
        return engine([builder.build(prompt, setting) for prompt in shown], seed=seed, progress=progress)

    return best_of_n(
        prompts,
        ask,
        reward,
        1 if setting["temperature"] == 0 else arguments.samples_per_prompt,
        seed=arguments.seed,
        path=folder / "samples" / f"{number:04d}.jsonl",
        save_every=arguments.save_every,
        accelerator=accelerator,
        progress=f"setting {number}" if accelerator.is_main_process else None,
    )


def _figures(result: BestOfN, prompts, base, judge, tokenizer, folder: Path) -> dict[str, Any]:
    first = [group[0] for group in result.samples]
    compared = None if judge is None else judge_against(judge, prompts, first, base, folder)[0].to_dict()
    ids = [response_ids(row, tokenizer) for row in result.rows]
    return summarize_setting(result.samples, ids, win_rate=compared)


def _best(results: list[dict[str, Any]], sampled: list[BestOfN]) -> dict[str, Any] | None:
    """The setting of the highest score, or reward, and by how much it beats the first, on the same prompts."""
    metric = next((name for name in ("score", "reward") if results[0][name] is not None), None)
    if metric is None or len(results) == 1:
        return None
    number = max(range(len(results)), key=lambda index: figure_of(results[index], metric) or float("-inf"))
    gain = paired_gain(sampled[number].samples, sampled[0].samples, metric)
    return {"metric": metric, "setting": results[number]["setting"], "gain_over_first": gain}


def _describe(arguments, model, reward, resolved: str, accelerator) -> dict[str, Any]:
    return {
        "objective": "generation sweep",
        "model": model.model_name_or_path,
        "dataset": arguments.dataset_name,
        "reward": None if reward is None else getattr(reward, "__name__", type(reward).__name__),
        "judge": arguments.judge,
        "settings_digest": settings_digest(resolved),
        "seed": arguments.seed,
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "versions": {name: version(name) for name in ("trl_ext", "trl", "transformers", "torch")},
    }


def _table(arguments, results: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: the axes that vary, the figures with their intervals, and the diagnostics."""
    axes = [axis for axis, flag in AXES.items() if len(getattr(arguments, flag)) > 1] or ["temperature"]
    figures = {"score": "true score", "reward": "reward"}
    shown = [name for name in figures if any(result[name] for result in results)]
    judged = results[0]["win_rate"] is not None
    header = [*axes, *(figures[name] for name in shown), *(["win rate, ties as half"] * judged), *DIAGNOSTICS.values()]
    rows = []
    for result in results:
        row = [str(result["setting"][axis]) for axis in axes]
        row += [_interval(result[name]) for name in shown]
        if judged:
            half = result["win_rate"]["half"]
            row.append(format_interval(half["rate"], half["low"], half["high"]))
        rows.append([*row, *(result["diagnostics"][name] for name in DIAGNOSTICS)])
    return [*header, "collapsed"], [
        [*row, "yes" if result["diagnostics"]["collapsed"] else "no"]
        for row, result in zip(rows, results, strict=True)
    ]


def _interval(estimate: dict[str, Any] | None) -> str:
    return "-" if estimate is None else format_interval(estimate["mean"], estimate["low"], estimate["high"])


def _notes(arguments, results: dict[str, Any]) -> str:
    run, first = results["run"], results["sweep"][0]
    notes = (
        f"Model {run['model']}, data {run['dataset']}, {first['n_prompts']} prompts, seed {run['seed']}; 95% intervals"
    )
    notes += " over prompts. Win rates are against greedy decoding of the plain prompt."
    best = results["best"]
    if best is not None:
        values = ", ".join(f"{name} {value}" for name, value in best["setting"].items())
        notes += (
            f" Highest {best['metric']}: {values}; over the first setting {_interval(best['gain_over_first'])}, and "
            "chosen on the same prompts."
        )
    return notes


def _write(arguments, results: dict[str, Any], folder: Path) -> None:
    header, rows = _table(arguments, results["sweep"])
    write_text(folder / "sweep.md", f"{markdown_table(header, rows)}\n{_notes(arguments, results)}\n")
    axes = tuple(arguments.heat_map)
    found = {tuple(result["setting"].values()): result for result in results["sweep"]}
    # A greedy setting stands in every cell that it is the setting of.
    cells = [found[tuple(as_sampled(s).values())] | {"setting": s} for s in arguments.combinations()]
    try:
        plot_heat_map(cells, axes, arguments.heat_metric, folder / "heat_map.png", title=arguments.heat_metric)
    except ImportError as error:
        print(f"heat_map.png was not drawn: {error}")
    # Last: a folder with results is a finished run.
    write_json(folder / "results.json", results)


def _print(arguments, results: dict[str, Any], folder: Path) -> None:
    print(f"\n{format_table(*_table(arguments, results['sweep']))}\n\n{_notes(arguments, results)}")
    files = ", ".join(name for name in FILES if (folder / name).exists())
    print(f"\n{results['run']['total_seconds']:.0f} s; in {folder}: {files}, {SAMPLES}")


if __name__ == "__main__":
    main()
