"""Diagnostics of generated text: length, diversity, repetition and signs of a collapsed policy."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import fmean
from typing import Any

REPETITION_NGRAM = 4
MIN_UNIQUE_TOKEN_RATIO, MAX_DOMINANT_TOKEN_FRACTION = 0.1, 0.5


def diagnose_generations(
    responses: Sequence[str],
    *,
    token_ids: Sequence[Sequence[int]] | None = None,
    finished: Sequence[bool] | None = None,
) -> dict[str, Any]:
    """Measure a set of responses, and find out whether the policy has collapsed.

    Args:
        token_ids: the token ids of each response, without padding; default: the words between whitespace.
        finished: False for a response that was truncated at the token limit.

    Returns:
        Statistics ready for JSON, None where no response has one; compare them at the same token limit. "Per text" is
        the unweighted mean over the responses that have the statistic, "pooled" counts over all responses together.

        - `n`: number of responses.
        - `mean_tokens`: per text; 0 for an empty response.
        - `distinct_1`, `distinct_2`: pooled; distinct n-grams / n-grams within responses (Li et al., 2016).
        - `unique_token_ratio`: per text; distinct tokens / tokens.
        - `dominant_token_fraction`: per text; count of the most frequent token / tokens.
        - `repetition`: per text; 1 - distinct 4-grams / 4-grams (seq-rep-n of Welleck et al., 2020).
        - `empty_fraction`: share of the responses whose text is empty or whitespace.
        - `truncated_fraction`: share of the truncated responses; None if not known.
        - `compression_ratio`: pooled; UTF-8 bytes of the concatenated texts / their bytes under zlib level 9.
        - `collapsed`: whether the mean unique-token ratio is below 0.1, the mean dominant-token fraction is above 0.5,
          or no response has a token; `collapse_reasons` has a sentence for each.
    """
    tokens: Sequence[Sequence[Hashable]] = [text.split() for text in responses] if token_ids is None else token_ids
    distinct = [distinct_ngram_ratio([text], REPETITION_NGRAM) for text in tokens]
    data = "".join(responses).encode("utf-8", errors="replace")
    unique, dominant, reasons = find_collapse(tokens)
    return {
        "n": len(responses),
        "mean_tokens": fmean(map(len, tokens)),
        "distinct_1": distinct_ngram_ratio(tokens, 1),
        "distinct_2": distinct_ngram_ratio(tokens, 2),
        "unique_token_ratio": unique,
        "dominant_token_fraction": dominant,
        "repetition": _mean([None if ratio is None else 1 - ratio for ratio in distinct]),
        "empty_fraction": fmean(not text.strip() for text in responses),
        "truncated_fraction": None if finished is None else fmean(not ended for ended in finished),
        "compression_ratio": len(data) / len(zlib.compress(data, level=9)) if data else None,
        "collapsed": bool(reasons),
        "collapse_reasons": reasons,
    }


def find_collapse(texts: Sequence[Sequence[Hashable]]) -> tuple[float | None, float | None, list[str]]:
    """The mean unique-token ratio and dominant-token fraction, and a sentence for each that shows a collapse."""
    counts = [Counter(text) for text in texts if text]
    if not counts:
        return None, None, ["no response has a token"]
    unique = fmean(len(count) / count.total() for count in counts)
    dominant = fmean(max(count.values()) / count.total() for count in counts)
    reasons = []
    if unique < MIN_UNIQUE_TOKEN_RATIO:
        reasons.append(f"mean unique-token ratio {unique:.3f} is below {MIN_UNIQUE_TOKEN_RATIO}")
    if dominant > MAX_DOMINANT_TOKEN_FRACTION:
        reasons.append(f"mean dominant-token fraction {dominant:.3f} is above {MAX_DOMINANT_TOKEN_FRACTION}")
    return unique, dominant, reasons


def distinct_ngram_ratio(texts: Sequence[Sequence[Hashable]], n: int) -> float | None:
    """Distinct n-grams / n-grams within the texts, over all of them together; None if no text has `n` tokens."""
    distinct: set[tuple[Hashable, ...]] = set()
    for text in texts:
        distinct.update(zip(*(text[start:] for start in range(n)), strict=False))
    total = sum(max(len(text) - n + 1, 0) for text in texts)
    return len(distinct) / total if total else None


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
