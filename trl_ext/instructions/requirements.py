"""The requirements of the benchmark on the form of a response, and the functions that check them.

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

import re
from collections.abc import Callable, Mapping

ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "mr.", "mrs.", "ms.", "dr.", "st.", "a.m.", "p.m.", "u.s.", "u.k.")
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


# The function that checks each requirement, given a response with a word and the requirement's parameters.
CHECKERS: dict[str, Callable[..., bool]] = {
    "at_most_words": lambda response, count: len(words_of(response)) <= count,
    "at_least_words": lambda response, count: len(words_of(response)) >= count,
    "sentences": lambda response, count: len(sentences_of(response)) == count,
    "paragraphs": lambda response, count: len(paragraphs_of(response)) == count,
    "numbered": lambda response, count: numbers_of(response) == [*range(1, count + 1)],
    "include_word": lambda response, word: word in words_of(response),
    "avoid_word": lambda response, word: word not in words_of(response),
    "no_commas": lambda response: not {*COMMAS} & {*response},
    "question": lambda response: re.search(r"\w\W*\?\W*$", response.rpartition(".")[2]) is not None,
    "exclamation": lambda response: re.search(r"\w\W*!", response) is not None,
    "digits": lambda response: re.search(r"\d", response) is not None,
}


def meets(response: str, name: str, parameters: Mapping[str, str | int]) -> bool:
    """Whether a response meets the requirement of this name; a response without a word meets none."""
    return bool(words_of(response)) and CHECKERS[name](response, **parameters)
