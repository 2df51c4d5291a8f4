"""How many tokens packing leaves of the benchmarks' workloads: counted, without a clock."""

from __future__ import annotations

import pytest
import torch

from benchmarks._lengths import generation_batches, groups, pairs, wildchat_lengths
from trl_ext.models.packing.planner import plan_batch

VOCABULARY = 2048
Row = tuple[list[int], list[int]]  # prompt, response


def pad(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`input_ids`, `attention_mask` and `labels` of rows padded to the longest."""
    width = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for index, (prompt, response) in enumerate(rows):
        tokens = torch.tensor(prompt + response)
        ids[index, : len(tokens)] = tokens
        mask[index, : len(tokens)] = 1
        labels[index, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return ids, mask, labels


def packed_tokens(rows: list[Row], **keywords) -> int:
    return plan_batch(*pad(rows), **keywords).tokens


def stock_tokens(rows: list[Row]) -> int:
    """Rows times the longest."""
    return len(rows) * max(len(prompt) + len(response) for prompt, response in rows)


def policy_rows(kind: str, size: int) -> list[list[Row]]:
    """The rows of each generation batch of 16 prompts, groups contiguous."""
    drawn = groups(kind, size, vocabulary=VOCABULARY)
    return [
        [(group.prompt, response) for group in batch for response in group.responses]
        for batch in generation_batches(drawn)
    ]


def preference_batches() -> list[list[Row]]:
    rows = pairs("wildchat", vocabulary=VOCABULARY)
    return [
        [(pair.prompt, pair[side]) for side in (1, 2) for pair in rows[start : start + 4]]
        for start in range(0, len(rows), 4)
    ]


def share(batches: list[list[Row]], **keywords) -> float:
    """Packed over stock tokens of all batches."""
    return sum(packed_tokens(rows, **keywords) for rows in batches) / sum(map(stock_tokens, batches))


def distinct_tokens(lengths: list[tuple[int, int, int]]) -> int:
    """Tokens that pairs without anything in common need, from their lengths alone.

    A prompt of p tokens is shared up to its last but one, p - 1, as each side predicts its own first token from that
    last one; each side of r tokens adds that one and r - 1 more, since its last token predicts nothing: r. A prompt of
    fewer than nine has fewer than eight tokens to share, and is encoded twice.
    """
    assert min(prompt for prompt, _, _ in lengths) >= 9
    return sum(prompt - 1 + chosen + rejected for prompt, chosen, rejected in lengths)


def test_the_committed_lengths_are_those_of_the_held_out_pairs():
    """Mean and median, Qwen2.5's template included: prompts 98 and 58, chosen 241 and 229, rejected 216 and 182."""
    lengths = torch.tensor(wildchat_lengths(), dtype=torch.float)
    assert lengths.shape == (256, 3)
    assert lengths.mean(0).tolist() == pytest.approx([98, 241, 216], abs=1)
    assert lengths.median(0).values.tolist() == pytest.approx([58, 229, 182], abs=2)
    assert lengths.max(0).values.tolist() == [700, 512, 512]


def test_preference_pairs_of_an_epoch_take_less_than_half_the_tokens():
    lengths = wildchat_lengths()
    batches = preference_batches()
    packed = sum(packed_tokens(rows) for rows in batches)
    assert packed == distinct_tokens(lengths)
    stock = sum(
        8 * max(prompt + max(chosen, rejected) for prompt, chosen, rejected in lengths[start : start + 4])
        for start in range(0, 256, 4)
    )
    assert sum(map(stock_tokens, batches)) == stock
    assert packed / stock <= 0.50


def test_policy_batches_with_whole_groups_take_little_more_than_a_third():
    """16 prompts with 4 responses each, 16 times."""
    batches = policy_rows("wildchat", 4)
    assert [len(rows) for rows in batches] == [64] * 16
    assert share(batches) <= 0.37


@pytest.mark.parametrize(("size", "most"), [(4, 0.46), (8, 0.36), (16, 0.32)])
def test_long_prompts_are_encoded_once_for_their_group(size, most):
    """A prompt of 700 and G responses of 256: 699 shared tokens and 256 of each, the last of the prompt among them.

    G = 4: 1723 of 4 x 956 = 3824 tokens, 0.451; G = 8: 2747 of 7648; G = 16: 4795 of 15296.
    """
    rows = policy_rows("long", size)[0][:size]
    assert packed_tokens(rows) == 699 + size * 256
    assert packed_tokens(rows) / stock_tokens(rows) <= most


def test_without_sharing_padding_alone_is_saved():
    """The negative control: every row is encoded whole but for its last token, which predicts nothing."""
    batches = preference_batches()
    each = sum(len(prompt) + len(response) - 1 for rows in batches for prompt, response in rows)
    assert sum(packed_tokens(rows, share=False) for rows in batches) == each
    assert share(batches, share=False) > 0.54
