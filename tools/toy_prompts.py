"""All prompts of the embedded benchmark, in disjoint pools."""

from __future__ import annotations

import hashlib
import itertools
import random

from trl_ext.toy import vocabulary as words
from trl_ext.toy.prompts import (
    DESCRIBE_COUNTS,
    DISTINCT_COUNTS,
    LIST_COUNTS,
    MANNERS,
    REPEAT_COUNTS,
    SEPARATORS,
    STARTS,
    VERBS,
)

INSTRUCTION_KINDS = ("list", "starts", "sentence", "ask", "sort", "say", "describe")
# The large kinds are sampled down to this many prompts, so that no kind dominates.
PROMPTS_PER_KIND = 2500
POOLS = {"pretrain": range(0, 4), "train": range(4, 7), "validation": range(7, 8), "test": range(8, 10)}


def _list_prompts() -> list[str]:
    options = itertools.product(VERBS, LIST_COUNTS, words.CATEGORIES, SEPARATORS)
    return [f"{verb} {count} {category}. Use {separator}." for verb, count, category, separator in options]


def _starts_prompts() -> list[str]:
    options = itertools.product(VERBS, DISTINCT_COUNTS, STARTS, words.STARTING_WORDS)
    return [f"{verb} {count} words {start} {letter}." for verb, count, start, letter in options]


def _sentence_prompts() -> list[str]:
    options = itertools.product(words.SUBJECTS, words.ADJECTIVES, words.PLACES)
    return [
        f"Write a sentence about {words.with_article(topic)} using the words {adjective} and {place}."
        for topic, adjective, place in options
    ]


def _ask_prompts() -> list[str]:
    options = itertools.product(words.NAMES, words.OBJECTS, MANNERS)
    return [f"Ask {name} for {words.with_article(item)} {manner}." for name, item, manner in options]


def _sort_prompts() -> list[str]:
    generator = random.Random(0)
    prompts: dict[str, None] = {}
    while len(prompts) < PROMPTS_PER_KIND:
        numbers = generator.sample(range(10), generator.randint(3, 6))
        if numbers != sorted(numbers):
            prompts[f"Sort these numbers: {' '.join(map(str, numbers))}."] = None
    return list(prompts)


def _say_prompts() -> list[str]:
    return [f"Say {word} {count} times." for word in words.CONTENT_WORDS for count in REPEAT_COUNTS]


def _describe_prompts() -> list[str]:
    options = itertools.product(words.ADJECTIVES, words.SUBJECTS, DESCRIBE_COUNTS)
    return [
        f"Describe {words.with_article(adjective)} {subject} in {count} words."
        for adjective, subject, count in options
    ]


def _add_prompts() -> list[str]:
    return [f"What is {first} + {second}?" for first in range(10, 100) for second in range(10, 100)]


def pool_of(prompt: str) -> str:
    """Return the pool that a prompt belongs to: pretrain, train, validation or test (40, 30, 10, 20 per cent)."""
    bucket = int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 10
    return next(name for name, buckets in POOLS.items() if bucket in buckets)


def prompt_pool(pool: str) -> dict[str, list[str]]:
    """Return all prompts of one pool by kind, in a fixed shuffled order.

    Membership depends only on the prompt's hash, so the pools are disjoint whatever the kinds' sizes are.
    """
    makers = {
        "list": _list_prompts,
        "starts": _starts_prompts,
        "sentence": _sentence_prompts,
        "ask": _ask_prompts,
        "sort": _sort_prompts,
        "say": _say_prompts,
        "describe": _describe_prompts,
        "add": _add_prompts,
    }
    result = {}
    for kind, maker in makers.items():
        prompts = maker()
        random.Random(kind).shuffle(prompts)
        limit = len(prompts) if kind == "add" else PROMPTS_PER_KIND
        result[kind] = [prompt for prompt in prompts[:limit] if pool_of(prompt) == pool]
    return result
