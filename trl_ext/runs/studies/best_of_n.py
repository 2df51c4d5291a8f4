"""Best-of-n sampling against a reward: its gain over n, reward hacking, and data for fine-tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from trl_ext import load_benchmark
from trl_ext.data.benchmark import EMBEDDED, known_score
from trl_ext.evaluation import (
    GroundTruthJudge,
    PairwiseJudge,
    WinRate,
    best_of_n_curve,
    judge_pairs,
    plot_best_of_n,
    win_rate,
)
from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.methods.generations import compare_generations
from trl_ext.files import write_json_lines
from trl_ext.rollouts import (
    Generation,
    SamplingSettings,
    best_of_n,
    demonstrations,
    end_processes,
    map_over_ranks,
    pick_best,
)
from trl_ext.rollouts.best_of_n import EMPTY_CHOICES
from trl_ext.rollouts.graded import Row
from trl_ext.runs.finish import drawing, estimate
from trl_ext.runs.online import RewardSources, only_reward
from trl_ext.runs.studies.sampling import EngineArguments, SamplingRun, sampling_errors
from trl_ext.trainers.defaults import check_at_least, check_choice

SAMPLES = "samples.jsonl"
JUDGE_CACHE = "judge_cache.sqlite"
JUDGES = ("ground_truth", "openai", "none")
FILES = ("config.yaml", "results.json", "generations.jsonl", SAMPLES, "sft.jsonl", "best_of_n.png", JUDGE_CACHE)


@dataclass
class BestOfNArguments(EngineArguments, RewardSources):
    """Prompts, the reward, the judge, how responses are sampled, how many to pick from, and which of them to keep."""

    dataset_name: str = HfArg(
        default="toy", help="toy, instructions, a folder of {split}.jsonl, one .jsonl file, or a hub dataset."
    )
    prompt_split: str = HfArg(default="test_gen", help="Prompts to respond to.")
    num_prompts: int | None = HfArg(default=None, help="The first so many. Default: all.")
    skip_bad_rows: bool = HfArg(default=False, help="Drop bad rows and say how many and why.")
    overwrite_output_dir: bool = HfArg(default=False, help="Replace an earlier run in output_dir.")
    judge: str | None = HfArg(
        default=None,
        help="Who compares responses with the base's, which are greedy: ground_truth (embedded data "
        "only), openai, or none. Default: ground_truth on embedded data, none on everything else.",
    )
    judge_model: str = HfArg(default="gpt-5.4", help="For the judge openai; key in OPENAI_API_KEY.")
    judge_base_url: str | None = HfArg(default=None, help="Of a server with OpenAI's API.")
    max_prompt_tokens: int | None = HfArg(default=None, help="Longer prompts lose their beginning.")
    max_new_tokens: int = HfArg(default=256, help="Longest response, in tokens.")
    generation_batch_size: int = HfArg(default=32, help="Prompts per batch of generation.")
    reward_batch_size: int = HfArg(default=32, help="Responses per batch of a reward model.")
    n: list[int] | None = HfArg(default=None, help="Numbers to pick the best from. Default: 1, 2, 4, 8, 16.")
    num_samples: int | None = HfArg(default=None, help="Responses to each prompt. Default: largest n.")
    temperature: float = HfArg(default=1.0, help="Of the sampling.")
    top_p: float = HfArg(default=1.0, help="Nucleus sampling.")
    top_k: int = HfArg(default=0, help="Most likely tokens to sample from; 0 for all.")
    repetition_penalty: float = HfArg(default=1.0, help="Above 1 makes tokens less likely to come again.")
    empty: str = HfArg(
        default="score", help="Responses without text: score them like others, leave_out of the picks, or refuse."
    )
    missing_eos_penalty: float = HfArg(
        default=0.0, help="Taken off the reward of a response that was cut at max_new_tokens."
    )
    keep: str | None = HfArg(
        default=None,
        help="Write sft.jsonl to fine-tune on: each prompt's best response, its top_k (--keep_count), or all "
        "from a threshold (--keep_threshold) up.",
    )
    keep_count: int | None = HfArg(default=None, help="Responses to a prompt, for --keep top_k. Default: 1.")
    keep_threshold: float | None = HfArg(default=None, help="Lowest reward, for --keep threshold.")

    def __post_init__(self):
        counts = ("num_prompts", "save_every", "reward_batch_size", "max_new_tokens", "generation_batch_size")
        check_at_least(self, dict.fromkeys(counts, 1) | {"missing_eos_penalty": 0})
        if self.judge is None:
            self.judge = "ground_truth" if self.score_function else "none"
        check_choice("judge", self.judge, JUDGES)
        if self.judge == "ground_truth" and self.score_function is None:
            known = " and ".join(EMBEDDED)
            raise ValueError(f"judge ground_truth is for {known}, the benchmarks whose responses have a known score")
        self.n = sorted({1, 2, 4, 8, 16} if self.n is None else {*self.n})
        if self.n[0] < 1:
            raise ValueError(f"n must be at least 1, got {self.n[0]}")
        self.num_samples = self.n[-1] if self.num_samples is None else self.num_samples
        if self.num_samples < self.n[-1]:
            raise ValueError(f"num_samples {self.num_samples} is less than the largest n, {self.n[-1]}: sample more")
        if self.num_samples > 1 and (self.temperature == 0 or self.top_k == 1):
            raise ValueError("best-of-n at temperature 0 or top_k 1 would pick from equal responses")
        check_choice("empty", self.empty, EMPTY_CHOICES)
        self.place("best-of-n")
        for name, choice in (("keep_count", "top_k"), ("keep_threshold", "threshold")):
            if getattr(self, name) is not None and self.keep != choice:
                kept = "nothing is kept" if self.keep is None else f"--keep is {self.keep}"
                raise ValueError(f"{name} is for --keep {choice}, and {kept}: leave it out, or give --keep {choice}")
        demonstrations([], [], **self.kept())
        if self.keep_count is not None and self.keep_count > self.num_samples:
            raise ValueError(f"keep_count {self.keep_count} is more than the {self.num_samples} responses to a prompt")

    def kept(self) -> dict[str, Any]:
        """Keyword arguments of `demonstrations`."""
        count = 1 if self.keep_count is None else self.keep_count
        return {"keep": self.keep or "best", "count": count, "threshold": self.keep_threshold}

    @property
    def score_function(self) -> Callable[..., float] | None:
        """The known score of a response, `f(prompt_text, response, *, finished=True)`; None for none."""
        return known_score(self.dataset_name)

    def settings(self) -> SamplingSettings:
        return SamplingSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            stop=(),
            max_prompt_tokens=self.max_prompt_tokens,
            batch_size=self.generation_batch_size,
        )


def main() -> None:
    """Sample, score, compare, and write the run folder; resume an earlier call that stopped."""
    with sampling_errors():
        run = SamplingRun(
            BestOfNArguments,
            config="best_of_n",
            description="Pick the best of n responses by a reward.",
            files=FILES,
            responses=SAMPLES,
        )
        arguments, folder, settings = run.arguments, run.folder, run.arguments.settings()
        reward = only_reward(arguments, arguments.reward_batch_size)
        judge, prompts = load_judge(arguments), load_prompts(arguments)
        run.open()
        if run.is_main_process and arguments.keep and arguments.prompt_split.startswith("test"):
            print(f"{arguments.prompt_split} is held out: to fine-tune on, give --prompt_split train_gen")
        engine, tokenizer = run.load_engine(settings)
        samples = best_of_n(
            prompts,
            engine,
            reward,
            arguments.num_samples,
            empty=arguments.empty,
            missing_eos_penalty=arguments.missing_eos_penalty,
            seed=arguments.seed,
            path=folder / SAMPLES,
            save_every=arguments.save_every,
            accelerator=run.accelerator,
            progress="responses" if run.is_main_process else None,
        )
        engine.settings = dataclasses.replace(settings, temperature=0.0, top_p=1.0, top_k=0)
        base = map_over_ranks(
            lambda rows: engine([row["prompt"] for row in rows], seed=arguments.seed), prompts, run.accelerator
        )
        if run.is_main_process:
            if score := arguments.score_function:
                for row in chain(*samples):
                    row["score"] = score(row["prompt_text"], row["response_text"], finished=row["finished"])
                # The same rows as before, now with the score.
                write_json_lines(folder / SAMPLES, chain(*samples))
            results = _compare(arguments, samples, prompts, base, judge, tokenizer, folder)
            model, reward_name = run.model.model_name_or_path, getattr(reward, "__name__", type(reward).__name__)
            penalty = arguments.missing_eos_penalty
            penalized = f", missing_eos_penalty {penalty:g}" if penalty else ""
            objective = f"best of {arguments.n[-1]} (temperature {settings.temperature:g}{penalized})"
            results["run"] = run.describe(objective, settings, reward=reward_name, judge=arguments.judge)
            if arguments.keep:
                provenance = {"sampled_from": model, "rewarded_by": reward_name}
                results["sft"] = _write_sft(arguments, samples, prompts, provenance, folder)
            title = f"{objective} by {reward_name}, model {model}, data {arguments.dataset_name}"
            with drawing("best_of_n.png"):
                plot_best_of_n(results["best_of_n"]["curve"], folder / "best_of_n.png", title=title)
            run.end(results, _table(results))
    end_processes(run.accelerator)


def _compare(
    arguments: BestOfNArguments,
    samples: list[list[Row]],
    prompts,
    base: list[Generation],
    judge,
    tokenizer,
    folder: Path,
) -> dict[str, Any]:
    """The curve over n, and the picks of the largest n beside the base's responses; writes generations.jsonl."""
    unscorable = sum(row["reward"] is None for row in chain(*samples))
    found = {**best_of_n_curve(samples, arguments.n), "unscorable": unscorable}
    outcomes: list[str | None] = []
    for row in found["curve"]:
        picks = [pick_best(group, row["n"]) for group in samples]
        kept = [index for index, pick in enumerate(picks) if pick is not None]
        own, asked, other = ([values[index] for index in kept] for values in (picks, prompts, base))
        row["mean_tokens"] = sum(pick["generated_num_tokens"] for pick in own) / len(own)
        row["win_rate"] = None
        if judge is not None:
            compared, outcomes = judge_against(judge, asked, own, other, folder)
            row["win_rate"] = compared.to_dict()
    # Those of the largest n, which is the last.
    comparison = compare_generations(
        asked,
        [Generation([], response_ids(pick, tokenizer), pick["response_text"], pick["finished"]) for pick in own],
        other,
        max_new_tokens=arguments.max_new_tokens,
        score_function=arguments.score_function,
    )
    for row, pick in zip(comparison.rows, own, strict=True):
        row |= {name: pick[name] for name in ("generated_num_tokens", "sample", "reward")}
        row["best_of"] = arguments.n[-1]
    for row, outcome in zip(comparison.rows, outcomes, strict=bool(outcomes)):
        row["outcome"] = outcome
    write_json_lines(folder / "generations.jsonl", comparison.rows)
    results = dict.fromkeys(("run", "rewards", "preferences", "kl"))
    results |= {name: comparison.summary[name] for name in ("score", "generations")}
    return {**results, "win_rate": found["curve"][-1]["win_rate"], "best_of_n": found}


