"""The estimated cost of judging, before anything is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.evaluation.judging.pairs import distinct_questions, make_questions, open_cache
from trl_ext.evaluation.judging.protocol import PairwiseJudge

# Output tokens of an answer with a short reason and no reasoning tokens.
TYPICAL_OUTPUT_TOKENS = 150


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a call of `judge_pairs`.

    Attributes:
        calls: questions to ask: two per row, except for cached, repeated, empty and identical ones.
        cached: verdicts already in the cache.
        input_tokens, output_tokens: tokens of those calls; the output is a guess.
        dollars: None without prices; 0 for judges that cost nothing.
        notes: how tokens were estimated, and what the figures leave out.
    """

    calls: int
    cached: int
    input_tokens: int
    output_tokens: int
    dollars: float | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        return dataclasses.asdict(self)


def estimate(
    judge: PairwiseJudge,
    rows: Iterable[Mapping[str, Any]],
    candidate: Sequence[str],
    base: Sequence[str],
    cache: str | Path | None = None,
    *,
    price_in: float | None = None,
    price_out: float | None = None,
    **finished: Sequence[bool] | None,
) -> Estimate:
    """Estimate the calls and cost of `judge_pairs` with the same arguments, without a key or any request.

    Input tokens are estimated as a quarter of the UTF-8 bytes. Output tokens are the mean of this comparison's cached
    verdicts, or a typical number. `price_in` and `price_out` are dollars per million tokens of input and output.
    """
    passes = make_questions(judge, list(rows), candidate, base, **finished)
    questions = {question.key: question for question in distinct_questions(passes)}
    records: dict[str, dict[str, Any]] = {}
    if cache is not None and Path(cache).is_file():
        with open_cache(judge, cache) as store:
            found = {} if store is None else {key: store.get(key) for key in questions}
        records = {key: record for key, record in found.items() if record is not None}
    missing = [question for key, question in questions.items() if key not in records]
    if not hasattr(judge, "estimate_tokens"):
        free = getattr(judge, "identity", ()) is None
        notes = () if free else ("this judge does not say what it costs",)
        return Estimate(len(missing), len(records), 0, 0, 0.0 if free else None, notes)
    input_tokens = sum(judge.estimate_tokens(q.prompt, q.response_a, q.response_b) for q in missing)
    measured = [record["output_tokens"] for record in records.values() if record.get("output_tokens")]
    each = sum(measured) / len(measured) if measured else min(TYPICAL_OUTPUT_TOKENS, judge.max_output_tokens)
    output_tokens = round(each * len(missing))
    source = f"the mean of {len(measured)} cached verdicts" if measured else "a typical answer without reasoning"
    notes = [
        "input tokens: a quarter of the UTF-8 bytes",
        f"output tokens: {each:.0f} each, {source}; at most {judge.max_output_tokens} each",
        "requests that have to be repeated cost extra",
    ]
    dollars = None
    if price_in is None or price_out is None:
        notes.append("no dollars without --price_in and --price_out")
    else:
        dollars = (input_tokens * price_in + output_tokens * price_out) / 1e6
    return Estimate(len(missing), len(records), input_tokens, output_tokens, dollars, tuple(notes))
