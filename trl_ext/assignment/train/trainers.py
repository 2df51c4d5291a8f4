"""Run the library's trainers on a student's functions, and evaluate the trained policies and reward models."""

from __future__ import annotations

from typing import Any

from trl_ext import (
    PolicyConfig,
    PolicyTrainer,
    PreferenceConfig,
    PreferenceTrainer,
    RewardConfig,
    RewardTrainer,
    load_benchmark,
)
from trl_ext.assignment.train.functions import (
    Functions,
    read_config,
    register_policy_loss,
    register_preference_loss,
)
from trl_ext.assignment.train.recipe import RecipeSpec, used_functions
from trl_ext.evaluation import GroundTruthJudge
from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings
from trl_ext.models import resolve_model_path
from trl_ext.rewards import RewardModel
from trl_ext.rewards.verified import completion_text
from trl_ext.toy import MAX_NEW_TOKENS, score
from trl_ext.trainers.policies import remember_base

COMMON = {"report_to": "none", "save_strategy": "no", "logging_steps": 10}


class StudentRewardTrainer(RewardTrainer):
    """`RewardTrainer` with another function for the loss of a pair."""

    loss_function: Any = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        window = inputs.get("window")
        _, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        losses = self.loss_function(*outputs.logits.squeeze(-1).float().chunk(2))
        loss = losses.mean() if window is None else losses.sum() * window.scale
        return (loss, outputs) if return_outputs else loss


def run_trainer(recipe: RecipeSpec, functions: Functions, options: Any, rest: list[str]) -> dict[str, Any] | None:
    """Train on the embedded benchmark and return the results; None on all processes but the first.

    Raises:
        ValueError: the trainer does not have a setting, or a function is not implemented or cannot be used.
    """
    settings = {**COMMON, **recipe.settings, "output_dir": str(options.output_dir)}
    build = {"preference": _preference, "reward": _reward, "policy": _policy}[recipe.kind]
    trainer = build(recipe, functions, settings, rest, options.reward_model)
    if trainer.accelerator.is_main_process:
        print(functions.describe(used_functions(recipe, functions.library)))
    compared = recipe.kind != "reward" and options.eval_prompts
    if compared:
        remember_base(trainer)
    trainer.train()
    trainer.save_model(str(options.output_dir))
    steps = trainer.state.global_step
    results = {
        "yours": functions.yours(used_functions(recipe, functions.library)),
        "steps": steps,
        "summary": f"{steps} steps",
    }
    if recipe.kind == "reward":
        accuracy = trainer.evaluate()["eval_accuracy"]
        results |= {"accuracy": accuracy, "summary": f"accuracy on held-out pairs {accuracy:.3f}"}
    elif compared:
        results |= _compare(trainer, options.eval_prompts)
    return results if trainer.accelerator.is_main_process else None


def _preference(recipe: RecipeSpec, functions: Functions, settings: dict[str, Any], rest: list[str], _):
    settings["loss"] = register_preference_loss(functions, recipe.loss)
    config = read_config(PreferenceConfig, settings, rest)
    return PreferenceTrainer(resolve_model_path("toy"), args=config, train_dataset=load_benchmark()["train_prefs"])


def _reward(recipe: RecipeSpec, functions: Functions, settings: dict[str, Any], rest: list[str], _):
    config = read_config(RewardConfig, settings, rest)
    splits = load_benchmark()
    datasets = {"train_dataset": splits["train_prefs"], "eval_dataset": splits["test_prefs"]}
    trainer = StudentRewardTrainer(resolve_model_path("toy"), args=config, **datasets)
    trainer.loss_function = functions.by_name[recipe.loss]
    return trainer


def _policy(recipe: RecipeSpec, functions: Functions, settings: dict[str, Any], rest: list[str], reward: str | None):
    settings.setdefault("max_completion_length", MAX_NEW_TOKENS)
    has_budget = functions.library[recipe.loss] == "assignment.dr_grpo_loss"
    options = {"max_new_tokens": settings["max_completion_length"]} if has_budget else {}
    settings["algorithm"] = register_policy_loss(functions, recipe.loss, recipe.advantage, options)
    config = read_config(PolicyConfig, settings, rest)
    # A flag may have set another length.
    options |= dict.fromkeys(options, config.max_completion_length)
    rewards = known_score if reward is None else RewardModel(reward)
    prompts = load_benchmark()["train_gen"]
    return PolicyTrainer(resolve_model_path("toy"), [rewards], args=config, train_dataset=prompts)


def known_score(prompts: list, completions: list, **columns: Any) -> list[float]:
    """The reward of the embedded benchmark: the known quality of each response."""
    pairs = zip(prompts, completions, strict=True)
    return [score(prompt[-1]["content"], completion_text(text)) for prompt, text in pairs]


def _compare(trainer, prompts: int) -> dict[str, Any]:
    settings = GenerationSettings(max_prompt_tokens=None, max_new_tokens=MAX_NEW_TOKENS, batch_size=100)
    judge = GroundTruthJudge()
    rows = load_benchmark()["test_gen"]
    evaluation = GenerationEvaluation(trainer, rows, settings, judge=judge, score_function=judge.score_function)
    summary = evaluation.compare(prompts).summary
    half = summary["win_rate"]["half"]
    line = f"win rate against the base {half['rate']:.3f} [{half['low']:.3f}, {half['high']:.3f}], ties as half"
    return {"win_rate": summary["win_rate"], "score": summary["score"], "kl": summary["kl"], "summary": line}
