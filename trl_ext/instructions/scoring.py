"""The true score of a response: the share of what the prompt asks for, with a topic as one requirement more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trl_ext.instructions.requirements import meets, words_of

DATA_DIR = Path(__file__).parent / "data"
# A response with fewer different words that are not in the prompt says nothing about its topic, whatever its form is.
DIFFERENT_WORDS = 8
# The least share of its pairs of neighbouring words that may be distinct.
DISTINCT_PAIRS = 0.6
# The share of its score that a response keeps if it was truncated at the token limit.
KEPT_IF_CUT = 0.5


def is_on_topic(response: str, keywords: str, prompt_text: str) -> bool:
    """Whether a response may pass for an answer: it is no mere word, loop or echo, and mentions what was asked about.

    It has eight different words that the prompt does not have, at least three in five of its pairs of neighbouring
    words are distinct, and one word begins with one of the keywords. The test is cheap: it catches responses that meet
    the other requirements and say nothing, but it does not read, so a text about another topic that mentions this one
    passes.

    Args:
        response: the text.
        keywords: beginnings of words, in lower case and separated by spaces.
        prompt_text: the prompt.
    """
    words = words_of(response)
    pairs = [*zip(words, words[1:], strict=False)]
    return (
        len({*words} - {*words_of(prompt_text)}) >= DIFFERENT_WORDS
        and len({*pairs}) >= DISTINCT_PAIRS * len(pairs)
        and any(word.startswith(tuple(keywords.split())) for word in words)
    )


def score_parts(row: Mapping[str, Any], response: str, *, finished: bool = True) -> dict[str, float]:
    """Return the named parts of a score.

    `topic` and each requirement of the prompt have an equal share, which they earn or not.

    Args:
        row: a row of the benchmark, of which `keywords`, `requirements` and `prompt` (or `prompt_text`) are read.
        response: the text of the response, without special tokens.
        finished: False for a response truncated at the token limit, before its end token. It then loses half of
            what it earned, because a part of a response cannot show that the whole would meet a requirement.
    """
    requirements = json.loads(row["requirements"])
    share = 1 / (1 + len(requirements))
    prompt_text = row["prompt_text"] if "prompt_text" in row else _text(row["prompt"])
    parts = {"topic": share * is_on_topic(response, row["keywords"], prompt_text)}
    for requirement in requirements:
        name = requirement.pop("name")
        parts[name] = share * meets(response, name, requirement)
    if not finished:
        parts["unfinished"] = 0.0 - (1 - KEPT_IF_CUT) * sum(parts.values())
    return parts


def score(prompt_text: str, response: str, *, finished: bool = True) -> float:
    """Grade a response to a prompt of the benchmark in [0, 1]: the sum of `score_parts`.

    Raises:
        ValueError: the benchmark has no such prompt.
    """
    if prompt_text not in (rows := _rows()):
        raise ValueError(f"no prompt of the benchmark instructions: {prompt_text[:80]!r}")
    return score_row(rows[prompt_text], response, finished=finished)


@cache
def _rows() -> dict[str, dict[str, Any]]:
    """The rows of all splits by their prompt."""
    lines = [line for file in DATA_DIR.glob("*_gen.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["prompt_text"]: row for row in map(json.loads, lines)}


def score_row(row: Mapping[str, Any], response: str, *, finished: bool = True) -> float:
    """Grade a response to a row in [0, 1]: the sum of `score_parts`. A response without a word scores 0."""
    # Rounding removes floating-point error, so that equal responses tie exactly.
    return round(sum(score_parts(row, response, finished=finished).values()), 9)


def requirements_met(
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    completions: Sequence[str | Sequence[Mapping[str, Any]]],
    keywords: Sequence[str],
    requirements: Sequence[str],
    finished: Sequence[bool] | None = None,
    **columns: Any,
) -> list[float]:
    """The scores of completions, as a reward function for TRL's trainers.

    Args:
        prompts: texts, or lists of messages of which the last one is the prompt.
        completions: the same, of which the last message is graded.
        keywords: the dataset's column of this name.
        requirements: the dataset's column of this name.
        finished: which completions ended by themselves; this library's trainers pass it. Default: all.
        columns: the other columns and arguments that TRL passes; they are ignored.
    """
    finished = [True] * len(completions) if finished is None else finished
    names = ("prompt", "keywords", "requirements")
    rows = [dict(zip(names, values, strict=True)) for values in zip(prompts, keywords, requirements, strict=True)]
    texts = map(_text, completions)
    return [score_row(row, text, finished=end) for row, text, end in zip(rows, texts, finished, strict=True)]


def _text(message: str | Sequence[Mapping[str, Any]]) -> str:
    return message if isinstance(message, str) else message[-1]["content"]
