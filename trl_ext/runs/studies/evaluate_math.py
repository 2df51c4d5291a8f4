"""Evaluation on problems with known answers: accuracy, pass@k and maj@k of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.hf_argparser import HfArg

from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.reasoning import evaluate_reasoning, summarize_reasoning
from trl_ext.rollouts import end_processes
from trl_ext.runs.finish import LENGTHS, TITLES, estimate, examples
from trl_ext.runs.reasoning import ProblemArguments, load_problems, sampling_settings
from trl_ext.runs.studies.sampling import EngineArguments, SamplingRun, sampling_errors
from trl_ext.trainers.defaults import check_at_least

RESPONSES = "generations.jsonl"
FILES = ("config.yaml", RESPONSES, "results.json")


@dataclass
class EvaluationArguments(EngineArguments, ProblemArguments):
    """The number of sampled responses, and the k of pass@k."""

    samples_per_prompt: int = HfArg(default=1, help="Responses to each problem; several give pass@k.")
    pass_at: list[int] | None = HfArg(
        default=None, help="The k of pass@k and maj@k. Default: powers of 2 up to samples_per_prompt."
    )

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, {"samples_per_prompt": 1, "save_every": 1})
        if self.samples_per_prompt > 1 and self.generation_temperature == 0:
            raise ValueError(
                f"samples_per_prompt {self.samples_per_prompt} at temperature 0 would all be the same: sample at "
                "--generation_temperature 1, or one response"
            )
        self.place("evaluate-math")
        if self.pass_at is None:
            powers = [2**power for power in range(self.samples_per_prompt.bit_length())]
            self.pass_at = powers if self.samples_per_prompt > 1 else []
        wrong = [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]
        if wrong:
            raise ValueError(f"pass_at {wrong[0]} must lie between 1 and samples_per_prompt {self.samples_per_prompt}")


def main() -> None:
    """Sample, grade, and write the run folder; resume an earlier call that was interrupted."""
    with sampling_errors():
        run = SamplingRun(
            EvaluationArguments,
            config="evaluate_math",
            description="Evaluate a model on problems with known answers.",
            files=FILES,
            responses=RESPONSES,
        )
        arguments = run.arguments
        problems = load_problems(arguments, arguments.eval_split, "num_eval_prompts")
        settings = sampling_settings(arguments, reward=problems.reward)
        run.open()
        engine, tokenizer = run.load_engine(settings)
        if problems.template is None and tokenizer.chat_template is None:
            raise ValueError("the model has no chat template: name a --prompt_template, such as r1_zero")
        rows = evaluate_reasoning(
            problems.rows,
            problems.prompts(),
            engine,
            problems.grade,
            samples=arguments.samples_per_prompt,
            seed=arguments.seed,
            path=run.folder / RESPONSES,
            save_every=arguments.save_every,
            accelerator=run.accelerator,
            progress="responses" if run.is_main_process else None,
        )
        if run.is_main_process:
            objective = f"evaluation ({problems.template_name} prompt, temperature {settings.temperature:g})"
            summary = summarize_reasoning(rows, arguments.pass_at)
            results = {
                "run": run.describe(objective, settings, reward=problems.reward),
                "score": {"policy": summary["accuracy"]["mean"]},
                "generations": {"policy": {name: summary[name] for name in ("mean_tokens", "truncated_fraction")}},
                "reasoning": summary,
            }
            run.end(results, _table(results, rows))
    end_processes(run.accelerator)


def _table(results: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    run, summary = results["run"], results["reasoning"]
    title = f"{run['objective']}, model {run['model']}, data {run['dataset']}, reward {run['reward']}"
    counts = f"{summary['n_prompts']} problems, responses to each: {summary['n_samples']}; 95% intervals"
    lines = [(TITLES[name], f"{count}  ({count / len(rows):.1%})") for name, count in summary["categories"].items()]
    estimates = {"accuracy": summary["accuracy"], "in the form asked for": summary["format_rate"]}
    estimates |= {f"{name}@{k}": value for name in ("pass", "maj") for k, value in summary[f"{name}_at"].items()}
    lines += [(name, estimate(found)) for name, found in estimates.items()]
    lines += [(label, f"{summary[key]:.3f}") for key, label in LENGTHS.items() if summary[key] is not None]
    return f"{title}\n{counts}\n\n{format_table(('', 'responses'), lines)}\n{examples(rows)}"
