"""Build the prompts of the benchmark: `python -m tools.instruction_prompts [--output FOLDER]`.

A prompt is a task of `data/topics.txt`, which names a topic, and one or two requirements with drawn parameters. The
same seed gives the same files everywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from trl_ext.files import write_json_lines
from trl_ext.instructions import DATA_DIR
from trl_ext.instructions.requirements import REQUIREMENTS

SEED = 0
PROMPT_ROWS = {"train": 800, "validation": 100, "test": 200}
TOPIC_SHARES = {"train": 0.7, "validation": 0.1, "test": 0.2}


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
