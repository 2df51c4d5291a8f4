"""Right answers to both assignments, written as students write them: other formulas, loops, masks that multiply."""

from __future__ import annotations

import math
import re

import torch
import torch.nn.functional as F

# ---- Offline and online RLHF ----


def sequence_log_probs(logits, input_ids, response_mask):
    # Cross-entropy is minus the log-probability.
    batch, tokens, size = logits.shape
    flat = F.cross_entropy(logits[:, :-1].reshape(-1, size), input_ids[:, 1:].reshape(-1), reduction="none")
    return -(flat.view(batch, tokens - 1) * response_mask[:, 1:]).sum(dim=1)


def completion_mask(completion_ids, eos_token_id):
    ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    mask = torch.zeros(completion_ids.shape, dtype=torch.long)
    for row, ids in enumerate(completion_ids.tolist()):
        for place, token in enumerate(ids):
            mask[row, place] = 1
            if token in ends:
                break
    return mask


def split_minibatches(batch, order, minibatch_size):
    for start in range(0, len(order), minibatch_size):
        rows = order[start : start + minibatch_size]
        yield {name: torch.stack([values[row] for row in rows]) for name, values in batch.items()}


def dpo(scores, *, beta=0.1):
    margin = (scores.chosen - scores.rejected) - (scores.ref_chosen - scores.ref_rejected)
    return F.softplus(-beta * margin)


def ipo(scores, *, beta=0.1, length_normalized=False):
    chosen, rejected = scores.chosen - scores.ref_chosen, scores.rejected - scores.ref_rejected
    if length_normalized:
        chosen, rejected = chosen / scores.chosen_length, rejected / scores.rejected_length
    return (chosen - rejected - 0.5 / beta) ** 2


def aot(scores, *, beta=0.01):
    # In the order of rank, not of the batch.
    chosen, _ = torch.sort(scores.chosen - scores.ref_chosen, descending=True)
    rejected, _ = torch.sort(scores.rejected - scores.ref_rejected, descending=True)
    return -F.logsigmoid(beta * (chosen - rejected))


def bradley_terry(chosen, rejected, *, margin=None, label_smoothing=0.0, centering=0.0):
    difference = chosen - rejected - (0 if margin is None else margin)
    losses = F.softplus(-difference) + label_smoothing * difference
    return losses + centering * (chosen + rejected) ** 2


def group_normalized(rewards, group_size, std_ddof=0, eps=1e-6):
    advantages = torch.zeros_like(rewards)
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean = sum(group) / group_size
        variance = sum((reward - mean) ** 2 for reward in group) / (group_size - std_ddof)
        if (group != group[0]).any():
            advantages[start : start + group_size] = (group - mean) / (variance.sqrt() + eps)
    return advantages


def group_centered(rewards, group_size):
    return rewards - rewards.view(-1, group_size).mean(dim=1).repeat_interleave(group_size)


def token_log_ratio(log_probs, old_log_probs):
    return torch.add(log_probs, old_log_probs, alpha=-1)


def sequence_log_ratio(log_probs, old_log_probs, mask):
    difference = torch.where(mask.bool(), log_probs - old_log_probs, torch.zeros_like(log_probs))
    return (difference.sum(dim=1) / mask.sum(dim=1))[:, None]


