"""A sweep over how responses are generated: decoding, length, prompt template and few-shot examples."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from trl_ext import load_benchmark
from trl_ext.data.templates import load_prompt_template, render
from trl_ext.evaluation.command_line import format_table, markdown_table
from trl_ext.evaluation.methods.generation_sweep import (
    DIAGNOSTICS,
    figure_of,
    paired_gain,
    plot_heat_map,
    summarize_setting,
)
from trl_ext.files import write_text
from trl_ext.rollouts import BestOfN, SamplingSettings, best_of_n, end_processes, map_over_ranks
from trl_ext.rollouts.best_of_n import prompt_text
from trl_ext.runs.online import only_reward
from trl_ext.runs.results import drawing, estimate
from trl_ext.runs.studies.sampling import (
    JUDGE_CACHE,
    SampledArguments,
    SamplingRun,
    add_true_scores,
    judge_against,
    load_judge,
    load_prompts,
    name_of_reward,
    response_ids,
    sampling_errors,
)
from trl_ext.trainers.defaults import check_at_least

CHAT = "chat"
_WITHIN_CHAT = f"{CHAT}+"
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
FILES = ("config.yaml", "results.json", "sweep.md", "heat_map.png", JUDGE_CACHE)
SAMPLES = "samples/*.jsonl"


def _axis(help_text: str, default: list):
    return field(default_factory=lambda: list(default), metadata={"help": help_text})


@dataclass
class SweepArguments(SampledArguments):
    """The values of each axis; every combination is sampled."""

    temperatures: list[float] = _axis("Temperatures; 0 for greedy decoding.", [1.0])
    top_ps: list[float] = _axis("Nucleus sampling.", [1.0])
    top_ks: list[int] = _axis("Most likely tokens to sample from; 0 for all.", [0])
    repetition_penalties: list[float] = _axis("Above 1 makes tokens less likely to come again.", [1.0])
    no_repeat_ngram_sizes: list[int] = _axis("n-grams of this length occur once at most; 0 for no limit.", [0])
    lengths: list[int] | None = field(
        default=None, metadata={"help": "Longest responses, in tokens. Default: max_new_tokens."}
    )
    templates: list[str] = _axis(
        "chat for the model's chat template; r1_zero, question_only, boxed, alpaca_sft or a text file with {question} "
        "for plain text; chat+NAME for the template within a chat.",
        [CHAT],
    )
    few_shots: list[int] = _axis("Numbers of examples before the prompt.", [0])
    few_shot_split: str = field(
        default="train_gen",
        metadata={"help": "Where examples are from: reference responses, or chosen ones of pairs."},
    )
    samples_per_prompt: int = field(default=1, metadata={"help": "Responses to each prompt; 1 for greedy decoding."})

    def __post_init__(self):
        super().__post_init__()
        self.lengths = [self.max_new_tokens] if self.lengths is None else self.lengths
        for flag in AXES.values():
            values = list(dict.fromkeys(getattr(self, flag)))
            if not values:
                raise ValueError(f"--{flag} needs at least one value")
            setattr(self, flag, values)
        check_at_least(self, {"samples_per_prompt": 1})
        for setting in self.settings():
            self.sampling(setting)
        for template in self.templates:
            _load_template(template)
        if min(self.few_shots) < 0:
            raise ValueError(f"few_shots must be at least 0, got {min(self.few_shots)}")
        self.place("sweep-generation")

    def combinations(self) -> list[dict[str, Any]]:
        """Every combination of values."""
        values = product(*(getattr(self, flag) for flag in AXES.values()))
        return [dict(zip(AXES, combination, strict=True)) for combination in values]

    def settings(self) -> list[dict[str, Any]]:
        """The distinct combinations: greedy ones are equal whatever their sampling parameters."""
        found = {tuple(as_sampled(setting).values()): as_sampled(setting) for setting in self.combinations()}
        return list(found.values())

    def sampling(self, setting: dict[str, Any]) -> SamplingSettings:
        own = {name: value for name, value in setting.items() if name not in _OF_PROMPTS}
        return SamplingSettings(
            **own, stop=(), max_prompt_tokens=self.max_prompt_tokens, batch_size=self.generation_batch_size
        )


def main() -> None:
    """Sample every setting, and write the run folder; resume an earlier call that stopped."""
    with sampling_errors():
        run = SamplingRun(
            SweepArguments,
            config="sweep_generation",
            description="Compare settings of generation.",
            files=FILES,
            responses=SAMPLES,
        )
        arguments, settings = run.arguments, run.arguments.settings()
        rewarded = bool(arguments.reward_model or arguments.reward_function)
        reward = only_reward(arguments, arguments.reward_batch_size) if rewarded else _no_reward
        judge, prompts = load_judge(arguments), load_prompts(arguments)
        builder = PromptBuilder(arguments, prompts)
        run.open()
        if run.is_main_process:
            print(f"{len(settings)} settings on {len(prompts)} prompts")
        greedy = {"temperature": 0.0, "max_new_tokens": arguments.max_new_tokens}
        engine, tokenizer = run.load_engine(arguments.sampling(greedy))
        builder.check(tokenizer)
        base = map_over_ranks(lambda rows: engine([row["prompt"] for row in rows]), prompts, run.accelerator)
        sampled = [
            _sample(run, setting, number, prompts, builder, engine, reward)
            for number, setting in enumerate(settings, start=1)
        ]
        if run.is_main_process:
            if score := arguments.score_function:
                add_true_scores([row for result in sampled for row in result.rows], score)
            found = [
                {"setting": setting, **_figures(result, prompts, base, judge, tokenizer, run.folder)}
                for setting, result in zip(settings, sampled, strict=True)
            ]
            named = {"reward": name_of_reward(reward) if rewarded else None, "judge": arguments.judge}
            described = run.describe("generation sweep", **named)
            results = {"run": described, "sweep": found, "best": _best(found, sampled)}
            header, rows = _table(arguments, found)
            write_text(run.folder / "sweep.md", f"{markdown_table(header, rows)}\n{_notes(results)}\n")
            with drawing("heat_map.png"):
                _draw(arguments, found, run.folder / "heat_map.png")
            run.end(results, f"{format_table(header, rows)}\n\n{_notes(results)}")
    end_processes(run.accelerator)


def as_sampled(setting: dict[str, Any]) -> dict[str, Any]:
    """The setting; a greedy one without its sampling parameters."""
    return setting | ({"top_p": 1.0, "top_k": 0} if setting["temperature"] == 0 else {})


def _no_reward(completions, **columns: Any) -> list[None]:
    """Reward function of runs without a reward."""
    return [None] * len(completions)


def _sample(run: SamplingRun, setting, number: int, prompts, builder, engine, reward) -> BestOfN:
    """Sample responses for one setting and reward them on the prompts without template and examples."""
    arguments = run.arguments
    engine.settings = arguments.sampling(setting)

    def ask(shown: list, *, seed: int, progress: str | None):
        return engine([builder.build(prompt, setting) for prompt in shown], seed=seed, progress=progress)

    return best_of_n(
        prompts,
        ask,
        reward,
        1 if setting["temperature"] == 0 else arguments.samples_per_prompt,
        seed=arguments.seed,
        path=run.folder / "samples" / f"{number:04d}.jsonl",
        save_every=arguments.save_every,
        accelerator=run.accelerator,
        progress=run.progress(f"setting {number}"),
    )


def _figures(result: BestOfN, prompts, base, judge, tokenizer, folder: Path) -> dict[str, Any]:
    first = [group[0] for group in result.samples]
    compared = None if judge is None else judge_against(judge, prompts, first, base, folder)[0].to_dict()
    ids = [response_ids(row, tokenizer) for row in result.rows]
    return summarize_setting(result.samples, ids, win_rate=compared)


def _best(results: list[dict[str, Any]], sampled: list[BestOfN]) -> dict[str, Any] | None:
    """The setting with the highest score or reward, and its gain over the first setting on the same prompts."""
    metric = next((name for name in ("score", "reward") if results[0][name] is not None), None)
    if metric is None or len(results) == 1:
        return None
    number = max(range(len(results)), key=lambda index: figure_of(results[index], metric) or float("-inf"))
    gain = paired_gain(sampled[number].samples, sampled[0].samples, metric)
    return {"metric": metric, "setting": results[number]["setting"], "gain_over_first": gain}


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
            row.append(estimate(result["win_rate"]["half"], "rate"))
        rows.append([*row, *(result["diagnostics"][name] for name in DIAGNOSTICS)])
    return [*header, "collapsed"], [
        [*row, "yes" if result["diagnostics"]["collapsed"] else "no"]
        for row, result in zip(rows, results, strict=True)
    ]


def _interval(found: dict[str, Any] | None) -> str:
    return "-" if found is None else estimate(found)


def _notes(results: dict[str, Any]) -> str:
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


def _draw(arguments: SweepArguments, results: list[dict[str, Any]], path: Path) -> None:
    """Draw the score (else the reward, else the win rate) over the first two axes with several values."""
    several = [axis for axis, flag in AXES.items() if len(getattr(arguments, flag)) > 1]
    axes = tuple([*several, *(axis for axis in AXES if axis not in several)][:2])
    metric = next((name for name in ("score", "reward") if results[0][name] is not None), "win_rate")
    found = {tuple(result["setting"].values()): result for result in results}
    # A greedy setting fills the cell of every combination that it represents.
    cells = [found[tuple(as_sampled(s).values())] | {"setting": s} for s in arguments.combinations()]
    plot_heat_map(cells, axes, metric, path, title=metric)


# ---- Prompts with templates and examples ----


class PromptBuilder:
    """Builds prompts from a setting's `template` and `few_shot`.

    All prompts share the same examples, except that a prompt is never its own example. A smaller number of examples
    uses the first of a larger number's.

    Args:
        arguments: provides `dataset_name`, `few_shot_split`, `templates`, `few_shots` and `seed`.
        prompts: the prompts that will be built.

    Raises:
        ValueError: examples are requested, and the split has too few or no responses.
    """

    def __init__(self, arguments, prompts: Sequence[Mapping[str, Any]]):
        self.templates = {name: _load_template(name) for name in arguments.templates}
        self.holds_text = any(isinstance(row["prompt"], str) for row in prompts)
        most = max(arguments.few_shots)
        self.examples = _examples(arguments, most) if most else []

    def check(self, tokenizer) -> None:
        """Raise ValueError if a chat is requested and the tokenizer has no chat template."""
        chats = [name for name in self.templates if name == CHAT or name.startswith(_WITHIN_CHAT)]
        if chats and tokenizer.chat_template is None and not self.holds_text:
            raise ValueError(f"the model has no chat template for the template {chats[0]}: name one of plain text")

    def build(self, prompt: list[dict] | str, setting: Mapping[str, Any]) -> list[dict] | str:
        """The prompt in the form that the model receives."""
        name, template = setting["template"], self.templates[setting["template"]]
        asked = prompt_text(prompt)
        examples = [pair for pair in self.examples if pair[0] != asked][: setting["few_shot"]]
        if template is not None:
            examples = [(render(template, question), answer) for question, answer in examples]
            asked = render(template, asked)
        if isinstance(prompt, str) or not name.startswith(CHAT):
            return "\n\n".join([*(f"{question} {answer}".rstrip() for question, answer in examples), asked])
        turns = [
            {"role": role, "content": text}
            for pair in examples
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        # Examples come after a system message and before the conversation; the last question is the one rendered.
        start = 1 if prompt[0]["role"] == "system" else 0
        last = max(index for index, message in enumerate(prompt) if message["role"] == "user")
        asking = [*prompt[:last], {**prompt[last], "content": asked}, *prompt[last + 1 :]]
        return [*asking[:start], *turns, *asking[start:]]


def _load_template(name: str) -> str | None:
    """The text of a template; None for the chat template alone."""
    return None if name == CHAT else load_prompt_template(name.removeprefix(_WITHIN_CHAT))


def _examples(arguments, count: int) -> list[tuple[str, str]]:
    """Questions and answers, one more than requested, because a prompt may be one of them."""
    split, name = arguments.few_shot_split, arguments.dataset_name
    rows = load_benchmark(name, splits=split)[split]
    column = next((c for c in ("reference_response_text", "chosen") if c in rows.column_names), None)
    if column is None:
        raise ValueError(f"few_shots: the split {split!r} has neither reference_response_text nor chosen responses")
    if count + 1 > len(rows):
        raise ValueError(
            f"few_shots: {count} examples and one to spare are more than the {len(rows)} rows of {split!r}"
        )
    chosen = rows.select(random.Random(arguments.seed).sample(range(len(rows)), count + 1))
    answers = [value if isinstance(value, str) else value[-1]["content"] for value in chosen[column]]
    return list(zip(map(prompt_text, chosen["prompt"]), answers, strict=True))
