"""The instructions of the embedded benchmark: their grammar, the parts of a prompt, and worked additions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from trl_ext.toy import vocabulary as words

SEPARATORS = {"commas": ",", "semicolons": ";", "slashes": "/"}
VERBS = ("List", "Name", "Give me", "Write")
STARTS = ("that start with", "that begin with", "starting with")
MANNERS = ("politely", "kindly", "nicely")
LIST_COUNTS = DISTINCT_COUNTS = REPEAT_COUNTS = ("two", "three", "four", "five", "six")
DESCRIBE_COUNTS = ("five", "six", "seven", "eight")


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
        f"(kinds: {', '.join(_PATTERNS)}); pass the text of the user message alone"
    )


def kind_of(prompt: str) -> str:
    """Return the kind of a prompt, such as `list`; raise `ValueError` if the prompt is unknown."""
    return parse(prompt).kind


def addition_trace(prompt: str) -> str:
    """The response to an addition, digit by digit: `<think>7+8=15 4+3+1=8</think> <answer>85</answer>` for 47 + 38."""
    first, second = parse(prompt).numbers
    ones = first % 10 + second % 10
    carried = f"+{ones // 10}" if ones >= 10 else ""
    tens = first // 10 + second // 10 + ones // 10
    steps = f"{first % 10}+{second % 10}={ones} {first // 10}+{second // 10}{carried}={tens}"
    return f"<think>{steps}</think> <answer>{first + second}</answer>"
