"""Best-of-n sampling against a reward: its gain over n, reward hacking, and data for fine-tuning."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
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
from trl_ext.evaluation.comparing.generations import compare_generations
from trl_ext.files import write_json, write_json_lines, write_text
from trl_ext.models.loading import model_sha256
from trl_ext.rollouts import (
    Generation,
    SamplingSettings,
    best_of_n,
    demonstrations,
    end_processes,
    load_engine,
    map_over_ranks,
    pick_best,
)
from trl_ext.rollouts.responses import Row, check_settings, settings_path
from trl_ext.runs.arguments import one_line_errors, parse_arguments
from trl_ext.runs.configs import toy_config
from trl_ext.runs.finish import describe_machine, drawing, estimate, say_written
from trl_ext.runs.folder import config_text, settings_digest
from trl_ext.runs.online import RewardSources, only_reward
from trl_ext.trainers.defaults import check_at_least, check_choice, runs_on_cpu

RESPONSES = "responses.jsonl"
JUDGE_CACHE = "judge_cache.sqlite"
JUDGES = ("ground_truth", "openai", "none")
FILES = ("config.yaml", "results.json", "generations.jsonl", RESPONSES, "sft.jsonl", "best_of_n.png", JUDGE_CACHE)


@dataclass
class BestOfNArguments(RewardSources):
    """Prompts, the reward, the judge, how responses are sampled, how many to pick from, and which of them to keep."""

    model_name_or_path: str = HfArg(
        default="toy", help="toy, smollm2, a folder of a model or an adapter, or a hub model."
    )
    dtype: str = HfArg(default="auto", help="Of the weights on an accelerator; on a CPU they are float32.")
    output_dir: str | None = HfArg(default=None, help="Where results go. Default: in runs/.")
    use_vllm: bool = HfArg(default=False, help="Sample with vLLM, which the extra vllm installs.")
    use_cpu: bool = HfArg(default=False, help="Use no accelerator even if there is one.")
    save_every: int = HfArg(default=512, help="Responses between saves, from which a run resumes.")
    seed: int = HfArg(default=42, help="Sampling seed.")
    dataset_name: str = HfArg(
        default="toy", help="toy, instructions, a folder of {split}.jsonl, one .jsonl file, or a hub dataset."
    )
    prompt_split: str = HfArg(default="test_gen", help="Prompts to respond to.")
    num_prompts: int | None = HfArg(default=None, help="Use only the first N prompts. Default: all.")
    skip_bad_rows: bool = HfArg(default=False, help="Drop bad rows and say how many and why.")
    overwrite_output_dir: bool = HfArg(default=False, help="Replace an earlier run in output_dir.")
    judge: str | None = HfArg(
        default=None,
        help="Who compares responses with the base's, which are greedy: ground_truth (embedded data "
        "only), openai, or none. Default: ground_truth on embedded data, none on everything else.",
    )
    judge_model: str = HfArg(default="gpt-5.4", help="For the judge openai; key in OPENAI_API_KEY.")
    judge_base_url: str | None = HfArg(default=None, help="Base URL of an OpenAI-compatible server.")
    max_prompt_tokens: int | None = HfArg(default=None, help="Longer prompts lose their beginning.")
    max_new_tokens: int = HfArg(default=256, help="Longest response, in tokens.")
    generation_batch_size: int = HfArg(default=32, help="Prompts per batch of generation.")
    reward_batch_size: int = HfArg(default=32, help="Responses per batch of a reward model.")
    n: list[int] | None = HfArg(default=None, help="Numbers to pick the best from. Default: 1, 2, 4, 8, 16.")
    num_samples: int | None = HfArg(default=None, help="Responses to each prompt. Default: largest n.")
    temperature: float = HfArg(default=1.0, help="Sampling temperature.")
    top_p: float = HfArg(default=1.0, help="Nucleus sampling.")
    top_k: int = HfArg(default=0, help="Most likely tokens to sample from; 0 for all.")
    repetition_penalty: float = HfArg(default=1.0, help="Above 1 makes tokens less likely to come again.")
    missing_eos_penalty: float = HfArg(
        default=0.0, help="Subtracted from the reward of a response that was truncated at max_new_tokens."
    )
    keep: str | None = HfArg(
        default=None,
        help="Write sft.jsonl to fine-tune on: each prompt's best response, its top_k (--keep_count), or all "
        "from a threshold (--keep_threshold) up.",
    )
    keep_count: int = HfArg(default=1, help="Responses to a prompt, for --keep top_k.")
    keep_threshold: float | None = HfArg(default=None, help="Lowest reward, for --keep threshold.")

    def __post_init__(self):
        counts = (
            "num_prompts",
            "save_every",
            "reward_batch_size",
            "max_new_tokens",
            "generation_batch_size",
            "keep_count",
        )
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
        if self.output_dir is None:
            self.output_dir = f"runs/best-of-n-{Path(self.dataset_name).absolute().stem}"
        demonstrations([], [], **self.kept())

    def kept(self) -> dict[str, Any]:
        """Keyword arguments of `demonstrations`."""
        return {"keep": self.keep or "best", "count": self.keep_count, "threshold": self.keep_threshold}

    @property
    def score_function(self) -> Callable[..., float] | None:
        """The known score of a response, `f(prompt_text, response, *, finished=True)`; None for none."""
        return known_score(self.dataset_name)

    def settings(self) -> SamplingSettings:
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "max_prompt_tokens")
        own = {name: getattr(self, name) for name in names}
        return SamplingSettings(**own, stop=(), batch_size=self.generation_batch_size)


def main() -> None:
    """Sample, score, compare, and write the run folder; resume an earlier call that stopped."""
    try:
        with one_line_errors():
            _run(time.time())
    except KeyboardInterrupt:
        print("\ninterrupted: what was saved is kept, and the same command resumes from there")
        raise SystemExit(130) from None


def _run(started: float) -> None:
    (arguments,) = parse_arguments(
        (BestOfNArguments,),
        default_config=toy_config("best_of_n"),
        description="Pick the best of n responses by a reward.",
    )
    resolved, sampling, folder = config_text(arguments), arguments.settings(), Path(arguments.output_dir)
    accelerator = Accelerator(cpu=runs_on_cpu(arguments.use_cpu))
    reward = only_reward(arguments, arguments.reward_batch_size)
    judge, prompts = load_judge(arguments), load_prompts(arguments)
    if arguments.use_vllm and accelerator.num_processes > 1:
        raise ValueError("vLLM is for one process here: launch with --num_processes 1")
    settings = yaml.safe_load(resolved) | {"model_sha256": model_sha256(arguments.model_name_or_path)}
    del settings["output_dir"]
    if accelerator.is_main_process:
        _open(arguments, folder, settings)
        write_text(folder / "config.yaml", resolved)
        if arguments.keep and arguments.prompt_split.startswith("test"):
            print(f"{arguments.prompt_split} is held out: to fine-tune on, give --prompt_split train_gen")
    accelerator.wait_for_everyone()
    dtype = "float32" if accelerator.device.type == "cpu" else arguments.dtype
    options = {"dtype": dtype, "use_vllm": arguments.use_vllm, "device": accelerator.device}
    engine, tokenizer = load_engine(arguments.model_name_or_path, sampling, **options)
    samples = best_of_n(
        prompts,
        engine,
        reward,
        arguments.num_samples,
        score_function=arguments.score_function,
        missing_eos_penalty=arguments.missing_eos_penalty,
        seed=arguments.seed,
        path=folder / RESPONSES,
        settings=settings,
        save_every=arguments.save_every,
        accelerator=accelerator,
        progress="responses" if accelerator.is_main_process else None,
    )
    engine.settings = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    base = map_over_ranks(
        lambda rows: engine([row["prompt"] for row in rows], seed=arguments.seed), prompts, accelerator
    )
    if accelerator.is_main_process:
        results = _compare(arguments, samples, prompts, base, judge, tokenizer, folder)
        reward_name, penalty = getattr(reward, "__name__", type(reward).__name__), arguments.missing_eos_penalty
        penalized = f", missing_eos_penalty {penalty:g}" if penalty else ""
        objective = f"best of {arguments.n[-1]} (temperature {sampling.temperature:g}{penalized})"
        results["run"] = {
            "objective": objective,
            "model": arguments.model_name_or_path,
            "dataset": arguments.dataset_name,
            "reward": reward_name,
            "judge": arguments.judge,
            "sampling": asdict(sampling),
            "engine": "vllm" if arguments.use_vllm else "transformers",
            "settings_digest": settings_digest(resolved),
            "seed": arguments.seed,
            "total_seconds": round(time.time() - started, 1),
            **describe_machine(accelerator),
        }
        if arguments.keep:
            results["sft"] = _write_sft(arguments, samples, prompts, reward_name, folder)
        title = f"{objective} by {reward_name}, model {arguments.model_name_or_path}, data {arguments.dataset_name}"
        with drawing("best_of_n.png"):
            plot_best_of_n(results["best_of_n"]["curve"], folder / "best_of_n.png", title=title)
        write_json(folder / "results.json", results)
        print(f"\n{_table(results)}")
        say_written(results["run"], folder, FILES)
    end_processes(accelerator)


def _open(arguments: BestOfNArguments, folder: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder of another run, and clear it if requested."""
    if (folder / "metrics.jsonl").exists():
        raise FileExistsError(f"{folder} holds a training run: choose another --output_dir")
    if arguments.overwrite_output_dir:
        for path in (*(folder / name for name in FILES), settings_path(folder / RESPONSES)):
            path.unlink(missing_ok=True)
    check_settings(folder / RESPONSES, settings)


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
    arguments: BestOfNArguments, samples: list[list[Row]], prompts: list[dict], reward: str, folder: Path
) -> dict[str, Any]:
    """Write the kept responses with their provenance, and return their counts."""
    provenance = {"sampled_from": arguments.model_name_or_path, "rewarded_by": reward}
    provenance |= {"temperature": arguments.temperature, "keep": arguments.keep}
    rows = [{**row, **provenance} for row in demonstrations(samples, prompts, **arguments.kept())]
    write_json_lines(folder / "sft.jsonl", rows)
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
    return list(benchmark[arguments.prompt_split])[: arguments.num_prompts]


def load_judge(arguments: BestOfNArguments) -> PairwiseJudge | None:
    """The requested judge; None for none."""
    if arguments.judge == "none":
        return None
    if arguments.judge == "ground_truth":
        return GroundTruthJudge(arguments.score_function)
    from trl_ext.evaluation import OpenAIJudge

    return OpenAIJudge(arguments.judge_model, base_url=arguments.judge_base_url)


def judge_against(
    judge: PairwiseJudge, prompts: Sequence[dict], own: Sequence[Row], base: Sequence[Generation], folder: Path
) -> tuple[WinRate, list[str | None]]:
    """The win rate of sampled rows against the base's responses, and each row's outcome; None if the judge failed."""
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
