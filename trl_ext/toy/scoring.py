"""The graded task of the embedded benchmark: rules that give a response signed parts, whose sum is its score."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from trl_ext.toy import vocabulary as words
from trl_ext.toy.prompts import SEPARATORS, Task, parse

GREETINGS = ("hello", "hi", "dear")
REQUESTS = ("may i", "can i", "could i", "could you", "can you")
SENTENCE_LENGTHS = (5, 12)
REQUEST_LENGTHS = (6, 14)
# Penalty for each word outside the permitted length.
LENGTH_COST = 0.1
# Penalty for a response that was truncated at the token limit, in addition to losing the credit for its ending.
UNFINISHED_COST = 0.2


def tokens_of(response: str) -> list[str]:
    """Split a response into lower-case words; each number is one word."""
    return re.findall(r"[^\W\d_]+|\d+", response.lower())


def _items(found: list[str], count: int, accepted: Callable[[str], bool], *, credit: float, distinct: bool) -> dict:
    """Credit each accepted item up to `count`; each wrong, repeated or surplus item costs half an item's credit."""
    kept = [item for item in found if accepted(item)]
    right = min(len(set(kept)) if distinct else len(kept), count)
    return {"items": credit * right / count, "wrong": -0.5 * credit * (len(found) - right) / count}


def _separators(response: str, wanted: str) -> float:
    """Return the share of gaps between words with the expected separator; 0 with fewer than two words."""
    gaps = re.split(r"[^\W\d_]+", response)[1:-1]
    return sum(gap.strip() == wanted for gap in gaps) / len(gaps) if gaps else 0.0


def _length(found: list[str], limits: tuple[int, int]) -> float:
    low, high = limits
    return -LENGTH_COST * (max(0, low - len(found)) + max(0, len(found) - high))


def _repetition(parts: dict[str, float], found: list[str]) -> float:
    """Return the penalty that scales the credits by the share of distinct word pairs (bigrams)."""
    pairs = list(zip(found, found[1:], strict=False))
    share = len(set(pairs)) / len(pairs) if pairs else 1.0
    return -(1 - share) * sum(value for value in parts.values() if value > 0)


def fluency(found: list[str]) -> float:
    """Return how well the word classes follow one another, in [0, 1].

    This is the share of permitted neighbours (both ends of the sentence count as neighbours), rescaled so that a share
    of one half earns nothing.
    """
    classes = ["start", *(words.WORD_CLASSES.get(word, "unknown") for word in found), "end"]
    permitted = [right in words.TRANSITIONS.get(left, ()) for left, right in zip(classes, classes[1:], strict=False)]
    return max(0.0, 2 * sum(permitted) / len(permitted) - 1)


def _ends(response: str, marks: str, finished: bool) -> bool:
    return finished and response.rstrip().endswith(tuple(marks))


def _list(task: Task, response: str, finished: bool) -> dict[str, float]:
    category = words.CATEGORIES[task.fields["category"]]
    parts = _items(tokens_of(response), task.count, category.__contains__, credit=0.6, distinct=True)
    parts["separator"] = 0.2 * _separators(response, SEPARATORS[task.fields["separator"]])
    return parts | {"ending": 0.2 * _ends(response, ".", finished)}


def _starts(task: Task, response: str, finished: bool) -> dict[str, float]:
    accepted = words.STARTING_WORDS[task.fields["letter"]]
    parts = _items(tokens_of(response), task.count, accepted.__contains__, credit=0.6, distinct=True)
    parts["separator"] = 0.2 * _separators(response, ",")
    return parts | {"ending": 0.2 * _ends(response, ".", finished)}


def _say(task: Task, response: str, finished: bool) -> dict[str, float]:
    wanted = task.fields["word"]
    parts = _items(tokens_of(response), task.count, wanted.__eq__, credit=0.8, distinct=False)
    return parts | {"ending": 0.2 * _ends(response, ".", finished)}


