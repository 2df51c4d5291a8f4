"""Checks whether rows and responses fit into a model's context. They are measured only if their limits exceed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from datasets import Dataset

from trl_ext.rollouts.generation import prompt_tokens


def check_generations(model, tokenizer, prompts: Iterable[Any], limits: dict[str, int | None]) -> None:
    """Reject prompts that leave too little of the context for their responses.

    Args:
        model: a model with a `config`.
        tokenizer: the model's tokenizer.
        prompts: messages or text.
        limits: maximum tokens of a response, then of a prompt (None for no limit), by the names of the settings.

    Raises:
        ValueError: names the settings to lower.
    """
    response, prompt = limits.values()

    def longest() -> int:
        return response + max((len(prompt_tokens(tokenizer, one, prompt)) for one in prompts), default=0)

    _check(model, limits, longest)


def check_policy(trainer) -> None:
    """Reject training prompts of a `PolicyTrainer` that are too long for the context.

    Raises:
        ValueError: names the settings to lower.
    """
    limits = {"max_completion_length": trainer.max_completion_length}
    limits["max_prompt_tokens"] = trainer.args.max_prompt_tokens
    prompts = trainer.train_dataset["prompt"] if isinstance(trainer.train_dataset, Dataset) else []
    check_generations(trainer.model, trainer.processing_class, prompts, limits)


def check_rows(model, dataset: Any, limits: dict[str, int | None]) -> None:
    """Reject a tokenized dataset with a row that is longer than the context.

    Args:
        model: a model with a `config`.
        dataset: as a trainer on given responses prepares it. Anything but a `Dataset` is accepted without a check.
        limits: as for `check_generations`.

    Raises:
        ValueError: names the settings to lower.
    """
    if not isinstance(dataset, Dataset):
        return
    columns = set(dataset.column_names)
    responses = columns & {"chosen_ids", "rejected_ids", "completion_ids", "input_ids"}

    def longest() -> int:
        rows = dataset.select_columns(sorted(responses | columns & {"prompt_ids"}))
        return max(len(row.get("prompt_ids", ())) + max(len(row[name]) for name in responses) for row in rows)

    if responses:
        _check(model, limits, longest)


def _check(model, limits: dict[str, int | None], longest: Callable[[], int]) -> None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None or (None not in limits.values() and sum(limits.values()) <= context):
        return
    length = longest()
    if length > context:
        flags = " or ".join(f"--{name} (now {value})" for name, value in limits.items())
        raise ValueError(
            f"a prompt and its response take up to {length} tokens, and the model's context holds {context}: lower "
            f"{flags}"
        )
