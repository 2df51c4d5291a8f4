"""Wrong answers to helpers of log-probabilities and masks, and to the functions of the reasoning course."""

from __future__ import annotations

import re
from operator import neg

import torch
from torch.nn.functional import logsigmoid

from trl_ext.assignment.catalog.loss_mistakes import NOT_ZERO
from trl_ext.assignment.catalog.task import given, then


def not_shifted(right, logits, input_ids, response_mask):
    log_probs = logits.log_softmax(-1).gather(-1, input_ids.unsqueeze(-1)).squeeze(-1)
    return (log_probs * response_mask).sum(-1)


def mask_not_shifted(right, logits, input_ids, response_mask):
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (log_probs * response_mask[:, :-1]).sum(-1)


def mean_for_sum(right, logits, input_ids, response_mask):
    return right(logits, input_ids, response_mask) / response_mask[:, 1:].sum(-1)


def last_dropped(right, minibatch_size, **arguments):
    parts = right(minibatch_size=minibatch_size, **arguments)
    return [part for part in parts if len(part["rewards"]) == minibatch_size]


def kept(reduction):
    """Reduce all entries, with 0 where the mask is 0."""

    def wrong(right, tensor, mask, dim=None):
        filled = tensor.masked_fill(mask == 0, 0)
        return reduction(filled) if dim is None else reduction(filled, dim)

    return wrong


def mean_for_constant(right, tensor, mask, normalize_constant, dim=None):
    return right(tensor, mask, 1.0, dim) / (mask.sum() if dim is None else mask.sum(dim))


def ends(completion_ids, eos_token_id):
    return torch.isin(completion_ids, torch.as_tensor(eos_token_id))


def end_left_out(right, completion_ids, eos_token_id):
    return right(completion_ids, eos_token_id) & ~ends(completion_ids, eos_token_id)


def batch_with(name, change):
    """The token batch with one tensor changed."""
    return then(lambda batch: {**batch, name: change(batch)})


def mask_shifted_twice(batch):
    mask = batch["response_mask"]
    return torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1)


def no_log_probability(right, logits):
    probabilities = logits.softmax(-1)
    return -(probabilities * probabilities).sum(-1)


def logits_returned(right, model, input_ids, labels, **options):
    values = model(input_ids).logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return {**right(model, input_ids, labels, **options), "log_probs": values}


def regrouped(**deviation):
    """Advantages divided by the deviation that `std` computes, in groups of equal rewards too."""

    def wrong(right, group_size, advantage_eps, normalize_by_std, **arguments):
        settings = {"advantage_eps": advantage_eps, "normalize_by_std": normalize_by_std}
        _, rewards, metadata = right(group_size=group_size, **settings, **arguments)
        groups = rewards.reshape(-1, group_size)
        advantages = groups - groups.mean(1, keepdim=True)
        if normalize_by_std:
            advantages = advantages / (groups.std(1, keepdim=True, **deviation) + advantage_eps)
        return advantages.reshape(-1), rewards, metadata

    return wrong


def over_the_batch(right, rollout_responses, **arguments):
    return right(rollout_responses=rollout_responses, **{**arguments, "group_size": len(rollout_responses)})


def gradient_through_old(right, advantages, policy_log_probs, old_log_probs, cliprange):
    ratio = (policy_log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - cliprange, 1 + cliprange)
    return -torch.minimum(ratio * advantages, clipped * advantages), {}


def no_minimum(right, advantages, policy_log_probs, old_log_probs, cliprange):
    ratio = (policy_log_probs - old_log_probs.detach()).exp()
    return -ratio.clamp(1 - cliprange, 1 + cliprange) * advantages, {}


def advantages_for_rewards(right, advantages, **arguments):
    return right(**{**arguments, "raw_rewards": advantages, "advantages": advantages})


def rewards_for_advantages(right, loss_type, raw_rewards, advantages, **arguments):
    used = raw_rewards if loss_type == "reinforce_with_baseline" else advantages
    return right(loss_type=loss_type, raw_rewards=raw_rewards, advantages=used, **arguments)


def rows_summed(right, response_mask, normalize_constant, **arguments):
    return right(response_mask=response_mask, normalize_constant=normalize_constant / len(response_mask), **arguments)


def mean_over_all_tokens(right, response_mask, **arguments):
    lengths = response_mask.sum(1, keepdim=True)
    weights = lengths * len(lengths) / lengths.sum()
    weighted = {name: arguments[name] * weights for name in ("advantages", "raw_rewards")}
    return right(response_mask=response_mask, **{**arguments, **weighted})


def instance_without_reference(right, lm, lm_ref, tokenizer, beta, **texts):
    flat = type(lm_ref)(seed=0)
    torch.nn.init.zeros_(flat.head)
    # With equal logits, every token has the same log-probability, so texts differ only by their number of tokens.
    loss = right(lm, flat, tokenizer, beta, **texts)
    extra = len(texts["response_chosen"].split()) - len(texts["response_rejected"].split())
    margin = -torch.log(torch.expm1(loss)) - beta * extra * torch.log(torch.tensor(float(flat.head.shape[1])))
    return -logsigmoid(margin)


def responses_exchanged(right, response_chosen, response_rejected, **arguments):
    return right(response_chosen=response_rejected, response_rejected=response_chosen, **arguments)


def numbers(text):
    return re.findall(r"-?[0-9][0-9,]*(?:\.[0-9]+)?", text)


def first_number(right, model_output):
    found = numbers(model_output)
    return found[0].replace(",", "") if found else None


