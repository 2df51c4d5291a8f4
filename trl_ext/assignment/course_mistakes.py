"""Wrong answers to whole steps, mask and log-probability helpers, the reasoning course and the reward rules."""

from __future__ import annotations

import re

import torch

from trl_ext.assignment.mistakes import NOT_ZERO, mistake

WHOLE = "assignment.grpo_loss assignment.dr_grpo_loss assignment.gspo_loss"


def _whole_loss(
    right,
    log_probs,
    old,
    ref,
    mask,
    advantages,
    *,
    clip,
    kl_coef,
    max_new_tokens=None,
    minimum=True,
    summed=False,
    kl_by_response=False,
    token_mean=False,
):
    """GRPO's loss, Dr.GRPO's or GSPO's, by the name of the right function, without a detach."""
    counts = mask != 0
    lengths = counts.sum(1).clamp(min=1)
    drift = (log_probs - old).masked_fill(~counts, 0)
    ratio = drift.exp()
    if "gspo" in right.__name__:
        ratio = (drift.sum(1) / (1 if summed else lengths)).exp().unsqueeze(1).expand_as(drift)
    weighted, clipped = ratio * advantages.unsqueeze(1), ratio.clamp(1 - clip, 1 + clip) * advantages.unsqueeze(1)
    losses = -(torch.minimum(weighted, clipped) if minimum else clipped)
    rows = losses.masked_fill(~counts, 0).sum(1) / (max_new_tokens or lengths)
    surrogate = losses.masked_fill(~counts, 0).sum() / counts.sum() if token_mean else rows.mean()
    difference = (ref - log_probs).masked_fill(~counts, 0)
    divergence = difference.exp() - 1 - difference
    mean = (divergence.sum(1) / lengths).mean() if kl_by_response else divergence.sum() / counts.sum()
    return surrogate + kl_coef * mean


@mistake(WHOLE, "gradient flows through the old log-probabilities: detach them")
def gradient_through_old(right, log_probs, old_log_probs, ref_log_probs, mask, advantages, **options):
    return _whole_loss(right, log_probs, old_log_probs, ref_log_probs.detach(), mask, advantages, **options)


@mistake(WHOLE, "gradient flows through the reference's log-probabilities: detach them")
def gradient_through_reference(right, log_probs, old_log_probs, ref_log_probs, mask, advantages, **options):
    return _whole_loss(right, log_probs, old_log_probs.detach(), ref_log_probs, mask, advantages, **options)


@mistake(WHOLE, "the clip's minimum is missing: the clipped ratio is taken wherever it lies")
def no_minimum_in_loss(right, log_probs, old_log_probs, ref_log_probs, mask, advantages, **options):
    given = (log_probs, old_log_probs.detach(), ref_log_probs.detach(), mask, advantages)
    return _whole_loss(right, *given, **options, minimum=False)


@mistake(WHOLE, "the KL term is left out")
def no_divergence(right, *arguments, kl_coef, **options):
    return right(*arguments, kl_coef=0.0, **options)


@mistake(WHOLE, "the mask is left out, so that padding counts")
def no_mask_in_loss(right, log_probs, old_log_probs, ref_log_probs, mask, advantages, **options):
    return right(log_probs, old_log_probs, ref_log_probs, torch.ones_like(mask), advantages, **options)


@mistake(WHOLE, "the KL term is averaged over each response first: average it over all tokens")
def divergence_by_response(right, log_probs, old_log_probs, ref_log_probs, mask, advantages, **options):
    given = (log_probs, old_log_probs.detach(), ref_log_probs.detach(), mask, advantages)
    return _whole_loss(right, *given, **options, kl_by_response=True)


@mistake(WHOLE, "the KL term is taken off: it is added to the loss")
def divergence_taken_off(right, *arguments, kl_coef, **options):
    return right(*arguments, kl_coef=-kl_coef, **options)


@mistake("assignment.grpo_loss", "all tokens count alike (that is DAPO): take each response's mean, then theirs")
def averaged_over_tokens(right, log_probs, old_log_probs, ref_log_probs, mask, advantages, **options):
    given = (log_probs, old_log_probs.detach(), ref_log_probs.detach(), mask, advantages)
    return _whole_loss(right, *given, **options, token_mean=True)


@mistake("assignment.gspo_loss", "the log-ratios are summed: GSPO takes their mean over the response's tokens")
def summed_ratio(right, log_probs, old_log_probs, ref_log_probs, mask, advantages, **options):
    given = (log_probs, old_log_probs.detach(), ref_log_probs.detach(), mask, advantages)
    return _whole_loss(right, *given, **options, summed=True)


