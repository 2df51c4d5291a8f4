"""The results of a reasoning run as files, tables and plots: graded responses before and after training."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.reasoning import accuracy_gain, summarize_reasoning
from trl_ext.evaluation.reporting.plots import plot_run
from trl_ext.files import write_json_lines
from trl_ext.held_out.reasoning import DECODINGS, ReasoningEvaluation
from trl_ext.rewards.verified import CATEGORIES
from trl_ext.rollouts import SamplingSettings, end_processes
from trl_ext.runs.reasoning import Problems
from trl_ext.runs.results import describe_run, estimate, figure, write_results
from trl_ext.runs.training_run import TrainingRun

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
LENGTHS = {
    "mean_tokens": "mean length (tokens)",
    "mean_tokens_correct": "mean length, correct",
    "mean_tokens_incorrect": "mean length, incorrect",
    "truncated_fraction": "cut at the token limit",
    "mean_entropy": "mean entropy (nats per token)",
}


def evaluate_on(trainer, problems: Problems, settings: SamplingSettings) -> ReasoningEvaluation:
    """An evaluation that samples a trainer's policy on the problems and grades it."""
    return ReasoningEvaluation(trainer, problems.rows, problems.template, problems.grade, settings)


def require_base(evaluation: ReasoningEvaluation, run: TrainingRun) -> None:
    """Check that a resumed run can be compared with its base, whose weights are no longer available for sampling."""
    if run.checkpoint is not None and not evaluation.base_is_known():
        raise ValueError(
            f"{run.folder}/samples does not hold the base's responses to the {len(evaluation.rows)} held-out "
            "problems, which a run leaves there at its start: begin anew with --overwrite_output_dir"
        )


def end_with_comparison(
    run: TrainingRun, trainer, evaluation: ReasoningEvaluation, *, done: int, of: int, unit="steps", **described: Any
) -> None:
    """Evaluate the trained policy, write and print the comparison with its base, and shut the processes down.

    `evaluation` knows the base's responses already, `done` and `of` count the completed and the planned steps or
    rounds, and `described` are the recipe's own entries in the description of the run.
    """
    after = {decoding: evaluation.evaluate(decoding, progress=f"policy, {decoding}") for decoding in DECODINGS}
    before = evaluation.base()
    if trainer.accelerator.is_main_process:
        stopped = run.arguments.max_hours is not None and done < of
        described = describe_run(trainer, run.describe(stopped_by_max_hours=stopped, **described))
        results = comparison(described, before, after)
        write_json_lines(run.folder / "generations.jsonl", _beside_base(before, after))
        write_results(
            trainer,
            results,
            lambda metrics, path: plot_run(metrics, results, path, PANELS),
            lambda: _show(results["reasoning"], after["sampled"]),
        )
        if stopped:
            print(
                f"stopped by --max_hours {run.arguments.max_hours:g} after {done} of {of} {unit}; with more hours, "
                "--resume_from_checkpoint goes on"
            )
    end_processes(trainer.accelerator)


def comparison(run: Mapping[str, Any], before: Mapping[str, list], after: Mapping[str, list]) -> dict[str, Any]:
    """The content of `results.json`, under the names that all recipes use; the score is the sampled accuracy."""
    found: dict[str, Any] = {
        name: {decoding: summarize_reasoning(rows[decoding]) for decoding in DECODINGS}
        for name, rows in (("before", before), ("after", after))
    }
    found["gain"] = {decoding: accuracy_gain(before[decoding], after[decoding]) for decoding in DECODINGS}
    own, base = (found[name]["sampled"] for name in ("after", "before"))
    return {
        "run": dict(run),
        "score": {
            "base": base["accuracy"]["mean"],
            "policy": own["accuracy"]["mean"],
            "gain": found["gain"]["sampled"],
        },
        **dict.fromkeys(("win_rate", "rewards", "preferences", "kl")),
        "generations": {
            name: {key: summary[key] for key in ("mean_tokens", "truncated_fraction")}
            for name, summary in (("base", base), ("policy", own))
        },
        "reasoning": found,
    }


def _beside_base(before: Mapping[str, list], after: Mapping[str, list]) -> list[dict[str, Any]]:
    """The sampled responses, each with the base's and the greedy one, under the names that the report reads."""
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


def _show(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of figures before and after training, and a response of each category."""
    before, after, gain = (found[name] for name in ("before", "after", "gain"))
    lines = []
    for decoding in DECODINGS:
        pair = (before[decoding], after[decoding])
        lines.append((f"accuracy, {decoding}", *(estimate(one["accuracy"]) for one in pair)))
        lines.append(("  gain", "", f"{estimate(gain[decoding])}  p {gain[decoding]['p_value']:.1g}"))
        lines.append(("  in the form asked for", *(estimate(one["format_rate"]) for one in pair)))
        counts = (" / ".join(str(one["categories"][name]) for name in CATEGORIES) for one in pair)
        lines.append((f"  {' / '.join(TITLES.values())}", *counts))
        for key, label in LENGTHS.items():
            lines.append((f"  {label}", *(figure(one[key]) for one in pair)))
    print(f"\n{format_table(('', 'before', 'after'), lines)}")
    print(examples(rows))
    print(f"n {after['sampled']['n_prompts']} problems, 95% intervals")


def examples(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first response of each category."""
    lines = []
    for category in CATEGORIES:
        row = next((row for row in rows if row["category"] == category), None)
        if row is not None:
            prompt = textwrap.shorten(row["prompt_text"], 100)
            lines.append(f"\n{TITLES[category]}: {prompt}  (answer {row['answer']})")
            lines.append(f"  {textwrap.shorten(row['response_text'], 200) or '(empty)'}")
    return "\n".join(lines)
