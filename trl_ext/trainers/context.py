"""Checks the model and the data that a trainer is given, and truncates rows to their limits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset

from trl_ext.models.loading import resolve_model_path
from trl_ext.processes import warn_once_per_run
from trl_ext.rollouts.generation import prompt_tokens, without_template

Formats = Sequence[Sequence[str]]

# Without a prompt, the two are conversations that share their first turns.
PAIRS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
LABELLED = (("prompt", "completion", "label"), *PAIRS)
PROMPTS = (("prompt",),)


# ---- Models and datasets ----


def check_inputs(model: Any, given: Mapping[str, Any], formats: Formats) -> Any:
    """Check a trainer's model, and its datasets by `check_dataset`; return the model as TRL takes it.

    The names `toy` and `smollm2` become those of their folders.

    Raises:
        FileNotFoundError: the model's folder does not exist.
        TypeError: the reference model is a name.
        ValueError: the model is an adapter.
    """
    if isinstance(model, (str, os.PathLike)):
        model = resolve_model_path(os.fspath(model))
        if (Path(model) / "adapter_config.json").is_file() and not (Path(model) / "config.json").is_file():
            raise ValueError(f"{model} is an adapter, and training starts from a whole model: merge it into its base")
    if isinstance(given.get("ref_model"), str):
        raise TypeError("ref_model must be a model, got str: AutoModelForCausalLM.from_pretrained loads one")
    held_out = given.get("eval_dataset")
    named = held_out if isinstance(held_out, Mapping) else {"eval_dataset": held_out}
    for name, dataset in {"train_dataset": given.get("train_dataset"), **named}.items():
        # TRL says itself that there is no data to train on.
        if dataset is not None:
            check_dataset(name, dataset, formats)
    return model


def check_dataset(name: str, dataset: Any, formats: Formats) -> None:
    """Check a dataset, which messages name `name`, by its first row; a streamed one by its type.

    Raises:
        TypeError: it is no dataset.
        ValueError: it is empty, has the columns of none of the `formats` (none to leave them to TRL), or has a text
            that is neither a string nor messages.
    """
    if isinstance(dataset, IterableDataset):
        return
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name} must be a Dataset, got {type(dataset).__name__}: Dataset.from_list(rows) makes one of rows, "
            "load_benchmark(name)[split] reads a file or a folder"
        )
    if not len(dataset):
        raise ValueError(f"{name} has no rows")
    # A transform may add and change columns.
    first = (dataset if dataset.format["type"] == "custom" else dataset.with_format(None))[0]
    read = next((columns for columns in formats if {*columns} <= {*first}), ())
    if any(column.endswith("_ids") for column in first):
        return
    if formats and not read:
        lacks = next(column for column in formats[0] if column not in first)
        rows = ", or of ".join(map(", ".join, formats))
        raise ValueError(
            f"{name} has no column {lacks!r}: give rows of {rows}, or name another split on the command line; it has "
            f"{', '.join(first)}"
        )
    for column in {*read} & {"prompt", "completion", "chosen", "rejected"}:
        text = first[column]
        if not isinstance(text, str) and not (isinstance(text, list) and text and "role" in text[0]):
            raise ValueError(f"{name}, row 0: {column} must be text or messages with roles, got {text!r:.100}")


def report_plain_prompts(tokenizer: Any, dataset: Any) -> None:
    """Log a line if prompts are plain text and the tokenizer has a chat template, which is not applied to text."""
    prompts = dataset[:100].get("prompt", []) if isinstance(dataset, Dataset) else []
    if prompts and (line := without_template(tokenizer, prompts)):
        warn_once_per_run(line)


def report_doubled_begin(tokenizer: Any, dataset: Any) -> None:
    """Log a line if TRL's tokenization puts the begin token before plain prompts that begin with it."""
    prompts = dataset[:100].get("prompt", []) if isinstance(dataset, Dataset) else []
    begin = getattr(tokenizer, "bos_token", None)
    texts = [text for text in prompts if begin and isinstance(text, str) and text.startswith(begin)]
    if texts and tokenizer(texts[0])["input_ids"][:2] == 2 * [tokenizer.bos_token_id]:
        warn_once_per_run(f"prompts begin with {begin}, and the tokenizer puts one before each: remove it from them")


