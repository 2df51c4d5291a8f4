"""What the reasoning recipes share: problems, prompts, the verified reward, and tables of graded responses."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results import describe_run
from run_folder import TrainingRun

from trl_ext.data.math import load_math
from trl_ext.data.templates import load_prompt_template
from trl_ext.evaluation.plots import plot_run
from trl_ext.evaluation.reasoning import CATEGORIES, accuracy_gain, grader, summarize_reasoning
from trl_ext.files import write_json, write_json_lines
from trl_ext.rollouts import SamplingSettings
from trl_ext.rollouts.engines import ANSWER_END
from trl_ext.trainers.callbacks import read_metrics
from trl_ext.trainers.reasoning_evaluation import DECODINGS, ReasoningEvaluation

CHAT = "chat"
TITLES = {"correct": "correct", "wrong_answer": "wrong answer", "wrong_format": "wrong format"}
PANELS = {
    "Loss": {"train": "loss"},
    "Held-out problems, one sample each": {"correct": "eval_score", "in the form": "eval_rewards/format"},
    "Entropy (nats per token)": {"train": "entropy", "held-out responses": "eval_entropy"},
    "Response length (tokens)": {
        "correct": "eval_completions/mean_length_correct",
        "incorrect": "eval_completions/mean_length_incorrect",
    },
}


@dataclass
class ProblemArguments:
    """Problems, prompts and rewards, and how responses to held-out problems are sampled."""

    dataset_name: str = field(
        default="toy", metadata={"help": "toy (additions), a folder of {split}.jsonl, or one .jsonl file."}
    )
    eval_split: str = field(default="test", metadata={"help": "Problems to evaluate on."})
    prompt_template: str | None = field(
        default=None,
        metadata={
            "help": "r1_zero, question_only, alpaca_sft, a text file with {question}, or chat for the model's chat "
            "template. Default: chat on toy, r1_zero on everything else."
        },
    )
    reward: str | None = field(
        default=None,
        metadata={
            "help": "r1_zero (answer in tags), question_only (answer in a box), gsm8k (the last number) or countdown. "
            "Default: countdown where problems have numbers and a target, question_only for the prompt of that name, "
            "else r1_zero."
        },
    )
    use_math_verify: bool = field(
        default=False,
        metadata={"help": "Ask math-verify, too, about answers that string and value do not settle."},
    )
    num_eval_prompts: int | None = field(default=None, metadata={"help": "Problems to evaluate on. Default: all."})
    max_new_tokens: int = field(default=1024, metadata={"help": "Longest response, in tokens."})
    generation_temperature: float = field(default=1.0, metadata={"help": "Of sampled evaluations; 0 is greedy."})
    generation_top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling in evaluations."})
    generation_eval_batch_size: int = field(default=32, metadata={"help": "Prompts per batch of the evaluations."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier run in output_dir."})

    def __post_init__(self):
        if self.num_eval_prompts is not None and self.num_eval_prompts < 1:
            raise ValueError(f"num_eval_prompts must be at least 1, got {self.num_eval_prompts}")
        sampling_settings(self)


@dataclass
class Problems:
    """The problems of a split, with what they are asked and graded by.

    Attributes:
        rows: of `load_math`.
        template: the text of the prompt template; None for the chat template.
        template_name: its name.
        reward: the name of the reward.
        grade: the reward.
    """

    rows: list[dict[str, Any]]
    template: str | None
    template_name: str
    reward: str
    grade: Any


def load_problems(arguments: ProblemArguments, split: str, count: int | None = None) -> Problems:
    """The first `count` problems of a split (None for all), their template and their reward.

    Raises:
        FileNotFoundError, ValueError: no such problems, template or reward, or fewer problems than are asked for.
    """
    name = arguments.prompt_template or (CHAT if arguments.dataset_name == "toy" else "r1_zero")
    template = None if name == CHAT else load_prompt_template(name)
    rows = first(load_math(arguments.dataset_name, split), count, f"{arguments.dataset_name}, split {split!r},")
    reward = arguments.reward
    if reward is None:
        has_numbers = all("numbers" in row for row in rows)
        reward = "countdown" if has_numbers else "question_only" if name == "question_only" else "r1_zero"
    elif reward == "countdown" and not all("numbers" in row for row in rows):
        raise ValueError(f"the reward countdown needs problems with nums and target, which {split!r} has not")
    return Problems(rows, template, name, reward, grader(reward, fast=not arguments.use_math_verify))


def first(rows: list, count: int | None, what: str) -> list:
    """The first rows; all for None.

    Raises:
        ValueError: there are fewer.
    """
    if count is not None and count > len(rows):
        raise ValueError(f"{what} has {len(rows)} problems, and {count} were asked for: ask for fewer")
    return rows[:count]


def sampling_settings(arguments: ProblemArguments, *, reward: str = "r1_zero") -> SamplingSettings:
    """How responses are sampled; where the answer stands in tags, its closing one ends a response.

    Raises:
        ValueError: a value outside its range.
    """
    return SamplingSettings(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.generation_temperature,
        top_p=arguments.generation_top_p,
        stop=(ANSWER_END,) if reward in ("r1_zero", "countdown") else (),
        batch_size=arguments.generation_eval_batch_size,
    )


def evaluate_on(trainer, problems: Problems, settings: SamplingSettings) -> ReasoningEvaluation:
    """What samples a trainer's policy on the problems and grades it."""
    return ReasoningEvaluation(trainer, problems.rows, problems.template, problems.grade, settings)


