"""Instruction examples joined into one stream of tokens and cut into sequences of constant length, without padding."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trl_ext.data.rows import parse_row
from trl_ext.data.templates import load_prompt_template, render
from trl_ext.files import brief, numbered_lines, refuse_other_formats

FIELDS = ("prompt", "response")
# Documents tokenized in one call: enough for the tokenizer's threads, few enough for its intermediate objects.
DOCUMENTS_PER_CALL = 1000


def encode_documents(tokenizer, rows: list[dict[str, str]]) -> list[list[int]]:
    """Token ids of each example in the Alpaca template, ended by one end-of-text token.

    Args:
        tokenizer: a tokenizer of transformers; what it puts before a text stands before each document.
        rows: examples with the texts `prompt` and `response`.

    Raises:
        ValueError: the tokenizer has no end-of-text token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer has no end-of-text token to end a document with: set tokenizer.eos_token")
    template = load_prompt_template("alpaca_sft")
    texts = [render(template, row["prompt"]) + row["response"] for row in rows]
    # Documents longer than the model's context are fine here, so that no warning is due.
    documents = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    return [ids if ids and ids[-1] == end else [*ids, end] for ids in documents]


class PackedSFTDataset(Dataset):
    """Instruction examples in the Alpaca template, packed: every item is full of tokens.

    Documents are tokenized, each ended by the end-of-text token, joined, and cut into sequences; what is left at the
    end and does not fill one is dropped. An item is a dict of `input_ids` and `labels`, int64 of shape [seq_length]
    each; a label is the token after its input, so that the last label of an item is the first input of the next.
    The stream lies in memory, 8 bytes per token.

    Args:
        tokenizer: a tokenizer of transformers with an end-of-text token.
        dataset_path: a file of one JSON object with the texts `prompt` and `response` per line; `.gz` is decompressed.
        seq_length: tokens of an item.
        shuffle: whether to shuffle the documents before they are joined, by torch's random state.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a bad line, with its number; too few tokens for one sequence; a `seq_length` below 1; a tokenizer
            without an end-of-text token.
    """

    def __init__(self, tokenizer, dataset_path: str | os.PathLike, seq_length: int, shuffle: bool):
        if seq_length < 1:
            raise ValueError(f"seq_length must be at least 1, got {seq_length}")
        rows = list(_read_rows(Path(dataset_path)))
        if shuffle:
            rows = [rows[index] for index in torch.randperm(len(rows)).tolist()]
        pieces = [torch.empty(0, dtype=torch.long)]
        for start in range(0, len(rows), DOCUMENTS_PER_CALL):
            documents = encode_documents(tokenizer, rows[start : start + DOCUMENTS_PER_CALL])
            pieces.append(torch.tensor([token for document in documents for token in document]))
        self.seq_length = seq_length
        self._tokens = torch.cat(pieces)
        if not len(self):
            raise ValueError(
                f"{dataset_path}: {len(self._tokens)} tokens do not fill one sequence of {seq_length} and its labels, "
                f"for which it takes {seq_length + 1}: give more examples or a smaller seq_length"
            )

    def __len__(self) -> int:
        # The last label needs a token of its own.
        return max(len(self._tokens) - 1, 0) // self.seq_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(len(self))[index] * self.seq_length
        end = start + self.seq_length
        # Copies, so that a change in an item is none in its neighbours.
        return {"input_ids": self._tokens[start:end].clone(), "labels": self._tokens[start + 1 : end + 1].clone()}


def iterate_batches(dataset: Dataset, batch_size: int, shuffle: bool) -> DataLoader:
    """Batches of one pass over the data set; the last one holds what is left.

    Args:
        dataset: items are dicts of tensors of one shape, such as those of `PackedSFTDataset`.
        batch_size: items per batch, B.
        shuffle: whether each pass takes the items in a new order.

    Returns:
        An iterable with a length, over dicts of tensors of shape [B, ...].
    """
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def _read_rows(path: Path) -> Iterator[dict[str, str]]:
    if not path.is_file():
        raise FileNotFoundError(f"no such file of examples: {path}")
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            refuse_other_formats(file, path)
            for number, line in numbered_lines(file):
                yield _parse_row(line, f"{path}: line {number}")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: cannot be decompressed after line {number}: {error}") from error


def _parse_row(line: bytes | None, place: str) -> dict[str, str]:
    try:
        row = parse_row(line)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    for field in FIELDS:
        if not isinstance(row.get(field), str):
            there = brief(", ".join(row) or "none", 80)
            got = f"got {type(row[field]).__name__}" if field in row else f"the line has {there}"
            raise ValueError(f"{place}: the field {field!r} must be a text; {got}")
    return {field: row[field] for field in FIELDS}
