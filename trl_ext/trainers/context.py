"""Checks the model and the rows that a trainer is given, and cuts rows to their limits and a model's context."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from torch.nn import Module

from trl_ext.data import truncate_pair
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
    for name, given in {"model": model, "ref_model": datasets.get("ref_model")}.items():
        if not isinstance(given, Module) and not (isinstance(given, str) if name == "model" else given is None):
            raise TypeError(
                f"{name} must be a model, got {type(given).__name__}: AutoModelForCausalLM.from_pretrained loads one"
            )
    for name in ("train_dataset", "eval_dataset"):
        given = datasets.get(name)
        # TRL says itself that there is no data to train on, and evaluates several sets by their names.
        several = name == "eval_dataset" and isinstance(given, Mapping)
        parts = {f"{name}[{key!r}]": one for key, one in given.items()} if several else {name: given}
        for part, dataset in parts.items():
            if dataset is not None:
                check_dataset(part, dataset, formats, one_kind=one_kind)
    return model


def check_dataset(name: str, dataset: Any, formats: Formats, *, one_kind: bool = False) -> None:
    """The same for one dataset; of a streamed one only the type is checked."""
    if isinstance(dataset, Mapping):
        raise TypeError(f"{name} holds several data sets, {', '.join(dataset)}: give one of them")
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(
            f"{name} must be a Dataset, got {type(dataset).__name__}: Dataset.from_list(rows) makes one of rows, "
            "load_benchmark(name)[split] reads a file or a folder"
        )
    if isinstance(dataset, IterableDataset):
        return
    if not len(dataset):
        raise ValueError(f"{name} has no rows")
    # A transform may add columns.
    first = dataset[0]
    if any(column.endswith("_ids") for column in first):
        return
    read = next((columns for columns in formats if {*columns} <= {*first}), None)
    if formats and read is None:
        raise ValueError(_other_columns(name, formats, list(first)))
    texts = [column for column in read or () if column in _TEXTS]
    if dataset.format["type"] is None:
        rows = dataset.select_columns([*texts, *(["row_id"] if "row_id" in dataset.column_names else [])])
    else:
        # Of a transform one row is made; other formats, such as numpy's, hold no lists.
        rows = [first] if dataset.format["type"] == "custom" else []
    for index, row in enumerate(rows):
        kinds = {column: _kind(row[column]) for column in texts}
        bad = next((column for column, kind in kinds.items() if kind is None), None)
        where = f"{name}, row {index}" + (f" (row_id {row['row_id']})" if "row_id" in row else "")
        if bad is not None:
            raise ValueError(
                f"{where}: {bad} must be text or messages such as [{{'role': 'user', 'content': '...'}}], got "
                f"{brief(repr(row[bad]), 100)}"
            )
        if one_kind and len({*kinds.values()}) > 1:
            described = ", ".join(f"{column} is {kind}" for column, kind in kinds.items())
            raise ValueError(f"{where}: {described}: give all of them as messages, or all as text")


def _other_columns(name: str, formats: Formats, have: Sequence[str]) -> str:
    if formats == PAIRS and {*LABELLED[0]} <= {*have}:
        return f"{name} holds labelled responses and no pairs: they are for KTOTrainer, recipes/kto.py"
    says = f"has no column {next(column for column in formats[0] if column not in have)!r}"
    if formats == PAIRS and "prompt" in have and not {"chosen", "rejected"} & {*have}:
        says = "holds prompts and no pairs"
    rows = ", or of ".join(", ".join(columns) for columns in formats)
    split = "eval_split" if name.startswith("eval") else "train_split"
    return (
        f"{name} {says}: give rows of {rows}, or name another --{split} on the command line; it has {', '.join(have)}"
    )


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
        return
    first = dataset[0]
    if any(_kind(first.get(column)) == "messages" for column in (*_TEXTS, "messages")):
        raise ValueError(
            f"the data holds messages, and the model {getattr(tokenizer, 'name_or_path', '')} has no chat template to "
            "write them by: put a chat_template.jinja into the model's folder, or give plain text"
        )


def quiet_about_length(processing_class: Any) -> None:
    """Turn off the tokenizer's warning of indexing errors: rows are truncated after they are tokenized."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True


def _kind(value: Any) -> str | None:
    """`text` or `messages`; None for anything else."""
    if isinstance(value, str):
        return "text"
    is_messages = isinstance(value, list) and value and all(isinstance(m, Mapping) and m.get("role") for m in value)
    return "messages" if is_messages else None


# ---- Lengths ----


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
