"""Problems with known answers, on which the reasoning recipes train, validate and evaluate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers.hf_argparser import HfArg

from trl_ext.data.math import demonstration, load_math, load_prompt_template, math_prompt, render
from trl_ext.held_out.reasoning import ReasoningEvaluation
from trl_ext.processes import is_main_process
from trl_ext.rewards.verified import VerifiedGrader
from trl_ext.rollouts import SamplingSettings
from trl_ext.rollouts.generation import ANSWER_END
from trl_ext.trainers.defaults import check_at_least

CHAT = "chat"
WITHIN_CHAT = f"{CHAT}+"
# The prompt templates of embedded problems, which also have a split `validation`.
TEMPLATE_OF_EMBEDDED = {"toy": CHAT, "word_problems": f"{WITHIN_CHAT}boxed"}
# Templates whose answers are in a box.
BOXED = ("question_only", "boxed")


@dataclass
class ProblemArguments:
    """Problems, prompts and rewards, and how responses to held-out problems are sampled."""

    dataset_name: str = HfArg(
        default="toy", help="toy (additions), word_problems, a folder of {split}.jsonl, or one .jsonl file."
    )
    train_split: str = HfArg(default="train", help="Problems to train on.")
    eval_split: str = HfArg(default="test", help="Problems to evaluate on.")
    prompt_template: str | None = HfArg(
        default=None,
        help="r1_zero, question_only, boxed, alpaca_sft or a text file with {question} for plain text; chat "
        "for the model's chat template; chat+NAME for the template within a chat. Default: chat on toy, "
        "chat+boxed on word_problems, r1_zero on everything else.",
    )
    reward: str | None = HfArg(
        default=None,
        help="r1_zero (answer in tags), question_only (answer in a box), gsm8k (the last number) or countdown. "
        "Default: countdown where problems have numbers and a target, question_only for the prompts of that name "
        "and boxed, else r1_zero.",
    )
    num_eval_prompts: int | None = HfArg(default=None, help="Problems to evaluate on. Default: all.")
    max_new_tokens: int = HfArg(default=1024, help="Longest response, in tokens.")
    generation_temperature: float = HfArg(default=1.0, help="Sampling temperature of evaluations; 0 is greedy.")
    generation_top_p: float = HfArg(default=1.0, help="Nucleus sampling in evaluations.")
    generation_eval_batch_size: int = HfArg(default=32, help="Prompts per batch of the evaluations.")
    overwrite_output_dir: bool = HfArg(default=False, help="Replace an earlier run in output_dir.")

    def __post_init__(self):
        check_at_least(self, {"num_eval_prompts": 1})
        sampling_settings(self)


@dataclass
class ValidatedProblems(ProblemArguments):
    """Problems to validate on, in addition to those for training and for the final comparison."""

    validation_split: str | None = HfArg(
        default=None, help="Problems to validate on. Default: validation on embedded problems, else eval_split."
    )
    num_validation_prompts: int = HfArg(default=128, help="The first N are the fixed set.")
    num_train_problems: int | None = HfArg(default=None, help="Train on the first N. Default: all.")

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, {"num_validation_prompts": 1, "num_train_problems": 1})


@dataclass
class Problems:
    """The problems of a split, with the text of their prompt template (None for the chat template) and the reward."""

    rows: list[dict[str, Any]]
    template: str | None
    template_name: str
    reward: str
    grade: Any

    def prompts(self) -> list:
        """The rows with the model's prompts."""
        return [math_prompt(row, self.template) for row in self.rows]

    def evaluation(self, trainer, settings: SamplingSettings) -> ReasoningEvaluation:
        """An evaluation that samples a trainer's policy on the problems and grades it."""
        return ReasoningEvaluation(trainer, self.rows, self.template, self.grade, settings)

    def dataset(self) -> Dataset:
        """The rows in TRL's format: prompts, and the columns that the reward reads."""
        columns = [name for name in ("row_id", "answer", "numbers") if name in self.rows[0]]
        pairs = zip(self.rows, self.prompts(), strict=True)
        return Dataset.from_list(
            [{"prompt": prompt, **{name: row[name] for name in columns}} for row, prompt in pairs]
        )


