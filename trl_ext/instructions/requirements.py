"""The requirements of the benchmark: what a prompt asks of the form of a response, and the function that checks it.

What the checkers count:

- A *word* is a run of characters between spaces, line breaks or long dashes that has a letter or a digit. So `don't`,
  `well-known`, `3.5` and `e.g.` are one word each, and the bullet `-` is none. Words are compared without their outer
  punctuation, in lower case, and with a straight apostrophe.
- A *sentence* has a letter and ends at `.`, `!` or `?` before a space, at a line break, or with the text. The full
  stop of an abbreviation (`ABBREVIATIONS`) or of a single letter, as in `J. Bach`, ends no sentence within a line.
- A *paragraph* has a word. Blank lines separate paragraphs.
- A *point* of a numbered list is a line that begins with its number, `.` or `)`, and a space, and that has a word. The
  numbers count from 1. A text may come before and after the list.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

Parameters = dict[str, str | int]

ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "mr.", "mrs.", "ms.", "dr.", "st.", "a.m.", "p.m.", "u.s.", "u.k.")
# Words that may have to appear, and words that responses are full of. The lists share no word, so that no draw
# contradicts another.
INCLUDED = (
    "green",
    "window",
    "small",
    "quiet",
    "river",
    "paper",
    "seven",
    "music",
    "yellow",
    "stone",
    "garden",
    "friend",
    "winter",
    "sugar",
    "bright",
    "letter",
    "market",
    "silver",
    "bridge",
    "early",
)
AVOIDED = ("and", "is", "it", "that", "with", "but", "can", "for")
COMMAS = ",，、،"


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case and without outer punctuation."""
    runs = re.split(r"[\s—–]+", text.replace("’", "'").lower())
    return [word for word in (re.sub(r"^[\W_]+|[\W_]+$", "", run) for run in runs) if word]


def sentences_of(text: str) -> list[str]:
    """The sentences of a text."""
    sentences = []
    for line in text.splitlines():
        begin = 0
        # The marks may be followed by quotation marks, brackets or emphasis, which belong to the sentence.
        for end in re.finditer(r"[.!?]+[\"'”’)\]*_]*(?=\s|$)", line):
            last = line[begin : end.end()].split()[-1].lstrip("\"'“‘([*_")
            is_initial = re.fullmatch(r"[A-Z]\.", last) and last != "I."
            if end.end() == len(line.rstrip()) or not (last.lower() in ABBREVIATIONS or is_initial):
                sentences.append(line[begin : end.end()])
                begin = end.end()
        sentences.append(line[begin:])
    return [sentence.strip() for sentence in sentences if re.search(r"[^\W\d_]", sentence)]


def paragraphs_of(text: str) -> list[str]:
    """The paragraphs of a text."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", text) if words_of(paragraph)]


def numbers_of(text: str) -> list[int]:
    """The numbers at the beginning of the points of a numbered list."""
    points = re.findall(r"^[ \t]*[*_]*(\d{1,3})[.)][*_]*[ \t]+(.*)$", text, flags=re.MULTILINE)
    return [int(number) for number, point in points if words_of(point)]


@dataclass(frozen=True)
class Requirement:
    """A kind of requirement.

    Attributes:
        sentences: what the prompt says, each with the parameters in braces.
        is_met: `f(response, **parameters)`; `meets` asks it only about a response with a word.
        draw: draws the parameters.
        concerns: the sides of a response that it fixes. Two requirements of one prompt share none.
    """

    sentences: tuple[str, ...]
    is_met: Callable[..., bool]
    draw: Callable[[random.Random], Parameters] = lambda generator: {}
    concerns: frozenset[str] = frozenset()


def _count(*choices: int) -> Callable[[random.Random], Parameters]:
    return lambda generator: {"count": generator.choice(choices)}


def _text(name: str, choices: tuple[str, ...]) -> Callable[[random.Random], Parameters]:
    return lambda generator: {name: generator.choice(choices)}


REQUIREMENTS: dict[str, Requirement] = {
    "at_most_words": Requirement(
        (
            "Use at most {count} words.",
            "Your answer must not be longer than {count} words.",
            "Stay within {count} words.",
        ),
        lambda response, count: len(words_of(response)) <= count,
        _count(15, 20, 25, 30, 35, 40),
        frozenset({"length"}),
    ),
    "at_least_words": Requirement(
        ("Use at least {count} words.", "Your answer must have {count} words or more."),
        lambda response, count: len(words_of(response)) >= count,
        _count(30, 35, 40, 45, 50),
        frozenset({"length"}),
    ),
    "sentences": Requirement(
        ("Use exactly {count} sentences.", "Your answer must consist of {count} sentences."),
        lambda response, count: len(sentences_of(response)) == count,
        _count(2, 3, 4),
        frozenset({"length", "layout"}),
    ),
    "paragraphs": Requirement(
        (
            "Write exactly {count} paragraphs, with a blank line between them.",
            "Divide your answer into {count} paragraphs.",
        ),
        lambda response, count: len(paragraphs_of(response)) == count,
        _count(2, 3),
        frozenset({"length", "layout"}),
    ),
    "numbered": Requirement(
        ("Answer with a numbered list of {count} points.", "Give {count} points, and number them."),
        lambda response, count: numbers_of(response) == [*range(1, count + 1)],
        _count(2, 3, 4, 5),
        frozenset({"length", "layout", "digits"}),
    ),
    "include_word": Requirement(
        ('Use the word "{word}".', 'The word "{word}" must appear in your answer.'),
        lambda response, word: word in words_of(response),
        _text("word", INCLUDED),
    ),
    "avoid_word": Requirement(
        ('Do not use the word "{word}".', 'Write it without the word "{word}".'),
        lambda response, word: word not in words_of(response),
        _text("word", AVOIDED),
    ),
    "no_commas": Requirement(
        ("Do not use commas.", "Write it without a single comma."),
        lambda response: not {*COMMAS} & {*response},
    ),
    "question": Requirement(
        ("End with a question.", "Your last sentence must be a question."),
        lambda response: re.search(r"\w\W*\?\W*$", response.rpartition(".")[2]) is not None,
        concerns=frozenset({"ending", "layout"}),
    ),
    "exclamation": Requirement(
        ("Use an exclamation mark.", "Put at least one exclamation mark into your answer."),
        lambda response: re.search(r"\w\W*!", response) is not None,
    ),
    "digits": Requirement(
        ("Mention a number in digits.", "Your answer must contain a number in digits."),
        lambda response: re.search(r"\d", response) is not None,
        concerns=frozenset({"digits"}),
    ),
}


def meets(response: str, name: str, parameters: Parameters) -> bool:
    """Whether a response meets the requirement of this name; a response without a word meets none."""
    return bool(words_of(response)) and REQUIREMENTS[name].is_met(response, **parameters)
