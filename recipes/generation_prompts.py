"""What a prompt is shown to a model as: in a template, in its chat template or as plain text, behind examples."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from trl_ext import load_benchmark
from trl_ext.data.templates import load_prompt_template, render
from trl_ext.rollouts.best_of_n import prompt_text

CHAT = "chat"
_WITHIN_CHAT = f"{CHAT}+"


def check_template(name: str) -> None:
    """Raise FileNotFoundError or ValueError where a template's name is none."""
    if name != CHAT:
        load_prompt_template(name.removeprefix(_WITHIN_CHAT))


class PromptBuilder:
    """Builds prompts of a setting's `template` and `few_shot`.

    The examples of a number are the same for every prompt, save that a prompt is no example of itself; those of a
    smaller number are the first of a larger one's.

    Args:
        arguments: with `dataset_name`, `few_shot_split`, `templates`, `few_shots` and `seed`.
        prompts: that will be built.

    Raises:
        ValueError: examples are asked for, and the split has too few, or no responses.
    """

    def __init__(self, arguments, prompts: Sequence[Mapping[str, Any]]):
        self.templates = {
            name: None if name == CHAT else load_prompt_template(name.removeprefix(_WITHIN_CHAT))
            for name in arguments.templates
        }
        self.holds_text = any(isinstance(row["prompt"], str) for row in prompts)
        most = max(arguments.few_shots)
        self.examples = _examples(arguments, most) if most else []

    def check(self, tokenizer) -> None:
        """Raise ValueError where a chat is asked for, and the tokenizer has no chat template."""
        chats = [name for name in self.templates if name == CHAT or name.startswith(_WITHIN_CHAT)]
        if chats and tokenizer.chat_template is None and not self.holds_text:
            raise ValueError(f"the model has no chat template for the template {chats[0]}: name one of plain text")

    def build(self, prompt: list[dict] | str, setting: Mapping[str, Any]) -> list[dict] | str:
        """The prompt as the model is given it."""
        name, template = setting["template"], self.templates[setting["template"]]
        asked = prompt_text(prompt)
        examples = [pair for pair in self.examples if pair[0] != asked][: setting["few_shot"]]
        if template is not None:
            examples = [(render(template, question), answer) for question, answer in examples]
            asked = render(template, asked)
        if isinstance(prompt, str) or not name.startswith(CHAT):
            return "\n\n".join([*(f"{question} {answer}".rstrip() for question, answer in examples), asked])
        turns = [
            {"role": role, "content": text}
            for pair in examples
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        # Examples go behind a system message and before the conversation; the last question is what is rendered.
        start = 1 if prompt[0]["role"] == "system" else 0
        last = max(index for index, message in enumerate(prompt) if message["role"] == "user")
        asking = [*prompt[:last], {**prompt[last], "content": asked}, *prompt[last + 1 :]]
        return [*asking[:start], *turns, *asking[start:]]


def _examples(arguments, count: int) -> list[tuple[str, str]]:
    """Questions and answers, one more than are asked for: a prompt may be one of them."""
    split, name = arguments.few_shot_split, arguments.dataset_name
    benchmark = load_benchmark(name)
    if split not in benchmark:
        raise ValueError(f"{name} has no split {split!r} for examples: it has {', '.join(benchmark)}")
    rows = benchmark[split]
    column = next((c for c in ("reference_response_text", "chosen") if c in rows.column_names), None)
    if column is None:
        raise ValueError(f"few_shots: the split {split!r} has neither reference_response_text nor chosen responses")
    if count + 1 > len(rows):
        raise ValueError(
            f"few_shots: {count} examples and one to spare are more than the {len(rows)} rows of {split!r}"
        )
    chosen = rows.select(random.Random(arguments.seed).sample(range(len(rows)), count + 1))
    answers = [value if isinstance(value, str) else value[-1]["content"] for value in chosen[column]]
    return list(zip(map(prompt_text, chosen["prompt"]), answers, strict=True))