def clipped_surrogate(log_ratio, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    ratio, weights = torch.exp(log_ratio), advantages.view(-1, 1)
    losses = torch.max(-weights * ratio, -weights * torch.clip(ratio, 1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        losses = torch.where(weights < 0, torch.min(losses, -weights * dual_clip), losses)
    return losses


def kl_estimate(log_probs, ref_log_probs, kind):
    delta = ref_log_probs - log_probs
    return {"k1": -delta, "k2": 0.5 * delta**2, "k3": torch.exp(delta) - delta - 1}[kind]


def aggregate(losses, mask, kind, *, constant=None, token_count=None):
    kept = torch.where(mask > 0, losses, 0.0)
    if kind == "token_mean":
        return kept.sum() / (mask.sum() if token_count is None else token_count)
    sums = kept.sum(dim=1)
    per_row = {"sequence_mean": sums / mask.sum(dim=1).clamp(min=1), "sum": sums}
    return (per_row[kind] if kind in per_row else sums / constant).mean()


def _kl_term(log_probs, ref_log_probs, mask):
    delta = torch.where(mask > 0, ref_log_probs.detach() - log_probs, 0.0)
    return (torch.exp(delta) - delta - 1).sum() / mask.sum()


def grpo_loss(log_probs, old_log_probs, ref_log_probs, mask, advantages, *, clip=0.2, kl_coef=0.0):
    with torch.no_grad():
        old = old_log_probs * 1.0
    ratio, weights = torch.exp(log_probs - old), advantages[:, None]
    losses = -torch.min(ratio * weights, torch.clamp(ratio, 1 - clip, 1 + clip) * weights)
    rows = (losses * mask).sum(1) / mask.sum(1)
    return rows.mean() + kl_coef * _kl_term(log_probs, ref_log_probs, mask)


def dr_grpo_loss(log_probs, old_log_probs, ref_log_probs, mask, advantages, *, max_new_tokens, clip=0.2, kl_coef=0.0):
    ratio, weights = torch.exp(log_probs - old_log_probs.detach()), advantages[:, None]
    losses = -torch.min(ratio * weights, torch.clamp(ratio, 1 - clip, 1 + clip) * weights)
    total = (losses * mask).sum() / (len(mask) * max_new_tokens)
    return total + kl_coef * _kl_term(log_probs, ref_log_probs, mask)


def gspo_loss(log_probs, old_log_probs, ref_log_probs, mask, advantages, *, clip=0.2, kl_coef=0.0):
    ratio = torch.exp(((log_probs - old_log_probs.detach()) * mask).sum(1) / mask.sum(1))
    losses = -torch.min(ratio * advantages, torch.clamp(ratio, 1 - clip, 1 + clip) * advantages)
    return losses.mean() + kl_coef * _kl_term(log_probs, ref_log_probs, mask)


# ---- Reasoning ----


def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    prompts = [tokenizer.encode(text) for text in prompt_strs]
    outputs = [tokenizer.encode(text) for text in output_strs]
    longest = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    ids, mask = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        missing = longest - len(prompt) - len(output)
        ids.append(prompt + output + [pad] * missing)
        mask.append([0] * len(prompt) + [1] * len(output) + [0] * missing)
    ids, mask = torch.tensor(ids), torch.tensor(mask)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:].bool()}


def token_entropy(logits):
    probabilities = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - (probabilities * logits).sum(dim=-1)


def response_log_probs(model, input_ids, labels, return_token_entropy=False):
    logits = model(input_ids).logits
    log_probs = torch.log_softmax(logits, dim=-1)
    result = {"log_probs": torch.gather(log_probs, 2, labels[..., None])[..., 0]}
    if return_token_entropy:
        result["token_entropy"] = token_entropy(logits)
    return result


def masked_mean(tensor, mask, dim=None):
    kept = torch.where(mask, tensor, torch.zeros_like(tensor))
    return kept.sum() / mask.sum() if dim is None else kept.sum(dim=dim) / mask.sum(dim=dim)


def masked_normalize(tensor, mask, normalize_constant, dim=None):
    kept = torch.where(mask, tensor / normalize_constant, torch.zeros_like(tensor))
    return kept.sum() if dim is None else kept.sum(dim=dim)


def sft_microbatch_step(policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0):
    total = -(policy_log_probs * response_mask).sum()
    loss = total / normalize_constant / policy_log_probs.shape[0] / gradient_accumulation_steps
    loss.backward()
    return loss, {}


def naive_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs):
    return raw_rewards_or_advantages * policy_log_probs * -1


def grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange):
    ratio = torch.exp(policy_log_probs - old_log_probs.detach())
    losses = torch.max(-ratio * advantages, -torch.clamp(ratio, 1 - cliprange, 1 + cliprange) * advantages)
    return losses, {"clipped": (ratio - 1).abs() > cliprange}


def policy_gradient_loss(
    policy_log_probs, loss_type, raw_rewards=None, advantages=None, old_log_probs=None, cliprange=None
):
    if loss_type == "no_baseline":
        return -raw_rewards * policy_log_probs, {}
    if loss_type == "reinforce_with_baseline":
        return -advantages * policy_log_probs, {}
    if loss_type == "grpo_no_clip":
        return -torch.exp(policy_log_probs - old_log_probs.detach()) * advantages, {}
    return grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)


def policy_microbatch_step(policy_log_probs, response_mask, gradient_accumulation_steps, loss_type, **given):
    losses, metadata = policy_gradient_loss(policy_log_probs, loss_type, **given)
    loss = sum((row * m).sum() / m.sum() for row, m in zip(losses, response_mask, strict=True)) / len(losses)
    loss = loss / gradient_accumulation_steps
    loss.backward()
    return loss, metadata


def compute_group_normalized_rewards(
    reward_fn, rollout_responses, repeated_ground_truths, group_size, advantage_eps, normalize_by_std
):
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    rewards = torch.tensor([reward_fn(response, truth)["reward"] for response, truth in pairs])
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(dim=-1, keepdim=True)
    if normalize_by_std:
        advantages = advantages / (groups.std(dim=-1, keepdim=True) + advantage_eps)
    advantages[(groups == groups[:, :1]).all(dim=-1)] = 0
    return advantages.flatten(), rewards, {"mean": rewards.mean().item()}


def parse_gsm8k_response(model_output):
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", model_output)
    return found[-1].replace(",", "") if found else None


def parse_mmlu_response(mmlu_example, model_output):
    stated = re.findall(r"answer is \(?([A-D])\b", model_output)
    marked = re.findall(r"^\(?([A-D])\)?\b|option ([A-D])", model_output)
    if stated or marked:
        return stated[-1] if stated else "".join(marked[0])
    options = [option.lower() for option in mmlu_example["options"]]
    return "ABCD"[options.index(model_output.lower())] if model_output.lower() in options else None


def per_instance_dpo_loss(lm, lm_ref, tokenizer, beta, prompt, response_chosen, response_rejected):
    from trl_ext.data.packed_sft import encode_documents

    def score(model, response):
        ids = torch.tensor(encode_documents(tokenizer, [{"prompt": prompt, "response": response}]))
        log_probs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        return sum(log_probs[place, token] for place, token in enumerate(ids[0, 1:].tolist()))

    policy = score(lm, response_chosen) - score(lm, response_rejected)
    with torch.no_grad():
        reference = score(lm_ref, response_chosen) - score(lm_ref, response_rejected)
    return torch.log1p(math.e ** (-beta * (policy - reference)))
