"""Means and sums under a mask, and losses of micro-batches.

Shapes: B responses of up to T tokens. A mask is True or 1 where a token counts; values elsewhere, which may be NaN in
`masked_mean` and `masked_normalize`, must not reach the result. The tests do not read the contents of metadata.
"""

import torch
import torch.nn.functional as F

ALPACA = """\
Below is an instruction that describes a task. Write a response that appropriately completes the request.

### Instruction:
{prompt}

### Response:
{response}"""


def masked_mean(tensor, mask, dim=None):
    """Mean of `tensor` where `mask` is True, over the dimension `dim` or over everything."""
    ### BEGIN SOLUTION
    kept = torch.where(mask, tensor, 0.0)
    return kept.sum() / mask.sum() if dim is None else kept.sum(dim) / mask.sum(dim)
    ### END SOLUTION


def masked_normalize(tensor, mask, normalize_constant, dim=None):
    """Sum of `tensor` where `mask` is True, divided by `normalize_constant`, over `dim` or over everything.

    Liu et al. 2025, arXiv 2503.20783, on what the sum is divided by.
    """
    ### BEGIN SOLUTION
    kept = torch.where(mask, tensor, 0.0) / normalize_constant
    return kept.sum() if dim is None else kept.sum(dim)
    ### END SOLUTION


def sft_microbatch_step(policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0):
    """The loss of one micro-batch of demonstrations, after its backward pass, and a dict of metadata.

    Each row's negative log-likelihood over the response is divided by `normalize_constant`. The rows are averaged and
    divided by `gradient_accumulation_steps`. Log-probabilities and mask are [B, T]. CS336 assignment 5, section 4.2.
    """
    ### BEGIN SOLUTION
    rows = -(policy_log_probs * response_mask).sum(dim=1) / normalize_constant
    loss = rows.mean() / gradient_accumulation_steps
    loss.backward()
    return loss, {}
    ### END SOLUTION


def naive_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs):
    """The policy-gradient loss of each token, `-A log_prob`: [B, T], for A of shape [B, 1]. Williams 1992."""
    ### BEGIN SOLUTION
    return -raw_rewards_or_advantages * policy_log_probs
    ### END SOLUTION


def grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange):
    """`-min(ratio A, clip(ratio, 1 - cliprange, 1 + cliprange) A)` of each token, [B, T], and a dict of metadata.

    Advantages are [B, 1] and log-probabilities [B, T]. No gradient flows into `old_log_probs`.
    Shao et al. 2024, arXiv 2402.03300, equation 3.
    """
    ### BEGIN SOLUTION
    ratio = torch.exp(policy_log_probs - old_log_probs.detach())
    losses = torch.max(-ratio * advantages, -torch.clamp(ratio, 1 - cliprange, 1 + cliprange) * advantages)
    return losses, {"clipped": (ratio - 1).abs() > cliprange}
    ### END SOLUTION


def policy_gradient_loss(
    policy_log_probs, loss_type, raw_rewards=None, advantages=None, old_log_probs=None, cliprange=None
):
    """The loss of each token, [B, T], and a dict of metadata. Loss types:

    `no_baseline` is the naive loss of `raw_rewards`, `reinforce_with_baseline` that of `advantages`, `grpo_clip` is
    `grpo_clip_loss`, and `grpo_no_clip` is `-ratio A`. CS336 assignment 5; Schulman et al. 2017, arXiv 1707.06347.
    """
    ### BEGIN SOLUTION
    if loss_type == "no_baseline":
        return naive_policy_gradient_loss(raw_rewards, policy_log_probs), {}
    if loss_type == "reinforce_with_baseline":
        return naive_policy_gradient_loss(advantages, policy_log_probs), {}
    if loss_type == "grpo_no_clip":
        return -torch.exp(policy_log_probs - old_log_probs.detach()) * advantages, {}
    return grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)
    ### END SOLUTION


def policy_microbatch_step(policy_log_probs, response_mask, gradient_accumulation_steps, loss_type, **arguments):
    """The policy-gradient loss of one micro-batch, after its backward pass, and a dict of metadata.

    Each row's mean over the response is averaged over the rows and divided by `gradient_accumulation_steps`. The other
    arguments are those of `policy_gradient_loss`. CS336 assignment 5; Schulman et al. 2017, arXiv 1707.06347.
    """
    ### BEGIN SOLUTION
    losses, metadata = policy_gradient_loss(policy_log_probs, loss_type, **arguments)
    loss = masked_mean(losses, response_mask.bool(), dim=1).mean() / gradient_accumulation_steps
    loss.backward()
    return loss, metadata
    ### END SOLUTION


def per_instance_dpo_loss(lm, lm_ref, tokenizer, beta, prompt, response_chosen, response_rejected):
    """The DPO loss of one pair of texts; a scalar. Rafailov et al. 2023, arXiv 2305.18290, equation 7.

    A text is in the template `ALPACA` and followed by the end-of-text token. Its log-probability is that of all its
    tokens: the prompt's part cancels. `lm(ids).logits` has the shape [B, T, V].
    """
    ### BEGIN SOLUTION

    def score(model, response):
        ids = tokenizer.encode(ALPACA.format(prompt=prompt, response=response)) + [tokenizer.eos_token_id]
        log_probs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
        return sum(log_probs[place, token] for place, token in enumerate(ids[1:]))

    policy, reference = (score(model, response_chosen) - score(model, response_rejected) for model in (lm, lm_ref))
    return F.softplus(-beta * (policy - reference.detach()))
    ### END SOLUTION
