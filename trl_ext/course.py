"""Reference versions of the functions that students write in a course on reasoning, built on the library's own.

They follow the arguments, shapes and conventions of Stanford's CS336, assignment 5. Each docstring says where these
differ from the rest of the library. Shapes: B responses of up to T tokens, N = B responses of a rollout. Masks are 1
(or True) where a token counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trl_ext import losses
from trl_ext.advantages import group_centered, group_normalized
from trl_ext.data.math import load_prompt_template, render
from trl_ext.data.rows import read_jsonl, text_field
from trl_ext.models import response_log_probs, token_entropy, tokenize_prompt_and_output
from trl_ext.names import check_choice
from trl_ext.rewards.parsers import parse_gsm8k_response, parse_mmlu_response

__all__ = [
    "PackedSFTDataset",
    "compute_group_normalized_rewards",
    "grpo_clip_loss",
    "iterate_batches",
    "masked_mean",
    "masked_normalize",
    "naive_policy_gradient_loss",
    "parse_gsm8k_response",
    "parse_mmlu_response",
    "per_instance_dpo_loss",
    "policy_gradient_loss",
    "policy_microbatch_step",
    "response_log_probs",
    "sft_microbatch_step",
    "token_entropy",
    "tokenize_prompt_and_output",
]

# The arguments that each loss type reads in addition to the policy's log-probabilities.
LOSS_TYPES = {
    "no_baseline": ("raw_rewards",),
    "reinforce_with_baseline": ("advantages",),
    "grpo_clip": ("advantages", "old_log_probs", "cliprange"),
    "grpo_no_clip": ("advantages", "old_log_probs"),
}


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `tensor` where `mask` is 1, over `dim` or over everything; NaN where the mask selects nothing."""
    return losses.masked_mean(tensor, mask, dim)


def masked_normalize(tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None = None) -> Tensor:
    """Sum of `tensor` where `mask` is 1, over `dim` or over everything, divided by `normalize_constant`."""
    return losses.masked_normalize(tensor, mask, normalize_constant, dim)


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Rewards of a rollout, and their advantages within the groups of responses to one prompt.

    `(r - mean) / (std + advantage_eps)` with the sample standard deviation (divided by G - 1), or `r - mean` if
    `normalize_by_std` is False. A group of equal rewards, and one of a single response, has advantages of exactly 0.

    Args:
        reward_fn: maps a response and its ground truth to a dict of numbers, including `reward`.
        rollout_responses, repeated_ground_truths: N responses, grouped by prompt, and the ground truth of each.
        group_size: responses per prompt, G.

    Returns:
        Advantages [N] and rewards [N], float32, and metadata: the mean of each number that `reward_fn` returns for
        every response, `reward_std`, the groups' mean sample deviation, and `frac_reward_zero_std`, the fraction of
        groups without signal.

    Raises:
        ValueError: the lists differ in length, `group_size` does not divide it, or a reward is not finite.
    """
    scores = [reward_fn(*pair) for pair in zip(rollout_responses, repeated_ground_truths, strict=True)]
    rewards = torch.tensor([float(score["reward"]) for score in scores], dtype=torch.float32)
    if not rewards.isfinite().all():
        raise ValueError(f"reward_fn returned rewards that are not finite: {rewards.tolist()}")
    if normalize_by_std:
        advantages = group_normalized(rewards, group_size, std_ddof=1, eps=advantage_eps)
    else:
        advantages = group_centered(rewards, group_size)
    groups = rewards.reshape(-1, group_size)
    deviations = groups.std(dim=1) if group_size > 1 else torch.zeros(len(groups))
    names = [name for name in scores[0] if all(isinstance(score.get(name), (int, float)) for score in scores)]
    metadata = {name: sum(score[name] for score in scores) / len(scores) for name in names}
    metadata["reward_std"] = deviations.mean().item()
    metadata["frac_reward_zero_std"] = (groups == groups[:, :1]).all(dim=1).float().mean().item()
    return advantages, rewards, metadata


def naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """`-A log_prob` of each token, [B, T], for rewards or advantages of shape [B, 1], [B] or [B, T]."""
    return losses.reinforce(policy_log_probs, raw_rewards_or_advantages)


def grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-min(ratio A, clip(ratio, 1 - cliprange, 1 + cliprange) A)` of each token. [B, T].

    Advantages are [B, 1], [B] or [B, T], log-probabilities [B, T]; no gradient flows into the old ones.

    Returns:
        Losses, and metadata: `clipped`, [B, T], True where the clip made the loss larger, so that the token gives no
        gradient; `clip_fraction`, its mean over all B T positions, including padding.

    Raises:
        ValueError: `old_log_probs` has another shape.
    """
    log_ratio = _log_ratio(policy_log_probs, old_log_probs)
    clipped_losses = losses.clipped_surrogate(log_ratio, advantages, clip_low=cliprange, clip_high=cliprange)
    clipped = (clipped_losses > losses.unclipped_surrogate(log_ratio, advantages)).detach()
    return clipped_losses, {"clip_fraction": clipped.float().mean(), "clipped": clipped}


def policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token for a loss type. [B, T].

    | loss_type                 | loss                         | reads                                      |
    |---------------------------|------------------------------|--------------------------------------------|
    | `no_baseline`             | `naive_policy_gradient_loss` | `raw_rewards`                              |
    | `reinforce_with_baseline` | `naive_policy_gradient_loss` | `advantages`                               |
    | `grpo_clip`               | `grpo_clip_loss`             | `advantages`, `old_log_probs`, `cliprange` |
    | `grpo_no_clip`            | `-ratio A`                   | `advantages`, `old_log_probs`              |

    Arguments that the loss type does not read are ignored.

    Returns:
        Losses, and metadata as in `grpo_clip_loss`; without a clip, no token is clipped.

    Raises:
        ValueError: the loss type is unknown, an argument is missing, or a shape is wrong.
    """
    check_choice("loss_type", loss_type, LOSS_TYPES)
    given = {"raw_rewards": raw_rewards, "advantages": advantages}
    given |= {"old_log_probs": old_log_probs, "cliprange": cliprange}
    missing = [name for name in LOSS_TYPES[loss_type] if given[name] is None]
    if missing:
        raise ValueError(f"missing for the loss_type {loss_type!r}: {', '.join(missing)}")
    if loss_type == "grpo_clip":
        return grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)
    if loss_type == "grpo_no_clip":
        token_losses = losses.unclipped_surrogate(_log_ratio(policy_log_probs, old_log_probs), advantages)
    else:
        token_losses = naive_policy_gradient_loss(given[LOSS_TYPES[loss_type][0]], policy_log_probs)
    clipped = torch.zeros_like(token_losses, dtype=torch.bool)
    return token_losses, {"clip_fraction": clipped.float().mean(), "clipped": clipped}


def sft_microbatch_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, normalize_constant: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of one micro-batch, with its backward pass.

    Each row's sum over the response is divided by `normalize_constant`; the rows are averaged and divided by
    `gradient_accumulation_steps`. `policy_log_probs` have a gradient; they and the mask are [B, T].

    Returns:
        The loss, a scalar without gradient, and metadata: `token_count`, the number of response tokens, and
        `mean_log_prob` over them, NaN if there are none.

    Raises:
        ValueError: the mask has another shape, or `normalize_constant` is not positive.
    """
    _check_same_shape("response_mask", response_mask, policy_log_probs)
    row_losses = -masked_normalize(policy_log_probs, response_mask, normalize_constant, dim=1)
    mean_log_prob = masked_mean(policy_log_probs.detach(), response_mask)
    metadata = {"token_count": (response_mask != 0).sum(), "mean_log_prob": mean_log_prob}
    return _backward(row_losses.mean(), gradient_accumulation_steps), metadata