def load_problems(arguments: ProblemArguments, split: str, setting: str | None = None) -> Problems:
    """The first problems of a split, as many as a setting says (None for all), with their template and reward."""
    name = arguments.prompt_template or TEMPLATE_OF_EMBEDDED.get(arguments.dataset_name, "r1_zero")
    within = name.removeprefix(WITHIN_CHAT)
    template = None if name == CHAT else load_prompt_template(within)
    rows = load_math(arguments.dataset_name, split)
    if setting is not None:
        rows = first(rows, arguments, setting, f"{arguments.dataset_name}, split {split!r},")
    if within != name:
        rows = [{**row, "prompt_text": render(template, row["prompt_text"])} for row in rows]
        template = None
    reward = arguments.reward
    if reward is None:
        has_numbers = all("numbers" in row for row in rows)
        reward = "countdown" if has_numbers else "question_only" if within in BOXED else "r1_zero"
    elif reward == "countdown" and not all("numbers" in row for row in rows):
        raise ValueError(f"the reward countdown needs problems with nums and target, which {split!r} has not")
    return Problems(rows, template, name, reward, VerifiedGrader(reward))


def load_problem_sets(arguments: ValidatedProblems) -> tuple[Problems, Problems, Problems]:
    """Problems for training, for validation and for the final comparison, all with the same template and reward."""
    validation = arguments.validation_split
    if validation is None:
        validation = "validation" if arguments.dataset_name in TEMPLATE_OF_EMBEDDED else arguments.eval_split
    wanted = (
        (arguments.train_split, "num_train_problems"),
        (validation, "num_validation_prompts"),
        (arguments.eval_split, "num_eval_prompts"),
    )
    return tuple(load_problems(arguments, split, setting) for split, setting in wanted)


def first(rows: list, arguments: ProblemArguments, setting: str, what: str) -> list:
    """The first rows, as many as a setting says, or all for None."""
    count = getattr(arguments, setting)
    if count is not None and count > len(rows):
        raise ValueError(f"{what} has {len(rows)} problems, and {count} were asked for: lower --{setting}")
    return rows[:count]


def sampling_settings(arguments: ProblemArguments, *, reward: str = "r1_zero") -> SamplingSettings:
    """How responses are sampled. If answers are in tags, the closing tag ends a response."""
    return SamplingSettings(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.generation_temperature,
        top_p=arguments.generation_top_p,
        stop=(ANSWER_END,) if reward in ("r1_zero", "countdown") else (),
        batch_size=arguments.generation_eval_batch_size,
    )


def rollout_settings(arguments: ValidatedProblems, training, reward: str) -> SamplingSettings:
    """Sampling settings of evaluations, equal to those of rollouts; without stop strings, the reward's are used."""
    if arguments.max_new_tokens not in (ProblemArguments.max_new_tokens, training.max_completion_length):
        raise ValueError("evaluations sample as the rollouts do: give max_completion_length, not max_new_tokens")
    arguments.max_new_tokens = training.max_completion_length
    settings = sampling_settings(arguments, reward=reward)
    if training.stop is None:
        training.set_stop(list(settings.stop))
    return dataclasses.replace(settings, max_prompt_tokens=training.max_prompt_tokens, stop=tuple(training.stop or ()))


def choose_demonstrations(arguments, problems: Problems) -> tuple[Dataset, dict[str, int] | None]:
    """The rows to train on, with `prompt` and `completion`, and the filter's counts of kept and of all rows."""
    boxed = problems.reward == "question_only"
    pairs = [(row, demonstration(row, problems.template, boxed=boxed)) for row in problems.rows]
    pairs = [(row, response) for row, response in pairs if response is not None]
    if not pairs:
        raise ValueError(f"the split {arguments.train_split!r} has no response or solution to train on")
    counts = None
    if arguments.filter_correct:
        right = [(row, response) for row, response in pairs if problems.grade(response, row)["reward"]]
        counts = {"kept": len(right), "of": len(pairs)}
        if is_main_process():
            print(f"filter_correct: kept {len(right)} of {len(pairs)} responses, whose answers verify")
        if not right:
            raise ValueError(
                f"filter_correct: no response of {arguments.train_split!r} verifies under the reward {problems.reward}"
            )
        pairs = right
    pairs = first(pairs, arguments, "num_examples", f"what is left of {arguments.train_split!r} to train on")
    rows = []
    for row, response in pairs:
        prompt = math_prompt(row, problems.template)
        # Prompt and completion must both be messages or both be text.
        completion = response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
        rows.append({"row_id": row["row_id"], "prompt": prompt, "completion": completion})
    return Dataset.from_list(rows), counts
