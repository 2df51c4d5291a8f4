"""Win rates from judged pairs of responses, under both rules for disagreement and with 95% intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trl_ext.evaluation.statistics.intervals import wilson_interval

System = Literal["candidate", "base", "tie"]
# What an outcome is worth to the candidate.
OUTCOME_VALUES = {"candidate": 1.0, "tie": 0.5, "base": 0.0}
Rule = Literal["agreed", "half"]
RULES = ("agreed", "half")


@dataclass(frozen=True)
class PairOutcome:
    """The judge's verdicts on one prompt, asked once in each order.

    Attributes:
        row_id: the prompt's identifier.
        first: the system preferred when the candidate's response was shown first, or "tie".
        second: the system preferred when the base's response was shown first, or "tie".
        usable: False if the judge called the comparison unfit in either order.
        error: why the row could not be judged; `first` and `second` are then meaningless and may be None.
        empty: True if the candidate's response is empty.
    """

    row_id: str
    first: System | None
    second: System | None
    usable: bool = True
    error: str | None = None
    empty: bool = False


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
        agreed: wins / rows on which both orders name the same system. Its denominator depends on the candidate, which
            can gain by turning losses into disagreements, so read it together with `n_counted` and `half`.
        half: wins and half wins / rows without an error.
        n_total: all rows.
        n_counted: rows in the denominator of `agreed`.
        n_ties: rows worth one half in `half`.
        n_errors: rows without a judgement.
        agreement_rate: share of the rows without an error or an empty response on which both orders give the same
            verdict; 0 if there are no rows.
        position_bias: P(the response shown first wins) - 1/2 over both orders of these rows, with a tie as half a win;
            in [-1/2, 1/2], 0 if there are no rows.
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
    """The candidate's win rate under two rules for rows that the judge does not decide; see `row_credits`.

    If no rows count, a rate is 0 and its interval (0, 1). Both intervals are Wilson's at 95%. For `half`, the number
    of successes is wins + half wins / 2. Its interval is conservative, and wider than necessary, because a half win
    has a smaller variance than the wins and losses that the interval assumes.
    """
    outcomes = list(outcomes)
    # An empty response loses without being judged, which says nothing about the judge.
    asked = [outcome for outcome in outcomes if outcome.error is None and not outcome.empty]
    value, passes = OUTCOME_VALUES, max(len(asked), 1)
    agreements = sum(outcome.first == outcome.second for outcome in asked)
    # In the second pass the base's response is shown first.
    shown_first = sum((value[outcome.first] - value[outcome.second]) / 2 for outcome in asked)
    agreed, half = (credit_interval(row_credits(outcomes, rule)) for rule in RULES)
    return WinRate(
        agreed=agreed,
        half=half,
        n_total=len(outcomes),
        n_counted=agreed.n,
        n_ties=row_credits(outcomes, "half").count(0.5),
        n_errors=len(outcomes) - half.n,
        agreement_rate=agreements / passes,
        position_bias=shown_first / passes,
    )


def row_credits(outcomes: Sequence[PairOutcome], rule: Rule) -> list[float | None]:
    """Each prompt's contribution to the numerator of a win rate: 1, 1/2 or 0; None if it is not in the denominator.

    Under `agreed`, a row counts only if both orders name the same system, the judge called it usable and the
    candidate's response is not empty. `half` excludes only errors: two verdicts for the candidate give 1, two for the
    base 0, every other combination 1/2, and an empty response of the candidate 0. Unusable rows count like any other.
    """
    return [_credit(outcome, rule) for outcome in outcomes]


def _credit(outcome: PairOutcome, rule: Rule) -> float | None:
    if outcome.error is not None:
        return None
    agrees = outcome.first == outcome.second != "tie"
    if rule == "agreed" and not (agrees and outcome.usable and not outcome.empty):
        return None
    if outcome.empty:
        return 0.0
    return float(outcome.first == "candidate") if agrees else 0.5


def credit_interval(credits: Sequence[float | None]) -> Interval:
    """The mean of the credits that count, with Wilson's interval; a rate of 0 in (0, 1) if none counts."""
    counted = [credit for credit in credits if credit is not None]
    low, high = wilson_interval(sum(counted), len(counted))
    return Interval(rate=sum(counted) / max(len(counted), 1), low=low, high=high, n=len(counted))