def policy_microbatch_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy-gradient loss of one micro-batch, with its backward pass.

    Each row's mean over the response is averaged over the rows and divided by `gradient_accumulation_steps`. A row
    without response tokens counts as 0 and is one of the B rows: its mean would be NaN and so would every gradient.
    The arguments are those of `sft_microbatch_step` and of `policy_gradient_loss`.

    Returns:
        The loss, a scalar without gradient, and metadata as in `grpo_clip_loss`, but over response tokens only; the
        fraction is NaN if there are none.

    Raises:
        ValueError: see `policy_gradient_loss` and `sft_microbatch_step`.
    """
    _check_same_shape("response_mask", response_mask, policy_log_probs)
    token_losses, metadata = policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    clipped = metadata["clipped"] & (response_mask != 0)
    metadata = {"clip_fraction": masked_mean(clipped.float(), response_mask), "clipped": clipped}
    loss = losses.aggregate(token_losses, response_mask, "sequence_mean")
    return _backward(loss, gradient_accumulation_steps), metadata


def per_instance_dpo_loss(
    lm, lm_ref, tokenizer, beta: float, prompt: str, response_chosen: str, response_rejected: str
) -> Tensor:
    """DPO loss of one pair of responses; a scalar, with gradient to `lm`.

    Prompt and response are put into the Alpaca template, followed by the end-of-text token. Log-probabilities cover
    the whole text: the prompt's part is the same in both and cancels.

    Args:
        lm: the model to train; its mode is not changed.
        lm_ref: the reference, without gradient; put it into evaluation mode.
        tokenizer: the tokenizer of both models.
        beta: strength of the preference signal.

    Raises:
        ValueError: the tokenizer has no end-of-text token.

    Rafailov et al. 2023, arXiv 2305.18290, equation 7.
    """
    rows = [{"prompt": prompt, "response": response} for response in (response_chosen, response_rejected)]
    documents = encode_documents(tokenizer, rows)
    policy = [_text_log_prob(lm, ids) for ids in documents]
    with torch.no_grad():
        reference = [_text_log_prob(lm_ref, ids).to(policy[0]) for ids in documents]
    return losses.dpo(losses.PreferenceScores(*policy, *reference), beta=beta)


def _text_log_prob(model, ids: list[int]) -> Tensor:
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    return response_log_probs(model, tokens[:, :-1], tokens[:, 1:])["log_probs"].sum()


def _log_ratio(policy_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    _check_same_shape("old_log_probs", old_log_probs, policy_log_probs)
    return losses.token_log_ratio(policy_log_probs, old_log_probs.detach())


def _backward(loss: Tensor, gradient_accumulation_steps: int) -> Tensor:
    loss = loss / gradient_accumulation_steps
    loss.backward()
    return loss.detach()


def _check_same_shape(name: str, tensor: Tensor, policy_log_probs: Tensor) -> None:
    """Refuse what broadcasting would hide."""
    if tensor.shape != policy_log_probs.shape:
        raise ValueError(
            f"{name} must have the shape of policy_log_probs, {list(policy_log_probs.shape)}, got {list(tensor.shape)}"
        )


# ---- Packed data for fine-tuning ----


def encode_documents(tokenizer, rows: list[dict[str, str]]) -> list[list[int]]:
    """Token ids of each `prompt` with its `response` in the Alpaca template, followed by one end-of-text token.

    Raises:
        ValueError: the tokenizer has no end-of-text token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer has no end-of-text token to end a document with: set tokenizer.eos_token")
    template = load_prompt_template("alpaca_sft")
    texts = [render(template, row["prompt"]) + row["response"] for row in rows]
    # Documents may be longer than the model's context here, so the warning is suppressed.
    documents = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    return [ids if ids and ids[-1] == end else [*ids, end] for ids in documents]


class PackedSFTDataset(Dataset):
    """Instruction examples in the Alpaca template, packed: every item is full of tokens.

    Documents are tokenized, each followed by the end-of-text token, joined, and cut into sequences; an incomplete
    last sequence is dropped. An item is a dict of `input_ids` and `labels`, int64 of shape [seq_length] each. A label
    is the token after its input, so the last label of an item is the first input of the next. The stream is held in
    memory, at 8 bytes per token.

    Args:
        tokenizer: a tokenizer of transformers with an end-of-text token.
        dataset_path: a file of one JSON object with the texts `prompt` and `response` per line; `.gz` is decompressed.
        seq_length: tokens per item.
        shuffle: whether to shuffle the documents before joining them, with torch's random state.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a line is bad (the message gives its number), there are too few tokens for one sequence,
            `seq_length` is below 1, or the tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer, dataset_path: str | os.PathLike, seq_length: int, shuffle: bool):
        if seq_length < 1:
            raise ValueError(f"seq_length must be at least 1, got {seq_length}")
        split = read_jsonl(dataset_path)
        names = ("prompt", "response")
        rows = split.check(lambda row: {name: text_field(row, name, may_be_empty=True) for name in names})
        if split.problems:
            raise ValueError(split.describe())
        if shuffle:
            rows = [rows[index] for index in torch.randperm(len(rows)).tolist()]
        pieces = [torch.empty(0, dtype=torch.long)]
        # Enough documents in a call to use the tokenizer's threads, few enough to limit the memory of lists.
        for start in range(0, len(rows), 1000):
            documents = encode_documents(tokenizer, rows[start : start + 1000])
            pieces.append(torch.tensor([token for document in documents for token in document]))
        self.seq_length = seq_length
        self._tokens = torch.cat(pieces)
        if not len(self):
            raise ValueError(
                f"{dataset_path}: {len(self._tokens)} tokens do not fill one sequence of {seq_length} and its labels, "
                f"for which it takes {seq_length + 1}: give more examples or a smaller seq_length"
            )

    def __len__(self) -> int:
        # The last label needs one more token.
        return max(len(self._tokens) - 1, 0) // self.seq_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(len(self))[index] * self.seq_length
        end = start + self.seq_length
        # Copy, so that changing an item does not change its neighbours.
        return {"input_ids": self._tokens[start:end].clone(), "labels": self._tokens[start + 1 : end + 1].clone()}


def iterate_batches(dataset: Dataset, batch_size: int, shuffle: bool) -> DataLoader:
    """Batches of one pass over a data set such as `PackedSFTDataset`; the last one may be smaller.

    An iterable with a length, over dicts of tensors of shape [B, ...]. With `shuffle`, each pass has a new order.
    """
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)
