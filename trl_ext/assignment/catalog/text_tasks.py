"""Functions of tokens and texts that an assignment can ask for, and those of the reasoning course."""

from __future__ import annotations

from trl_ext.assignment.catalog import cases, text_cases
from trl_ext.assignment.catalog.task import Task, group

TEXT_TASKS: dict[str, Task] = {}

# ---- Tokens and texts ----

add = group(TEXT_TASKS, "log-probability helper")
add(
    "assignment.sequence_log_probs",
    "the summed log-probability of each response",
    cases.sequence_log_probs,
    shapes="logits [B, T, V], ids and mask [B, T]; returns [B]",
    in_float32=True,
    paper="Rafailov et al. 2023, arXiv 2305.18290, section 4.",
)
add(
    "assignment.split_minibatches",
    "a rollout cut into minibatches",
    cases.split_minibatches,
    {"minibatch_size": (2, 3, 5)},
    variants=3,
    shapes="tensors [N, ...]; returns a list of dicts of [minibatch_size, ...]",
    paper="Schulman et al. 2017, arXiv 1707.06347, algorithm 1.",
)
add(
    "models.tokenize_prompt_and_output",
    "prompts and outputs as shifted token batches",
    text_cases.tokenize,
    variants=6,
    shapes="B texts each; returns three tensors [B, L - 1]",
    paper="Ouyang et al. 2022, arXiv 2203.02155, on fine-tuning with demonstrations.",
)
add(
    "models.token_entropy",
    "the entropy of each next-token distribution",
    cases.entropy,
    shapes="logits [..., V]; returns [...]",
    in_float32=True,
    paper="Shannon 1948.",
)
add(
    "models.response_log_probs",
    "the log-probability of each label",
    text_cases.log_probs,
    {"return_token_entropy": (True, False)},
    shapes="input_ids and labels [B, T]; returns a dict of tensors [B, T]",
    paper="Ziegler et al. 2019, arXiv 1909.08593.",
    notes="Gradient flows through log_probs; token_entropy may have one or none.",
)
add(
    "models.completion_mask",
    "the mask of each completion up to its end-of-text token",
    cases.completion_mask,
    {"eos_token_id": (2, [2, 3])},
    shapes="completion_ids [B, T]; returns [B, T]",
    paper="Ziegler et al. 2019, arXiv 1909.08593.",
)
summary, shapes = "the token limits of prompts and responses", "three lists of token ids; returns three lists"
add("data.truncate_pair", summary, cases.truncate_pair, variants=3, shapes=shapes)

add = group(TEXT_TASKS, "reward rule", "a text and its truth; returns a dict of three numbers")
paper = "DeepSeek-AI 2025, arXiv 2501.12948."
add("rewards.r1_zero_reward", "the reward of a tagged answer", text_cases.tagged, variants=6, paper=paper)
paper = "Liu et al. 2025, arXiv 2503.20783."
add("rewards.question_only_reward", "the reward of a boxed answer", text_cases.boxed, variants=5, paper=paper)
add("rewards.gsm8k_reward", "the reward of a response's last number", text_cases.last_number, variants=4)
paper = "Gandhi et al. 2024, arXiv 2404.03683."
add("rewards.countdown_reward", "the reward of a formula", text_cases.countdown, variants=5, paper=paper)
add = group(TEXT_TASKS, "reward rule", "a text; returns a text or None", variants=8)
paper = "Cobbe et al. 2021, arXiv 2110.14168."
add("rewards.parse_gsm8k_response", "the last number of a response", text_cases.gsm8k_text, paper=paper)
paper = "Hendrycks et al. 2020, arXiv 2009.03300."
add("rewards.parse_mmlu_response", "the letter that a response chooses", text_cases.mmlu_text, paper=paper)

# ---- The reasoning course ----

add = group(
    TEXT_TASKS,
    "reasoning course",
    "tensor and mask [B, T]; returns a scalar, or one dimension",
    variants=6,
    special=("nan",),
    paper="Liu et al. 2025, arXiv 2503.20783, on what the sum is divided by.",
)
add("course.masked_mean", "the mean where the mask is 1", cases.masked_tensor)
summary = "the sum where the mask is 1, over a constant"
add("course.masked_normalize", summary, cases.masked_tensor, {"normalize_constant": (4.0, 7.0)})

add = group(TEXT_TASKS, "reasoning course")
add(
    "course.compute_group_normalized_rewards",
    "rewards and group-normalised advantages",
    text_cases.group_rewards,
    variants=6,
    special=("equal",),
    compared=[0, 1],
    shapes="N responses; returns advantages [N], rewards [N], metadata",
    paper="Shao et al. 2024, arXiv 2402.03300, section 4.1.2.",
)
add(
    "course.naive_policy_gradient_loss",
    "the policy-gradient loss of each token",
    cases.naive_loss,
    in_float32=True,
    shapes="[B, 1] and [B, T]; returns [B, T]",
    paper="Williams 1992.",
)
add(
    "course.grpo_clip_loss",
    "the clipped loss of each token",
    cases.clip_loss,
    {"cliprange": (0.2, 0.4)},
    compared=[0],
    in_float32=True,
    shapes="[B, 1] and [B, T]; returns [B, T] and metadata",
    paper="Shao et al. 2024, arXiv 2402.03300, equation 3.",
)
by_type = {
    "loss_type": ("grpo_clip", "no_baseline", "reinforce_with_baseline", "grpo_no_clip"),
    "cliprange": (0.2, 0.4),
}
add(
    "course.policy_gradient_loss",
    "the loss of each token by its name",
    cases.by_type,
    by_type,
    compared=[0],
    variants=4,
    shapes="[B, T] and [B, 1]; returns [B, T] and metadata",
    paper="CS336 assignment 5; Schulman et al. 2017, arXiv 1707.06347.",
)
add(
    "course.sft_microbatch_step",
    "the loss of one micro-batch of demonstrations, with its backward pass",
    cases.sft_step,
    {"gradient_accumulation_steps": (2, 4, 1), "normalize_constant": (1.0, 3.0, 2.0)},
    compared=[0],
    own_backward=True,
    variants=3,
    shapes="[B, T]; returns a scalar and metadata",
    paper="CS336 assignment 5, section 4.2.",
)
add(
    "course.policy_microbatch_step",
    "the policy-gradient loss of one micro-batch, with its backward pass",
    cases.policy_step,
    by_type | {"gradient_accumulation_steps": (2, 3)},
    compared=[0],
    own_backward=True,
    variants=4,
    shapes="[B, T]; returns a scalar and metadata",
    paper="CS336 assignment 5; Schulman et al. 2017, arXiv 1707.06347.",
)
add(
    "course.per_instance_dpo_loss",
    "the DPO loss of one pair of texts",
    text_cases.instance_dpo,
    {"beta": (0.1, 0.02)},
    shapes="three texts; returns a scalar",
    notes="Given is trl_ext.data.packed_sft.encode_documents, for texts in the Alpaca template.",
)
