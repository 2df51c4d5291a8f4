"""Training runs on a student's functions: `python train.py --recipe dpo`, in the folder of an assignment."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import HfArgumentParser

from trl_ext import PolicyConfig, PolicyTrainer, PreferenceConfig, PreferenceTrainer
from trl_ext.algorithms import policy_algorithm
from trl_ext.data.benchmark import load_benchmark
from trl_ext.data.math import load_math, math_prompt
from trl_ext.evaluation import GroundTruthJudge
from trl_ext.evaluation.command_line import CommandParser, one_line_errors
from trl_ext.files import read_yaml, write_json
from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings
from trl_ext.losses import PolicyScores
from trl_ext.models import resolve_model_path
from trl_ext.processes import is_main_process
from trl_ext.registry import preference_loss
from trl_ext.rewards import parse_gsm8k_response
from trl_ext.rewards.verified import completion_text
from trl_ext.rollouts import generate_responses
from trl_ext.toy import MAX_NEW_TOKENS, score
from trl_ext.toy.prompts import addition_trace
from trl_ext.trainers import SFTConfig, SFTTrainer
from trl_ext.trainers.policies import remember_base

COMMON = {"report_to": "none", "save_strategy": "no", "logging_steps": 10}


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, train, evaluate, and write the results."""
    parser = CommandParser(prog="train.py", description=__doc__)
    parser.add_argument("--recipe", required=True, help="a recipe of assignment.yaml")
    parser.add_argument("--output_dir", type=Path, help="default: runs/RECIPE")
    parser.add_argument("--eval_prompts", type=int, default=100, help="held-out prompts at the end; 0 for none")
    with one_line_errors():
        # Every other flag is a setting of the recipe.
        options, flags = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
        assignment = read_yaml("assignment.yaml")
        if options.recipe not in assignment["recipes"]:
            raise ValueError(f"no recipe {options.recipe!r}: there are {', '.join(assignment['recipes'])}")
        recipe = assignment["recipes"][options.recipe]
        out = options.output_dir or Path("runs") / options.recipe
        names, (build, measure) = recipe["functions"], KINDS[recipe["kind"]]
        read = partial(read_config, COMMON | recipe["settings"] | {"output_dir": str(out)}, flags)
        try:
            functions = students_functions(assignment["package"], names)
            trainer = build(read, *functions, **recipe.get("arguments", {}))
            if options.eval_prompts:
                remember_base(trainer)
            trainer.train()
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        trainer.save_model(str(out))
        results = {"recipe": options.recipe, "yours": names, "steps": trainer.state.global_step}
        results |= measure(trainer, options.eval_prompts) if options.eval_prompts else {}
        if is_main_process():
            write_json(out / "results.json", results)
            print(f"{out / 'results.json'}: {results}")


def students_functions(package: str, names: list[str]) -> list[Callable]:
    """The student's functions of these names, from the modules of the package."""
    sys.path.insert(0, str(Path.cwd()))
    files = sorted(Path(package).glob("*.py"))
    found = {k: v for file in files for k, v in vars(importlib.import_module(f"{package}.{file.stem}")).items()}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{package} has no function {', '.join(missing)}")
    return [found[name] for name in names]


