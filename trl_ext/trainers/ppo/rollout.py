"""PPO's rewards of tokens, and its update of the KL coefficient after a rollout."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest change of the coefficient per horizon of responses.
LARGEST_ERROR = 0.2


def token_rewards(scores: Tensor, penalties: Tensor | None, mask: Tensor) -> Tensor:
    """Each response's score on its last token, less a penalty on every token. [B, T].

    A truncated response also has its score on its last token: its value beyond that counts as 0.

    Args:
        scores: [B].
        penalties: of each token, such as beta times its estimate of the KL divergence, [B, T]; None for none.
        mask: 1 where a token counts, [B, T]; a response without any has no reward.
    """
    counts = mask != 0
    rewards = torch.zeros_like(scores[:, None].expand(mask.shape))
    if penalties is not None:
        rewards = rewards - penalties.masked_fill(~counts, 0)
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = (columns * counts).amax(dim=1, keepdim=True)
    return rewards + ((columns == last) & counts) * scores[:, None]


def adapted_coefficient(coefficient: float, divergence: float, *, target: float, horizon: int, count: int) -> float:
    """The coefficient of the KL term after a rollout.

    `coefficient (1 + clip(divergence / target - 1, -0.2, 0.2) count / horizon)`.

    Args:
        coefficient: the rollout's coefficient.
        divergence: the rollout's mean sum of k1 per response.
        target: the desired divergence.
        horizon: responses over which the coefficient changes by the clipped error.
        count: the rollout's number of responses.

    Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """
    error = min(max(divergence / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * count / horizon)