def _sort(task: Task, response: str, finished: bool) -> dict[str, float]:
    target = [str(number) for number in sorted(task.numbers)]
    found = tokens_of(response)
    present = sum((Counter(target) & Counter(found)).values())
    placed = sum(left == right for left, right in zip(target, found, strict=False))
    return {
        "present": 0.3 * present / len(target),
        "order": 0.6 * placed / len(target),
        "wrong": -0.1 * (len(found) - present),
        "ending": 0.1 * _ends(response, ".", finished),
    }


def _sentence(task: Task, response: str, finished: bool) -> dict[str, float]:
    found = tokens_of(response)
    parts = {name: 0.2 * (task.fields[name] in found) for name in ("topic", "adjective", "place")}
    parts["fluency"] = 0.25 * fluency(found)
    parts["capital"] = 0.05 * response.lstrip()[:1].isupper()
    parts["ending"] = 0.1 * _ends(response, ".", finished)
    parts["repetition"] = _repetition(parts, found)
    return parts | {"length": _length(found, SENTENCE_LENGTHS)}


def _ask(task: Task, response: str, finished: bool) -> dict[str, float]:
    found = tokens_of(response)
    text = " ".join(found)
    parts = {
        "name": 0.15 * (task.fields["name"].lower() in found),
        "object": 0.25 * (task.fields["object"] in found),
        "request": 0.1 * any(request in text for request in REQUESTS),
        "please": 0.15 * ("please" in found),
        "greeting": 0.1 * (bool(found) and found[0] in GREETINGS),
        "thanks": 0.15 * ("thank you" in text or "thanks" in found),
        "ending": 0.1 * _ends(response, ".?!", finished),
    }
    parts["repetition"] = _repetition(parts, found)
    return parts | {"length": _length(found, REQUEST_LENGTHS)}


def _describe(task: Task, response: str, finished: bool) -> dict[str, float]:
    found = tokens_of(response)
    parts = {name: 0.2 * (task.fields[name] in found) for name in ("subject", "adjective")}
    parts["fluency"] = 0.2 * fluency(found)
    parts["count"] = 0.25 * max(0.0, 1 - abs(len(found) - task.count) / 3)
    parts["capital"] = 0.05 * response.lstrip()[:1].isupper()
    parts["ending"] = 0.1 * _ends(response, ".", finished)
    parts["repetition"] = _repetition(parts, found)
    return parts | {"length": _length(found, (task.count - 3, task.count + 3))}


def _add(task: Task, response: str, finished: bool) -> dict[str, float]:
    match = re.fullmatch(r"<think>.*</think> <answer>(.*)</answer>", response.strip(), flags=re.DOTALL)
    right = match is not None and match.group(1).strip() == str(sum(task.numbers))
    return {"format": 0.2 * (match is not None and finished), "answer": 0.8 * right}


_RULES = {
    "list": _list,
    "starts": _starts,
    "sentence": _sentence,
    "ask": _ask,
    "sort": _sort,
    "say": _say,
    "describe": _describe,
    "add": _add,
}


def score_parts(prompt: str, response: str, *, finished: bool = True) -> dict[str, float]:
    """Return the named parts of a score: credits are positive, penalties negative.

    Args:
        prompt: the text of the user message. A text that is not a prompt of the benchmark raises `ValueError`.
        response: the text of the response, without special tokens.
        finished: False for a response truncated at the token limit, before its end token. It then earns no credit
            for its ending and loses a further 0.2; surplus words and items cost the same as otherwise.
    """
    task = parse(prompt)
    if not response.strip():
        return {"empty": 0.0}
    parts = _RULES[task.kind](task, response, finished)
    if not finished:
        parts["unfinished"] = -UNFINISHED_COST
    # Adding zero turns the -0.0 of an absent penalty into 0.0.
    return {name: value + 0.0 for name, value in parts.items()}


def score(prompt: str, response: str, *, finished: bool = True) -> float:
    """Grade a response in [0, 1]: the sum of `score_parts`, clipped to the interval. An empty response scores 0."""
    # Rounding removes floating-point error (0.6 + 0.2 + 0.2 differs from 1), so that equal answers tie exactly.
    return round(min(1.0, max(0.0, sum(score_parts(prompt, response, finished=finished).values()))), 9)
