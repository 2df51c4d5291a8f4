"""Judging submitted responses against the base's: win rates, length control and human labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trl_ext.evaluation.judging.pairs import judge_pairs
from trl_ext.evaluation.judging.protocol import Usage, last_user_text
from trl_ext.evaluation.judging.score_judges import GroundTruthJudge
from trl_ext.evaluation.statistics.human_labels import PredictionPowered, judge_values, prediction_powered
from trl_ext.evaluation.statistics.length_control import LengthControlledWinRate, length_controlled_win_rate
from trl_ext.evaluation.statistics.win_rate import (
    OUTCOME_VALUES,
    PairOutcome,
    System,
    WinRate,
    row_credits,
    win_rate,
)
from trl_ext.evaluation.submissions.assets import Response


@dataclass(frozen=True)
class CandidateResult:
    """A candidate judged against the base, with the outcomes, verdicts and usage of `judge_pairs`.

    `length_controlled` is the win rate at equal lengths, None if it cannot be estimated; the mean tokens are generated
    tokens per response; `human_labels` is the win rate from the judge and human labels, None without labels.
    """

    name: str
    win_rate: WinRate
    length_controlled: LengthControlledWinRate | None
    mean_tokens: float
    base_mean_tokens: float
    outcomes: list[PairOutcome]
    usage: Usage
    verdicts: list[dict[str, Any]]
    human_labels: PredictionPowered | None

    def to_dict(self) -> dict[str, Any]:
        """The figures without the rows, ready for JSON."""
        figures = dataclasses.asdict(self)
        return {name: value for name, value in figures.items() if name not in ("outcomes", "verdicts")}


def judge_candidate(
    judge: Any,
    name: str,
    responses: Sequence[Response],
    prompts: Sequence[Mapping[str, Any]],
    base: Sequence[Response],
    *,
    human_labels: Mapping[str, System] | None = None,
    **judging: Any,
) -> CandidateResult:
    """Judge a candidate's responses against the base's, one for each row of `prompts`, by `judge_pairs`.

    `human_labels` are outcomes by row_id for some of the prompts; `judging` are keyword arguments of `judge_pairs`,
    which may raise `TooManyErrors`.
    """
    outcomes, usage, verdicts = judge_pairs(judge, prompts, **both_systems(responses, base), **judging)
    estimated = None
    if human_labels:
        values = dict(zip((outcome.row_id for outcome in outcomes), judge_values(outcomes), strict=True))
        told = [(OUTCOME_VALUES[human_labels[row]], value) for row, value in values.items() if row in human_labels]
        further = [value for row, value in values.items() if row not in human_labels]
        estimated = prediction_powered(*zip(*told, strict=True), further)
    controlled = _at_equal_lengths(outcomes, responses, base)
    tokens = (fmean(response.tokens for response in system) for system in (responses, base))
    return CandidateResult(name, win_rate(outcomes), controlled, *tokens, outcomes, usage, verdicts, estimated)


def _at_equal_lengths(outcomes: Sequence[PairOutcome], responses: Sequence[Response], base: Sequence[Response]):
    """The length-controlled win rate; empty responses count as losses, but not because they are short."""
    credits = row_credits(outcomes, "half")
    kept = [None if outcome.empty else credit for outcome, credit in zip(outcomes, credits, strict=True)]
    lengths = ([len(response.text) for response in system] for system in (responses, base))
    controlled = length_controlled_win_rate(kept, *lengths)
    empty = sum(outcome.empty for outcome in outcomes)
    if controlled is None or not empty:
        return controlled
    share = controlled.n / (controlled.n + empty)
    rates = {name: share * getattr(controlled, name) for name in ("rate", "low", "high")}
    return dataclasses.replace(controlled, **rates, n=controlled.n + empty)


def known_score_judge(prompts: Sequence[Mapping[str, Any]]) -> GroundTruthJudge:
    """The judge that uses the known score of the embedded task; ValueError if a prompt is from another task."""
    from trl_ext.toy import kind_of

    for row in prompts:
        try:
            kind_of(last_user_text(row["prompt"]))
        except ValueError as error:
            known = "the known score is of the embedded task only: choose another judge"
            raise ValueError(f"row_id {row['row_id']}: {error}; {known}") from None
    return GroundTruthJudge()


def both_systems(responses: Sequence[Response], others: Sequence[Response]) -> dict[str, list[Any]]:
    """Keyword arguments of `judge_pairs`."""
    systems = {"candidate": responses, "base": others}
    texts = {name: [response.text for response in system] for name, system in systems.items()}
    return texts | {f"{name}_finished": [one.finished for one in system] for name, system in systems.items()}
