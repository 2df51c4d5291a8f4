"""Log-probabilities that a causal language model assigns to responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from trl.trainer.utils import selective_log_softmax

from trl_ext.models.batches import in_batches, pad_rows, response_logits
from trl_ext.models.packing import packed_inputs, packing_of


@torch.no_grad()
def score_responses(
    model,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    batch_size: int = 8,
    pad_token_id: int = 0,
    progress: str | None = None,
) -> list[Tensor]:
    """Log-probability of every token of each response, given its prompt and the response so far.

    Batches hold rows of similar length, padded on the left so that logits are computed only at response positions. If
    the model's passes are packed, batches hold rows with a common beginning. The model is temporarily put into
    evaluation mode.

    Args:
        model: a causal language model of transformers.
        prompt_ids: N prompts as token ids, each of at least one token.
        response_ids: N responses as token ids; an empty one scores as an empty tensor.
        batch_size: rows per forward pass.
        pad_token_id: any id of the vocabulary; padding is masked out.
        progress: label of the progress bar; None for no bar.

    Returns:
        N float32 tensors on the CPU, in nats; the i-th has the shape [len(response_ids[i])].

    Raises:
        ValueError: an empty prompt, or lists of different length.
    """
    for index, prompt in enumerate(prompt_ids):
        if not len(prompt):
            raise ValueError(f"prompt {index} is empty: there is nothing to predict its first response token from")
    packing = packing_of(model)
    rows = [[*prompt, *response] for prompt, response in zip(prompt_ids, response_ids, strict=True)]
    packed = packing is not None and packing.active
    order = sorted(range(len(rows)), key=lambda i: rows[i] if packed else -len(rows[i]))

    def scored(batch: list[int]) -> list[Tensor]:
        return _score_batch(model, [rows[i] for i in batch], [len(response_ids[i]) for i in batch], pad_token_id)

    return in_batches(model, scored, order, batch_size=batch_size, progress=progress)


def _score_batch(model, rows: list[list[int]], counts: list[int], pad_token_id: int) -> list[Tensor]:
    """Log-probabilities of the last tokens of each row; `counts` are the response tokens of each."""
    kept = max(counts)
    if kept == 0:
        return [torch.empty(0) for _ in rows]
    input_ids, attention_mask = (part.to(model.device) for part in pad_rows(rows, pad_token_id, "left"))
    packing = packing_of(model)
    scored = None if packing is None else _score_packed(packing, input_ids, attention_mask, counts)
    if scored is not None:
        return scored
    logits, width = response_logits(model, input_ids, attention_mask, kept), input_ids.shape[1]
    # Row by row, since float32 logits of the whole batch would be the largest tensor of all.
    return [
        selective_log_softmax(
            logits[row : row + 1, kept - count :].float(), input_ids[row : row + 1, width - count :]
        )[0].cpu()
        for row, count in enumerate(counts)
    ]


def _score_packed(packing, input_ids: Tensor, attention_mask: Tensor, counts: list[int]) -> list[Tensor] | None:
    """The same on a packed row; None if the batch stays padded."""
    width = input_ids.shape[1]
    labels = torch.full_like(input_ids, -100)
    for row, count in enumerate(counts):
        labels[row, width - count :] = input_ids[row, width - count :]
    plan = packing.plan(input_ids, attention_mask, labels)
    if plan is None:
        return None
    targets = plan.shift_labels(labels)[0]
    places = (targets != -100).nonzero().flatten()
    logits = packing.call(**packed_inputs(plan), use_cache=False, logits_to_keep=places).logits[0]
    log_probs = torch.zeros(plan.tokens)
    # In chunks, since float32 logits of the whole batch would be the largest tensor of all.
    for start in range(0, len(places), 256):
        piece = slice(start, start + 256)
        scored = selective_log_softmax(logits[piece].float(), targets[places[piece]])
        log_probs[places[piece].cpu()] = scored.cpu()
    columns = plan.columns.cpu()
    return [log_probs[columns[row, width - count - 1 : width - 1]] for row, count in enumerate(counts)]
