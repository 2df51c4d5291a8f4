"""Functions for assignments that the library has only in parts: whole policy losses and two helpers.

Shapes: B responses of up to T tokens, a vocabulary of V. Masks are 1 (or True) where a token counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_ext.losses.kl import kl_estimate
from trl_ext.losses.masking import aggregate, masked_sum
from trl_ext.losses.policy import clipped_surrogate
from trl_ext.losses.policy_scores import sequence_log_ratio, token_log_ratio


def sequence_log_probs(logits: Tensor, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Sum of the log-probabilities of each response's tokens, in nats. [B].

    The logits at a position predict the next token, so the last logits predict no token of the input, and no logits
    predict the first token.

    Args:
        logits: logits of a causal language model, [B, T, V].
        input_ids: prompt, response and padding, [B, T].
        response_mask: 1 where `input_ids` holds a token of the response, [B, T].
    """
    log_probs = logits[:, :-1].log_softmax(dim=-1)
    of_tokens = log_probs.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return masked_sum(of_tokens, response_mask[:, 1:], dim=-1)


def split_minibatches(batch: dict[str, Tensor], order: Tensor, minibatch_size: int) -> list[dict[str, Tensor]]:
    """Split a rollout into minibatches, in a given order of its rows; the last one may be smaller.

    Args:
        batch: tensors of N rows each, [N, ...].
        order: the numbers 0 to N - 1 in the order in which rows are taken, [N].
        minibatch_size: rows per minibatch.

    Returns:
        Minibatches, each with the keys of `batch`, of shape [minibatch_size, ...]; the last may have fewer rows.

    Raises:
        ValueError: `minibatch_size` is below 1.
    """
    if minibatch_size < 1:
        raise ValueError(f"minibatch_size must be at least 1, got {minibatch_size}")
    parts = torch.split(order, minibatch_size)
    return [{name: rows[part] for name, rows in batch.items()} for part in parts]


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    clip: float = 0.2,
    kl_coef: float = 0.0,
) -> Tensor:
    """GRPO: the clipped surrogate with a ratio per token, averaged over each response's tokens, then over responses.

    It adds `kl_coef` times the k3 estimate of the KL divergence, averaged over all tokens.
    Shao et al. 2024, arXiv 2402.03300, equation 3.
    """
    log_ratio = token_log_ratio(log_probs, old_log_probs.detach())
    losses = clipped_surrogate(log_ratio, advantages.detach(), clip_low=clip, clip_high=clip)
    kl = kl_estimate(log_probs, ref_log_probs.detach(), "k3")
    return aggregate(losses, mask, "sequence_mean") + kl_coef * aggregate(kl, mask, "token_mean")


def dr_grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    max_new_tokens: int,
    clip: float = 0.2,
    kl_coef: float = 0.0,
) -> Tensor:
    """Dr.GRPO: GRPO's loss, summed over all tokens and divided by `B max_new_tokens`, whatever the responses' lengths.

    It adds `kl_coef` times the k3 estimate of the KL divergence, averaged over all tokens.
    Liu et al. 2025, arXiv 2503.20783.
    """
    log_ratio = token_log_ratio(log_probs, old_log_probs.detach())
    losses = clipped_surrogate(log_ratio, advantages.detach(), clip_low=clip, clip_high=clip)
    kl = kl_estimate(log_probs, ref_log_probs.detach(), "k3")
    surrogate = aggregate(losses, mask, "constant", constant=max_new_tokens)
    return surrogate + kl_coef * aggregate(kl, mask, "token_mean")


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    clip: float = 0.2,
    kl_coef: float = 0.0,
) -> Tensor:
    """GSPO: one ratio per response, exp of the mean of its tokens' log-ratios, clipped once; averaged over responses.

    It adds `kl_coef` times the k3 estimate of the KL divergence, averaged over all tokens.
    Zheng et al. 2025, arXiv 2507.18071, equation 5.
    """
    log_ratio = sequence_log_ratio(log_probs, old_log_probs.detach(), mask)
    losses = clipped_surrogate(log_ratio, advantages.detach(), clip_low=clip, clip_high=clip)
    kl = kl_estimate(log_probs, ref_log_probs.detach(), "k3")
    return aggregate(losses, mask, "sequence_mean") + kl_coef * aggregate(kl, mask, "token_mean")
