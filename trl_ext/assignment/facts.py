"""What a docstring without formulas must still say for a function to be written: conventions, names, rules."""

from __future__ import annotations

_PER_TOKEN = "A mean is over the tokens of a response: chosen_length and rejected_length are their numbers."
_MASKED = "mask has a shape that broadcasts; dim None is all dimensions."
_EMPTY = "The result is NaN where the mask selects nothing."
_KL = "The KL term is the k3 estimate, averaged over all tokens that count. Gradient flows to log_probs only."
_WHOLE = (
    "log_probs, old_log_probs and ref_log_probs are token log-probabilities under the policy, the policy that sampled "
    "and the reference, in nats. clip is how far the ratio may move from 1, kl_coef the coefficient of the KL term."
)
_SCORES = "format_reward, answer_reward and reward are each 0 or 1; the reward is that of the answer."

# By the name in the catalogue. Where the library's own docstring is given whole, none of these is added.
FACTS = {
    "losses.cdpo": "label_smoothing is the probability that a label is wrong.",
    "losses.robust_dpo": "label_smoothing is the probability that a label is wrong.",
    "losses.ipo": (
        "The margin is of summed log-probabilities; with length_normalized each log-ratio is averaged over "
        "the tokens of its response first."
    ),
    "losses.dpop": (
        "penalty multiplies by how much the chosen response has become less likely; it stands inside the sigmoid."
    ),
    "losses.sppo": "The loss is half the sum of the pair's two squares. beta is the paper's 1 / eta.",
    "losses.aot": (
        "The chosen and the rejected log-ratios are compared as two distributions over the batch (the "
        "unpaired form), by their logistic loss."
    ),
    "losses.aot_paired": (
        "The policy's and the reference's margins are compared as two distributions over the batch, by their "
        "logistic loss."
    ),
    "losses.simpo": (
        f"There is no reference. {_PER_TOKEN} gamma is the target margin itself; where it is not given it is "
        "gamma_beta_ratio times beta, and that is 0.5 where it is not given either."
    ),
    "losses.repo": (
        f"There is no reference. {_PER_TOKEN} gamma is the margin beyond which a pair costs nothing; beta has "
        "no part in the loss."
    ),
    "losses.cpo": (
        "There is no reference: the first term is of summed log-probabilities, and nll_weight multiplies the "
        f"chosen response's mean token loss. {_PER_TOKEN}"
    ),
    "losses.orpo": (
        f"There is no reference. beta, the paper's lambda, multiplies the log-odds-ratio loss. {_PER_TOKEN}"
    ),
    "losses.kto": (
        "The divergence is the mean of kl_log_ratio, at least 0: the mean is clamped, not its terms. No "
        "gradient flows through it."
    ),
    "losses.sequence_log_ratio": "The mean is over the tokens that count, and 0 for a response without any.",
    "losses.clipped_surrogate": (
        "dual_clip: where an advantage is negative, the loss is at most dual_clip times its size; None for no "
        "such bound."
    ),
    "losses.quadratic_ratio": (
        "To the loss with no clip comes half of strength times the squared distance of the ratio from 1."
    ),
    "losses.cispo": "No gradient flows through the capped ratio; there is no lower cap.",
    "losses.aggregate": (
        "kind is sequence_mean (the mean over each response's tokens, then over responses), token_mean (over "
        "all tokens alike), constant (over B times a constant) or sum (the mean over the responses of their "
        "tokens' sums). A response without tokens counts as 0 and as one of the B. token_count, where it is "
        "given, is what token_mean divides by."
    ),
    "losses.kl_estimate": (
        "The estimates are of the divergence of the policy from the reference, under the policy's samples."
    ),
    "losses.masked_mean": f"{_MASKED} {_EMPTY}",
    "losses.masked_normalize": f"{_MASKED} The sum is divided by constant, whatever the number of tokens.",
    "losses.clipped_value_loss": (
        "Half of the larger of two squared errors: that of the value, and that of the value kept within clip "
        "of the old one."
    ),
    "losses.whiten": "The deviation is the sample's, over the tokens that count, and 1e-8 is added to it.",
    "advantages.group_normalized": "eps is added to the standard deviation.",
    "advantages.group_rank": (
        "The advantages go from -scale for the worst of a group to scale for the best, in equal steps; equal "
        "rewards have the mean of their ranks."
    ),
    "advantages.batch_normalized": "eps is added to the deviation, which is the population's where std_ddof is 0.",
    "advantages.mean_normalized": "eps is added to the group's mean.",
    "advantages.length_weighted": "Each response weighs as many times as it has tokens.",
    "advantages.clip_advantages": "The limit is on both sides of 0.",
    "advantages.gae": (
        "Value and advantage after the last token that counts are 0. A return is the advantage and the value together."
    ),
    "assignment.grpo_loss": f"The surrogate is averaged over each response's tokens, then over responses. {_KL}",
    "assignment.dr_grpo_loss": (
        f"{_WHOLE} max_new_tokens is the longest response that generation permits, in tokens: the constant. {_KL}"
    ),
    "assignment.gspo_loss": f"{_WHOLE} {_KL}",
    "assignment.sequence_log_probs": "In nats. The logits at a position are about the token after it.",
    "models.tokenize_prompt_and_output": (
        "The keys are input_ids (the tokens but the last), labels (the tokens but the first) and "
        "response_mask (True where the label is a token of the output). Prompts and outputs are tokenized "
        "apart. Special tokens that the tokenizer puts before a text stand before the prompt, once; no "
        "end-of-text token is added. Rows are padded on the right with the padding token, or with the "
        "end-of-text token where there is none."
    ),
    "models.token_entropy": "In nats, with gradient, and finite for logits of any size.",
    "models.completion_mask": (
        "True up to and including the first end-of-text token; everywhere where there is none."
    ),
    "data.truncate_pair": "Kept are the end of the prompt and the start of each response.",
    "rewards.r1_zero_reward": (
        "The form is strict: </think> <answer> with one space between, and </answer>. The answer is what "
        "follows the last <answer>, and where a \\boxed is in it, what the last of them holds."
    ),
    "rewards.question_only_reward": f"The answer is what the last closed \\boxed{{...}} holds. {_SCORES}",
    "rewards.gsm8k_reward": f"To have a number is all of the form. {_SCORES}",
    "rewards.countdown_reward": (
        "The response is in the form of r1_zero_reward: ... </think> <answer> 2 * 3 + 4 </answer>. The answer "
        "is a formula of + - * / and brackets with each number exactly once; = and the target may follow it. "
        f"{_SCORES}"
    ),
    "rewards.parse_gsm8k_response": "As a text, without thousands separators and currency; None if there is none.",
    "rewards.parse_mmlu_response": (
        "Taken from, in this order: the last 'answer is B'; a response that is or begins with a letter, as "
        "'B' or '(B) ...'; the only letter that is marked, as '(B)' or 'option B'; an option's text as the "
        "whole response."
    ),
    "course.masked_mean": f"{_MASKED} {_EMPTY}",
    "course.masked_normalize": f"{_MASKED} The sum is divided by normalize_constant only.",
    "course.compute_group_normalized_rewards": (
        "The deviation is the sample's, of G - 1. A group of equal rewards has advantages of exactly 0."
    ),
    "course.policy_gradient_loss": (
        "loss_type is no_baseline (naive loss of raw_rewards), reinforce_with_baseline (naive loss of "
        "advantages), grpo_clip or grpo_no_clip (the unclipped ratio times the advantages, no gradient "
        "through old_log_probs)."
    ),
    "course.sft_microbatch_step": (
        "Each row's sum over the response is divided by normalize_constant; rows are averaged, and the mean "
        "is divided by gradient_accumulation_steps."
    ),
    "course.policy_microbatch_step": (
        "Each row's mean over the response is averaged over the rows and divided by "
        "gradient_accumulation_steps; a row without response tokens counts as 0 and as one of the B."
    ),
    "course.per_instance_dpo_loss": (
        "Prompt and response stand in the Alpaca template, followed by the end-of-text token; "
        "log-probabilities are of the whole text. Gradient flows to lm."
    ),
}
