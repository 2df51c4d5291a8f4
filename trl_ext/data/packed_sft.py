"""Pack instruction examples: join them into one stream of tokens and cut it into sequences of constant length."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trl_ext.data.math import load_prompt_template, render
from trl_ext.data.rows import read_jsonl, text_field

# Documents per tokenizer call: enough to use its threads, few enough to limit the memory of intermediate objects.
DOCUMENTS_PER_CALL = 1000


def encode_documents(tokenizer, rows: list[dict[str, str]]) -> list[list[int]]:
    """Token ids of each example in the Alpaca template, followed by one end-of-text token.

    `rows` have the texts `prompt` and `response`. Any tokens that the tokenizer puts before a text precede each
    document.

    Raises:
        ValueError: the tokenizer has no end-of-text token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer has no end-of-text token to end a document with: set tokenizer.eos_token")
    template = load_prompt_template("alpaca_sft")
    texts = [render(template, row["prompt"]) + row["response"] for row in rows]
    # Documents may be longer than the model's context here, so the warning is suppressed.
    documents = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    return [ids if ids and ids[-1] == end else [*ids, end] for ids in documents]


class PackedSFTDataset(Dataset):
    """Instruction examples in the Alpaca template, packed: every item is full of tokens.

    Documents are tokenized, each followed by the end-of-text token, joined, and cut into sequences; an incomplete
    last sequence is dropped. An item is a dict of `input_ids` and `labels`, int64 of shape [seq_length] each. A label
    is the token after its input, so the last label of an item is the first input of the next. The stream is held in
    memory, at 8 bytes per token.

    Args:
        tokenizer: a tokenizer of transformers with an end-of-text token.
        dataset_path: a file of one JSON object with the texts `prompt` and `response` per line; `.gz` is decompressed.
        seq_length: tokens per item.
        shuffle: whether to shuffle the documents before joining them, with torch's random state.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a line is bad (the message gives its number), there are too few tokens for one sequence,
            `seq_length` is below 1, or the tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer, dataset_path: str | os.PathLike, seq_length: int, shuffle: bool):
        if seq_length < 1:
            raise ValueError(f"seq_length must be at least 1, got {seq_length}")
        split = read_jsonl(dataset_path)
        names = ("prompt", "response")
        rows = split.check(lambda row: {name: text_field(row, name, may_be_empty=True) for name in names})
        if split.problems:
            raise ValueError(split.describe())
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
        # The last label needs one more token.
        return max(len(self._tokens) - 1, 0) // self.seq_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(len(self))[index] * self.seq_length
        end = start + self.seq_length
        # Copy, so that changing an item does not change its neighbours.
        return {"input_ids": self._tokens[start:end].clone(), "labels": self._tokens[start + 1 : end + 1].clone()}


def iterate_batches(dataset: Dataset, batch_size: int, shuffle: bool) -> DataLoader:
    """Batches of one pass over a data set such as `PackedSFTDataset`; the last one may be smaller.

    An iterable with a length, over dicts of tensors of shape [B, ...]. With `shuffle`, each pass has a new order.
    """
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)
