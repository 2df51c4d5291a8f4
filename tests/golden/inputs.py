"""Fixed inputs in float64 for the golden values.

They are multiples of powers of 2 or written out, so that sums and differences of them are exact: equal log-ratios are
equal on every processor, and no token lies at the edge of a clip.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from trl_ext.losses import PreferenceScores


def table(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def grid(rows: int, columns: int, factor: int, divisor: int, start: float = 0.0) -> Tensor:
    """`start + (factor k mod divisor) / divisor` for the k-th entry; exact if the divisor is a power of 2."""
    entries = [(factor * k % divisor) / divisor + start for k in range(rows * columns)]
    return torch.tensor(entries, dtype=torch.float64).reshape(rows, columns)


# ---- Pairs ----

# Sums of the chosen and the rejected response, the same under the reference, and lengths.
PAIRS = table(
    (-10, -14, -12, -12, 8, 8),
    (-14, -10, -12, -12, 8, 8),
    (-20, -6, -21, -8, 16, 4),
    (-6, -20, -4.5, -20.5, 4, 16),
    # No margin at all, no margin under the policy, and the log-ratios of the first pair again.
    (-9, -9, -9, -9, 8, 8),
    (-12, -12, -10, -14, 6, 12),
    (-11, -15, -13, -13, 10, 10),
    # The margin of 2 at which the hinge of beta 0.5 ends.
    (-10, -12, -12, -12, 8, 8),
    # Extreme margins of both signs.
    (-500, -3, -2, -400, 64, 1),
    (-3, -500, -400, -2, 1, 64),
    # Probabilities near 1, and one of exactly 1.
    (-1 / 1024, -1 / 2048, -1, -1, 1, 1),
    (0, -8, -1, -9, 2, 5),
).T
CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, CHOSEN_LENGTH, REJECTED_LENGTH = PAIRS
COLUMNS = {
    "avg_confidence": grid(1, 12, 5, 16, 1 / 16)[0],
    "win": grid(1, 12, 3, 8)[0],
    "loss": grid(1, 12, 7, 16)[0],
}


def pairs(chosen: Tensor, rejected: Tensor, rows: slice = slice(None)) -> PreferenceScores:
    """The scores of these pairs, with the log-probabilities given.

    Weights would have a gradient if they were not detached: adding `moved`, which is 0, does not change their values.
    """
    moved = chosen - CHOSEN
    columns = {**COLUMNS, "avg_confidence": COLUMNS["avg_confidence"] + moved}
    return PreferenceScores(
        chosen[rows],
        rejected[rows],
        REF_CHOSEN[rows],
        REF_REJECTED[rows],
        CHOSEN_LENGTH[rows].long(),
        REJECTED_LENGTH[rows].long(),
        {name: values[rows] for name, values in columns.items()},
        (grid(1, 12, 3, 8, 0.5)[0] + moved)[rows],
        (grid(1, 12, 5, 8, 0.75)[0] + moved)[rows],
    )


# ---- Responses ----

# Log of new over old probability. A response of each sign of the advantage is beyond either clip, by tokens and as a
# whole; the third is within GSPO's, the sixth has one token and the last none.
LOG_RATIO = table(
    (0.5, -0.5, 0.125, 0.0625, -0.125),
    (0.5, -0.5, 0.125, -0.0625, 0),
    (1 / 4096, 1 / 2048, 0, 1 / 8192, 0),
    (-0.125, -2, 1.5, 0, 0),
    (-0.25, 0.125, -0.5, 0.0625, 0),
    (0.5, 0, 0, 0, 0),
    (0, 0, 0, 0, 0),
)
LENGTHS = (5, 4, 5, 3, 5, 1, 0)
MASK = table(*([float(token < length) for token in range(5)] for length in LENGTHS))
# A token that does not count within a response, as one of a tool.
MASK[2, 2] = 0
RESPONSE_ADVANTAGES = table(1.25, -0.75, 0.5, -2, 0.5, 0.75, 1)
TOKEN_ADVANTAGES = RESPONSE_ADVANTAGES.unsqueeze(1) * grid(7, 5, 3, 4)
OLD_LOG_PROBS = grid(7, 5, 7, 32, -1.25) * 2
LOG_PROBS = OLD_LOG_PROBS + LOG_RATIO
REF_LOG_PROBS = LOG_PROBS + grid(7, 5, 5, 16, -0.5)
WEIGHTS = grid(7, 5, 5, 8, 0.25)
# The same with log-ratios beyond the clamp of exponents, and NaN at padding.
FAR = LOG_RATIO + table(*([25 * (t == 0) - 40 * (t == 2) for t in range(5)] for _ in range(7)))
FAR_LOG_PROBS = (OLD_LOG_PROBS + FAR).masked_fill(MASK == 0, math.nan)
FAR_REF_LOG_PROBS = (FAR_LOG_PROBS + 30 * grid(7, 5, 1, 2, -0.25)).masked_fill(MASK == 0, math.nan)

# ---- Rewards ----

# Groups of four: mixed, all equal (their mean is rounded), one winner, and equal but for the last digits.
REWARDS = table(0, 1, 0.5, 0.25, 0.1, 0.1, 0.1, 0.1, 0, 0, 0, 1, 3, 3, 3, 3 + 2**-20)
# Responses that could not be scored, and a group of which only one could.
UNSCORED = table(0, 1, math.nan, 0.25, math.nan, math.inf, 0.5, math.nan, 2, 0, 0, -math.inf, 1, 1, 1, math.nan)
GREEDY_REWARDS = table(0.5, 0.25, math.nan, -1)
LOGITS = table((0, 0, 0, 0, 0), (-math.inf, 0, 1, -math.inf, 2), (900, 0, 0, -900, 1), (-2, 0.5, 1, -0.25, 3))

# ---- Texts ----


class Letters:
    """A tokenizer of letters to the ids 1 to 7, without special tokens but for the end, 0."""

    eos_token_id, pad_token_id, bos_token, bos_token_id = 0, None, None, None

    def __call__(self, texts, **_):
        rows = [[ord(letter) % 7 + 1 for letter in text] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": rows[0] if isinstance(texts, str) else rows}


class Bigram:
    """A language model whose logits depend on the latest token alone."""

    def __init__(self, logits: Tensor):
        self.logits = logits

    def parameters(self):
        return iter([self.logits])

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[ids])


BIGRAM_LOGITS, REF_BIGRAM_LOGITS = grid(8, 8, 11, 32, -0.5) * 4, grid(8, 8, 5, 64, -0.5) * 2
