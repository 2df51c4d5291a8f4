"""The end of a training run: the comparison with the base, the files that it writes and the table that it prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from trl_ext.evaluation import plot_run
from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.reasoning import accuracy_gain, summarize_reasoning
from trl_ext.evaluation.reporting.results import save_results
from trl_ext.evaluation.reporting.tables import results_section
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.files import write_json_lines
from trl_ext.held_out.generations import GenerationEvaluation
from trl_ext.held_out.reasoning import DECODINGS, ReasoningEvaluation
from trl_ext.rewards.verified import CATEGORIES
from trl_ext.rollouts import end_processes
from trl_ext.runs import RECIPES
from trl_ext.runs.arguments import MENDABLE_IN_TRAINING, one_line_errors
from trl_ext.runs.folder import RESULT_FILES, settings_digest
from trl_ext.runs.training_run import TrainingRun

DIAGNOSTICS = {
    "mean_tokens": "mean length (tokens)",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "unique_token_ratio": "unique-token ratio",
    "dominant_token_fraction": "dominant-token fraction",
    "repetition": "repeated 4-grams",
    "empty_fraction": "empty responses",
    "truncated_fraction": "truncated at the token limit",
}
ACCURACIES = {"summed": "summed log-prob", "mean": "mean log-prob", "reference_corrected": "log-ratio"}
LENGTHS = {
    "mean_tokens": "mean length (tokens)",
    "mean_tokens_correct": "mean length, correct",
    "mean_tokens_incorrect": "mean length, incorrect",
    "truncated_fraction": "truncated at the token limit",
    "mean_entropy": "mean entropy (nats per token)",
}
OUTCOMES = {"candidate": "   (the policy wins)", "base": "   (the base wins)", "tie": "   (a tie)"}


def write_results(
    run: TrainingRun,
    trainer,
    evaluation: GenerationEvaluation | None,
    *,
    preferences: dict[str, Any] | None = None,
    **described: Any,
) -> None:
    """Compare the trained policy with its base on held-out prompts, write and print that, and end the processes.

    `preferences` are metrics of held-out pairs, `described` the recipe's own entries in the description of the run,
    including `objective`. Without an `evaluation` there is no comparison.
    """
    summary, rows = {}, []
    if evaluation is not None:
        with one_line_errors(MENDABLE_IN_TRAINING):
            comparison = evaluation.compare(run.arguments.num_eval_prompts, progress=True)
        summary, rows = comparison.summary, comparison.rows
    results = {"preferences": preferences}
    results |= {name: summary.get(name) for name in ("win_rate", "score", "rewards", "kl", "generations")}
    if rows and trainer.accelerator.is_main_process:
        write_json_lines(run.folder / "generations.jsonl", rows)
    finish(run, trainer, results, show=partial(_show_comparison, generations=rows), **described)


def finish(
    run: TrainingRun, trainer, results: dict[str, Any], *, show: Callable[[dict[str, Any]], None], **described: Any
) -> None:
    """Write `results.json`, the model card and `report.png`, print the results by `show`, and end the processes."""
    if trainer.accelerator.is_main_process:
        results = {"run": describe_run(run, trainer, described), **results}
        save_results(run.folder, results)
        trainer.card_results = results_section(results)
        trainer.create_model_card()
        try:
            plot_run(run.folder, run.folder / "report.png")
        except ImportError as error:
            print(f"report.png was not drawn: {error}")
        told = results["run"]
        print(f"\n{told['objective']}, model {told['model']}, data {told['dataset']}, {told['optimizer_steps']} steps")
        show(results)
        say_written(told, trainer.args.output_dir, RESULT_FILES)
    end_processes(trainer.accelerator)


def describe_run(run: TrainingRun, trainer, own: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a run for results.json: common entries and the recipe's own; the total time ends now."""
    script = Path(sys.argv[0])
    recipe = {"recipe": script.stem} if (RECIPES / script.name).is_file() else {}
    return {
        **recipe,
        **own,
        "settings_digest": settings_digest(run.resolved),
        "model": run.model.model_name_or_path,
        "dataset": run.arguments.dataset_name,
        "training_seconds": round(run.training_seconds, 1),
        "total_seconds": round(time.time() - run.started, 1),
        "optimizer_steps": trainer.state.global_step,
        "seed": trainer.args.seed,
        **describe_machine(trainer.accelerator),
    }


def describe_machine(accelerator) -> dict[str, Any]:
    """The processes, their device, and the versions of the libraries."""
    versions = {name: version(name) for name in ("trl_ext", "trl", "transformers", "torch", "peft")}
    return {"processes": accelerator.num_processes, "device": accelerator.device.type, "versions": versions}


def say_written(run: Mapping[str, Any], output_dir: str | Path, files: Sequence[str]) -> None:
    """Print the times of a run and the files that it wrote."""
    # Training includes the parts before a resumption, and the total does not.
    training = f"{run['training_seconds']:.0f} s of training, " if "training_seconds" in run else ""
    names = ", ".join(name for name in files if (Path(output_dir) / name).exists())
    print(f"\n{training}{run['total_seconds']:.0f} s since the start of this command; in {output_dir}: {names}")


def estimate(found: Mapping[str, float], name: str = "mean", digits: int = 3) -> str:
    """A figure and its interval, formatted for a table."""
    return f"{Estimate(found[name], found['low'], found['high']):.{digits}f}"


def figure(value: float | None) -> str:
    """A figure formatted for a table."""
    return "-" if value is None else f"{value:.3f}"


