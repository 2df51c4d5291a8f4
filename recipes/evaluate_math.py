"""Evaluation on problems with known answers. Without arguments: the embedded model on embedded additions."""

from __future__ import annotations

import os

# A run says nothing to anybody unless it is asked to.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import dataclasses
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from common import RECIPES, one_line_errors, parse_arguments
from reasoning import (
    LENGTHS,
    TITLES,
    ProblemArguments,
    Problems,
    load_problems,
    print_examples,
    print_table,
    sampling_settings,
)
from run_folder import config_text, settings_digest
from training import ModelArguments
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import get_quantization_config

from trl_ext.data.math import math_prompt
from trl_ext.evaluation.reasoning import evaluate_reasoning, summarize_reasoning
from trl_ext.files import write_json, write_text
from trl_ext.models import resolve_model_path
from trl_ext.rollouts import SamplingSettings, TransformersEngine, VLLMEngine, end_processes
from trl_ext.trainers.defaults import runs_on_cpu

# What an evaluation that goes on may differ in from what it was begun with.
_MAY_DIFFER = ("output_dir", "use_vllm", "vllm_gpu_memory_utilization")
FILES = ("config.yaml", "generations.jsonl", "results.json")


@dataclass
class EvaluationArguments(ProblemArguments):
    """How many responses are sampled, with what, and where they go."""

    output_dir: str | None = field(
        default=None, metadata={"help": "Where results go. Default: runs/evaluate-math-{dataset}."}
    )
    samples_per_prompt: int = field(default=1, metadata={"help": "Responses to each problem; several give pass@k."})
    pass_at: list[int] | None = field(
        default=None, metadata={"help": "The k of pass@k and maj@k. Default: powers of 2 up to samples_per_prompt."}
    )
    use_vllm: bool = field(default=False, metadata={"help": "Sample with vLLM, which the extra vllm installs."})
    vllm_gpu_memory_utilization: float = field(default=0.9, metadata={"help": "Share of the GPU's memory for vLLM."})
    use_cpu: bool = field(default=False, metadata={"help": "Use no accelerator even if there is one."})
    save_every: int = field(default=256, metadata={"help": "Responses between saves, from which a run goes on."})
    seed: int = field(default=42, metadata={"help": "Of the sampling."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("samples_per_prompt", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.samples_per_prompt > 1 and self.generation_temperature == 0:
            raise ValueError(
                f"samples_per_prompt {self.samples_per_prompt} at temperature 0 would all be the same: sample at "
                "--generation_temperature 1, or one response"
            )
        if self.output_dir is None:
            self.output_dir = f"runs/evaluate-math-{Path(self.dataset_name).absolute().stem}"
        if self.pass_at is None:
            powers = [2**power for power in range(self.samples_per_prompt.bit_length())]
            self.pass_at = powers if self.samples_per_prompt > 1 else []
        wrong = [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]
        if wrong:
            raise ValueError(f"pass_at {wrong[0]} must lie between 1 and samples_per_prompt {self.samples_per_prompt}")


def main() -> None:
    """Read the arguments, sample and grade, and write the run folder; go on where an earlier call was interrupted."""
    try:
        _run()
    except KeyboardInterrupt:
        print("\ninterrupted: what was saved is kept, and the same command goes on from there")
        raise SystemExit(130) from None


def _run() -> None:
    started = time.time()
    with one_line_errors():
        arguments, model = parse_arguments(
            (EvaluationArguments, ModelArguments),
            default_config=RECIPES / "configs" / "toy" / "evaluate_math.yaml",
            description="Evaluate a model on problems with known answers.",
        )
        problems = load_problems(arguments, arguments.eval_split, arguments.num_eval_prompts)
        settings = sampling_settings(arguments, reward=problems.reward)
        resolved = config_text(arguments, model)
        folder = Path(arguments.output_dir)
        accelerator = Accelerator(cpu=runs_on_cpu(arguments.use_cpu))
        if accelerator.is_main_process:
            _open_folder(folder, resolved, arguments.overwrite_output_dir)
        accelerator.wait_for_everyone()
        engine, tokenizer = _engine(arguments, model, settings, accelerator)
        _check_template(problems, tokenizer)
        rows = evaluate_reasoning(
            problems.rows,
            [math_prompt(row, problems.template) for row in problems.rows],
            engine,
            problems.grade,
            samples=arguments.samples_per_prompt,
            seed=arguments.seed,
            path=folder / "generations.jsonl",
            save_every=arguments.save_every,
            accelerator=accelerator,
            progress="responses" if accelerator.is_main_process else None,
        )
    if accelerator.is_main_process:
        run = {
            "objective": f"evaluation ({problems.template_name} prompt, temperature {settings.temperature:g})",
            "model": model.model_name_or_path,
            "dataset": arguments.dataset_name,
            "reward": problems.reward,
            "sampling": dataclasses.asdict(settings),
            "engine": "vllm" if arguments.use_vllm else "transformers",
            "settings_digest": settings_digest(resolved),
            "seed": arguments.seed,
            "processes": accelerator.num_processes,
            "device": accelerator.device.type,
            "total_seconds": round(time.time() - started, 1),
            "versions": {name: version(name) for name in ("trl_ext", "trl", "transformers", "torch")},
        }
        summary = summarize_reasoning(rows, arguments.pass_at)
        write_json(folder / "results.json", _results(run, summary))
        _print(run, summary, rows, folder)
    end_processes(accelerator)


def _open_folder(folder: Path, resolved: str, overwrite: bool) -> None:
    """Make the folder, or find in it an evaluation that was begun with the same settings and is not finished.

    Raises:
        FileExistsError: it holds another evaluation, or a finished one, or a run of training.
    """
    way_out = "choose another --output_dir, or give --overwrite_output_dir"
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--output_dir {folder} is a file: name a folder")
    if overwrite:
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
    if (folder / "results.json").exists() or (folder / "metrics.jsonl").exists():
        raise FileExistsError(f"{folder} holds a finished evaluation or a training run: {way_out}")
    begun = folder / "generations.jsonl"
    if begun.exists() and begun.stat().st_size:
        config = folder / "config.yaml"
        if not config.exists():
            raise FileExistsError(f"{folder} holds responses and no config.yaml that says of what: {way_out}")
        earlier = yaml.safe_load(config.read_text(encoding="utf-8"))
        now = yaml.safe_load(resolved)
        names = [name for name in sorted({*earlier, *now}) if name not in _MAY_DIFFER]
        changed = [name for name in names if earlier.get(name) != now.get(name)]
        if changed:
            raise FileExistsError(
                f"{folder} holds an unfinished evaluation with another {changed[0]} "
                f"({earlier.get(changed[0])!r}, now {now.get(changed[0])!r}): {way_out}"
            )
        count = begun.read_bytes().count(b"\n")
        print(f"going on in {folder}, which holds {count} responses")
    write_text(folder / "config.yaml", resolved)


def _engine(arguments: EvaluationArguments, model: ModelArguments, settings: SamplingSettings, accelerator):
    """What samples, and its tokenizer.

    Raises:
        ValueError: the model cannot be loaded, a new adapter is asked for, or vLLM is to run in several processes or
            on an adapter.
        ImportError: vLLM is asked for and not installed.
    """
    path = resolve_model_path(model.model_name_or_path)
    if model.use_peft:
        raise ValueError("--use_peft is for training: give the folder of a trained adapter as --model_name_or_path")
    if arguments.use_vllm and accelerator.num_processes > 1:
        raise ValueError("vLLM is for one process here: launch with --num_processes 1")
    if arguments.use_vllm and (Path(path) / "adapter_config.json").exists():
        raise ValueError(f"vLLM loads no adapter by its folder: merge {path} into its base, or leave out --use_vllm")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=model.model_revision)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        if arguments.use_vllm:
            memory = arguments.vllm_gpu_memory_utilization
            options = {"revision": model.model_revision, "dtype": model.dtype or "auto", "seed": arguments.seed}
            return VLLMEngine(path, tokenizer, settings, gpu_memory_utilization=memory, **options), tokenizer
        dtype = "float32" if accelerator.device.type == "cpu" else model.dtype or "auto"
        loaded = AutoModelForCausalLM.from_pretrained(
            path,
            revision=model.model_revision,
            dtype=dtype,
            attn_implementation=model.attn_implementation,
            quantization_config=get_quantization_config(model),
        )
    except OSError as error:
        raise ValueError(
            f"the model {model.model_name_or_path!r} could not be loaded; without a network, give a copy's folder "
            f"with --model_name_or_path. ({error})"
        ) from error
    return TransformersEngine(loaded.to(accelerator.device).eval(), tokenizer, settings), tokenizer


def _check_template(problems: Problems, tokenizer) -> None:
    if problems.template is None and tokenizer.chat_template is None:
        raise ValueError("the model has no chat template: name a --prompt_template, such as r1_zero")


def _results(run: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": run,
        "score": {"policy": summary["accuracy"]["mean"]},
        "generations": {"policy": {name: summary[name] for name in ("mean_tokens", "truncated_fraction")}},
        "reasoning": summary,
    }


def _print(run: dict[str, Any], summary: dict[str, Any], rows: list[dict[str, Any]], folder: Path) -> None:
    print(f"\n{run['objective']}, model {run['model']}, data {run['dataset']}, reward {run['reward']}")
    n, total = summary["n_prompts"], len(rows)
    print(f"{n} problems, responses to each: {summary['n_samples']}; 95% intervals")
    lines = [(TITLES[name], f"{count}  ({count / total:.1%})") for name, count in summary["categories"].items()]
    estimates = {"accuracy": summary["accuracy"], "in the form asked for": summary["format_rate"]}
    estimates |= {f"pass@{k}": value for k, value in summary["pass_at"].items()}
    estimates |= {f"maj@{k}": value for k, value in summary["maj_at"].items()}
    lines += [(name, f"{e['mean']:.3f}  [{e['low']:.3f}, {e['high']:.3f}]") for name, e in estimates.items()]
    lines += [(label, f"{summary[key]:.3f}") for key, label in LENGTHS.items() if summary[key] is not None]
    print_table(("", "responses"), lines)
    print_examples(rows)
    print(f"\n{run['total_seconds']:.0f} s; in {folder}: {', '.join(FILES)}")


if __name__ == "__main__":
    main()
