"""The estimated cost of judging, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trl_ext.evaluation.judging.pairs import distinct_questions, make_questions, open_cache
from trl_ext.evaluation.judging.protocol import PairwiseJudge

# Output tokens of an answer with a short reason and no reasoning tokens.
TYPICAL_OUTPUT_TOKENS = 150


class Cost(NamedTuple):
    """The estimated cost of a call of `judge_pairs`.

    Attributes:
        calls: questions to ask: two per row, except for cached, repeated, empty and identical ones.
        cached: verdicts already in the cache.
        input_tokens, output_tokens: tokens of those calls, without requests that have to be repeated.
        dollars: None without prices; 0 for judges that cost nothing.
    """

    calls: int
    cached: int
    input_tokens: int
    output_tokens: int
    dollars: float | None


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
) -> Cost:
    """Estimate the calls and cost of `judge_pairs` with the same arguments, without a key or any request.

    Input tokens are estimated as a quarter of the UTF-8 bytes. Output tokens are the mean of this comparison's cached
    verdicts, or a typical number. `price_in` and `price_out` are dollars per million tokens of input and output.
    """
    missing = distinct_questions(make_questions(judge, list(rows), candidate, base, **finished))
    records: list[dict[str, Any]] = []
    if cache is not None and Path(cache).is_file():
        with open_cache(judge, cache) as store:
            found = {} if store is None else {question.key: store.get(question.key) for question in missing}
        records = [record for record in found.values() if record is not None]
        missing = [question for question in missing if found.get(question.key) is None]
    if not hasattr(judge, "estimate_tokens"):
        is_free = getattr(judge, "identity", ()) is None
        return Cost(len(missing), len(records), 0, 0, 0.0 if is_free else None)
    input_tokens = sum(judge.estimate_tokens(q.prompt, q.response_a, q.response_b) for q in missing)
    measured = [record["output_tokens"] for record in records if record.get("output_tokens")]
    each = fmean(measured) if measured else min(TYPICAL_OUTPUT_TOKENS, judge.max_output_tokens)
    output_tokens = round(each * len(missing))
    is_priced = price_in is not None and price_out is not None
    dollars = (input_tokens * price_in + output_tokens * price_out) / 1e6 if is_priced else None
    return Cost(len(missing), len(records), input_tokens, output_tokens, dollars)
