"""Build the prompts of the benchmark: `python -m tools.instruction_prompts [--output FOLDER]`.

A prompt is a task of `data/topics.txt`, which names a topic, and one or two requirements with drawn parameters. The
same seed gives the same files everywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from trl_ext.files import write_json_lines
from trl_ext.instructions import DATA_DIR

SEED = 0
PROMPT_ROWS = {"train": 800, "validation": 100, "test": 200}
TOPIC_SHARES = {"train": 0.7, "validation": 0.1, "test": 0.2}
Parameters = dict[str, str | int]

# Words that may have to appear, and words that responses are full of. The lists share no word, so that no draw
# contradicts another.
INCLUDED = [
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
]
AVOIDED = ("and", "is", "it", "that", "with", "but", "can", "for")


@dataclass(frozen=True)
class Requirement:
    """What a prompt says of a kind of requirement; `CHECKERS` has the function that checks it.

    Attributes:
        sentences: what the prompt says, each with the parameters in braces.
        draw: draws the parameters.
        concerns: the sides of a response that it fixes. Two requirements of one prompt share none.
    """

    sentences: tuple[str, ...]
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
        _count(15, 20, 25, 30, 35, 40),
        frozenset({"length"}),
    ),
    "at_least_words": Requirement(
        ("Use at least {count} words.", "Your answer must have {count} words or more."),
        _count(30, 35, 40, 45, 50),
        frozenset({"length"}),
    ),
    "sentences": Requirement(
        ("Use exactly {count} sentences.", "Your answer must consist of {count} sentences."),
        _count(2, 3, 4),
        frozenset({"length", "layout"}),
    ),
    "paragraphs": Requirement(
        (
            "Write exactly {count} paragraphs, with a blank line between them.",
            "Divide your answer into {count} paragraphs.",
        ),
        _count(2, 3),
        frozenset({"length", "layout"}),
    ),
    "numbered": Requirement(
        ("Answer with a numbered list of {count} points.", "Give {count} points, and number them."),
        _count(2, 3, 4, 5),
        frozenset({"length", "layout", "digits"}),
    ),
    "include_word": Requirement(
        ('Use the word "{word}".', 'The word "{word}" must appear in your answer.'),
        _text("word", INCLUDED),
    ),
    "avoid_word": Requirement(
        ('Do not use the word "{word}".', 'Write it without the word "{word}".'),
        _text("word", AVOIDED),
    ),
    "no_commas": Requirement(
        ("Do not use commas.", "Write it without a single comma."),
    ),
    "question": Requirement(
        ("End with a question.", "Your last sentence must be a question."),
        concerns=frozenset({"ending", "layout"}),
    ),
    "exclamation": Requirement(
        ("Use an exclamation mark.", "Put at least one exclamation mark into your answer."),
    ),
    "digits": Requirement(
        ("Mention a number in digits.", "Your answer must contain a number in digits."),
        concerns=frozenset({"digits"}),
    ),
}


def read_topics() -> list[tuple[str, str]]:
    """Each task, and the beginnings of words that show that a response is about its topic."""
    lines = (DATA_DIR / "topics.txt").read_text(encoding="utf-8").splitlines()
    return [tuple(line.split(" | ")) for line in lines]


def topics_of(split: str) -> list[tuple[str, str]]:
    """The topics of a split, in a fixed shuffled order. No topic is in two splits."""
    topics = read_topics()
    random.Random(f"topics {SEED}").shuffle(topics)
    names = list(TOPIC_SHARES)
    begin = sum(TOPIC_SHARES[name] for name in names[: names.index(split)])
    end = begin + TOPIC_SHARES[split]
    return topics[round(begin * len(topics)) : round(end * len(topics))]


def draw_requirements(first: str, generator: random.Random) -> list[dict]:
    """A requirement of the kind `first`, and half the time one more, which concerns other sides of a response."""
    names = [first]
    if generator.random() < 0.5:
        sides = REQUIREMENTS[first].concerns
        others = [name for name in REQUIREMENTS if name != first and not sides & REQUIREMENTS[name].concerns]
        names.append(generator.choice(others))
    return [{"name": name, **REQUIREMENTS[name].draw(generator)} for name in names]


def build_rows(split: str) -> Iterator[dict]:
    """Rows without end: topics and kinds of requirements take turns, so that all are about equally frequent."""
    generator = random.Random(f"{split} {SEED}")
    seen = set()
    kinds = cycle(REQUIREMENTS)
    for task, keywords in cycle(topics_of(split)):
        requirements = draw_requirements(next(kinds), generator)
        sentences = [
            generator.choice(REQUIREMENTS[requirement["name"]].sentences).format(**requirement)
            for requirement in requirements
        ]
        prompt = " ".join([task, *sentences])
        if prompt not in seen:
            seen.add(prompt)
            yield {
                "row_id": hashlib.sha256(prompt.encode()).hexdigest()[:32],
                "prompt_messages": [{"role": "user", "content": prompt}],
                "prompt_text": prompt,
                "topic": task,
                "keywords": keywords,
                "requirements": json.dumps(requirements),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DATA_DIR, help="folder to write (default: the embedded data)")
    arguments = parser.parse_args()
    for split, count in PROMPT_ROWS.items():
        write_json_lines(arguments.output / f"{split}_gen.jsonl", islice(build_rows(split), count))
        print(f"{split}_gen: {count} rows")


if __name__ == "__main__":
    main()
