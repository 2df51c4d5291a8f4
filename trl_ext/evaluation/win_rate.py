"""Win rates from judged pairs of responses, under both rules for disagreement and with 95% intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trl_ext.evaluation.intervals import wilson_interval

System = Literal["candidate", "base", "tie"]
SYSTEMS = ("candidate", "base", "tie")


@dataclass(frozen=True)
class PairOutcome:
    """What a judge said about one prompt, asked once in each order.

    Attributes:
        row_id: the prompt's identifier.
        first: the system preferred when the candidate's response was shown first, or "tie".
        second: the system preferred when the base's response was shown first, or "tie".
        usable: False if the judge called the comparison unfit in either pass.
        error: why the row could not be judged; then `first` and `second` mean nothing and may be None.
        empty: True if the candidate's response is empty.
    """

    row_id: str
    first: System | None
    second: System | None
    usable: bool = True
    error: str | None = None
    empty: bool = False

    def __post_init__(self):
        for name in ("first", "second"):
            verdict = getattr(self, name)
            if self.error is None and verdict not in SYSTEMS:
                raise ValueError(f"row_id {self.row_id}, {name}: must be one of {', '.join(SYSTEMS)}, got {verdict!r}")


@dataclass(frozen=True)
class Interval:
    """A rate in [0, 1] over `n` rows and its interval."""

    rate: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class WinRate:
    """The candidate's win rate against the base.

    Attributes:
        agreed: wins / rows on which both passes name the same system. Its denominator depends on the candidate, which
            can gain by turning losses into disagreements: read it beside `n_counted` and `half`.
        half: wins and half wins / rows without an error.
        n_total: all rows.
        n_counted: rows in the denominator of `agreed`.
        n_ties: rows worth one half in `half`.
        n_errors: rows without a judgement.
        agreement_rate: share of the rows without an error or an empty response on which both passes give the same
            verdict; 0 without rows.
        position_bias: P(the response shown first wins) - 1/2 over all passes of these rows, a tie counting as half a
            win; in [-1/2, 1/2], 0 without rows.
    """

    agreed: Interval
    half: Interval
    n_total: int
    n_counted: int
    n_ties: int
    n_errors: int
    agreement_rate: float
    position_bias: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and dictionaries, ready for JSON."""
        return dataclasses.asdict(self)


def win_rate(outcomes: Iterable[PairOutcome]) -> WinRate:
    """The candidate's win rate under two rules for what the judge does not settle.

    `agreed` drops such rows: a row counts only if both passes name the same system, the judge called it usable and
    the candidate's response is not empty. Without such rows the rate is 0 and the interval (0, 1).

    `half` drops nothing but errors: both passes for the candidate are 1, both for the base 0, every other pair of
    verdicts 1/2, and an empty response of the candidate 0. An unusable row counts like any other.

    Both intervals are Wilson's at 95%; for `half` with wins + half wins / 2 as its successes. That is conservative: a
    half win has a smaller variance than the wins and losses that the interval assumes, so it is wider than need be.
    """
    outcomes = list(outcomes)
    judged = [outcome for outcome in outcomes if outcome.error is None]
    counted = [
        outcome
        for outcome in judged
        if outcome.first == outcome.second != "tie" and outcome.usable and not outcome.empty
    ]
    # Nobody judges an empty response: it loses, which says nothing of the judge.
    asked = [outcome for outcome in judged if not outcome.empty]
    credits = [_half_credit(outcome) for outcome in judged]
    return WinRate(
        agreed=_interval(sum(outcome.first == "candidate" for outcome in counted), len(counted)),
        half=_interval(sum(credits), len(judged)),
        n_total=len(outcomes),
        n_counted=len(counted),
        n_ties=credits.count(0.5),
        n_errors=len(outcomes) - len(judged),
        agreement_rate=_mean([float(outcome.first == outcome.second) for outcome in asked], default=0.0),
        position_bias=_mean([_shown_first_wins(outcome) for outcome in asked], default=0.5) - 0.5,
    )


def _half_credit(outcome: PairOutcome) -> float:
    if outcome.empty:
        return 0.0
    if outcome.first == outcome.second != "tie":
        return float(outcome.first == "candidate")
    return 0.5


def _shown_first_wins(outcome: PairOutcome) -> float:
    """The share of the row's two passes that the response shown first won."""
    value = {"candidate": 1.0, "base": 0.0, "tie": 0.5}
    return (value[outcome.first] + 1.0 - value[outcome.second]) / 2


def _interval(successes: float, n: int) -> Interval:
    low, high = wilson_interval(successes, n)
    return Interval(rate=successes / n if n else 0.0, low=low, high=high, n=n)


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default