def _write_sft(
    arguments, samples: list[list[Row]], prompts, provenance: dict[str, Any], folder: Path
) -> dict[str, Any]:
    provenance = {**provenance, "temperature": arguments.temperature, "keep": arguments.keep}
    rows = [{**row, **provenance} for row in demonstrations(samples, prompts, **arguments.kept())]
    write_json_lines(folder / "sft.jsonl", rows)
    if not rows:
        print("warning: sft.jsonl is empty: no response that ended has a reward to keep it for")
    return {"rows": len(rows), "prompts": sum(row["rank"] == 1 for row in rows)}


def _table(results: dict[str, Any]) -> str:
    run, found = results["run"], results["best_of_n"]
    left_out = f", {found['left_out']} left out for want of rewards" if found["left_out"] else ""
    names = {"proxy": "reward", "gold": "true score", "oracle": "best possible"}
    shown = [name for name in names if name in found["curve"][0]]
    judged = found["curve"][0]["win_rate"] is not None
    header = ["n", "KL bound", *(names[name] for name in shown), *(["win rate, ties as half"] * judged), "tokens"]
    rows = []
    for row in found["curve"]:
        win = [estimate(row["win_rate"]["half"], "rate")] if judged else []
        estimates = [estimate(row[name]) if name != "oracle" else f"{row[name]['mean']:.3f}" for name in shown]
        rows.append([str(row["n"]), f"{row['kl_bound']:.3f}", *estimates, *win, f"{row['mean_tokens']:.1f}"])
    lines = [
        f"{run['objective']} by {run['reward']}, model {run['model']}, data {run['dataset']}",
        f"{found['n_prompts']} prompts{left_out}; 95% intervals over prompts; win rate against the greedy base",
        f"\n{format_table(header, rows)}",
    ]
    peak = found["peak"]
    if peak is not None and peak["n"] < found["curve"][-1]["n"]:
        change = estimate(peak["change"])
        lines.append(f"\nthe true score is highest at n = {peak['n']}; from there to the largest n: {change}")
    if found["unscorable"]:
        lines.append(f"\n{found['unscorable']} responses have no reward")
    if "sft" in results:
        kept = results["sft"]
        lines.append(f"\nto fine-tune on: sft.jsonl, {kept['rows']} responses to {kept['prompts']} prompts")
    return "\n".join(lines)