def commas_kept(right, model_output):
    found = numbers(model_output)
    return found[-1].rstrip(",") if found else None


def first_capital(right, mmlu_example, model_output):
    found = re.search(r"[A-D]", model_output)
    return found[0] if found else None


def first_answer(right, mmlu_example, model_output):
    found = re.search(r"answer is ([A-D])", model_output)
    return found[1] if found else right(mmlu_example, model_output)


def form_not_checked(right, response, ground_truth):
    correct = float(ground_truth in response)
    return {"reward": correct, "format_reward": 1.0, "answer_reward": correct}


COURSE_MISTAKES = {
    "assignment.sequence_log_probs": {
        "logits and tokens are not shifted: the logits are about the next token": not_shifted,
        "the mask is not shifted with the tokens: take response_mask[:, 1:]": mask_not_shifted,
        "the mean is taken over the response's tokens: take the sum": mean_for_sum,
        "the prompt and the padding are counted: the mask is left out": given(response_mask=torch.ones_like),
    },
    "assignment.split_minibatches": {
        "the last minibatch, which is not full, is dropped": last_dropped,
        "the order is not read: take the rows in the order given": given(order=lambda order: torch.arange(len(order))),
    },
    "course.masked_mean": {
        "the sum is divided by the number of all entries: divide by those that count": kept(torch.mean),
        "the sum is returned: divide it by the number of entries that count": kept(torch.sum),
    },
    "course.masked_normalize": {
        "the mean is taken: divide the sum by normalize_constant only": mean_for_constant,
        "normalize_constant is not read": given(normalize_constant=1.0),
    },
    "course.masked_normalize course.masked_mean": {"the mask is left out": given(mask=torch.ones_like)},
    "models.completion_mask": {
        "the end-of-text token is not counted: it is a token that the policy has chosen": end_left_out,
        "what follows the first end-of-text token is counted": lambda right, **arguments: ~ends(**arguments),
    },
    "models.tokenize_prompt_and_output": {
        "response_mask is not shifted with the labels: it is one place too far right": batch_with(
            "response_mask", mask_shifted_twice
        ),
        "the labels are not shifted: each is the token after its input": batch_with(
            "labels", lambda batch: batch["input_ids"].clone()
        ),
        "the prompt is in response_mask": batch_with(
            "response_mask", lambda batch: batch["response_mask"].flip(1).cumsum(1).flip(1) > 0
        ),
    },
    "models.token_entropy": {
        "the probabilities are taken for their logarithms: it is -sum p log p": no_log_probability,
        "the mean over the vocabulary is taken: take the sum": lambda right, logits: right(logits) / logits.shape[-1],
    },
    "models.response_log_probs": {
        "the logits themselves are returned: normalise them with log_softmax": logits_returned,
        "the tokens of input_ids are looked up: look up the labels": lambda right, **arguments: right(
            **{**arguments, "labels": arguments["input_ids"]}
        ),
        "no gradient flows: compute it outside torch.no_grad()": then(
            lambda outputs: {name: value.detach() for name, value in outputs.items()}
        ),
    },
    "course.compute_group_normalized_rewards": {
        "the population's deviation is taken: std() of torch is the sample's": regrouped(correction=0),
        NOT_ZERO: regrouped(),
        "the statistics are those of the whole batch: take them by group": over_the_batch,
        "normalize_by_std is not read: the advantages are always divided": given(normalize_by_std=True),
        "advantage_eps is not read": given(advantage_eps=0.0),
    },
    "course.naive_policy_gradient_loss": {"the losses are averaged: return one for each token": then(torch.mean)},
    "course.grpo_clip_loss": {
        "gradient flows through the old log-probabilities: detach them": gradient_through_old,
        "the minimum is missing: the clipped ratio is taken wherever it lies": no_minimum,
        "the sign is flipped": then(lambda output: (-output[0], output[1])),
    },
    "course.policy_gradient_loss": {
        "no_baseline takes the advantages: it takes the raw rewards": advantages_for_rewards,
        "reinforce_with_baseline takes the raw rewards: it takes the advantages": rewards_for_advantages,
    },
    "course.sft_microbatch_step course.policy_microbatch_step": {
        "the loss is not divided by gradient_accumulation_steps": given(gradient_accumulation_steps=1),
        "backward() is not called": given(policy_log_probs=lambda values: values.detach().requires_grad_()),
    },
    "course.sft_microbatch_step": {
        "the sign is flipped: the loss is the negative log-likelihood": given(policy_log_probs=neg),
        "the rows are summed: take their mean": rows_summed,
    },
    "course.policy_microbatch_step": {
        "the mean is over all tokens: take each row's mean, then that of the rows": mean_over_all_tokens
    },
    "course.per_instance_dpo_loss": {
        "beta is left out": given(beta=1.0),
        "the reference model is left out": instance_without_reference,
        "chosen and rejected are exchanged": responses_exchanged,
    },
    "rewards.parse_gsm8k_response": {
        "the first number is taken: take the last": first_number,
        "the thousands separators are kept": commas_kept,
        "decimals are cut off": then(lambda found: found and found.partition(".")[0]),
    },
    "rewards.parse_mmlu_response": {
        "the first capital letter is taken, which may begin a word": first_capital,
        "the first answer is taken: a response may correct itself": first_answer,
    },
    "rewards.r1_zero_reward": {"the form is not checked: an answer in the wrong form earns nothing": form_not_checked},
    "rewards.question_only_reward": {
        "the first box is read: read the last": given(
            response=lambda response: re.sub(r"(\\boxed\{[^}]*\}).*", r"\1", response)
        )
    },
}
