"""From rewards to advantages, and from ratios to the scalar loss of a policy.

Shapes: N = B responses of up to T tokens. Log-probabilities are in nats, [B, T]. `mask`, [B, T], is 1 where a token
counts; values elsewhere must not reach the result. Advantages are [B]. A group has the responses to one prompt. Where
their rewards are equal, the advantages are exactly 0. A whole loss is a scalar and adds `kl_coef` times the k3
estimate to the reference, averaged over all tokens. No gradient flows into the other log-probabilities:
`old_log_probs`, of the policy that sampled, and `ref_log_probs`.
"""

import torch


def group_normalized(rewards, group_size, std_ddof=0, eps=1e-6):
    """GRPO's: `(r - mean) / (std + eps)` within each group, std by `group_size - std_ddof`. [N]. arXiv 2402.03300."""
    ### BEGIN SOLUTION
    groups = rewards.view(-1, group_size)
    deviation = groups.std(dim=1, correction=std_ddof, keepdim=True)
    advantages = (groups - groups.mean(dim=1, keepdim=True)) / (deviation + eps)
    advantages[(groups == groups[:, :1]).all(dim=1)] = 0
    return advantages.view(-1)
    ### END SOLUTION


def group_centered(rewards, group_size):
    """Dr. GRPO's advantages: `r - mean` within each group. [N]. Liu et al. 2025, arXiv 2503.20783."""
    ### BEGIN SOLUTION
    return rewards - rewards.view(-1, group_size).mean(dim=1).repeat_interleave(group_size)
    ### END SOLUTION


def token_log_ratio(log_probs, old_log_probs):
    """Log of the probability ratio of each token. [B, T]. Schulman et al. 2017, arXiv 1707.06347, equation 6."""
    ### BEGIN SOLUTION
    return log_probs - old_log_probs
    ### END SOLUTION


def sequence_log_ratio(log_probs, old_log_probs, mask):
    """Mean of the tokens' log-ratios of each response. [B, 1]. Zheng et al. 2025, arXiv 2507.18071, equation 5."""
    ### BEGIN SOLUTION
    difference = torch.where(mask.bool(), log_probs - old_log_probs, 0.0)
    return (difference.sum(dim=1) / mask.sum(dim=1))[:, None]
    ### END SOLUTION


def clipped_surrogate(log_ratio, advantages, *, clip_low=0.2, clip_high=0.2):
    """PPO: `-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)`, [B, T] or [B, 1]. arXiv 1707.06347, eq. 7."""
    ### BEGIN SOLUTION
    ratio, weights = torch.exp(log_ratio), advantages.view(-1, 1)
    return torch.max(-weights * ratio, -weights * torch.clip(ratio, 1 - clip_low, 1 + clip_high))
    ### END SOLUTION


def kl_estimate(log_probs, ref_log_probs, kind):
    """With `d = log_probs - ref_log_probs`, k1 is d, k2 is `d^2 / 2`, k3 is `exp(-d) - 1 + d`. Schulman 2020."""
    ### BEGIN SOLUTION
    d = log_probs - ref_log_probs
    return {"k1": d, "k2": 0.5 * d**2, "k3": torch.exp(-d) - 1 + d}[kind]
    ### END SOLUTION


def aggregate(losses, mask, kind, *, constant=None, token_count=None):
    """Reduce token losses, [B, T], to a scalar. GRPO: arXiv 2402.03300; DAPO: 2503.14476; Dr. GRPO: 2503.20783.

    `token_mean` is the sum over all tokens divided by `token_count`, by default their number. The others are means
    over rows: of their means, 0 without tokens (`sequence_mean`), sums (`sum`) or sums by `constant` (`constant`).
    """
    ### BEGIN SOLUTION
    kept = torch.where(mask > 0, losses, 0.0)
    if kind == "token_mean":
        return kept.sum() / (mask.sum() if token_count is None else token_count)
    sums = kept.sum(dim=1)
    divisors = {"sequence_mean": mask.sum(dim=1).clamp(min=1), "constant": constant, "sum": 1}
    return (sums / divisors[kind]).mean()
    ### END SOLUTION


### BEGIN SOLUTION
def token_surrogate(log_probs, old_log_probs, advantages, clip):
    log_ratio = token_log_ratio(log_probs, old_log_probs.detach())
    return clipped_surrogate(log_ratio, advantages, clip_low=clip, clip_high=clip)


def kl_term(log_probs, ref_log_probs, mask):
    return aggregate(kl_estimate(log_probs, ref_log_probs.detach(), "k3"), mask, "token_mean")


### END SOLUTION
def grpo_loss(log_probs, old_log_probs, ref_log_probs, mask, advantages, *, clip=0.2, kl_coef=0.0):
    """GRPO: each token's clipped surrogate, averaged over each response, then over responses. arXiv 2402.03300."""
    ### BEGIN SOLUTION
    losses = token_surrogate(log_probs, old_log_probs, advantages, clip)
    return aggregate(losses, mask, "sequence_mean") + kl_coef * kl_term(log_probs, ref_log_probs, mask)
    ### END SOLUTION


def dr_grpo_loss(log_probs, old_log_probs, ref_log_probs, mask, advantages, *, max_new_tokens, clip=0.2, kl_coef=0.0):
    """Dr. GRPO: GRPO's token losses, summed and divided by `B max_new_tokens`. Liu et al. 2025, arXiv 2503.20783."""
    ### BEGIN SOLUTION
    losses = token_surrogate(log_probs, old_log_probs, advantages, clip)
    surrogate = aggregate(losses, mask, "constant", constant=max_new_tokens)
    return surrogate + kl_coef * kl_term(log_probs, ref_log_probs, mask)
    ### END SOLUTION


def gspo_loss(log_probs, old_log_probs, ref_log_probs, mask, advantages, *, clip=0.2, kl_coef=0.0):
    """GSPO: one ratio for each response, clipped once, averaged over responses. arXiv 2507.18071, equation 5."""
    ### BEGIN SOLUTION
    log_ratio = sequence_log_ratio(log_probs, old_log_probs.detach(), mask)
    losses = clipped_surrogate(log_ratio, advantages, clip_low=clip, clip_high=clip)
    return losses.mean() + kl_coef * kl_term(log_probs, ref_log_probs, mask)
    ### END SOLUTION
