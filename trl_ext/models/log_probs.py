"""Log-probabilities that a causal language model assigns to responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm
from trl.trainer.utils import selective_log_softmax

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
    if len(prompt_ids) != len(response_ids):
        raise ValueError(f"{len(prompt_ids)} prompts for {len(response_ids)} responses")
    for index, prompt in enumerate(prompt_ids):
        if not len(prompt):
            raise ValueError(f"prompt {index} is empty: there is nothing to predict its first response token from")
    packing = packing_of(model)
    packed = packing is not None and packing.active
    if packed:
        order = sorted(range(len(prompt_ids)), key=lambda i: [*prompt_ids[i], *response_ids[i]])
    else:
        order = sorted(range(len(prompt_ids)), key=lambda i: -(len(prompt_ids[i]) + len(response_ids[i])))
    results: list[Tensor | None] = [None] * len(order)
    was_training = model.training
    model.eval()
    try:
        starts = range(0, len(order), batch_size)
        for start in tqdm(starts, desc=progress, leave=False) if progress else starts:
            rows = order[start : start + batch_size]
            scored = _score_batch(model, [prompt_ids[i] for i in rows], [response_ids[i] for i in rows], pad_token_id)
            for row, log_probs in zip(rows, scored, strict=True):
                results[row] = log_probs
    finally:
        model.train(was_training)
    return results


def _score_batch(model, prompts: list, responses: list, pad_token_id: int) -> list[Tensor]:
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    width, kept = max(lengths), max(len(response) for response in responses)
    if kept == 0:
        return [torch.empty(0) for _ in responses]
    input_ids = torch.full((len(prompts), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        input_ids[row, width - lengths[row] :] = torch.tensor([*prompt, *response])
        attention_mask[row, width - lengths[row] :] = 1
    input_ids, attention_mask = input_ids.to(model.device), attention_mask.to(model.device)
    packing = packing_of(model)
    if packing is not None:
        counts = [len(response) for response in responses]
        scored = _score_packed(packing, input_ids, attention_mask, counts)
        if scored is not None:
            return scored
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
        logits_to_keep=kept + 1,
    ).logits[:, -kept - 1 : -1]
    results = []
    for row, response in enumerate(responses):
        # Row by row, since float32 logits of the whole batch would be the largest tensor of all.
        own_logits = logits[row : row + 1, kept - len(response) :].float()
        targets = input_ids[row : row + 1, width - len(response) :]
        results.append(selective_log_softmax(own_logits, targets)[0].cpu())
    return results


def _score_packed(packing, input_ids: Tensor, attention_mask: Tensor, counts: list[int]) -> list[Tensor] | None:
    """The same on a packed row; None if the batch stays padded. `counts` are the response tokens of each row."""
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