def _show_comparison(results: dict[str, Any], generations: list[dict[str, Any]]) -> None:
    """Print one table of figures, and three responses with the base's: a win, a loss and a tie."""
    rows = list(_comparison_rows(results))
    if rows:
        print(f"\n{format_table(('', 'base', 'policy'), rows)}")
    else:
        print("\nno held-out rows to evaluate on; metrics.jsonl has what was logged in training")
    firsts = list({row.get("outcome"): row for row in reversed(generations)}.values())
    for row in [*firsts, *(row for row in generations if row not in firsts)][:3]:
        print(f"\nprompt: {shorten(row['prompt_text'], 100)}{OUTCOMES.get(row.get('outcome'), '')}")
        print(f"  base: {shorten(row['base_response_text'], 400) or '(empty)'}")
        print(f"  policy: {shorten(row['response_text'], 400) or '(empty)'}")
    if generations and all(row["response_text"] == row["base_response_text"] for row in generations):
        print(f"\nthe policy's and the base's responses are identical, all {len(generations)} of them")


def _comparison_rows(results: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The rows of the table: label, figure of the base, figure of the policy."""
    if results["win_rate"] is not None:
        for label, rule in (("win rate, ties as half", "half"), ("win rate, ties dropped", "agreed")):
            rate = results["win_rate"][rule]
            yield label, "", f"{estimate(rate, 'rate') if rate['n'] else '-'}  n {rate['n']}"
    score = results["score"]
    if score is not None:
        yield "ground-truth score", figure(score["base"]), figure(score["policy"])
        yield "  gain", "", estimate(score["gain"])
    for name, reward in (results["rewards"] or {}).items():
        yield f"reward, {name}", figure(reward.get("base")), figure(reward.get("policy"))
        for key, label in (("gain", "  gain"), ("gain_over_reference", "  gain over the reference responses")):
            if key in reward:
                yield label, "", estimate(reward[key])
    if results["preferences"] is not None:
        before, after = results["preferences"]["before"], results["preferences"]["after"]
        for key, label in ACCURACIES.items():
            base, own = figure(before[key]["accuracy"]) if key in before else "", after[key]
            # If the model has not moved, every log-ratio is a tie, and an accuracy of 0 would be misleading.
            yield f"held-out accuracy, {label}", base, "-" if own["ties"] == after["n"] else estimate(own, "accuracy")
    if results["kl"] is not None:
        yield "KL to the base (nats per response)", "", estimate(results["kl"], digits=2)
    if results["generations"] is not None:
        base, policy = results["generations"]["base"], results["generations"]["policy"]
        for key, label in DIAGNOSTICS.items():
            yield label, figure(base[key]), figure(policy[key])
        yield "collapsed", *("yes" if model["collapsed"] else "no" for model in (base, policy))
        for reason in policy["collapse_reasons"]:
            yield "", "", reason


# ---- Problems with known answers ----


def write_reasoning_results(run: TrainingRun, trainer, evaluation: ReasoningEvaluation, **described: Any) -> None:
    """Evaluate the trained policy, write and print the comparison with its base, and end the processes.

    `described` are the recipe's own entries in the description of the run.
    """
    after = {decoding: evaluation.evaluate(decoding, progress=f"policy, {decoding}") for decoding in DECODINGS}
    before = evaluation.base()
    if trainer.accelerator.is_main_process:
        write_json_lines(run.folder / "generations.jsonl", _beside_base(before, after))
    show = partial(_show_reasoning, rows=after["sampled"])
    finish(run, trainer, reasoning_results(before, after), show=show, **described)


def reasoning_results(before: Mapping[str, list], after: Mapping[str, list]) -> dict[str, Any]:
    """The figures under the names that all recipes use; the score is the sampled accuracy."""
    found: dict[str, Any] = {
        name: {decoding: summarize_reasoning(rows[decoding]) for decoding in DECODINGS}
        for name, rows in (("before", before), ("after", after))
    }
    found["gain"] = {decoding: accuracy_gain(before[decoding], after[decoding]) for decoding in DECODINGS}
    own, base = (found[name]["sampled"] for name in ("after", "before"))
    return {
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
    of_both = ("response_text", "generated_num_tokens", "finished", "category")
    return [
        {
            **{name: value for name, value in own.items() if name not in ("sample", "reward")},
            "score": own["reward"],
            **{f"base_{name}": base[name] for name in of_both},
            "base_score": base["reward"],
            "greedy_response_text": greedy["response_text"],
            "greedy_category": greedy["category"],
            "base_greedy_category": base_greedy["category"],
        }
        for own, base, greedy, base_greedy in columns
    ]


def _show_reasoning(results: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of figures before and after training, and a response of each category."""
    before, after, gain = (results["reasoning"][name] for name in ("before", "after", "gain"))
    lines = []
    for decoding in DECODINGS:
        pair = (before[decoding], after[decoding])
        lines.append((f"accuracy, {decoding}", *(estimate(one["accuracy"]) for one in pair)))
        lines.append(("  gain", "", f"{estimate(gain[decoding])}  p {gain[decoding]['p_value']:.1g}"))
        lines.append(("  in the form asked for", *(estimate(one["format_rate"]) for one in pair)))
        counts = (" / ".join(str(one["categories"][name]) for name in CATEGORIES) for one in pair)
        lines.append((f"  {' / '.join(CATEGORIES).replace('_', ' ')}", *counts))
        for key, label in LENGTHS.items():
            lines.append((f"  {label}", *(figure(one[key]) for one in pair)))
    print(f"\n{format_table(('', 'before', 'after'), lines)}")
    for category, row in {row["category"]: row for row in reversed(rows)}.items():
        print(f"\n{category.replace('_', ' ')}: {shorten(row['prompt_text'], 100)}  (answer {row['answer']})")
        print(f"  {shorten(row['response_text'], 200) or '(empty)'}")
    print(f"n {after['sampled']['n_prompts']} problems, 95% intervals")
