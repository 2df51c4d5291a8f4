"""Means and sums under a mask, and losses of micro-batches.

Shapes: B responses of up to T tokens. Log-probabilities and masks are [B, T], rewards and advantages [B, 1]. A mask
is True or 1 where a token counts; values elsewhere, which may be NaN in `masked_mean` and `masked_normalize`, must not
reach the result. No gradient flows into `old_log_probs`. A micro-batch's loss is divided by the number of
`gradient_accumulation_steps` before its backward pass. Metadata is a dict whose contents the tests do not read.
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
    """Sum of `tensor` where `mask` is True, divided by `normalize_constant`, over `dim` or over everything."""
    ### BEGIN SOLUTION
    kept = torch.where(mask, tensor, 0.0) / normalize_constant
    return kept.sum() if dim is None else kept.sum(dim)
    ### END SOLUTION


def sft_microbatch_step(policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0):
    """The mean over rows of `-sum / normalize_constant` over the response, after its backward pass, and metadata."""
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
    """`-min(ratio A, clip(ratio, 1 - cliprange, 1 + cliprange) A)` of each token, [B, T], and metadata. 2402.03300."""
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
    """The mean over rows of their mean `policy_gradient_loss`, after its backward pass, and metadata. 1707.06347."""
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
