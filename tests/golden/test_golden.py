"""Every loss, gradient and advantage is the one that `values.jsonl` holds."""

from __future__ import annotations

import math

import pytest

from tests.golden.objectives import built_in
from tests.golden.record import computed, differences, recorded
from trl_ext import course
from trl_ext.advantages import ADVANTAGES
from trl_ext.algorithms import algorithms
from trl_ext.registry import preference_losses, preference_weightings

# Of the course, the functions of tensors, and not those that read texts and files.
MODULES = ("trl_ext.course", "trl_ext.models.scoring", "trl_ext.models.tokens")
COURSE = [name for name in course.__all__ if getattr(course, name).__module__ in MODULES]
COURSE = [name for name in COURSE if name not in ("PackedSFTDataset", "iterate_batches")]
TABLES = {
    "preference": preference_losses,
    "weighting": preference_weightings,
    "algorithm": algorithms,
    "advantages of algorithm": algorithms,
    "advantage": ADVANTAGES,
    "losses": ["bradley_terry", "kto"],
    "course": COURSE,
}


def test_every_value_is_the_recorded_one():
    found = list(differences(recorded(), computed()))
    assert not found, "\n".join([f"{len(found)} differ from values.jsonl, of tests.golden.record:", *found[:30]])


@pytest.mark.parametrize("kind", TABLES)
def test_every_name_of_a_table_is_recorded(kind):
    names = {part for row in recorded() if row.startswith(f"{kind}/") for part in row.split("/")[1].split("+")}
    assert not set(built_in(TABLES[kind])) - names


@pytest.mark.parametrize(
    ("values", "differ"),
    [
        ({"a": [1 + 1e-13, 0, math.nan]}, ""),
        ({"a": [1 + 1e-11, 0, math.nan]}, "row, a[0]: 1.0 recorded, 1.00000000001 computed"),
        ({"a": [1.0, 1e-30, math.nan]}, "row, a[1]: 0 recorded, 1e-30 computed"),
        ({"a": [1.0, 0, 2.0]}, "row, a[2]: nan recorded, 2.0 computed"),
        ({"a": [1.0, 0]}, "row, a: 3 values recorded, 2 computed"),
        ({}, "row, a: 3 values recorded, 0 computed"),
    ],
)
def test_what_counts_as_a_difference(values, differ):
    assert "".join(differences({"row": {"a": [1.0, 0, math.nan]}}, {"row": values})) == differ
