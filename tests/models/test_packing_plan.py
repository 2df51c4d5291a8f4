"""The plan of a packed pass: every row recoverable, and no token twice."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.packing import padded
from trl_ext.models.packing.plan import plan_batch


def planned(batch, drop_last: bool = False, **options):
    labels = [batch["labels"]] if drop_last else []
    return plan_batch(batch["input_ids"], batch["attention_mask"], *labels, **options)


# ---- An example worked by hand ----


def test_hand_worked_example():
    """Two rows of the prompt 5 6 7, one answered 8 1, one answered 9 1, and a third that is 5 6 7 8 1 again.

    Sorted: 0, 2, 1. Row 0 lays 5 6 7 8 1 at places 0 to 4. Row 2 adds nothing. Row 1 has 5 6 7 in common, places 0 to
    2, and adds 9 1 at places 5 and 6.

        place      0 1 2 3 4 5 6
        token      5 6 7 8 1 9 1
        position   0 1 2 3 4 3 4
    """
    batch = padded([[5, 6, 7, 8, 1], [5, 6, 7, 9, 1], [5, 6, 7, 8, 1]], [3, 3, 3], left=[0, 0, 1])
    plan = planned(batch, minimum_shared=1)
    assert plan.input_ids.tolist() == [[5, 6, 7, 8, 1, 9, 1]]
    assert plan.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4]]
    assert plan.query_lengths == (5, 2)
    assert plan.key_lengths == (5, 5)
    assert plan.key_index.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6]
    assert plan.columns.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 5, 6, 0], [0, 0, 1, 2, 3, 4]]
    assert plan.present.int().tolist() == [[1, 1, 1, 1, 1, 0]] * 2 + [[0, 1, 1, 1, 1, 1]]
    assert plan.shares is True
    assert plan.tokens == 7
    states = torch.arange(1.0, 8)[None, :, None].requires_grad_()
    unpacked = plan.unpack(states)
    assert unpacked[..., 0].tolist() == [[1, 2, 3, 4, 5, 0], [1, 2, 3, 6, 7, 0], [0, 1, 2, 3, 4, 5]]
    unpacked.sum().backward()
    assert states.grad.flatten().tolist() == [3, 3, 3, 2, 2, 1, 1]


def test_hand_worked_example_without_last_tokens():
    """The last token of a row predicts nothing: 5 6 7 8 and 9 are left, and a row of one token keeps it."""
    batch = padded([[5, 6, 7, 8, 1], [5, 6, 7, 9, 1], [5]], [3, 3, 1])
    plan = planned(batch, minimum_shared=2, drop_last=True)
    assert plan.input_ids.tolist() == [[5, 5, 6, 7, 8, 9]]
    assert plan.columns.tolist() == [[1, 2, 3, 4, 0], [1, 2, 3, 5, 0], [0, 0, 0, 0, 0]]
    assert plan.present.sum(dim=1).tolist() == [4, 4, 1]


# ---- Properties of random batches ----


def random_batch(seed: int) -> tuple[dict, list[list[int]]]:
    """A batch and its rows.

    Rows grow out of each other: duplicates, prefixes of others, forks, one-token rows; padding on either side.
    """
    draw = random.Random(seed)
    # The number of the padding among them: what is padding is for the mask to say.
    tokens = range(draw.choice([2, 3, 60]))
    rows: list[list[int]] = []
    for _ in range(draw.randint(1, 9)):
        stem = draw.choice(rows)[: draw.randint(0, 14)] if rows and draw.random() < 0.8 else []
        rows.append(stem + draw.choices(tokens, k=draw.randint(0 if stem else 1, 12)))
    left = [draw.choice([0, 0, draw.randint(0, 5)]) for _ in rows]
    width = max(len(row) + before for row, before in zip(rows, left, strict=True)) + draw.choice([0, 0, 3])
    return padded(rows, [1] * len(rows), left=left, width=width), rows


def check(plan, batch, rows) -> None:
    """A plan against the rows it is of, by reading it as attention does."""
    first = batch["attention_mask"].argmax(dim=1).tolist()
    starts = [sum(plan.query_lengths[:i]) for i in range(len(plan.query_lengths))]
    paths = [path.tolist() for path in plan.key_index.split(plan.key_lengths)]
    tokens, positions = plan.input_ids[0].tolist(), plan.position_ids[0].tolist()
    columns, present = plan.columns.tolist(), plan.present.tolist()
    assert sum(plan.query_lengths) == plan.tokens and sum(plan.key_lengths) == len(plan.key_index)
    assert plan.columns.shape == plan.present.shape == batch["input_ids"].shape
    for index, row in enumerate(rows):
        held = [column for column, is_held in enumerate(present[index]) if is_held]
        assert held == list(range(first[index], first[index] + len(row)))
        places = [columns[index][column] for column in held]
        assert [tokens[place] for place in places] == row
        assert [positions[place] for place in places] == list(range(len(row)))
        for position, place in enumerate(places):
            segment = max(i for i, start in enumerate(starts) if start <= place)
            # The segment is the end of its path, so the token sees the path up to itself: the row up to itself.
            seen = len(paths[segment]) - plan.query_lengths[segment] + place - starts[segment] + 1
            assert paths[segment][:seen] == places[: position + 1]


@pytest.mark.parametrize("block", range(4))
def test_random_batches(block):
    """1200 batches, each planned with and without last tokens, with and without sharing, filled up, and with another
    threshold.

    With a smallest shared prefix of one token, the tokens encoded are as many as there are distinct prefixes: no plan
    has fewer.
    """
    for seed in range(300 * block, 300 * block + 300):
        batch, rows = random_batch(seed)
        for drop_last in (False, True):
            encoded = [row[:-1] if drop_last and len(row) > 1 else row for row in rows]
            plan = planned(batch, minimum_shared=1, drop_last=drop_last)
            check(plan, batch, encoded)
            assert plan.tokens == len({tuple(row[:end]) for row in encoded for end in range(1, len(row) + 1)})
            assert plan.shares is (plan.tokens < sum(map(len, encoded)))

            plan = planned(batch, share=False, drop_last=drop_last)
            check(plan, batch, encoded)
            assert plan.tokens == sum(map(len, encoded)) and plan.shares is False
            assert plan.query_lengths == plan.key_lengths == tuple(map(len, encoded))

            filled = planned(batch, minimum_shared=1, drop_last=drop_last, round_up=True)
            check(filled, batch, encoded)
            shortest = planned(batch, minimum_shared=1, drop_last=drop_last)
            assert filled.tokens == -(-shortest.tokens // 128) * 128
            assert filled.input_ids[0, : shortest.tokens].tolist() == shortest.input_ids[0].tolist()

            least = seed % 5 + 2
            plan = planned(batch, minimum_shared=least, drop_last=drop_last)
            check(plan, batch, encoded)
            inherited = [keys - added for keys, added in zip(plan.key_lengths, plan.query_lengths, strict=True)]
            assert all(shared == 0 or shared >= least for shared in inherited)


# ---- Single cases ----


def test_short_prefixes_are_shared_from_eight_tokens_on():
    def tokens(common: int) -> int:
        rows = [[*range(10, 10 + common), 3, 4], [*range(10, 10 + common), 5, 6]]
        return planned(padded(rows, [1, 1])).tokens

    assert tokens(7) == 18
    assert tokens(8) == 8 + 2 + 2


@pytest.mark.parametrize("place", [(0, 2), (1,)], ids=["hole", "empty row"])
def test_batches_that_no_plan_fits(place):
    batch = padded([[5, 6, 7, 8, 9], [5, 6, 7]], [2, 2], left=[0, 1], width=5)
    assert planned(batch) is not None
    batch["attention_mask"][*place] = 0
    assert planned(batch) is None
