"""Training runs on a student's functions: `python train.py --recipe dpo`, in the folder of an assignment."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from operator import eq
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from trl_ext import PolicyConfig, PolicyTrainer, PreferenceConfig, PreferenceTrainer, RewardConfig, RewardTrainer
from trl_ext.data.benchmark import load_benchmark
from trl_ext.data.math import load_math, math_prompt
from trl_ext.evaluation import GroundTruthJudge
from trl_ext.evaluation.command_line import CommandParser, one_line_errors
from trl_ext.files import read_yaml, write_json
from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings
from trl_ext.models import resolve_model_path
from trl_ext.processes import is_main_process
from trl_ext.registry import policy_algorithm, preference_loss
from trl_ext.rewards import RewardModel, parse_gsm8k_response
from trl_ext.rewards.verified import completion_text
from trl_ext.rollouts import generate_responses
from trl_ext.toy import MAX_NEW_TOKENS, score
from trl_ext.toy.traces import addition_trace
from trl_ext.trainers.policies import remember_base

Functions = dict[str, Callable]
COMMON = {"report_to": "none", "save_strategy": "no", "logging_steps": 10}


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, train, evaluate, and write the results."""
    parser = CommandParser(prog="train.py", description=__doc__)
    parser.add_argument("--recipe", required=True, help="a recipe of assignment.yaml")
    parser.add_argument("--output_dir", type=Path, help="default: runs/RECIPE")
    parser.add_argument("--reward_model", help="of a policy recipe: a folder; default: the known score")
    parser.add_argument("--eval_prompts", type=int, default=100, help="held-out prompts at the end; 0 for none")
    with one_line_errors():
        # Every other flag is a setting of the recipe.
        options, flags = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
        assignment = read_yaml("assignment.yaml")
        if options.recipe not in assignment["recipes"]:
            raise ValueError(f"no recipe {options.recipe!r}: there are {', '.join(assignment['recipes'])}")
        recipe = assignment["recipes"][options.recipe]
        if options.reward_model and recipe["kind"] != "policy":
            raise ValueError(f"--reward_model is for policy recipes; {options.recipe} is a {recipe['kind']} recipe")
        options.output_dir = options.output_dir or Path("runs") / options.recipe
        functions = students_functions(assignment["package"], recipe["functions"])
        run = run_loop if recipe["kind"] in ("sft_loop", "policy_loop") else run_trainer
        try:
            figures = run(recipe["kind"], functions, recipe["settings"], options, flags)
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        results = {"recipe": options.recipe, "yours": recipe["functions"], **figures}
        if is_main_process():
            write_json(options.output_dir / "results.json", results)
            print(f"{options.output_dir / 'results.json'}: {results}")


def students_functions(package: str, names: list[str]) -> Functions:
    """The student's functions by name, from the modules of the package."""
    sys.path.insert(0, str(Path.cwd()))
    files = sorted(Path(package).glob("*.py"))
    found = {k: v for file in files for k, v in vars(importlib.import_module(f"{package}.{file.stem}")).items()}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{package} has no function {', '.join(missing)}")
    return {name: found[name] for name in names}