# ---- Prompts and judge ----


def load_prompts(arguments: BestOfNArguments) -> list[dict[str, Any]]:
    """The prompts to respond to. The only split of a single file need not be named; `prompt_split` is set to it."""
    name, split = arguments.dataset_name, arguments.prompt_split
    alone = Path(name).is_file() and split == BestOfNArguments.prompt_split
    benchmark = load_benchmark(name, splits=None if alone else split, skip_bad_rows=arguments.skip_bad_rows)
    if alone:
        (arguments.prompt_split,) = benchmark
    rows = benchmark[arguments.prompt_split]
    if arguments.num_prompts is not None and arguments.num_prompts > len(rows):
        raise ValueError(f"{arguments.prompt_split} has {len(rows)} prompts: ask for no more with --num_prompts")
    return list(rows)[: arguments.num_prompts]


def load_judge(arguments: BestOfNArguments) -> PairwiseJudge | None:
    """The requested judge; None for none."""
    if arguments.judge == "none":
        return None
    if arguments.judge == "ground_truth":
        return GroundTruthJudge(arguments.score_function)
    from trl_ext.evaluation import OpenAIJudge

    return OpenAIJudge(arguments.judge_model, base_url=arguments.judge_base_url)


def judge_against(
    judge: PairwiseJudge,
    prompts: Sequence[dict[str, Any]],
    own: Sequence[dict[str, Any]],
    base: Sequence[Generation],
    folder: Path,
) -> tuple[WinRate, list[str | None]]:
    """The win rate of sampled rows against the base's responses; a judge's verdicts are kept in the folder.

    Also returns the outcome of each row: `candidate`, `base` or `tie`, or None if the judge failed.
    """
    result = judge_pairs(
        judge,
        prompts,
        [row["response_text"] for row in own],
        [generation.text for generation in base],
        candidate_finished=[row["finished"] for row in own],
        base_finished=[generation.finished for generation in base],
        cache=folder / JUDGE_CACHE,
    )
    outcomes = [None if one.error else one.first if one.first == one.second else "tie" for one in result.outcomes]
    return win_rate(result.outcomes), outcomes


def response_ids(row: dict[str, Any], tokenizer) -> list[int]:
    """The token ids of a sampled row's text, with the end token if the response finished."""
    ids = tokenizer(row["response_text"], add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if row["finished"] and tokenizer.eos_token_id is not None else ids
