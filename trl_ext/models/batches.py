"""Passes over many token sequences: padded batches, modes and attributes for a while, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm


def in_batches(
    model,
    function: Callable[[list[int]], Sequence[Any]],
    order: Sequence[int],
    *,
    batch_size: int,
    tokens: Sequence[int] | None = None,
    progress: str | None = None,
) -> list[Any]:
    """Call `function` on batches of row numbers with the model in evaluation mode, and return its results by row.

    Args:
        model: its modes are restored.
        function: returns a result for each of the row numbers that it receives.
        order: the row numbers 0 to N - 1, in the order in which batches take them.
        batch_size: rows per call.
        tokens: the number of tokens of each row, if batches of shorter rows may have more rows, with at most as many
            tokens, padding included, as `batch_size` of the longest rows.
        progress: label of the progress bar; None for no bar.
    """
    results: list[Any] = [None] * len(order)
    batches = [[*order[start : start + batch_size]] for start in range(0, len(order), batch_size)]
    if tokens is not None:
        batches, width, most = [], 0, batch_size * max(tokens, default=0)
        for row in order:
            width = max(width, tokens[row])
            if batches and (len(batches[-1]) + 1) * width <= most:
                batches[-1].append(row)
            else:
                batches.append([row])
                width = tokens[row]
    with evaluating(model):
        for rows in tqdm(batches, desc=progress, leave=False) if progress else batches:
            for row, result in zip(rows, function(rows), strict=True):
                results[row] = result
    return results


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def temporarily(owner: object, **values: Any) -> Iterator[None]:
    """Give attributes of an object other values within a block."""
    saved = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(saved)


def pad_rows(rows: Sequence[Sequence[int]], padding: int, side: str) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, each [B, L], of rows padded on one side, `left` or `right`."""
    ids = [torch.tensor(row) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    return (
        pad_sequence(ids, batch_first=True, padding_value=padding, padding_side=side),
        pad_sequence(masks, batch_first=True, padding_side=side),
    )
