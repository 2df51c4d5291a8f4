"""The part of the catalogue that has to do with texts: tokens, reward rules, and the reasoning course."""

from __future__ import annotations

from collections.abc import Callable

from trl_ext.assignment import cases, course_cases

_POLICY_GRADIENT = {"paper": "CS336 assignment 5; Schulman et al. 2017, arXiv 1707.06347."}


def add_course_tasks(add: Callable[..., None]) -> None:
    """Add them, with the catalogue's own function."""
    add(
        "models",
        "trl_ext.models.tokenization",
        "log-probability helper",
        "",
        {
            "tokenize_prompt_and_output": (
                "prompts and outputs as shifted token batches",
                course_cases.tokenize,
                {"variants": 6, "shapes": "B texts each; returns three tensors [B, L - 1]"}
                | {"paper": "Ouyang et al. 2022, arXiv 2203.02155, on fine-tuning with demonstrations."},
            ),
            "token_entropy": (
                "the entropy of each next-token distribution",
                cases.entropy,
                {"shapes": "logits [..., V]; returns [...]", "in_float32": True, "paper": "Shannon 1948."},
            ),
            "response_log_probs": (
                "the log-probability of each label",
                course_cases.log_probs,
                {"shapes": "input_ids and labels [B, T]; returns a dict of tensors [B, T]"}
                | {"paper": "Ziegler et al. 2019, arXiv 1909.08593.", "differentiated": ("log_probs",)}
                | {"notes": "Gradient flows through log_probs; token_entropy may have one or none."},
            ),
            "completion_mask": (
                "the mask of each completion up to its end-of-text token",
                cases.completion_mask,
                {"shapes": "completion_ids [B, T]; returns [B, T]", "paper": "Ziegler et al. 2019, arXiv 1909.08593."},
            ),
        },
    )
    add(
        "data",
        "trl_ext.data.truncation",
        "log-probability helper",
        "three lists of token ids; returns three lists",
        {"truncate_pair": ("the token limits of prompts and responses", cases.truncate_pair, {"variants": 3})},
    )
    add(
        "rewards",
        "trl_ext.rewards.verified",
        "reward rule",
        "a text and its truth; returns a dict of three numbers",
        {
            "r1_zero_reward": (
                "the reward of a tagged answer",
                course_cases.tagged,
                {"variants": 6, "paper": "DeepSeek-AI 2025, arXiv 2501.12948."},
            ),
            "question_only_reward": (
                "the reward of a boxed answer",
                course_cases.boxed,
                {"variants": 5, "paper": "Liu et al. 2025, arXiv 2503.20783."},
            ),
            "gsm8k_reward": ("the reward of a response's last number", course_cases.last_number, {"variants": 4}),
            "countdown_reward": (
                "the reward of a formula",
                course_cases.countdown,
                {"variants": 5, "paper": "Gandhi et al. 2024, arXiv 2404.03683."},
            ),
        },
    )
    add(
        "rewards",
        "trl_ext.rewards.parsers",
        "reward rule",
        "a text; returns a text or None",
        {
            "parse_gsm8k_response": (
                "the last number of a response",
                course_cases.gsm8k_text,
                {"variants": 8, "paper": "Cobbe et al. 2021, arXiv 2110.14168."},
            ),
            "parse_mmlu_response": (
                "the letter that a response chooses",
                course_cases.mmlu_text,
                {"variants": 8, "paper": "Hendrycks et al. 2020, arXiv 2009.03300."},
            ),
        },
    )
    add(
        "course",
        "trl_ext.course",
        "reasoning course",
        "",
        {
            "masked_mean": (
                "the mean where the mask is 1",
                course_cases.masked_course(constant=False),
                {
                    "variants": 6,
                    "special": ("nan",),
                    "shapes": "tensor and mask [B, T]; returns a scalar, or one dimension",
                    "paper": "Liu et al. 2025, arXiv 2503.20783, on what the sum is divided by.",
                },
            ),
            "masked_normalize": (
                "the sum where the mask is 1, over a constant",
                course_cases.masked_course(constant=True),
                {
                    "variants": 6,
                    "special": ("nan",),
                    "shapes": "tensor and mask [B, T]; returns a scalar, or one dimension",
                    "paper": "Liu et al. 2025, arXiv 2503.20783.",
                },
            ),
            "compute_group_normalized_rewards": (
                "rewards and group-normalised advantages",
                course_cases.group_rewards,
                {
                    "variants": 6,
                    "special": ("equal",),
                    "compared": (0, 1),
                    "shapes": "N responses; returns advantages [N], rewards [N], metadata",
                    "paper": "Shao et al. 2024, arXiv 2402.03300, section 4.1.2.",
                },
            ),
            "naive_policy_gradient_loss": (
                "the policy-gradient loss of each token",
                course_cases.naive_loss,
                {"in_float32": True, "shapes": "[B, 1] and [B, T]; returns [B, T]", "paper": "Williams 1992."},
            ),
            "grpo_clip_loss": (
                "the clipped loss of each token",
                course_cases.clip_loss,
                {"in_float32": True, "compared": (0,), "shapes": "[B, 1] and [B, T]; returns [B, T] and metadata"}
                | {"paper": "Shao et al. 2024, arXiv 2402.03300, equation 3."},
            ),
            "policy_gradient_loss": (
                "the loss of each token by its name",
                course_cases.by_type,
                {"variants": 4, "compared": (0,), "shapes": "[B, T] and [B, 1]; returns [B, T] and metadata"}
                | _POLICY_GRADIENT,
            ),
            "sft_microbatch_step": (
                "the loss of one micro-batch of demonstrations, with its backward pass",
                course_cases.sft_step,
                {
                    "variants": 3,
                    "compared": (0,),
                    "own_backward": True,
                    "shapes": "[B, T]; returns a scalar and metadata",
                }
                | {"paper": "CS336 assignment 5, section 4.2."},
            ),
            "policy_microbatch_step": (
                "the policy-gradient loss of one micro-batch, with its backward pass",
                course_cases.policy_step,
                {
                    "variants": 4,
                    "compared": (0,),
                    "own_backward": True,
                    "shapes": "[B, T]; returns a scalar and metadata",
                }
                | _POLICY_GRADIENT,
            ),
            "per_instance_dpo_loss": (
                "the DPO loss of one pair of texts",
                course_cases.instance_dpo,
                {
                    "shapes": "three texts; returns a scalar",
                    "notes": "Given is trl_ext.data.packed_sft.encode_documents, for texts in the Alpaca template.",
                },
            ),
        },
    )
