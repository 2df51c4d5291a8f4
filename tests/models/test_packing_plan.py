"""The plan of a packed pass: every row recoverable, one next token for each position, and no token twice."""

from __future__ import annotations

import random

import pytest

from tests.support.packing import padded
from trl_ext.models.packing.planner import plan_batch

IGNORED = -100


def planned(batch, **options):
    return plan_batch(batch["input_ids"], batch["attention_mask"], batch.get("labels"), **options)


# ---- An example worked by hand ----


def test_hand_worked_example():
    """Two rows of the prompt 5 6 7, one answered 8 1, one answered 9 1, and a third that is 5 6 7 8 1 again.

        column     0 1 2 3 4          what predicts a label     needed
        row 0      5 6 7 8 1          7 and 8                   5 6 7 8
        row 1      5 6 7 9 1          7 and 9                   5 6 7 9
        row 2      5 6 7 8 1          7 and 8                   5 6 7 8

    Sorted: 0, 2, 1. Row 0 lays 5 6 7 8 at places 0 to 3, for the last token predicts nothing. Row 2 adds nothing. Row
    1 has 5 6 7 in common, but after 7 comes 8 in the one and 9 in the other, so the prefix is left a token earlier: it
    shares 5 6, places 0 and 1, and adds 7 9 at places 4 and 5.

        place      0 1 2 3 4 5
        token      5 6 7 8 7 9
        position   0 1 2 3 2 3
        label      - - 8 1 9 1
    """
    batch = padded([[5, 6, 7, 8, 1], [5, 6, 7, 9, 1], [5, 6, 7, 8, 1]], [3, 3, 3])
    plan = planned(batch, minimum_shared=1)
    assert plan.input_ids.tolist() == [[5, 6, 7, 8, 7, 9]]
    assert plan.position_ids.tolist() == [[0, 1, 2, 3, 2, 3]]
    assert plan.shift_labels(batch["labels"]).tolist() == [[IGNORED, IGNORED, 8, 1, 9, 1]]
    assert plan.query_lengths == (4, 2)
    assert plan.key_lengths == (4, 4)
    assert plan.key_index.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]
    assert plan.columns.tolist() == [[0, 1, 2, 3, 0], [0, 1, 4, 5, 0], [0, 1, 2, 3, 0]]
    assert plan.present.int().tolist() == [[1, 1, 1, 1, 0]] * 3
    assert plan.shares is True
    assert plan.tokens == 6


def test_hand_worked_example_without_labels():
    """Every token is encoded, as a score is read at the last, and prefixes part where the tokens do: 5 + 0 + 2."""
    batch = padded([[5, 6, 7, 8, 1], [5, 6, 7, 9, 1], [5, 6, 7, 8, 1]], [3, 3, 3])
    plan = plan_batch(batch["input_ids"], batch["attention_mask"], minimum_shared=1)
    assert plan.input_ids.tolist() == [[5, 6, 7, 8, 1, 9, 1]]
    assert plan.columns.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 1, 2, 3, 4]]
    assert plan.key_index.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6]


# ---- Properties of random batches ----


