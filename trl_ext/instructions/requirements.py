"""The requirements of the benchmark: what a prompt asks of the form of a response, and the function that checks it.

What the checkers count:

- A *word* is a run of characters between spaces, line breaks or long dashes that has a letter or a digit. So `don't`,
  `well-known`, `3.5` and `e.g.` are one word each, and the bullet `-` is none. Words are compared without their outer
  punctuation, in lower case, and with a straight apostrophe.
- A *sentence* has a letter and ends at `.`, `!` or `?` before a space, at a line break, or with the text. The full
  stop of an abbreviation (`ABBREVIATIONS`) or of a single letter, as in `J. Bach`, ends no sentence within a line.
- A *paragraph* has a word. Blank lines separate paragraphs.
- A *bullet point* is a line that begins with `-`, `*` or `•` and a space, and that has a word. A text may stand before
  and after the list.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

Parameters = dict[str, str | int]

ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "mr.", "mrs.", "ms.", "dr.", "st.", "a.m.", "p.m.", "u.s.", "u.k.")
# Words that may have to appear, words that responses are full of, and words and phrases for the two ends. The lists
# share no word, so that no draw contradicts another.
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
OPENINGS = ("today", "sometimes", "imagine", "first", "here", "usually", "well", "yes")
CLOSINGS = ("thank you", "good luck", "the end", "see you soon", "have fun", "so they say")
COMMAS = ",，、،"
QUOTATION_MARKS = {'"': '"', "“": "”", "„": "“", "«": "»"}


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


def bullets_of(text: str) -> list[str]:
    """The bullet points of a text, without their marks."""
    bullets = re.findall(r"^[ \t]*[-*•][ \t]+(.*)$", text, flags=re.MULTILINE)
    return [bullet for bullet in bullets if words_of(bullet)]


def _in_quotation_marks(response: str) -> bool:
    text = response.strip()
    marks = {*QUOTATION_MARKS, *QUOTATION_MARKS.values()}
    # A mark inside would close the quotation before its end.
    return len(text) > 2 and QUOTATION_MARKS.get(text[0]) == text[-1] and not marks & {*text[1:-1]}


def _has_title(response: str) -> bool:
    first, _, rest = response.strip().partition("\n")
    title = re.fullmatch(r"[#*_\s]*\[([^\[\]]+)\][*_\s]*", first)
    return title is not None and bool(words_of(title[1])) and bool(words_of(rest))


def _is_json(response: str, key: str) -> bool:
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*)\n\s*```", response.strip(), flags=re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else response)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and [*value] == [key] and isinstance(value[key], str) and bool(words_of(value[key]))


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
        _count(20, 25, 30, 35, 40, 45, 50),
        frozenset({"length"}),
    ),
    "at_least_words": Requirement(
        ("Use at least {count} words.", "Your answer must have {count} words or more."),
        lambda response, count: len(words_of(response)) >= count,
        _count(50, 55, 60, 65, 70, 75, 80),
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
    "bullets": Requirement(
        ("Answer with exactly {count} bullet points.", "Give your answer as a list of {count} bullet points."),
        lambda response, count: len(bullets_of(response)) == count,
        _count(2, 3, 4, 5),
        frozenset({"length", "layout", "opening"}),
    ),
    "include_words": Requirement(
        ('Use the words "{first}" and "{second}".', 'The words "{first}" and "{second}" must appear in your answer.'),
        lambda response, first, second: {first, second} <= {*words_of(response)},
        lambda generator: dict(zip(("first", "second"), generator.sample(INCLUDED, 2), strict=True)),
    ),
    "avoid_word": Requirement(
        ('Do not use the word "{word}".', 'Write it without the word "{word}".'),
        lambda response, word: word not in words_of(response),
        _text("word", AVOIDED),
    ),
    "begin_with": Requirement(
        ('Begin with the word "{word}".', 'The first word of your answer must be "{word}".'),
        lambda response, word: words_of(response)[0] == word,
        _text("word", OPENINGS),
        frozenset({"opening"}),
    ),
    "end_with": Requirement(
        ('End with the words "{phrase}".', 'The last words of your answer must be "{phrase}".'),
        lambda response, phrase: words_of(response)[-len(phrase.split()) :] == phrase.split(),
        _text("phrase", CLOSINGS),
        frozenset({"ending"}),
    ),
    "lowercase": Requirement(
        ("Use lower case letters only.", "Write everything in lower case, without a single capital letter."),
        lambda response: response == response.lower() != response.upper(),
        concerns=frozenset({"case"}),
    ),
    "capitals": Requirement(
        ("USE CAPITAL LETTERS ONLY.", "Write everything in capital letters."),
        lambda response: response == response.upper() != response.lower(),
        concerns=frozenset({"case"}),
    ),
    "no_commas": Requirement(
        ("Do not use commas.", "Write it without a single comma."),
        lambda response: not {*COMMAS} & {*response},
    ),
    "quotation": Requirement(
        (
            "Put your whole answer in double quotation marks.",
            "Your answer must begin and end with a double quotation mark.",
        ),
        _in_quotation_marks,
        concerns=frozenset({"layout"}),
    ),
    "title": Requirement(
        (
            "Begin with a line that holds a title in square brackets.",
            "The first line must be a title in square brackets.",
        ),
        _has_title,
        concerns=frozenset({"layout", "opening"}),
    ),
    "json_object": Requirement(
        (
            'Answer with a JSON object whose only key is "{key}".',
            'Give your answer as JSON, under the single key "{key}".',
        ),
        _is_json,
        _text("key", ("answer", "text", "response")),
        frozenset({"length", "layout", "opening", "ending", "case"}),
    ),
}


def meets(response: str, name: str, parameters: Parameters) -> bool:
    """Whether a response meets the requirement of this name; a response without a word meets none."""
    return bool(words_of(response)) and REQUIREMENTS[name].is_met(response, **parameters)
