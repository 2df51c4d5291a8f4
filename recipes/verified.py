"""What recipes share that train on verified rewards: the sets of problems, the reward by name, and plots over time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasoning import ProblemArguments, Problems, load_problems

from trl_ext.evaluation.plots import draw_curves, new_figure
from trl_ext.files import replacing
from trl_ext.rewards import verified_reward
from trl_ext.rewards.answers import is_correct
from trl_ext.rewards.parsers import parse_gsm8k_response
from trl_ext.rewards.verified import completion_text
from trl_ext.rollouts.engines import ANSWER_END
from trl_ext.trainers.callbacks import read_metrics

LAST_NUMBER = "gsm8k"
# Title -> label of each curve -> metric, drawn over steps and over minutes.
TIME_PANELS = {
    "Accuracy on validation problems, 95% interval": {
        "sampled": "eval_score",
        "low": "eval_score_low",
        "high": "eval_score_high",
        "in the form": "eval_rewards/format",
    },
    "Reward of the rollouts": {"mean": "reward"},
    "Response length (tokens), validation": {
        "correct": "eval_completions/mean_length_correct",
        "incorrect": "eval_completions/mean_length_incorrect",
    },
    "Entropy (nats per token)": {"rollouts": "entropy", "validation": "eval_entropy"},
}


@dataclass
class TrainingProblems(ProblemArguments):
    """Problems to train and validate on, beside those of the final comparison."""

    reward: str | None = field(
        default=None,
        metadata={
            "help": "r1_zero (answer in tags), question_only (answer in a box), gsm8k (the last number) or countdown. "
            "Default: countdown where problems have numbers and a target, question_only for the prompt of that name, "
            "else r1_zero."
        },
    )
    train_split: str = field(default="train", metadata={"help": "Problems to train on."})
    validation_split: str | None = field(
        default=None, metadata={"help": "Problems to validate on. Default: validation on toy, else eval_split."}
    )
    num_validation_prompts: int = field(default=128, metadata={"help": "The first so many are the fixed set."})
    num_train_problems: int | None = field(
        default=None, metadata={"help": "Train on the first so many. Default: all."}
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_validation_prompts", "num_train_problems"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def load_problem_sets(arguments: TrainingProblems) -> tuple[Problems, Problems, Problems]:
    """Problems to train on, to validate on and of the final comparison, all with one template and reward.

    Raises:
        FileNotFoundError, ValueError: as `reasoning.load_problems`.
    """
    validation = arguments.validation_split
    if validation is None:
        validation = "validation" if arguments.dataset_name == "toy" else arguments.eval_split
    wanted = (
        (arguments.train_split, arguments.num_train_problems),
        (validation, arguments.num_validation_prompts),
        (arguments.eval_split, arguments.num_eval_prompts),
    )
    if arguments.reward != LAST_NUMBER:
        return tuple(load_problems(arguments, split, count) for split, count in wanted)
    # Loaded under any reward, and graded by their last number.
    arguments = dataclasses.replace(arguments, reward="question_only")
    problems = [load_problems(arguments, split, count) for split, count in wanted]
    return tuple(dataclasses.replace(one, reward=LAST_NUMBER, grade=grade_last_number) for one in problems)


def stops(reward: str) -> tuple[str, ...]:
    """What ends a response: where answers stand in tags, the closing one."""
    return (ANSWER_END,) if reward in ("r1_zero", "countdown") else ()


def grade_last_number(response: str, row: Mapping[str, Any]) -> dict[str, float]:
    """GSM8K's own grading: the last number of a response is its answer, and having one is all of its form."""
    answer = parse_gsm8k_response(response)
    correct = float(answer is not None and is_correct(answer, row["answer"]))
    return {"reward": correct, "format_reward": float(answer is not None), "answer_reward": correct}


def last_number_reward(completions: Sequence, answer: Sequence[str], log_metric=None, **columns: Any) -> list[float]:
    """`grade_last_number` with TRL's signature of a reward function; logs its parts as the verified rewards do."""
    pairs = zip(completions, answer, strict=True)
    graded = [grade_last_number(completion_text(completion), {"answer": truth}) for completion, truth in pairs]
    if log_metric is not None and graded:
        for part in ("format", "answer"):
            mean = sum(one[f"{part}_reward"] for one in graded) / len(graded)
            log_metric(f"rewards/{LAST_NUMBER}/{part}", mean)
    return [one["reward"] for one in graded]


# Under which TRL logs it.
last_number_reward.__name__ = LAST_NUMBER


def reward_function(problems: Problems, *, fast: bool = True):
    """The problems' reward as TRL's trainers call it."""
    return last_number_reward if problems.reward == LAST_NUMBER else verified_reward(problems.reward, fast=fast)


def plot_over_time(folder: str | Path, results: Mapping[str, Any]) -> None:
    """Draw the run's metrics into `report_time.png`: over optimizer steps above, over minutes of training below."""
    metrics = read_metrics(Path(folder) / "metrics.jsonl")
    # Under the name that the curves are drawn over.
    over_minutes = [{**row, "step": row["seconds"] / 60} for row in metrics if "seconds" in row]
    try:
        figure, axes = new_figure(2, len(TIME_PANELS))
    except ImportError as error:
        print(f"report_time.png was not drawn: {error}")
        return
    for number, (title, curves) in enumerate(TIME_PANELS.items()):
        draw_curves(axes[number], title, curves, metrics)
        draw_curves(axes[len(TIME_PANELS) + number], title, curves, over_minutes)
        axes[len(TIME_PANELS) + number].set_xlabel("minutes of training, evaluations included")
    run = results["run"]
    figure.suptitle(f"{run['objective']}, model {run['model']}, data {run['dataset']}", wrap=True)
    with replacing(Path(folder) / "report_time.png") as temporary:
        figure.savefig(temporary, dpi=110)