def require_base(evaluation: ReasoningEvaluation, run: TrainingRun) -> None:
    """Check that a run that goes on can be compared with its base, whose weights are no longer there to sample.

    Raises:
        ValueError: the run folder does not hold the base's responses to all problems.
    """
    if run.checkpoint is not None and not evaluation.base_is_known():
        raise ValueError(
            f"{run.folder}/samples does not hold the base's responses to the {len(evaluation.rows)} held-out "
            "problems, which a run leaves there at its start: begin anew with --overwrite_output_dir"
        )


def compare_with_base(run: TrainingRun, trainer, evaluation: ReasoningEvaluation, **own: Any) -> dict[str, Any] | None:
    """Evaluate the trained policy, write the comparison with its base into the run folder, and print it.

    Args:
        run: of the recipe.
        trainer: after training.
        evaluation: on the problems of the comparison, whose base is known.
        own: what the recipe says of the run.

    Returns:
        the results; None on processes other than the main one.
    """
    after = {decoding: evaluation.evaluate(decoding, progress=f"policy, {decoding}") for decoding in DECODINGS}
    before = evaluation.base()
    if not trainer.accelerator.is_main_process:
        return None
    described = describe_run(trainer, run.describe(**own))
    results = write_comparison(run.folder, described, before, after)
    trainer.create_model_card()
    print_comparison(results, after["sampled"], run.training.output_dir)
    return results


def compare(before: Mapping[str, list], after: Mapping[str, list]) -> dict[str, Any]:
    """The figures before and after training, by decoding, and the gain in accuracy with its interval."""
    return {
        "before": {decoding: summarize_reasoning(before[decoding]) for decoding in DECODINGS},
        "after": {decoding: summarize_reasoning(after[decoding]) for decoding in DECODINGS},
        "gain": {decoding: accuracy_gain(before[decoding], after[decoding]) for decoding in DECODINGS},
    }


def write_comparison(
    folder: str | Path, run: Mapping[str, Any], before: Mapping[str, list], after: Mapping[str, list]
) -> dict[str, Any]:
    """Write `generations.jsonl`, `results.json` and `report.png` into the run folder, as all recipes name them.

    The score of the results is the accuracy of the sampled responses, and their rewards are the two parts of it.
    """
    folder = Path(folder)
    found = compare(before, after)
    own, base = (found[name]["sampled"] for name in ("after", "before"))
    results = {
        "run": dict(run),
        "win_rate": None,
        "score": {
            "base": base["accuracy"]["mean"],
            "policy": own["accuracy"]["mean"],
            "gain": found["gain"]["sampled"],
        },
        "rewards": None,
        "preferences": None,
        "kl": None,
        "generations": {name: _of_texts(summary) for name, summary in (("base", base), ("policy", own))},
        "reasoning": found,
    }
    write_json_lines(folder / "generations.jsonl", _beside_base(before, after))
    write_json(folder / "results.json", results)
    try:
        plot_run(read_metrics(folder / "metrics.jsonl"), results, folder / "report.png", PANELS)
    except ImportError as error:
        print(f"report.png was not drawn: {error}")
    return results


