"""Best-of-n sampling against a reward: its gain over n, reward hacking, and data for fine-tuning."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from transformers.hf_argparser import HfArg

from trl_ext import load_benchmark
from trl_ext.data.benchmark import known_score
from trl_ext.evaluation import GroundTruthJudge, best_of_n_curve
from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.comparing.generations import compare_generations
from trl_ext.evaluation.reporting.results import save_results
from trl_ext.files import write_json_lines, write_text
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
from trl_ext.runs.finish import describe_machine, estimate, say_written
from trl_ext.runs.folder import config_text, settings_digest
from trl_ext.runs.loading import BenchmarkArguments
from trl_ext.runs.online import RewardSources, only_reward
from trl_ext.trainers.defaults import check_at_least, runs_on_cpu

RESPONSES = "responses.jsonl"
FILES = ("config.yaml", "results.json", "generations.jsonl", RESPONSES, "sft.jsonl")
# Settings that do not change the sampled and scored responses; a model is compared by the hash of its weights.
_MAY_CHANGE = ("output_dir", "model_name_or_path", "use_cpu", "generation_batch_size", "reward_batch_size")
_MAY_CHANGE += ("n", "keep")


@dataclass
class BestOfNArguments(BenchmarkArguments, RewardSources):
    """Prompts, the reward, how responses are sampled, and how many to pick from."""

    model_name_or_path: str = HfArg(
        default="toy", help="toy, smollm2, a folder of a model or an adapter, or a hub model."
    )
    dtype: str = HfArg(default="auto", help="Of the weights on an accelerator; on a CPU they are float32.")
    output_dir: str | None = HfArg(default=None, help="Where results go. Default: in runs/.")
    use_vllm: bool = HfArg(default=False, help="Sample with vLLM, which the extra vllm installs.")
    use_cpu: bool = HfArg(default=False, help="Use no accelerator even if there is one.")
    save_every: int = HfArg(default=512, help="Responses between saves, from which a run resumes.")
    seed: int = HfArg(default=42, help="Sampling seed.")
    prompt_split: str = HfArg(default="test_gen", help="Prompts to respond to.")
    num_prompts: int | None = HfArg(default=None, help="Use only the first N prompts. Default: all.")
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
    keep: bool = HfArg(default=False, help="Write each prompt's best response to sft.jsonl, to fine-tune on.")

    def __post_init__(self):
        check_at_least(self, {"num_prompts": 1, "save_every": 1, "reward_batch_size": 1, "missing_eos_penalty": 0})
        self.n = sorted({1, 2, 4, 8, 16} if self.n is None else {*self.n})
        self.num_samples = self.n[-1] if self.num_samples is None else self.num_samples
        if self.num_samples < self.n[-1]:
            raise ValueError(f"num_samples {self.num_samples} is less than the largest n, {self.n[-1]}: sample more")
        if self.num_samples > 1 and (self.temperature == 0 or self.top_k == 1):
            raise ValueError("best-of-n at temperature 0 or top_k 1 would pick from equal responses")
        if self.output_dir is None:
            self.output_dir = f"runs/best-of-n-{Path(self.dataset_name).absolute().stem}"

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
    prompts = load_prompts(arguments)
    if arguments.use_vllm and accelerator.num_processes > 1:
        raise ValueError("vLLM is for one process here: launch with --num_processes 1")
    settings = {name: value for name, value in yaml.safe_load(resolved).items() if name not in _MAY_CHANGE}
    settings["model_sha256"] = model_sha256(arguments.model_name_or_path)
    if accelerator.is_main_process:
        if (folder / "metrics.jsonl").exists():
            raise FileExistsError(f"{folder} holds a training run: choose another --output_dir")
        if arguments.overwrite_output_dir:
            for path in (*(folder / name for name in FILES), settings_path(folder / RESPONSES)):
                path.unlink(missing_ok=True)
        check_settings(folder / RESPONSES, settings)
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
        score_function=known_score(arguments.dataset_name),
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
        results = _compare(arguments, samples, prompts, base, tokenizer)
        write_json_lines(folder / "generations.jsonl", results.pop("rows"))
        reward_name, penalty = getattr(reward, "__name__", type(reward).__name__), arguments.missing_eos_penalty
        penalized = f", missing_eos_penalty {penalty:g}" if penalty else ""
        objective = f"best of {arguments.n[-1]} (temperature {sampling.temperature:g}{penalized})"
        results["run"] = {
            "objective": objective,
            "model": arguments.model_name_or_path,
            "dataset": arguments.dataset_name,
            "reward": reward_name,
            "sampling": asdict(sampling),
            "engine": "vllm" if arguments.use_vllm else "transformers",
            "settings_digest": settings_digest(resolved),
            "seed": arguments.seed,
            "total_seconds": round(time.time() - started, 1),
            **describe_machine(accelerator),
        }
        if arguments.keep:
            provenance = {"sampled_from": arguments.model_name_or_path, "rewarded_by": reward_name}
            provenance["temperature"] = arguments.temperature
            kept = [{**row, **provenance} for row in demonstrations(samples, prompts)]
            write_json_lines(folder / "sft.jsonl", kept)
            results["sft"] = {"rows": len(kept)}
        save_results(folder, results)
        print(f"\n{_table(results)}")
        say_written(results["run"], folder, FILES)
    end_processes(accelerator)


def _compare(
    arguments: BestOfNArguments, samples: list[list[Row]], prompts: list[dict], base: list[Generation], tokenizer
) -> dict[str, Any]:
    """The curve over n, and as `rows` the picks of the largest n beside the base's greedy responses."""
    score_function = known_score(arguments.dataset_name)
    judge = None if score_function is None else GroundTruthJudge(score_function)
    found = best_of_n_curve(samples, arguments.n)
    # The largest n, of which the rows are kept, is the last.
    for row in found["curve"]:
        picks = [pick_best(group, row["n"]) for group in samples]
        kept = [index for index, pick in enumerate(picks) if pick is not None]
        own, asked, other = ([values[index] for index in kept] for values in (picks, prompts, base))
        comparison = compare_generations(
            asked,
            [Generation([], response_ids(pick, tokenizer), pick["response_text"], pick["finished"]) for pick in own],
            other,
            judge=judge,
            score_function=score_function,
        )
        row["mean_tokens"] = sum(pick["generated_num_tokens"] for pick in own) / len(own)
        row["win_rate"] = comparison.summary["win_rate"]
    for row, pick in zip(comparison.rows, own, strict=True):
        row |= {name: pick[name] for name in ("generated_num_tokens", "sample", "reward")}
        row["best_of"] = arguments.n[-1]
    results = dict.fromkeys(("run", "rewards", "preferences", "kl"))
    results |= {name: comparison.summary[name] for name in ("score", "generations", "win_rate")}
    return {**results, "best_of_n": found, "rows": comparison.rows}


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
    if "sft" in results:
        lines.append(f"\nto fine-tune on: sft.jsonl, {results['sft']['rows']} responses")
    return "\n".join(lines)


def load_prompts(arguments: BestOfNArguments) -> list[dict[str, Any]]:
    """The prompts to respond to. The only split of a single file need not be named; `prompt_split` is set to it."""
    name, split = arguments.dataset_name, arguments.prompt_split
    alone = Path(name).is_file() and split == BestOfNArguments.prompt_split
    benchmark = load_benchmark(name, splits=None if alone else split, skip_bad_rows=arguments.skip_bad_rows)
    if alone:
        (arguments.prompt_split,) = benchmark
    return list(benchmark[arguments.prompt_split])[: arguments.num_prompts]


def response_ids(row: dict[str, Any], tokenizer) -> list[int]:
    """The token ids of a sampled row's text, with the end token if the response finished."""
    ids = tokenizer(row["response_text"], add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if row["finished"] and tokenizer.eos_token_id is not None else ids
