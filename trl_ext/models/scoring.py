"""Scores of tokens and of sequences: log-probabilities, entropies, and the scores of reward models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trl_ext.models.batches import in_batches, pad_rows
from trl_ext.models.packing import packed_inputs, packing_of, unwrapped


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy of the distribution over the vocabulary at each position, in nats; differentiable.

    Finite for logits of any size; a token whose logit is minus infinity contributes nothing.

    Args:
        logits: [..., V].

    Returns:
        [...], in float32 or finer.
    """
    return _entropy(_log_softmax(logits))


def response_log_probs(
    model, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """Log-probability of each label under the model, and the entropy of the model's prediction at its position.

    Prompt and padding positions are computed like the others: mask them afterwards. The model receives no attention
    mask, so padding must be on the right, as in `tokenize_prompt_and_output`. The function does not change the model's
    mode, and computes gradients unless the caller disables them.

    Args:
        model: a causal language model, whose output for [B, T] ids has `logits` of [B, T, V].
        input_ids: [B, T].
        labels: the token after each position, [B, T].
        return_token_entropy: whether to compute the entropies too.

    Returns:
        `log_probs`, [B, T], in nats, and if requested `token_entropy`, [B, T]; in float32 or finer.

    Raises:
        ValueError: a label that is not a token of the vocabulary, such as -100.
    """
    logits = model(input_ids).logits
    if bool(((labels < 0) | (labels >= logits.shape[-1])).any()):
        raise ValueError(
            "labels: an id that is no token, such as -100; give every position its token, and mask those that do not "
            "count afterwards"
        )
    # Row by row: without gradient, log-probabilities of the whole batch's vocabulary would be the largest tensor.
    rows = [_token_scores(row, targets, return_token_entropy) for row, targets in zip(logits, labels, strict=True)]
    results = {"log_probs": torch.stack([log_probs for log_probs, _ in rows])}
    if return_token_entropy:
        results["token_entropy"] = torch.stack([entropies for _, entropies in rows])
    return results


@torch.no_grad()
def score_responses(
    model,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    entropy: bool = False,
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
        entropy: whether to return the entropy of the model's prediction at each token in place of the log-probability.
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
    rows = [[*prompt, *response] for prompt, response in zip(prompt_ids, response_ids, strict=True)]

    def scored(batch: list[int]) -> list[Tensor]:
        counts = [len(response_ids[i]) for i in batch]
        if not any(counts):
            return [torch.empty(0) for _ in batch]
        input_ids, attention_mask = pad_rows([rows[i] for i in batch], pad_token_id, "left")
        logits = _response_logits(model, input_ids.to(model.device), attention_mask.to(model.device), counts)
        scores = []
        for i, own in zip(batch, logits, strict=True):
            # Row by row, since float32 logits of the whole batch would be the largest tensor of all.
            targets = torch.tensor(response_ids[i], dtype=torch.long, device=own.device)
            scores.append(_token_scores(own, targets, entropy)[entropy].cpu())
        return scores

    return in_batches(model, scored, _order(model, rows), batch_size=batch_size, progress=progress)


@torch.no_grad()
def score_sequences(
    model,
    sequences: Sequence[Sequence[int]],
    *,
    function: Callable[[Tensor, Tensor], Tensor] | None = None,
    batch_size: int = 16,
    pad_token_id: int = 0,
    progress: str | None = None,
) -> Tensor:
    """One score per sequence, in right-padded batches of similar length, or of sequences with a common beginning if
    the model's passes are packed.

    Args:
        model: a transformers model for sequence classification with one label. Temporarily put into evaluation mode.
        sequences: N lists of token ids, none empty.
        function: returns the scores, [B], of `input_ids` and `attention_mask`, each [B, L]; None for the model's own.
        batch_size: rows per forward pass; on an accelerator, of the longest rows.
        pad_token_id: the model's padding token, which it uses to find the last token of a row.
        progress: label of the progress bar; None for no bar.

    Returns:
        Float32 scores on the CPU, in the order of the sequences, [N].

    Raises:
        ValueError: an empty sequence.
    """
    for index, sequence in enumerate(sequences):
        if not len(sequence):
            raise ValueError(f"sequence {index} is empty: there is no token to read a score at")
    device = next(model.parameters()).device

    def scored(rows: list[int]) -> Tensor:
        input_ids, attention_mask = (
            part.to(device) for part in pad_rows([sequences[row] for row in rows], pad_token_id, "right")
        )
        if function is not None:
            return function(input_ids, attention_mask).float().cpu()
        return model(input_ids=input_ids, attention_mask=attention_mask).logits.squeeze(-1).float().cpu()

    # A CPU gains nothing from larger batches.
    tokens = None if device.type == "cpu" else [len(sequence) for sequence in sequences]
    options = {"batch_size": batch_size, "tokens": tokens, "progress": progress}
    return torch.tensor(in_batches(model, scored, _order(model, sequences), **options))


def _order(model, rows: Sequence[Sequence[int]]) -> list[int]:
    """The order in which batches take rows: the longest first or, if passes are packed, by their tokens."""
    packing = packing_of(model)
    packed = packing is not None and packing.active
    return sorted(range(len(rows)), key=lambda i: list(rows[i]) if packed else -len(rows[i]))


def _response_logits(model, input_ids: Tensor, attention_mask: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """Logits that predict the last tokens of rows padded on the left, `counts` of each: B tensors of [count, V]."""
    packing, width = packing_of(model), input_ids.shape[1]
    plan = None if packing is None else packing.plan(input_ids, attention_mask)
    if plan is not None:
        ranges = zip(plan.columns, counts, strict=True)
        places = torch.cat([columns[width - count - 1 : width - 1] for columns, count in ranges]).to(input_ids.device)
        return unwrapped(model)(**packed_inputs(plan), logits_to_keep=places).logits[0].split(counts)
    kept = max(counts)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=kept + 1,
    ).logits[:, -kept - 1 : -1]
    return [logits[row, kept - count :] for row, count in enumerate(counts)]


def _token_scores(logits: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the targets, [T], and the entropies if requested, [T], from logits of [T, V]."""
    distribution = _log_softmax(logits)
    log_probs = distribution.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_probs, _entropy(distribution) if entropy else None


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def _entropy(log_probs: Tensor) -> Tensor:
    probs = log_probs.exp()
    # 0 log 0 is 0, in the gradient as well.
    return -(probs * log_probs.masked_fill(probs == 0, 0)).sum(dim=-1)