def random_batch(seed: int) -> tuple[dict, list[list[int]], list[int]]:
    """A batch, its rows and the number of tokens that each must encode for its labels.

    Rows grow out of each other: duplicates, prefixes of others, forks, one-token rows, labels that end before the row
    does, labels that start late, none at all; padding on either side.
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
    prompts = [draw.choice([1, draw.randint(1, len(row)), len(row)]) for row in rows]
    batch = padded(rows, prompts, left=left, width=width)
    needed = []
    for index, (row, prompt, before) in enumerate(zip(rows, prompts, left, strict=True)):
        # Truncated: no labels from here on.
        end = draw.choice([len(row), draw.randint(prompt, len(row))])
        batch["labels"][index, before + end :] = IGNORED
        # A hole in the labels, as of a tool's output.
        if end - prompt > 3 and draw.random() < 0.3:
            batch["labels"][index, before + prompt + 1] = IGNORED
        needed.append(end - 1 if end > prompt else 1)
    return batch, rows, needed


def prefixes(rows, needed, *, labelled: bool) -> int:
    """Distinct prefixes that have to be encoded: with labels, two tokens are one if the next token is one too."""
    ends = [(row, end) for row, last in zip(rows, needed, strict=True) for end in range(1, last + 1)]
    return len({tuple(row[: end + labelled]) for row, end in ends})


def check(plan, batch, rows, needed) -> None:
    """A plan against the rows it is of, by reading it as attention does."""
    first = batch["attention_mask"].argmax(dim=1).tolist()
    starts = [sum(plan.query_lengths[:i]) for i in range(len(plan.query_lengths))]
    paths = [path.tolist() for path in plan.key_index.split(plan.key_lengths)]
    tokens, positions = plan.input_ids[0].tolist(), plan.position_ids[0].tolist()
    columns, present = plan.columns.tolist(), plan.present.tolist()
    assert sum(plan.query_lengths) == plan.tokens and sum(plan.key_lengths) == len(plan.key_index)
    assert plan.columns.shape == plan.present.shape == batch["input_ids"].shape
    for index, (row, last) in enumerate(zip(rows, needed, strict=True)):
        held = [column for column, is_held in enumerate(present[index]) if is_held]
        assert held == list(range(first[index], first[index] + last))
        places = [columns[index][column] for column in held]
        assert [tokens[place] for place in places] == row[:last]
        assert [positions[place] for place in places] == list(range(last))
        for position, place in enumerate(places):
            segment = max(i for i, start in enumerate(starts) if start <= place)
            # The segment is the end of its path, so the token sees the path up to itself: the row up to itself.
            seen = len(paths[segment]) - plan.query_lengths[segment] + place - starts[segment] + 1
            assert paths[segment][:seen] == places[: position + 1]


def check_labels(plan, batch) -> None:
    """Each packed position has one next-token label, and every label of the batch has its position."""
    labels, shifted = batch["labels"].tolist(), plan.shift_labels(batch["labels"])[0]
    columns, present = plan.columns.tolist(), plan.present.tolist()
    claims: dict[int, set[int]] = {}
    for row, column in (batch["labels"][:, 1:] != IGNORED).nonzero().tolist():
        assert present[row][column]
        claims.setdefault(columns[row][column], set()).add(labels[row][column + 1])
    assert all(len(claimed) == 1 for claimed in claims.values())
    expected = [claims[place].pop() if place in claims else IGNORED for place in range(plan.tokens)]
    assert shifted.tolist() == expected


@pytest.mark.parametrize("block", range(4))
def test_random_batches(block):
    """1200 batches, each planned with and without labels, with and without sharing, and with another threshold.

    With a smallest shared prefix of one token, the tokens encoded are as many as there are distinct prefixes: no plan
    has fewer.
    """
    for seed in range(300 * block, 300 * block + 300):
        batch, rows, needed = random_batch(seed)
        lengths = [len(row) for row in rows]
        plan = planned(batch, minimum_shared=1)
        check(plan, batch, rows, needed)
        check_labels(plan, batch)
        # A row of one token has no next token to tell it from another: it is encoded each time.
        single = [row for row, length in zip(rows, lengths, strict=True) if length == 1]
        longer = [(row, last) for row, last in zip(rows, needed, strict=True) if len(row) > 1]
        assert plan.tokens == len(single) + (prefixes(*zip(*longer, strict=True), labelled=True) if longer else 0)
        assert plan.shares is (plan.tokens < sum(needed))

        plan = plan_batch(batch["input_ids"], batch["attention_mask"], minimum_shared=1)
        check(plan, batch, rows, lengths)
        assert plan.tokens == prefixes(rows, lengths, labelled=False)

        plan = planned(batch, share=False)
        check(plan, batch, rows, needed)
        assert plan.tokens == sum(needed) and plan.shares is False
        assert plan.query_lengths == plan.key_lengths == tuple(needed)

        least = seed % 5 + 2
        plan = planned(batch, minimum_shared=least)
        check(plan, batch, rows, needed)
        check_labels(plan, batch)
        inherited = [keys - added for keys, added in zip(plan.key_lengths, plan.query_lengths, strict=True)]
        assert all(shared == 0 or shared >= least for shared in inherited)


# ---- Single cases ----


def test_short_prefixes_are_shared_from_eight_tokens_on():
    def tokens(common: int) -> int:
        rows = [[*range(10, 10 + common), 3, 4], [*range(10, 10 + common), 5, 6]]
        return plan_batch(*(padded(rows, [1, 1])[name] for name in ("input_ids", "attention_mask"))).tokens

    assert tokens(7) == 18
    assert tokens(8) == 8 + 2 + 2


def test_label_of_the_first_column_is_never_scored():
    """A causal model predicts from the second token on; labels that are a copy of the input have one there."""
    for width in (3, 5):
        batch = padded([[5, 6, 7]], [0], width=width)
        assert batch["labels"][0, :3].tolist() == [5, 6, 7]
        plan = planned(batch)
        assert plan.input_ids.tolist() == [[5, 6]]
        assert plan.shift_labels(batch["labels"]).tolist() == [[6, 7]]


@pytest.mark.parametrize(
    "spoilt",
    [
        {("attention_mask", 0, 2): 0},
        {("attention_mask", 1): 0, ("labels", 1): IGNORED},
        {("labels", 1, 4): 0},
        {("labels", 1, 1): 5},
        {("labels", 0, 4): 10},
    ],
    ids=["hole", "empty row", "label on padding", "label on the first token", "another label"],
)
def test_batches_that_no_plan_fits(spoilt):
    batch = padded([[5, 6, 7, 8, 9], [5, 6, 7]], [2, 2], left=[0, 1], width=5)
    assert planned(batch) is not None
    for (name, *place), value in spoilt.items():
        batch[name][*place] = value
    assert planned(batch) is None