def _of_texts(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in ("mean_tokens", "truncated_fraction")}


def _beside_base(before: Mapping[str, list], after: Mapping[str, list]) -> list[dict[str, Any]]:
    """The sampled responses, each beside the base's and with the greedy one, under the names that the report reads."""
    columns = zip(after["sampled"], before["sampled"], after["greedy"], before["greedy"], strict=True)
    return [
        {
            **{name: value for name, value in own.items() if name not in ("sample", "reward")},
            "score": own["reward"],
            "base_response_text": base["response_text"],
            "base_generated_num_tokens": base["generated_num_tokens"],
            "base_finished": base["finished"],
            "base_category": base["category"],
            "base_score": base["reward"],
            "greedy_response_text": greedy["response_text"],
            "greedy_category": greedy["category"],
            "base_greedy_category": base_greedy["category"],
        }
        for own, base, greedy, base_greedy in columns
    ]


def print_comparison(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], output_dir: str) -> None:
    """Print the table of the figures before and after, and a response of each category."""
    run, found = results["run"], results["reasoning"]
    print(f"\n{run['objective']}, model {run['model']}, data {run['dataset']}, {run['optimizer_steps']} steps")
    before, after, gain = (found[name] for name in ("before", "after", "gain"))
    lines = []
    for decoding in DECODINGS:
        pair = (before[decoding], after[decoding])
        lines.append((f"accuracy, {decoding}", *(_interval(one["accuracy"]) for one in pair)))
        lines.append(("  gain", "", f"{_interval(gain[decoding])}  p {gain[decoding]['p_value']:.1g}"))
        lines.append(("  in the form asked for", *(_interval(one["format_rate"]) for one in pair)))
        lines.append((f"  {' / '.join(TITLES.values())}", *(_counts(one) for one in pair)))
        for key, label in LENGTHS.items():
            lines.append((f"  {label}", *(_figure(one[key]) for one in pair)))
    print_table(("", "before", "after"), lines)
    print_examples(rows)
    files = ("results.json", "generations.jsonl", "metrics.jsonl", "config.yaml", "report.png")
    names = ", ".join(name for name in files if (Path(output_dir) / name).exists())
    seconds = f"{run['total_seconds']:.0f} s in all, {run['training_seconds']:.0f} s of training"
    print(f"\n{seconds}; n {after['sampled']['n_prompts']} problems, 95% intervals; in {output_dir}: {names}")


LENGTHS = {
    "mean_tokens": "mean length (tokens)",
    "mean_tokens_correct": "mean length, correct",
    "mean_tokens_incorrect": "mean length, incorrect",
    "truncated_fraction": "cut at the token limit",
    "mean_entropy": "mean entropy (nats per token)",
}


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of texts in aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print()
    for number, row in enumerate((header, *rows)):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if number == 0:
            print("-" * (sum(widths) + 2 * len(widths) - 2))


def print_examples(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the first response of each category."""
    for category in CATEGORIES:
        row = next((row for row in rows if row["category"] == category), None)
        if row is not None:
            prompt = textwrap.shorten(row["prompt_text"], 100)
            print(f"\n{TITLES[category]}: {prompt}  (answer {row['answer']})")
            print(f"  {textwrap.shorten(row['response_text'], 200) or '(empty)'}")


def _counts(summary: Mapping[str, Any]) -> str:
    return " / ".join(str(summary["categories"][name]) for name in CATEGORIES)


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['mean']:.3f}  [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