@mistake("assignment.dr_grpo_loss", "the sums are divided by the responses' lengths (that is GRPO)")
def length_normalized(right, log_probs, old_log_probs, ref_log_probs, mask, advantages, *, max_new_tokens, **options):
    given = (log_probs, old_log_probs.detach(), ref_log_probs.detach(), mask, advantages)
    return _whole_loss(right, *given, **options)


@mistake("assignment.sequence_log_probs", "logits and tokens are not shifted: the logits are about the next token")
def not_shifted(right, logits, input_ids, response_mask):
    log_probs = logits.log_softmax(-1).gather(-1, input_ids.unsqueeze(-1)).squeeze(-1)
    return (log_probs * response_mask).sum(-1)


@mistake("assignment.sequence_log_probs", "the mask is not shifted with the tokens: take response_mask[:, 1:]")
def mask_not_shifted(right, logits, input_ids, response_mask):
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (log_probs * response_mask[:, :-1]).sum(-1)


@mistake("assignment.sequence_log_probs", "the mean is taken over the response's tokens: take the sum")
def mean_for_sum(right, logits, input_ids, response_mask):
    return right(logits, input_ids, response_mask) / response_mask[:, 1:].sum(-1)


@mistake("assignment.sequence_log_probs", "the prompt and the padding are counted: the mask is left out")
def whole_text(right, logits, input_ids, response_mask):
    return right(logits, input_ids, torch.ones_like(response_mask))


@mistake("assignment.split_minibatches", "the last minibatch, which is not full, is dropped")
def last_dropped(right, batch, order, minibatch_size):
    return [part for part in right(batch, order, minibatch_size) if len(part["rewards"]) == minibatch_size]


@mistake("assignment.split_minibatches", "the order is not read: take the rows in the order given")
def in_file_order(right, batch, order, minibatch_size):
    return right(batch, torch.arange(len(order)), minibatch_size)


@mistake("losses.masked_mean", "the sum is divided by the number of all entries: divide by those that count")
def divided_by_all(right, values, mask, dim=None):
    kept = values.masked_fill(mask == 0, 0)
    return kept.mean() if dim is None else kept.mean(dim)


@mistake("course.masked_mean", "the sum is divided by the number of all entries: divide by those that count")
def course_divided_by_all(right, tensor, mask, dim=None):
    kept = tensor.masked_fill(mask == 0, 0)
    return kept.mean() if dim is None else kept.mean(dim)


@mistake("course.masked_mean", "the sum is returned: divide it by the number of entries that count")
def sum_returned(right, tensor, mask, dim=None):
    kept = tensor.masked_fill(mask == 0, 0)
    return kept.sum() if dim is None else kept.sum(dim)


@mistake("course.masked_normalize", "the mean is taken: divide the sum by normalize_constant only")
def mean_for_constant(right, tensor, mask, normalize_constant, dim=None):
    count = mask.sum() if dim is None else mask.sum(dim)
    return right(tensor, mask, 1.0, dim) / count


@mistake("course.masked_normalize", "normalize_constant is not read")
def no_constant(right, tensor, mask, normalize_constant, dim=None):
    return right(tensor, mask, 1.0, dim)


@mistake("course.masked_normalize course.masked_mean", "the mask is left out")
def mask_left_out(right, tensor, mask, *arguments, **keywords):
    return right(tensor, torch.ones_like(mask), *arguments, **keywords)


@mistake("models.completion_mask", "the end-of-text token is not counted: it is a token that the policy has chosen")
def end_left_out(right, completion_ids, eos_token_id):
    counted = right(completion_ids, eos_token_id)
    return counted & ~torch.isin(completion_ids, torch.as_tensor(eos_token_id))


@mistake("models.completion_mask", "what follows the first end-of-text token is counted")
def end_alone_left_out(right, completion_ids, eos_token_id):
    return ~torch.isin(completion_ids, torch.as_tensor(eos_token_id))


@mistake(
    "models.tokenize_prompt_and_output", "response_mask is not shifted with the labels: it is one place too far right"
)
def response_mask_not_shifted(right, prompt_strs, output_strs, tokenizer):
    batch = right(prompt_strs, output_strs, tokenizer)
    shifted = torch.zeros_like(batch["response_mask"])
    shifted[:, 1:] = batch["response_mask"][:, :-1]
    return {**batch, "response_mask": shifted}


@mistake("models.tokenize_prompt_and_output", "the labels are not shifted: each is the token after its input")
def labels_not_shifted(right, prompt_strs, output_strs, tokenizer):
    batch = right(prompt_strs, output_strs, tokenizer)
    return {**batch, "labels": batch["input_ids"].clone()}