class _Parser(HfArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


def read_config(settings: dict[str, Any], flags: list[str], config_class: type, **own: Any) -> Any:
    """A configuration from settings and from flags, which take precedence. ValueError for what it does not accept."""
    given = [part for name, value in (settings | own).items() for part in (f"--{name}", str(value))]
    parser = _Parser(config_class, allow_abbrev=False)
    config, unknown = parser.parse_args_into_dataclasses([*given, *flags], return_remaining_strings=True)
    if unknown:
        raise ValueError(f"{config_class.__name__} has no setting {unknown[0]}")
    return config


# ---- A trainer on the student's functions, for each kind of recipe ----


def preference(read: Callable, loss: Callable, **traits: Any) -> PreferenceTrainer:
    """For a loss of each pair."""
    name = f"{loss.__module__}.{loss.__name__}"
    preference_loss(name, **traits)(loss)
    data = load_benchmark()["train_prefs"]
    return PreferenceTrainer(resolve_model_path("toy"), args=read(PreferenceConfig, loss=name), train_dataset=data)


def policy(read: Callable, loss: Callable, advantage: Callable, **given: Any) -> PolicyTrainer:
    """For a whole loss and an advantage, on the benchmark's prompts."""

    def of_batch(scores: PolicyScores) -> Tensor:
        log_probs = scores.log_probs, scores.old_log_probs, scores.old_log_probs
        return loss(*log_probs, scores.mask, scores.advantages[:, 0], kl_coef=0.0, **given)

    return _policy_trainer(read, loss, of_batch, advantage, known_score, load_benchmark()["train_gen"])


def policy_step(read, step: Callable, group: Callable, parse: Callable, *, normalize_by_std, **given) -> PolicyTrainer:
    """For a micro-batch step, rewards in groups and a parser, on the embedded additions."""

    def of_batch(scores: PolicyScores) -> Tensor:
        drawn = {"old_log_probs": scores.old_log_probs, "advantages": scores.advantages}
        return stepped(step, scores.log_probs, scores.mask, **drawn, **given)

    def advantage(rewards: Tensor, group_size: int) -> Tensor:
        # The trainer knows the rewards already: they take the place of the responses.
        known = rewards.tolist(), [""] * len(rewards), group_size
        return group(lambda reward, truth: {"reward": reward}, *known, 1e-6, normalize_by_std)[0].to(rewards)

    def solved(completions: list, answer: list[str], **columns: Any) -> list[float]:
        return [float(parse(completion_text(text)) == truth) for text, truth in zip(completions, answer, strict=True)]

    rows = [{"prompt": math_prompt(row, None), "answer": row["answer"]} for row in load_math("toy", "train")]
    return _policy_trainer(read, step, of_batch, advantage, solved, Dataset.from_list(rows))


def _policy_trainer(read, loss, of_batch, advantage, reward, rows) -> PolicyTrainer:
    def student(scores: PolicyScores) -> Tensor:
        """The student's scalar for every response, as an algorithm returns one loss per response."""
        return of_batch(scores).reshape(1, 1).expand(len(scores.mask), 1)

    name = f"{loss.__module__}.{loss.__name__}"
    own = {"advantage": advantage, "ratio": "token", "aggregation": "sequence_mean", "beta": 0.0}
    policy_algorithm(name, **own)(student)
    config = read(PolicyConfig, algorithm=name)
    return PolicyTrainer(resolve_model_path("toy"), [reward], args=config, train_dataset=rows)


def known_score(prompts: list, completions: list, **columns: Any) -> list[float]:
    """The reward of the embedded benchmark: the known quality of each response."""
    pairs = zip(prompts, completions, strict=True)
    return [score(prompt[-1]["content"], completion_text(text)) for prompt, text in pairs]


def sft_step(read: Callable, tokenize: Callable, log_probs: Callable, step: Callable) -> SFTTrainer:
    """For batches of tokens, their log-probabilities and a micro-batch step, on worked additions."""

    class StudentTrainer(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            mask = inputs["response_mask"]
            own = log_probs(model, inputs["input_ids"], inputs["labels"])["log_probs"]
            # Dividing by the mean length makes the loss a mean over tokens.
            return stepped(step, own, mask, normalize_constant=mask.sum(1).float().mean().item())

    def collate(rows: list[dict]) -> dict[str, Tensor]:
        prompts, tokenizer = [math_prompt(row, None) for row in rows], trainer.processing_class
        texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
        return tokenize(texts, [addition_trace(row["prompt_text"]) + tokenizer.eos_token for row in rows], tokenizer)

    config, rows = read(SFTConfig), Dataset.from_list(load_math("toy", "train"))
    config.dataset_kwargs, config.remove_unused_columns = {"skip_prepare_dataset": True}, False
    trainer = StudentTrainer(resolve_model_path("toy"), config, train_dataset=rows, data_collator=collate)
    return trainer


def stepped(step: Callable, log_probs: Tensor, mask: Tensor, **given: Any) -> Tensor:
    """The loss of a micro-batch step, with the gradient that the step's own `backward` has computed."""
    leaf = log_probs.detach().requires_grad_()
    loss, _ = step(leaf, mask, 1, **given)
    if leaf.grad is None:
        raise ValueError("no gradient has reached the log-probabilities: does the micro-batch step call backward()?")
    return loss.detach() + ((log_probs - log_probs.detach()) * leaf.grad).sum()


# ---- What the library measures on held-out prompts ----


def wins(trainer, count: int) -> dict[str, Any]:
    """The comparison with the model before training."""
    judge, limits = GroundTruthJudge(), GenerationSettings(None, max_new_tokens=MAX_NEW_TOKENS, batch_size=100)
    known = {"judge": judge, "score_function": judge.score_function}
    summary = GenerationEvaluation(trainer, load_benchmark()["test_gen"], limits, **known).compare(count).summary
    return {name: summary[name] for name in ("win_rate", "score", "kl")}


def solves(trainer, count: int) -> dict[str, Any]:
    """The share of additions that the model solves. The library's parser reads the answers of every student alike."""
    rows = load_math("toy", "test")[:count]
    limits, prompts = {"max_new_tokens": MAX_NEW_TOKENS, "batch_size": 128}, [math_prompt(row, None) for row in rows]
    responses = generate_responses(trainer.model, trainer.processing_class, prompts, **limits)
    right = [parse_gsm8k_response(each.text) == row["answer"] for each, row in zip(responses, rows, strict=True)]
    return {"accuracy": sum(right) / len(right)}


KINDS = {"preference": (preference, wins), "policy": (policy, wins)}
KINDS |= {"policy_step": (policy_step, solves), "sft_step": (sft_step, solves)}
