"""Plain training loops on the embedded additions, in which every step is a function of the reasoning assignment."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext.assignment.spec import RecipeSpec
from trl_ext.assignment.training import Functions
from trl_ext.data.math import load_math, math_prompt
from trl_ext.models import resolve_model_path
from trl_ext.registry import nearest
from trl_ext.rollouts import generate_responses
from trl_ext.toy import MAX_NEW_TOKENS
from trl_ext.toy.traces import addition_trace


@dataclass
class LoopSettings:
    """Settings of a loop; each is a flag.

    Attributes:
        steps: rollouts, or batches of demonstrations.
        updates: optimizer steps on each rollout.
        batch_size: demonstrations per step.
        prompts, group_size: of a rollout.
        gradient_accumulation_steps: micro-batches per optimizer step.
    """

    learning_rate: float = 3e-4
    steps: int = 40
    updates: int = 1
    batch_size: int = 32
    prompts: int = 16
    group_size: int = 8
    gradient_accumulation_steps: int = 1
    normalize_by_std: bool = True
    advantage_eps: float = 1e-6
    cliprange: float = 0.2
    seed: int = 0


def run_loop(recipe: RecipeSpec, functions: Functions, options: Any, rest: list[str]) -> dict[str, Any]:
    """Train the embedded model, and return the share of held-out additions that it solves before and after."""
    settings = _settings(recipe.settings, rest)
    torch.manual_seed(settings.seed)
    path = resolve_model_path("toy")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    loop = Loop(functions, model, tokenizer, settings)
    held_out = load_math("toy", "test")[: options.eval_prompts]
    print(functions.describe(sorted(functions.own)) or "all functions are the library's")
    before = loop.accuracy(held_out)
    rows = load_math("toy", "train")
    for step in range(settings.steps):
        chosen = random.Random(1000 * settings.seed + step).sample(rows, loop.rows_per_step(recipe.kind))
        figure = loop.imitate(chosen) if recipe.kind == "sft_loop" else loop.reinforce(chosen, recipe.loss, step)
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: {figure}")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    accuracy = {"before": before, "after": loop.accuracy(held_out), "n": len(held_out)}
    line = (
        f"{settings.steps} steps" if not held_out else f"accuracy {before:.3f} before, {accuracy['after']:.3f} after"
    )
    return {"yours": sorted(functions.own), "steps": settings.steps, "accuracy": accuracy, "summary": line}


class Loop:
    """A model under training, and the functions that make its steps.

    Args:
        functions: of the assignment.
        model, tokenizer: what is trained.
        settings: of the loop.
    """

    def __init__(self, functions: Functions, model, tokenizer, settings: LoopSettings):
        self.functions, self.model, self.tokenizer, self.settings = functions, model, tokenizer, settings
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)

    def rows_per_step(self, kind: str) -> int:
        return self.settings.batch_size if kind == "sft_loop" else self.settings.prompts

    def imitate(self, rows: list[dict[str, Any]]) -> str:
        """One step on demonstrations."""
        outputs = [addition_trace(row["prompt_text"], wrong_share=0.0) + self.tokenizer.eos_token for row in rows]
        batch = self._tokenize([self._prompt(row) for row in rows], outputs)
        step = self.functions.of("course.sft_microbatch_step")
        # A mean over tokens, up to what rows of other lengths make of it.
        constant = float(batch["response_mask"].sum(1).float().mean())

        def loss_of(part: dict[str, torch.Tensor], log_probs: torch.Tensor) -> torch.Tensor:
            return step(log_probs, part["response_mask"], self.settings.gradient_accumulation_steps, constant)[0]

        return f"loss {self._update(batch, loss_of):.4f}"

    def reinforce(self, rows: list[dict[str, Any]], loss_type: str, number: int) -> str:
        """One rollout, and the updates on it."""
        settings = self.settings
        repeated = [row for row in rows for _ in range(settings.group_size)]
        sampled = generate_responses(
            self.model,
            self.tokenizer,
            [_messages(row) for row in repeated],
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=1.0,
            batch_size=128,
            seed=settings.seed + number,
        )
        advantages, rewards, _ = self.functions.of("course.compute_group_normalized_rewards")(
            self._reward,
            [each.text for each in sampled],
            [row["answer"] for row in repeated],
            settings.group_size,
            settings.advantage_eps,
            settings.normalize_by_std,
        )
        ends = [self.tokenizer.eos_token if each.finished else "" for each in sampled]
        texts = [each.text + end for each, end in zip(sampled, ends, strict=True)]
        batch = self._tokenize([self._prompt(row) for row in repeated], texts)
        with torch.no_grad():
            batch["old"] = self._log_probs(batch)
        batch |= {"advantages": advantages.unsqueeze(1), "rewards": rewards.unsqueeze(1)}
        step = self.functions.of("course.policy_microbatch_step")

        def loss_of(part: dict[str, torch.Tensor], log_probs: torch.Tensor) -> torch.Tensor:
            given = (log_probs, part["response_mask"], settings.gradient_accumulation_steps, loss_type)
            return step(*given, part["rewards"], part["advantages"], part["old"], settings.cliprange)[0]

        for _ in range(settings.updates):
            self._update(batch, loss_of)
        return f"mean reward {float(rewards.mean()):.3f}"

    def accuracy(self, rows: list[dict[str, Any]]) -> float | None:
        """Share of additions whose last number, in a greedy response, is right; None of none."""
        if not rows:
            return None
        prompts = [_messages(row) for row in rows]
        greedy = generate_responses(self.model, self.tokenizer, prompts, max_new_tokens=MAX_NEW_TOKENS, batch_size=128)
        right = [self._reward(each.text, row["answer"])["reward"] for each, row in zip(greedy, rows, strict=True)]
        return sum(right) / len(right)

    def _reward(self, response: str, truth: str) -> dict[str, float]:
        answer = self.functions.of("rewards.parse_gsm8k_response")(response)
        return {"reward": float(answer == truth), "format_reward": float(answer is not None)}

    def _prompt(self, row: dict[str, Any]) -> str:
        return self.tokenizer.apply_chat_template(_messages(row), tokenize=False, add_generation_prompt=True)

    def _tokenize(self, prompts: list[str], outputs: list[str]) -> dict[str, torch.Tensor]:
        return dict(self.functions.of("models.tokenize_prompt_and_output")(prompts, outputs, self.tokenizer))

    def _log_probs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.functions.of("models.response_log_probs")(self.model, batch["input_ids"], batch["labels"])[
            "log_probs"
        ]

    def _update(self, batch: dict[str, torch.Tensor], loss_of) -> float:
        self.model.train()
        total = 0.0
        for part in _parts(batch, self.settings.gradient_accumulation_steps):
            total += float(loss_of(part, self._log_probs(part)))
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise ValueError(
                "no gradient has reached the model: does the micro-batch step call backward() on its loss?"
            )
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def _parts(batch: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of equal size."""
    if len(batch["labels"]) % count:
        raise ValueError(f"{len(batch['labels'])} rows do not divide into {count} micro-batches of equal size")
    chunks = {name: rows.chunk(count) for name, rows in batch.items()}
    return [{name: rows[index] for name, rows in chunks.items()} for index in range(count)]


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    return math_prompt(row, None)


def _settings(given: dict[str, Any], rest: list[str]) -> LoopSettings:
    types = {each.name: each.type for each in fields(LoopSettings)}
    values = {name: str(value) for name, value in given.items()}
    if len(rest) % 2:
        raise ValueError(f"a value is missing after {rest[-1]}")
    values |= {flag.removeprefix("--"): value for flag, value in zip(rest[::2], rest[1::2], strict=True)}
    converted: dict[str, Any] = {}
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"the loop has no setting {name!r}{nearest(name, list(types))} Known: {', '.join(types)}")
        convert = {"int": int, "float": float, "bool": lambda text: text.lower() in ("true", "1")}[types[name]]
        try:
            converted[name] = convert(value)
        except ValueError:
            raise ValueError(f"--{name} does not take {value!r}") from None
    return LoopSettings(**converted)