# ---- Rows as token ids ----


def map_rows(dataset: Any, function: Any, description: str, num_proc: int | None = None, **options: Any) -> Any:
    """`dataset.map` with a progress bar and processes, which a streamed dataset does not have."""
    if isinstance(dataset, Dataset):
        options |= {"desc": description, "num_proc": num_proc}
    return dataset.map(function, **options)


@contextmanager
def encoding(row: Mapping[str, Any]) -> Iterator[None]:
    """Name the row, by its `row_id` or its beginning, in a ValueError if it cannot be encoded in the block."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        name = f"row_id {row['row_id']}" if "row_id" in row else f"the row {str(row)[:100]}"
        raise ValueError(f"{name} cannot be encoded: {error}") from error


def quiet_about_length(processing_class: Any) -> None:
    """Turn off the tokenizer's warning of indexing errors: rows are truncated after they are tokenized."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True


def truncate_rows(
    dataset: Any, dataset_name: str, args: Any, responses: Sequence[str] = ("chosen_ids", "rejected_ids")
) -> Any:
    """Truncate `prompt_ids` at the beginning and `responses` at the end, to the limits of a configuration.

    A truncated response loses its end token, so it does not teach the model to stop there. One line counts them.
    """
    prompt_limit, response_limit = args.max_prompt_tokens, args.max_response_tokens
    if prompt_limit is None and response_limit is None:
        return dataset
    if isinstance(dataset, Dataset):
        # KTO's `KL_completion_ids` are the responses of other rows.
        counted = [name for name in responses if name in dataset.column_names and not name.startswith("KL_")]
        for side, limit, columns in (("prompt", prompt_limit, ["prompt_ids"]), ("response", response_limit, counted)):
            lengths = [len(ids) for column in columns for ids in dataset[column]] if limit else []
            if count := sum(length > limit for length in lengths):
                warn_once_per_run(
                    f"{dataset_name}: {count} of {len(lengths)} {side}s are longer than max_{side}_tokens {limit} and "
                    "are truncated"
                )

    def truncate(row: Mapping[str, Any]) -> dict[str, list[int]]:
        prompt = row["prompt_ids"] if prompt_limit is None else row["prompt_ids"][-prompt_limit:]
        return {"prompt_ids": prompt, **{name: row[name][:response_limit] for name in responses if name in row}}

    return map_rows(dataset, truncate, f"Truncating {dataset_name} dataset")


# ---- The model's context ----


def check_context(model, data: Any, limits: Mapping[str, int | None], tokenizer: Any = None) -> None:
    """Raise ValueError, naming the settings to lower, if a prompt and its response exceed the model's context.

    Args:
        model: a model with a `config`.
        data: a tokenized dataset; or prompts for the tokenizer, whose responses may have the maximum length.
        limits: maximum tokens of a response, then of a prompt (None for no limit), by the names of the settings.
        tokenizer: encodes the prompts.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None or (None not in limits.values() and sum(limits.values()) <= context):
        return
    if isinstance(data, Dataset):
        responses = {"chosen_ids", "rejected_ids", "completion_ids", "input_ids"} & {*data.column_names}
        rows = data.select_columns(sorted(responses | {"prompt_ids"} & {*data.column_names}))
        lengths = (len(row.pop("prompt_ids", ())) + max(map(len, row.values()), default=0) for row in rows)
    else:
        response, prompt_limit = limits.values()
        lengths = (response + len(prompt_tokens(tokenizer, prompt, prompt_limit)) for prompt in data)
    length = max(lengths, default=0)
    if length > context:
        flags = " or ".join(f"--{name} (now {value})" for name, value in limits.items())
        raise ValueError(f"rows have up to {length} tokens, and the model's context holds {context}: lower {flags}")