@mistake("models.tokenize_prompt_and_output", "the prompt is in response_mask")
def prompt_in_mask(right, prompt_strs, output_strs, tokenizer):
    batch = right(prompt_strs, output_strs, tokenizer)
    return {**batch, "response_mask": batch["response_mask"].flip(1).cumsum(1).flip(1) > 0}


@mistake("models.token_entropy", "the probabilities are taken for their logarithms: it is -sum p log p")
def no_log_probability(right, logits):
    probabilities = logits.softmax(-1)
    return -(probabilities * probabilities).sum(-1)


@mistake("models.token_entropy", "the mean over the vocabulary is taken: take the sum")
def mean_over_vocabulary(right, logits):
    return right(logits) / logits.shape[-1]


@mistake("models.response_log_probs", "the logits themselves are returned: normalise them with log_softmax")
def logits_returned(right, model, input_ids, labels, return_token_entropy=False):
    logits = model(input_ids).logits
    values = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return {**right(model, input_ids, labels, return_token_entropy), "log_probs": values}


@mistake("models.response_log_probs", "the tokens of input_ids are looked up: look up the labels")
def inputs_looked_up(right, model, input_ids, labels, return_token_entropy=False):
    return right(model, input_ids, input_ids, return_token_entropy)


@mistake("models.response_log_probs", "no gradient flows: compute it outside torch.no_grad()")
def without_gradient(right, model, input_ids, labels, return_token_entropy=False):
    return {name: value.detach() for name, value in right(model, input_ids, labels, return_token_entropy).items()}


