"""Evaluation on problems with known answers. Without arguments: the embedded model on embedded additions."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
from accelerate import Accelerator
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
from sampling import kept_when_interrupted, load_engine, open_folder
from training import ModelArguments

from trl_ext.data.math import math_prompt
from trl_ext.evaluation.reasoning import evaluate_reasoning, summarize_reasoning
from trl_ext.files import write_json
from trl_ext.rollouts import end_processes
from trl_ext.trainers.defaults import runs_on_cpu

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
    with kept_when_interrupted():
        _run()


def _run() -> None:
    started = time.time()
    with common.one_line_errors():
        arguments, model = common.parse_arguments(
            (EvaluationArguments, ModelArguments),
            default_config=common.RECIPES / "configs" / "toy" / "evaluate_math.yaml",
            description="Evaluate a model on problems with known answers.",
        )
        problems = load_problems(arguments, arguments.eval_split, arguments.num_eval_prompts)
        settings = sampling_settings(arguments, reward=problems.reward)
        resolved = config_text(arguments, model)
        folder = Path(arguments.output_dir)
        accelerator = Accelerator(cpu=runs_on_cpu(arguments.use_cpu))
        if accelerator.is_main_process:
            open_folder(folder, resolved, overwrite=arguments.overwrite_output_dir, files=FILES)
        accelerator.wait_for_everyone()
        engine, tokenizer = load_engine(arguments, model, settings, accelerator)
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
