"""Plain training loops on the embedded additions, built from the functions of the reasoning assignment."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext.assignment.train.functions import Functions, read_config
from trl_ext.assignment.train.recipe import LoopSettings, RecipeSpec, used_functions
from trl_ext.data.math import load_math, math_prompt
from trl_ext.models import resolve_model_path
from trl_ext.rewards import parse_gsm8k_response
from trl_ext.rollouts import generate_responses
from trl_ext.toy import MAX_NEW_TOKENS
from trl_ext.toy.traces import addition_trace

Batch = dict[str, torch.Tensor]


def run_loop(recipe: RecipeSpec, functions: Functions, options: Any, rest: list[str]) -> dict[str, Any]:
    """Train the embedded model; return the share of held-out additions that it solves before and after."""
    settings = read_config(LoopSettings, recipe.settings, rest)
    torch.manual_seed(settings.seed)
    loop = Loop(functions, settings)
    held_out = load_math("toy", "test")[: options.eval_prompts]
    print(functions.describe(sorted(functions.own)) or "all functions are the library's")
    before = loop.accuracy(held_out)
    rows = load_math("toy", "train")
    count = settings.batch_size if recipe.kind == "sft_loop" else settings.prompts
    for step in range(settings.steps):
        chosen = random.Random(1000 * settings.seed + step).sample(rows, count)
        figure = loop.imitate(chosen) if recipe.kind == "sft_loop" else loop.reinforce(chosen, recipe.loss, step)
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: {figure}")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    loop.model.save_pretrained(options.output_dir)
    loop.tokenizer.save_pretrained(options.output_dir)
    after, line = loop.accuracy(held_out), f"{settings.steps} steps"
    if held_out:
        line = f"accuracy {before:.3f} before, {after:.3f} after"
    accuracy = {"before": before, "after": after, "n": len(held_out)}
    return {
        "yours": functions.yours(used_functions(recipe, functions.library)),
        "steps": settings.steps,
        "accuracy": accuracy,
        "summary": line,
    }


class Loop:
    """The embedded model under training, and the functions of the assignment that its steps use."""

    def __init__(self, functions: Functions, settings: LoopSettings):
        path = resolve_model_path("toy")
        self.functions, self.settings = functions, settings
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0)

    def imitate(self, rows: list[dict[str, Any]]) -> str:
        """Take one step on demonstrations."""
        outputs = [addition_trace(row["prompt_text"]) + self.tokenizer.eos_token for row in rows]
        batch = self._tokenize(rows, outputs)
        step = self.functions.of("course.sft_microbatch_step")
        # Dividing by the mean length makes the loss a mean over tokens.
        constant = float(batch["response_mask"].sum(1).float().mean())

        def loss_of(part: Batch, log_probs: torch.Tensor) -> torch.Tensor:
            return step(log_probs, part["response_mask"], self.settings.gradient_accumulation_steps, constant)[0]

        return f"loss {self._update(batch, loss_of):.4f}"

    def reinforce(self, rows: list[dict[str, Any]], loss_type: str, number: int) -> str:
        """Sample one rollout, and train on it."""
        settings = self.settings
        repeated = [row for row in rows for _ in range(settings.group_size)]
        sampled = self._generate(repeated, temperature=1.0, seed=settings.seed + number)
        advantages, rewards, _ = self.functions.of("course.compute_group_normalized_rewards")(
            self._reward,
            [each.text for each in sampled],
            [row["answer"] for row in repeated],
            settings.group_size,
            settings.advantage_eps,
            settings.normalize_by_std,
        )
        ends = [self.tokenizer.eos_token if each.finished else "" for each in sampled]
        batch = self._tokenize(repeated, [each.text + end for each, end in zip(sampled, ends, strict=True)])
        with torch.no_grad():
            batch["old"] = self._log_probs(batch)
        batch |= {"advantages": advantages.unsqueeze(1), "rewards": rewards.unsqueeze(1)}
        step = self.functions.of("course.policy_microbatch_step")

        def loss_of(part: Batch, log_probs: torch.Tensor) -> torch.Tensor:
            given = (log_probs, part["response_mask"], settings.gradient_accumulation_steps, loss_type)
            return step(*given, part["rewards"], part["advantages"], part["old"], settings.cliprange)[0]

        for _ in range(settings.updates):
            self._update(batch, loss_of)
        return f"mean reward {float(rewards.mean()):.3f}"

    def accuracy(self, rows: list[dict[str, Any]]) -> float | None:
        """Share of additions whose greedy response has the correct last number; None without additions.

        The library's parser reads the number, so that the figures of two students are measured alike.
        """
        if not rows:
            return None
        greedy = self._generate(rows)
        right = [parse_gsm8k_response(each.text) == row["answer"] for each, row in zip(greedy, rows, strict=True)]
        return sum(right) / len(right)

    def _generate(self, rows: list[dict[str, Any]], **options: Any) -> list:
        prompts = [math_prompt(row, None) for row in rows]
        limits = {"max_new_tokens": MAX_NEW_TOKENS, "batch_size": 128}
        return generate_responses(self.model, self.tokenizer, prompts, **limits, **options)

    def _reward(self, response: str, truth: str) -> dict[str, float]:
        answer = self.functions.of("rewards.parse_gsm8k_response")(response)
        return {"reward": float(answer == truth), "format_reward": float(answer is not None)}

    def _tokenize(self, rows: list[dict[str, Any]], outputs: list[str]) -> Batch:
        prompts = [math_prompt(row, None) for row in rows]
        texts = self.tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
        return dict(self.functions.of("models.tokenize_prompt_and_output")(texts, outputs, self.tokenizer))

    def _log_probs(self, batch: Batch) -> torch.Tensor:
        log_probs = self.functions.of("models.response_log_probs")
        return log_probs(self.model, batch["input_ids"], batch["labels"])["log_probs"]

    def _update(self, batch: Batch, loss_of: Callable[[Batch, torch.Tensor], torch.Tensor]) -> float:
        """One optimizer step, in micro-batches of equal size; returns the loss."""
        rows, count = len(batch["labels"]), self.settings.gradient_accumulation_steps
        if rows % count:
            raise ValueError(f"{rows} rows do not divide into {count} micro-batches of equal size")
        chunks = {name: values.chunk(count) for name, values in batch.items()}
        self.model.train()
        total = 0.0
        for index in range(count):
            part = {name: values[index] for name, values in chunks.items()}
            total += float(loss_of(part, self._log_probs(part)))
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise ValueError("no gradient has reached the model: does the micro-batch step call backward()?")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total
