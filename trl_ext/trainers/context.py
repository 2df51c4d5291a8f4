"""Checks the model and the rows that a trainer is given, and truncates rows to their limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from torch.nn import Module

from trl_ext.files import brief
from trl_ext.models.loading import resolve_model_path
from trl_ext.processes import warn_once_per_run
from trl_ext.rollouts.generation import prompt_tokens, without_template

Formats = Sequence[Sequence[str]]

# Without a prompt, the two are conversations that share their first turns.
PAIRS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
LABELLED = (("prompt", "completion", "label"), *PAIRS)
PROMPTS = (("prompt",),)
# Columns that hold text or messages in every format that TRL reads.
_TEXTS = ("prompt", "completion", "chosen", "rejected")


# ---- Models and datasets ----


def check_inputs(model: Any, datasets: Mapping[str, Any], formats: Formats, *, one_kind: bool = False) -> Any:
    """The model as TRL takes it: a model or a name, with `toy` and `smollm2` resolved to their folders.

    Args:
        model: the model, its name or its folder.
        datasets: a trainer's arguments, of which `train_dataset`, `eval_dataset` and `ref_model` are read.
        formats: the columns of a dataset, in one or more ways; none to leave them to TRL.
        one_kind: whether a row's texts must be all messages or all strings.

    Raises:
        FileNotFoundError: the model's folder does not exist.
        TypeError: the model or a dataset is of another type.
        ValueError: the model is an adapter, a dataset is empty or lacks a column, or a row's text is neither a string
            nor messages.
    """
    if isinstance(model, (str, os.PathLike)):
        model = resolve_model_path(os.fspath(model))
        if (Path(model) / "adapter_config.json").is_file() and not (Path(model) / "config.json").is_file():
            raise ValueError(
                f"{model} is an adapter, and training starts from a whole model: merge it into its base "
                "(merge_and_unload, save_pretrained) and give that folder"
            )
    reference = datasets.get("ref_model")
    for name, given, others in (("model", model, str), ("ref_model", reference, type(None))):
        if not isinstance(given, (Module, others)):
            raise TypeError(
                f"{name} must be a model, got {type(given).__name__}: AutoModelForCausalLM.from_pretrained loads one"
            )
    named = {name: datasets.get(name) for name in ("train_dataset", "eval_dataset")}
    if isinstance(named["eval_dataset"], Mapping):
        named |= {f"eval_dataset[{key!r}]": one for key, one in named.pop("eval_dataset").items()}
    for name, dataset in named.items():
        # TRL says itself that there is no data to train on.
        if dataset is not None:
            check_dataset(name, dataset, formats, one_kind=one_kind)
    return model


def check_dataset(name: str, dataset: Any, formats: Formats, *, one_kind: bool = False) -> None:
    """The same for one dataset; of a streamed one only the type is checked."""
    if isinstance(dataset, Mapping):
        raise TypeError(f"{name} holds several data sets, {', '.join(dataset)}: give one of them")
    if isinstance(dataset, IterableDataset):
        return
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name} must be a Dataset, got {type(dataset).__name__}: Dataset.from_list(rows) makes one of rows, "
            "load_benchmark(name)[split] reads a file or a folder"
        )
    if not len(dataset):
        raise ValueError(f"{name} has no rows")
    # A transform may add and change columns, and is not applied to all rows ahead.
    first = dataset[0]
    if any(column.endswith("_ids") for column in first):
        return
    read = next((columns for columns in formats if {*columns} <= {*first}), None)
    if formats and read is None:
        if formats == PAIRS and {*LABELLED[0]} <= {*first}:
            raise ValueError(f"{name} holds labelled responses and no pairs: they are for KTOTrainer, recipes/kto.py")
        lacks = next(column for column in formats[0] if column not in first)
        rows, split = ", or of ".join(map(", ".join, formats)), name.partition("_")[0]
        raise ValueError(
            f"{name} has no column {lacks!r}: give rows of {rows}, or name another --{split}_split on the command "
            f"line; it has {', '.join(first)}"
        )
    texts = [column for column in read or () if column in _TEXTS]
    rows = [first]
    if dataset.format["type"] != "custom":
        rows = dataset.with_format(None).select_columns([*texts, *({"row_id"} & {*dataset.column_names})])
    for index, row in enumerate(rows):
        where = f"{name}, row {index}" + (f" (row_id {row['row_id']})" if "row_id" in row else "")
        kinds = {column: _kind(row[column]) for column in texts}
        for column, kind in kinds.items():
            if kind is None:
                raise ValueError(
                    f"{where}: {column} must be text or messages such as [{{'role': 'user', 'content': '...'}}], got "
                    f"{brief(repr(row[column]), 100)}"
                )
        if one_kind and len({*kinds.values()}) > 1:
            described = ", ".join(f"{column} is {kind}" for column, kind in kinds.items())
            raise ValueError(f"{where}: {described}: give all of them as messages, or all as text")


def _kind(value: Any) -> str | None:
    """`text` or `messages`; None for anything else."""
    if isinstance(value, str):
        return "text"
    is_messages = isinstance(value, list) and value and all(isinstance(m, Mapping) and m.get("role") for m in value)
    return "messages" if is_messages else None


def check_template(tokenizer: Any, dataset: Any) -> None:
    """Raise ValueError, with what to do, if prompts are messages and the tokenizer has no chat template.

    If there is one and prompts are plain text, to which it is not applied, a log line says so.
    """
    if not isinstance(dataset, Dataset) or not len(dataset):
        return
    if getattr(tokenizer, "chat_template", None):
        prompts = dataset[:100]["prompt"] if "prompt" in dataset.column_names else []
        if line := without_template(tokenizer, prompts):
            warn_once_per_run(line)
    elif any(_kind(dataset[0].get(column)) == "messages" for column in (*_TEXTS, "messages")):
        raise ValueError(
            f"the data holds messages, and the model {getattr(tokenizer, 'name_or_path', '')} has no chat template to "
            "write them by: put a chat_template.jinja into the model's folder, or give plain text"
        )


# ---- Rows as token ids ----


def map_rows(dataset: Any, function: Any, description: str, num_proc: int | None = None, **options: Any) -> Any:
    """`dataset.map` with a progress bar and processes, which a streamed dataset does not have."""
    if isinstance(dataset, Dataset):
        options |= {"desc": description, "num_proc": num_proc}
    return dataset.map(function, **options)


def name_of_row(row: Mapping[str, Any]) -> str:
    """A row in a message: its `row_id`, or the beginning of what it holds."""
    return f"row_id {row['row_id']}" if "row_id" in row else f"the row {str(row)[:100]}"


@contextmanager
def encoding(row: Mapping[str, Any]) -> Iterator[None]:
    """Name the row in a ValueError if it cannot be encoded in the block."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{name_of_row(row)} cannot be encoded: {error}") from error


