"""The instructions of the embedded benchmark: their grammar, the list of all prompts, and disjoint pools of them."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from dataclasses import dataclass
from functools import lru_cache

from trl_ext.toy import vocabulary as words

INSTRUCTION_KINDS = ("list", "starts", "sentence", "ask", "sort", "say", "describe")
KINDS = INSTRUCTION_KINDS + ("add",)

SEPARATORS = {"commas": ",", "semicolons": ";", "slashes": "/"}
VERBS = ("List", "Name", "Give me", "Write")
STARTS = ("that start with", "that begin with", "starting with")
MANNERS = ("politely", "kindly", "nicely")
LIST_COUNTS = DISTINCT_COUNTS = REPEAT_COUNTS = ("two", "three", "four", "five", "six")
DESCRIBE_COUNTS = ("five", "six", "seven", "eight")
# The large kinds are sampled down to this many prompts, so that no kind dominates.
PROMPTS_PER_KIND = 2500
POOLS = {"pretrain": range(0, 4), "train": range(4, 7), "validation": range(7, 8), "test": range(8, 10)}


@dataclass(frozen=True)
class Task:
    """A parsed prompt: its kind and the parts of the instruction, as text."""

    kind: str
    fields: dict[str, str]

    @property
    def count(self) -> int:
        """How many items or words the instruction asks for."""
        return words.NUMBERS[self.fields["count"]]

    @property
    def numbers(self) -> list[int]:
        """The numbers of a `sort` or `add` prompt, in the order of the prompt."""
        return [int(number) for number in re.findall(r"\d+", self.fields["numbers"])]


def _either(options) -> str:
    return "(?:" + "|".join(map(re.escape, options)) + ")"


_PATTERNS = {
    "list": rf"{_either(VERBS)} (?P<count>{_either(LIST_COUNTS)}) (?P<category>{_either(words.CATEGORIES)})\. "
    rf"Use (?P<separator>{_either(SEPARATORS)})\.",
    "starts": rf"{_either(VERBS)} (?P<count>{_either(DISTINCT_COUNTS)}) words {_either(STARTS)} "
    rf"(?P<letter>{_either(words.STARTING_WORDS)})\.",
    "sentence": rf"Write a sentence about an? (?P<topic>{_either(words.SUBJECTS)}) using the words "
    rf"(?P<adjective>{_either(words.ADJECTIVES)}) and (?P<place>{_either(words.PLACES)})\.",
    "ask": rf"Ask (?P<name>{_either(words.NAMES)}) for an? (?P<object>{_either(words.OBJECTS)}) {_either(MANNERS)}\.",
    "sort": r"Sort these numbers: (?P<numbers>\d(?: \d){2,5})\.",
    "say": rf"Say (?P<word>{_either(words.CONTENT_WORDS)}) (?P<count>{_either(REPEAT_COUNTS)}) times\.",
    "describe": rf"Describe an? (?P<adjective>{_either(words.ADJECTIVES)}) (?P<subject>{_either(words.SUBJECTS)}) "
    rf"in (?P<count>{_either(DESCRIBE_COUNTS)}) words\.",
    "add": r"What is (?P<numbers>[1-9]\d \+ [1-9]\d)\?",
}


@lru_cache(maxsize=50_000)
def parse(prompt: str) -> Task:
    """Parse a prompt of the benchmark; raise `ValueError` for any other text."""
    for kind, pattern in _PATTERNS.items():
        match = re.fullmatch(pattern, prompt.strip())
        if match:
            return Task(kind, match.groupdict())
    raise ValueError(
        f"unknown prompt {prompt[:80]!r}: not an instruction of the embedded benchmark "
        f"(kinds: {', '.join(KINDS)}); pass the text of the user message alone"
    )


def kind_of(prompt: str) -> str:
    """Return the kind of a prompt, one of `KINDS`; raise `ValueError` if the prompt is unknown."""
    return parse(prompt).kind


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
    if pool not in POOLS:
        raise ValueError(f"unknown pool {pool!r}: choose one of {', '.join(POOLS)}")
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