class _Parser(HfArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


def read_config(config_class: type, settings: dict[str, Any], flags: list[str]) -> Any:
    """A configuration from settings and from flags, which take precedence.

    Raises:
        ValueError: the configuration does not have a setting, or does not accept a value.
    """
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    parser = _Parser(config_class, allow_abbrev=False)
    config, unknown = parser.parse_args_into_dataclasses([*given, *flags], return_remaining_strings=True)
    if unknown:
        raise ValueError(f"{config_class.__name__} has no setting {unknown[0]}")
    return config


class StudentRewardTrainer(RewardTrainer):
    """`RewardTrainer` with another function for the loss of a pair."""

    loss_function: Any = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        window = inputs.get("window")
        _, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        losses = self.loss_function(*outputs.logits.squeeze(-1).float().chunk(2))
        loss = losses.mean() if window is None else losses.sum() * window.scale
        return (loss, outputs) if return_outputs else loss


def run_trainer(kind: str, functions: Functions, settings: dict, options, flags: list[str]) -> dict[str, Any]:
    """Train the embedded model with a trainer of the library. Return figures on held-out rows."""
    settings = COMMON | settings | {"output_dir": str(options.output_dir)}
    model, splits, (name, loss) = resolve_model_path("toy"), load_benchmark(), next(iter(functions.items()))
    registered = f"{loss.__module__}.{name}"
    if kind == "preference":
        preference_loss(registered, batch_coupled=name == "aot")(loss)
        config = read_config(PreferenceConfig, settings | {"loss": registered}, flags)
        trainer = PreferenceTrainer(model, args=config, train_dataset=splits["train_prefs"])
    elif kind == "reward":
        config, pairs = read_config(RewardConfig, settings, flags), splits["test_prefs"]
        trainer = StudentRewardTrainer(model, args=config, train_dataset=splits["train_prefs"], eval_dataset=pairs)
        trainer.loss_function = loss
    else:
        budget: dict[str, int] = {}

        def whole(scores):
            """The student's scalar for every response, as an algorithm returns one loss per response."""
            given = (scores.log_probs, scores.old_log_probs, scores.old_log_probs, scores.mask)
            scalar = loss(*given, scores.advantages[:, 0], **budget, kl_coef=0.0)
            return scalar.reshape(1, 1).expand(len(scores.mask), 1)

        own = {"advantage": list(functions.values())[1], "ratio": "token", "aggregation": "sequence_mean", "beta": 0.0}
        policy_algorithm(registered, **own)(whole)
        settings = {"max_completion_length": MAX_NEW_TOKENS, **settings, "algorithm": registered}
        config = read_config(PolicyConfig, settings, flags)
        if name == "dr_grpo_loss":
            budget["max_new_tokens"] = config.max_completion_length
        reward = RewardModel(options.reward_model) if options.reward_model else known_score
        trainer = PolicyTrainer(model, [reward], args=config, train_dataset=splits["train_gen"])
    compared = kind != "reward" and options.eval_prompts
    if compared:
        remember_base(trainer)
    trainer.train()
    trainer.save_model(str(options.output_dir))
    figures = {"steps": trainer.state.global_step}
    if kind == "reward":
        figures["accuracy"] = trainer.evaluate()["eval_accuracy"]
    elif compared:
        judge, limits = GroundTruthJudge(), GenerationSettings(None, max_new_tokens=MAX_NEW_TOKENS, batch_size=100)
        known = {"judge": judge, "score_function": judge.score_function}
        evaluation = GenerationEvaluation(trainer, splits["test_gen"], limits, **known)
        summary = evaluation.compare(options.eval_prompts).summary
        figures |= {name: summary[name] for name in ("win_rate", "score", "kl")}
    return figures


def known_score(prompts: list, completions: list, **columns: Any) -> list[float]:
    """The reward of the embedded benchmark: the known quality of each response."""
    pairs = zip(prompts, completions, strict=True)
    return [score(prompt[-1]["content"], completion_text(text)) for prompt, text in pairs]


def run_loop(kind: str, functions: Functions, settings: dict, options, flags: list[str]) -> dict[str, Any]:
    """Train the embedded model on additions, in a plain loop. Return the share of held-out ones that it solves."""
    fields = [(name, type(value), value) for name, value in settings.items()]
    settings = read_config(make_dataclass("LoopSettings", fields), {}, flags)
    torch.manual_seed(settings.seed)
    path = resolve_model_path("toy")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    train, held_out = load_math("toy", "train"), load_math("toy", "test")[: options.eval_prompts]

    def generate(rows: list[dict], **sampling: Any) -> list:
        prompts, limits = [math_prompt(row, None) for row in rows], {"max_new_tokens": MAX_NEW_TOKENS}
        return generate_responses(model, tokenizer, prompts, batch_size=128, **limits, **sampling) if rows else []

    def accuracy() -> float | None:
        # The library's parser reads the number, so that the figures of two students are measured alike.
        answers = [parse_gsm8k_response(response.text) for response in generate(held_out)]
        return sum(map(eq, answers, [row["answer"] for row in held_out])) / len(held_out) if held_out else None

    def tokenize(rows: list[dict], outputs: list[str]) -> dict[str, torch.Tensor]:
        prompts = [math_prompt(row, None) for row in rows]
        texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
        return functions["tokenize_prompt_and_output"](texts, outputs, tokenizer)

    def log_probs(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functions["response_log_probs"](model, batch["input_ids"], batch["labels"])["log_probs"]

    def reward(response: str, truth: str) -> dict[str, float]:
        return {"reward": float(functions["parse_gsm8k_response"](response) == truth)}

    before = accuracy()
    for number in range(settings.steps):
        rows = random.Random(1000 * settings.seed + number).sample(train, settings.prompts)
        if kind == "sft_loop":
            outputs = [addition_trace(row["prompt_text"]) + tokenizer.eos_token for row in rows]
            batch, step = tokenize(rows, outputs), functions["sft_microbatch_step"]
            # Dividing by the mean length makes the loss a mean over tokens.
            given = {"normalize_constant": float(batch["response_mask"].sum(1).float().mean())}
        else:
            rows, step = [row for row in rows for _ in range(settings.group_size)], functions["policy_microbatch_step"]
            sampled = generate(rows, temperature=1.0, seed=settings.seed + number)
            responses, truths = [each.text for each in sampled], [row["answer"] for row in rows]
            grouped = (settings.group_size, settings.advantage_eps, settings.normalize_by_std)
            group = functions["compute_group_normalized_rewards"]
            advantages, rewards, _ = group(reward, responses, truths, *grouped)
            batch = tokenize(rows, [each.text + tokenizer.eos_token * each.finished for each in sampled])
            with torch.no_grad():
                given = {"old_log_probs": log_probs(batch)}
            given |= {"advantages": advantages.unsqueeze(1), "raw_rewards": rewards.unsqueeze(1)}
            given |= {"loss_type": settings.loss_type, "cliprange": settings.cliprange}
        for _ in range(settings.updates):
            model.train()
            loss = step(log_probs(batch), batch["response_mask"], 1, **given)[0]
            if all(parameter.grad is None for parameter in model.parameters()):
                raise ValueError("no gradient has reached the model: does the micro-batch step call backward()?")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if number % 10 == 9:
            print(f"step {number + 1}: loss {float(loss):.4f}")
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    return {"steps": settings.steps, "accuracy": {"before": before, "after": accuracy(), "n": len(held_out)}}