@mistake(
    "course.compute_group_normalized_rewards", "the population's deviation is taken: std() of torch is the sample's"
)
def population_std(right, *arguments, **keywords):
    group_size, eps = keywords["group_size"], keywords["advantage_eps"]
    _, rewards, metadata = right(*arguments, **keywords)
    groups = rewards.reshape(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if keywords["normalize_by_std"]:
        advantages = advantages / (groups.std(1, correction=0, keepdim=True) + eps)
    return advantages.reshape(-1), rewards, metadata


@mistake("course.compute_group_normalized_rewards", NOT_ZERO)
def course_rounding_divided(right, *arguments, **keywords):
    group_size, eps = keywords["group_size"], keywords["advantage_eps"]
    _, rewards, metadata = right(*arguments, **keywords)
    groups = rewards.reshape(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if keywords["normalize_by_std"]:
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    return advantages.reshape(-1), rewards, metadata


@mistake("course.compute_group_normalized_rewards", "the statistics are those of the whole batch: take them by group")
def over_the_batch(right, *arguments, **keywords):
    return right(*arguments, **{**keywords, "group_size": len(keywords["rollout_responses"])})


@mistake("course.compute_group_normalized_rewards", "normalize_by_std is not read: the advantages are always divided")
def always_divided(right, *arguments, **keywords):
    return right(*arguments, **{**keywords, "normalize_by_std": True})


@mistake("course.compute_group_normalized_rewards", "advantage_eps is not read")
def no_advantage_eps(right, *arguments, **keywords):
    return right(*arguments, **{**keywords, "advantage_eps": 0.0})


@mistake("course.naive_policy_gradient_loss", "the losses are averaged: return one for each token")
def tokens_averaged(right, *arguments, **keywords):
    return right(*arguments, **keywords).mean()


@mistake("course.grpo_clip_loss", "gradient flows through the old log-probabilities: detach them")
def course_gradient_through_old(right, advantages, policy_log_probs, old_log_probs, cliprange):
    ratio = (policy_log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - cliprange, 1 + cliprange)
    return -torch.minimum(ratio * advantages, clipped * advantages), {}


@mistake("course.grpo_clip_loss", "the minimum is missing: the clipped ratio is taken wherever it lies")
def course_no_minimum(right, advantages, policy_log_probs, old_log_probs, cliprange):
    ratio = (policy_log_probs - old_log_probs.detach()).exp()
    return -ratio.clamp(1 - cliprange, 1 + cliprange) * advantages, {}


@mistake("course.grpo_clip_loss", "the sign is flipped")
def course_sign_flipped(right, *arguments, **keywords):
    losses, metadata = right(*arguments, **keywords)
    return -losses, metadata


@mistake("course.policy_gradient_loss", "no_baseline takes the advantages: it takes the raw rewards")
def advantages_for_rewards(right, policy_log_probs, loss_type, raw_rewards, advantages, **options):
    return right(policy_log_probs, loss_type, raw_rewards=advantages, advantages=advantages, **options)


@mistake("course.policy_gradient_loss", "reinforce_with_baseline takes the raw rewards: it takes the advantages")
def rewards_for_advantages(right, policy_log_probs, loss_type, raw_rewards, advantages, **options):
    used = raw_rewards if loss_type == "reinforce_with_baseline" else advantages
    return right(policy_log_probs, loss_type, raw_rewards=raw_rewards, advantages=used, **options)


@mistake(
    "course.sft_microbatch_step course.policy_microbatch_step",
    "the loss is not divided by gradient_accumulation_steps",
)
def accumulation_not_divided(right, *arguments, **keywords):
    return right(*arguments, **{**keywords, "gradient_accumulation_steps": 1})


@mistake("course.sft_microbatch_step course.policy_microbatch_step", "backward() is not called")
def no_backward(right, policy_log_probs, **keywords):
    apart = policy_log_probs.detach().requires_grad_()
    return right(apart, **keywords)


@mistake("course.sft_microbatch_step", "the sign is flipped: the loss is the negative log-likelihood")
def likelihood(right, policy_log_probs, **keywords):
    # Backward of the right loss at the opposite of the log-probabilities is the opposite gradient.
    loss, metadata = right(-policy_log_probs, **keywords)
    return loss, metadata


@mistake("course.sft_microbatch_step", "the rows are summed: take their mean")
def rows_summed(right, policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0):
    constant = normalize_constant / len(response_mask)
    return right(policy_log_probs, response_mask, gradient_accumulation_steps, constant)


@mistake("course.policy_microbatch_step", "the mean is over all tokens: take each row's mean, then that of the rows")
def mean_over_all_tokens(right, policy_log_probs, response_mask, gradient_accumulation_steps, **keywords):
    lengths = response_mask.sum(1, keepdim=True)
    weights = lengths * len(lengths) / lengths.sum()
    names = ("advantages", "raw_rewards")
    weighted = {name: keywords[name] * weights for name in names}
    return right(policy_log_probs, response_mask, gradient_accumulation_steps, **{**keywords, **weighted})


@mistake("course.per_instance_dpo_loss", "beta is left out")
def instance_without_beta(right, lm, lm_ref, tokenizer, beta, **texts):
    return right(lm, lm_ref, tokenizer, 1.0, **texts)


@mistake("course.per_instance_dpo_loss", "the reference model is left out")
def instance_without_reference(right, lm, lm_ref, tokenizer, beta, **texts):
    flat = type(lm_ref)(seed=0)
    torch.nn.init.zeros_(flat.head)
    # Of equal logits every token has the same log-probability; texts of other length differ by as many of them.
    loss = right(lm, flat, tokenizer, beta, **texts)
    extra = len(texts["response_chosen"].split()) - len(texts["response_rejected"].split())
    margin = -torch.log(torch.expm1(loss)) - beta * extra * torch.log(torch.tensor(float(flat.head.shape[1])))
    return -torch.nn.functional.logsigmoid(margin)


@mistake("course.per_instance_dpo_loss", "chosen and rejected are exchanged")
def responses_exchanged(right, *arguments, response_chosen, response_rejected, **keywords):
    return right(*arguments, response_chosen=response_rejected, response_rejected=response_chosen, **keywords)


@mistake("rewards.parse_gsm8k_response", "the first number is taken: take the last")
def first_number(right, model_output):
    found = re.findall(r"-?[0-9][0-9,]*(?:\.[0-9]+)?", model_output)
    return found[0].replace(",", "") if found else None


@mistake("rewards.parse_gsm8k_response", "the thousands separators are kept")
def commas_kept(right, model_output):
    found = re.findall(r"-?[0-9][0-9,]*(?:\.[0-9]+)?", model_output)
    return found[-1].rstrip(",") if found else None


@mistake("rewards.parse_gsm8k_response", "decimals are cut off")
def decimals_cut(right, model_output):
    found = right(model_output)
    return found if found is None else found.partition(".")[0]


@mistake("rewards.parse_mmlu_response", "the first capital letter is taken, which may begin a word")
def first_capital(right, mmlu_example, model_output):
    found = re.search(r"[A-D]", model_output)
    return found[0] if found else None


@mistake("rewards.parse_mmlu_response", "the first answer is taken: a response may correct itself")
def first_answer(right, mmlu_example, model_output):
    found = re.search(r"answer is ([A-D])", model_output)
    return found[1] if found else right(mmlu_example, model_output)


@mistake("rewards.r1_zero_reward", "the form is not checked: an answer in the wrong form earns nothing")
def form_not_checked(right, response, ground_truth, fast=True):
    correct = float(ground_truth in response)
    return {"reward": correct, "format_reward": 1.0, "answer_reward": correct}


@mistake("rewards.question_only_reward", "the first box is read: read the last")
def first_box(right, response, ground_truth, fast=True):
    return right(re.sub(r"(\\boxed\{[^}]*\}).*", r"\1", response), ground_truth, fast)