def quiet_about_length(processing_class: Any) -> None:
    """Turn off the tokenizer's warning of indexing errors: rows are truncated after they are tokenized."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True


def truncate_rows(
    dataset: Any, dataset_name: str, args: Any, responses: Sequence[str] = ("chosen_ids", "rejected_ids")
) -> Any:
    """Cut `prompt_ids` at the beginning and responses at the end, to the limits of a configuration.

    A response that is cut loses its end token, so it does not teach the model to stop there. One line counts what is
    cut.

    Args:
        responses: columns of token ids, of which a dataset may lack some.
    """
    prompt_limit, response_limit = args.max_prompt_tokens, args.max_response_tokens
    if prompt_limit is None and response_limit is None:
        return dataset
    if isinstance(dataset, Dataset):
        # KTO's `KL_completion_ids` are the responses of other rows.
        counted = [name for name in responses if name in dataset.column_names and not name.startswith("KL_")]
        for side, limit, columns in (("prompt", prompt_limit, ["prompt_ids"]), ("response", response_limit, counted)):
            lengths = [len(ids) for column in columns for ids in dataset[column]] if limit else []
            if cut := sum(length > limit for length in lengths):
                warn_once_per_run(
                    f"{dataset_name}: {cut} of {len(lengths)} {side}s are longer than max_{side}_tokens {limit} and "
                    "are cut"
                )

    def truncate(row: Mapping[str, Any]) -> dict[str, list[int]]:
        prompt = row["prompt_ids"] if prompt_limit is None else row["prompt_ids"][-prompt_limit:]
        return {"prompt_ids": prompt, **{name: row[name][:response_limit] for name in responses if name in row}}

    return map_rows(dataset, truncate, f"Truncating {dataset_name} dataset")


# ---- Lengths and the model's context ----


def check_generations(model, tokenizer, prompts: Iterable[Any], limits: dict[str, int | None]) -> None:
    """Raise ValueError, naming the settings to lower, if prompts leave too little of the context for their responses.

    Args:
        model: a model with a `config`.
        tokenizer: the model's tokenizer.
        prompts: messages or text.
        limits: maximum tokens of a response, then of a prompt (None for no limit), by the names of the settings.
    """
    response, prompt = limits.values()
    lengths = (len(prompt_tokens(tokenizer, one, prompt)) for one in prompts)
    _check(model, limits, lambda: response + max(lengths, default=0))


def check_rows(model, dataset: Any, limits: dict[str, int | None]) -> None:
    """The same for the rows of a tokenized dataset, which may be no longer than the context."""
    if not isinstance(dataset, Dataset):
        return
    columns = {*dataset.column_names}
    responses = columns & {"chosen_ids", "rejected_ids", "completion_ids", "input_ids"}
    if responses:
        rows = dataset.select_columns(sorted(responses | columns & {"prompt_ids"}))
        lengths = (len(row.get("prompt_ids", ())) + max(len(row[name]) for name in responses) for row in rows)
        _check(model, limits, lambda: max(lengths))


def _check(model, limits: dict[str, int | None], longest: Callable[[], int]) -> None:
    """Compare the longest row with the context; it is not looked for if the limits alone fit into the context."""
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
