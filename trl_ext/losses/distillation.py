"""Distillation on the student's own samples: divergences from a teacher's next-token distribution, and advantages.

Notation: at one position, p is the student's distribution over V tokens and q the teacher's. The gradient is the
student's alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits of one piece of the tokens of a batch, of each of the two models.
PIECE = 2**25


def generalized_jsd(student_log_probs: Tensor, teacher_log_probs: Tensor, *, beta: float = 1.0) -> Tensor:
    """`beta KL(q || M) + (1 - beta) KL(p || M)` with the mixture `M = beta q + (1 - beta) p`, of each position.

    At beta 0 it is the forward divergence `KL(q || p)`, and at beta 1 the reverse `KL(p || q)`. These two are not its
    limits, which are 0: between them it is much smaller. The gradient goes through the mixture as well.

    Args:
        student_log_probs: normalised log-probabilities, [..., V].
        teacher_log_probs: the same of the teacher, [..., V].
        beta: from 0 to 1.

    Returns:
        in nats, [...].

    Agarwal et al. 2023 (GKD), arXiv 2306.13649; the reverse divergence: arXiv 2306.08543 (MiniLLM).
    """
    student, teacher = student_log_probs, teacher_log_probs.detach()
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def with_tail(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of k tokens, and of all others together as one further event. [..., k + 1].

    A divergence of two such distributions is never above that of the whole ones.

    Args:
        log_probs: normalised log-probabilities, [..., V].
        tokens: ids of different tokens, fewer than V, [..., k].
    """
    tail = log_probs.scatter(-1, tokens, -math.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, tokens), tail], dim=-1)


def divergence_from_hidden_states(
    student: Tensor,
    teacher: Tensor,
    student_head: Callable[[Tensor], Tensor],
    teacher_head: Callable[[Tensor], Tensor],
    *,
    beta: float = 1.0,
    top_k: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """`generalized_jsd` of N positions from the last hidden states of both models. [N].

    The logits of all positions never exist at once: the backward pass computes each piece again. Where one vocabulary
    is padded to more tokens than the other, the tokens that both have count.

    Args:
        student, teacher: hidden states, [N, H] and [N, H'].
        student_head, teacher_head: from hidden states to logits.
        beta: of the divergence.
        top_k: compare the student's k most likely tokens, and all others as one (`with_tail`); None for every token.
        temperature: divides the logits of both.
    """

    def of_piece(student: Tensor, teacher: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = teacher_head(teacher)
        student = student_head(student)
        size = min(student.shape[-1], teacher.shape[-1])
        student, teacher = (
            (logits[..., :size].float() / temperature).log_softmax(dim=-1) for logits in (student, teacher)
        )
        if top_k is not None and top_k < size:
            tokens = student.detach().topk(top_k).indices
            student, teacher = with_tail(student, tokens), with_tail(teacher, tokens)
        return generalized_jsd(student, teacher, beta=beta)

    with torch.no_grad():
        size = max(PIECE // student_head(student[:1]).shape[-1], 1) if len(student) else 1
    pieces = zip(student.split(size), teacher.split(size), strict=True)
    return torch.cat([checkpoint(of_piece, *piece, use_reentrant=False) for piece in pieces])


def teacher_advantages(
    sampler_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor, *, discount: float = 0.0
) -> Tensor:
    """`A_t = log q(y_t) - log p(y_t) + discount A_{t+1}` of sampled tokens y, without gradient. [B, T].

    p is the policy that sampled them. On-policy and without a discount, the expectation of `-A_t log p(y_t)` has the
    gradient of `KL(p || q)` at each position.

    Args:
        sampler_log_probs, teacher_log_probs: of the sampled tokens, [B, T].
        mask: 1 where the policy chose the token, [B, T]; others have and pass on no term of their own.
        discount: of later tokens' terms.

    Lu and Thinking Machines Lab 2025, "On-Policy Distillation".
    """
    terms = (teacher_log_probs - sampler_log_probs).detach().masked_fill(mask == 0, 0)
    if not discount:
        return terms
    advantages, later = terms.clone(), torch.zeros_like(terms[:, 0])
    for column in range(terms.shape[1] - 1, -1, -1):
        chosen = mask[:, column] != 0
        later = torch.where(chosen, terms[:, column] + discount * later, later)
        advantages[:, column] = later.masked_fill(~chosen, 0)
    return advantages
