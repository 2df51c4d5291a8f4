"""Cuts rows to their limits, and checks whether they and responses fit into a model's context."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from datasets import Dataset

from trl_ext.data import truncate_pair
from trl_ext.processes import warn_once_per_run
from trl_ext.rollouts.generation import prompt_tokens


def check_generations(model, tokenizer, prompts: Iterable[Any], limits: dict[str, int | None]) -> None:
    """Raise ValueError, naming the settings to lower, if prompts leave too little of the context for their responses.

    Args:
        model: a model with a `config`.
        tokenizer: the model's tokenizer.
        prompts: messages or text.
        limits: maximum tokens of a response, then of a prompt (None for no limit), by the names of the settings.
    """
    response, prompt = limits.values()

    def longest() -> int:
        return response + max((len(prompt_tokens(tokenizer, one, prompt)) for one in prompts), default=0)

    _check(model, limits, longest)


def check_rows(model, dataset: Any, limits: dict[str, int | None]) -> None:
    """The same for the rows of a tokenized dataset, which may be no longer than the context."""
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


def truncate_pairs(dataset: Any, dataset_name: str, args: Any) -> Any:
    """Cut the prompts and responses of pairs, as token ids, to the limits of a configuration; one line counts them."""
    limits = {name: getattr(args, name) for name in ("max_prompt_tokens", "max_response_tokens")}
    if not any(limits.values()):
        return dataset
    described = {}
    if isinstance(dataset, Dataset):
        described = {"desc": f"Truncating {dataset_name} dataset"}
        sides = {"prompts": ["prompt_ids"], "responses": ["chosen_ids", "rejected_ids"]}
        for (what, columns), (name, limit) in zip(sides.items(), limits.items(), strict=True):
            cut = sum(len(ids) > limit for column in columns for ids in dataset[column]) if limit else 0
            if cut:
                total = len(columns) * len(dataset)
                warn_once_per_run(
                    f"{dataset_name}: {cut} of {total} {what} are longer than {name} {limit} and are cut"
                )
    return dataset.map(_truncate, fn_kwargs={"limits": limits}, **described)


def _truncate(row: dict[str, Any], limits: dict[str, int | None]) -> dict[str, list[int]]:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return dict(zip(names, truncate_pair(*(row[name] for name in names), **limits), strict=True))
