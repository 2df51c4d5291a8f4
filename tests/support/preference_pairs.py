"""The pairs that the loss tests share: three with values worked by hand, and how to make scores of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trl_ext.losses import PreferenceScores
from trl_ext.registry import preference_losses


class Pair(NamedTuple):
    chosen: float
    rejected: float
    ref_chosen: float
    ref_rejected: float
    chosen_length: int = 1
    rejected_length: int = 1

    @property
    def h_w(self) -> float:
        return self.chosen - self.ref_chosen

    @property
    def h_l(self) -> float:
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> float:
        return (self.chosen - self.rejected) - (self.ref_chosen - self.ref_rejected)

    @property
    def mean_difference(self) -> float:
        return self.chosen / self.chosen_length - self.rejected / self.rejected_length


PAIRS = {
    "A": Pair(-20.0, -30.0, -22.0, -29.0, 8, 10),
    "B": Pair(-15.0, -12.0, -14.0, -13.0, 6, 5),
    "C": Pair(-10.0, -18.0, -9.5, -19.5, 4, 6),
}
# Other tests may register losses of their own in the same table.
REGISTERED = sorted(n for n in preference_losses if preference_losses[n].function.__module__.startswith("trl_ext."))
REFERENCE_FREE = {"simpo", "repo", "cpo", "orpo"}
BATCH_COUPLED = {"aot", "aot_paired"}


def scores_of(pairs: list[Pair], dtype=torch.float64, requires_grad=False) -> PreferenceScores:
    columns = [torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True)]
    for column in columns[:2]:
        column.requires_grad_(requires_grad)
    return PreferenceScores(*columns)


def canonical(names="ABC", **options) -> PreferenceScores:
    return scores_of([PAIRS[name] for name in names], **options)


def scores_of_log_ratios(chosen, rejected, requires_grad=False) -> PreferenceScores:
    """Scores with the given `h_w` and `h_l`: the reference's are all -7 and -9."""
    pairs = [Pair(h_w - 7.0, h_l - 9.0, -7.0, -9.0) for h_w, h_l in zip(chosen, rejected, strict=True)]
    return scores_of(pairs, requires_grad=requires_grad)
