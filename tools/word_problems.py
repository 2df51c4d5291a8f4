"""Build the embedded word problems: `python -m tools.word_problems SVAMP_FOLDER [--output FOLDER]`.

The folder holds `SVAMP.json` and `mawps_asdiv_train.csv` of https://github.com/arkilpatel/SVAMP. The README of
`trl_ext/word_problems` says what is dropped and why.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from tools.worked_problems import number_text, work_out
from trl_ext.files import write_json_lines
from trl_ext.word_problems import DATA_DIR

SEED = 0
MAX_STEPS = 2
HELD_OUT = {"test": 300, "validation": 200}
# Two problems whose words overlap so far are variations of one.
SAME_FAMILY = 0.5
# The equations of these problems ignore a number that matters, or use the wrong operation.
WRONG_EQUATIONS = ("Maggi had", "Beth has number0 packs", "Rose has number0 apples and number1 erasers")


class Problem(NamedTuple):
    """A problem as its source states it."""

    row_id: str
    text: str
    equation: str
    answer: str


def read_mawps(folder: Path, dropped: Counter) -> Iterator[Problem]:
    """The problems of MAWPS, with their numbers put in. The file's lower-case problems are those of ASDiv."""
    with open(folder / "mawps_asdiv_train.csv", encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            text, numbers = row["Question"], row["Numbers"].split()
            if text == text.lower():
                dropped["asdiv: its licence"] += 1
            elif text.startswith(WRONG_EQUATIONS):
                dropped["mawps: the equation is wrong"] += 1
            elif any(re.search(r"\.\d{3}", number) for number in numbers):
                dropped["mawps: a fraction as a rounded number, such as 0.3333"] += 1
            else:
                text, equation = filled(text, numbers), filled(row["Equation"], numbers)
                yield Problem(f"mawps-{number}", tidy(text), equation, row["Answer"])


def filled(template: str, numbers: Sequence[str]) -> str:
    """A template with its numbers in the places of `number0`, `number1` and so on."""
    return re.sub(r"number(\d+)", lambda match: number_text(Fraction(numbers[int(match[1])])), template)


def read_svamp(folder: Path, dropped: Counter) -> Iterator[Problem]:
    """The problems of SVAMP. A condition that ends without a mark, as in `If he had $4`, continues in the question."""
    for row in json.loads((folder / "SVAMP.json").read_text(encoding="utf-8")):
        body, question = row["Body"].strip(), row["Question"].strip()
        if not body.endswith((".", "?", "!")):
            conditional = body.rpartition(". ")[2].startswith("If ")
            body, question = (
                (f"{body},", question[0].lower() + question[1:]) if conditional else (f"{body}.", question)
            )
        yield Problem(f"svamp-{row['ID']}", tidy(f"{body} {question}"), row["Equation"], str(row["Answer"]))


def tidy(text: str) -> str:
    """Text as people write it, from text whose words and marks are separated by spaces."""
    text = text.replace("’", "'").replace("`", "'")
    text = re.sub(r"\s+([.,?!;:%)])", r"\1", text)
    text = re.sub(r"([$(])\s+", r"\1", text)
    text = re.sub(r"(?<=\w) (n't)\b", r"\1", text)
    text = re.sub(r"(?<= )' ([^'.]+) '(?=[ .,?])", r"'\1'", text)
    text = re.sub(r"(?<=\w) ?' ?(s|re|ll|ve|d|m)\b", r"'\1", text)
    text = re.sub(r"(?<=s) ' (?=\w)", "' ", text)
    text = re.sub(r"(?<=\w) - (?=\w)", "-", text).replace("..", ".")
    return " ".join(text.split())


def solved(problem: Problem) -> dict[str, str]:
    """The row of a problem, with its solution.

    Raises:
        ValueError: the problem is to be dropped; the message is the reason.
    """
    if not problem.text.endswith(("?", ".")):
        raise ValueError("unfinished text")
    try:
        steps, value = work_out(problem.equation)
    except (ValueError, ZeroDivisionError):
        raise ValueError("a number or result does not end within four decimal places") from None
    if value != Fraction(problem.answer):
        raise ValueError("the equation does not give the answer")
    if not 1 <= len(steps) <= MAX_STEPS:
        raise ValueError("no step or more than two")
    if any(re.search(r"-\d", step) for step in steps):
        raise ValueError("a result below zero")
    return {
        "row_id": problem.row_id,
        "prompt_text": problem.text,
        "answer": number_text(value),
        "solution": " ".join(steps),
    }


def words_of(text: str) -> frozenset[str]:
    """The words of a problem in lower case, without its numbers: what two fillings of a template share."""
    return frozenset(re.findall(r"[a-z]+", text.lower()))


def overlap(one: frozenset[str], other: frozenset[str]) -> float:
    """The number of words in both, divided by the number of words in either."""
    return len(one & other) / len(one | other)


def families(words: Sequence[frozenset[str]]) -> list[list[int]]:
    """Indices of problems by family: a problem is of the family of every problem that it overlaps with."""
    found: list[list[int]] = []
    for index, own in enumerate(words):
        near = [family for family in found if any(overlap(own, words[other]) >= SAME_FAMILY for other in family)]
        found = [family for family in found if family not in near]
        found.append([*(other for family in near for other in family), index])
    return found


def split_rows(mawps: list[dict], svamp: list[dict], dropped: Counter) -> dict[str, list[dict]]:
    """The rows by split. Families of SVAMP's fill the test and then the validation split; the rest is for training."""
    remaining = families([words_of(row["prompt_text"]) for row in svamp])
    random.Random(SEED).shuffle(remaining)
    splits: dict[str, list[dict]] = {}
    for split, size in HELD_OUT.items():
        chosen: list[int] = []
        for family in list(remaining):
            if len(chosen) + len(family) <= size:
                chosen += family
                remaining.remove(family)
        splits[split] = [svamp[index] for index in sorted(chosen)]
    held_out = [words_of(row["prompt_text"]) for rows in splits.values() for row in rows]
    train: dict[tuple, dict] = {}
    for row in [*mawps, *(svamp[index] for index in sorted(index for family in remaining for index in family))]:
        words = words_of(row["prompt_text"])
        template = tuple(re.findall(r"[a-z]+", row["prompt_text"].lower()))
        if any(overlap(words, other) >= SAME_FAMILY for other in held_out):
            dropped["a variation of a problem held out"] += 1
        elif template in train:
            dropped["the template of an earlier problem"] += 1
        else:
            train[template] = row
    return {"train": list(train.values()), **splits}


def build(source: Path, output: Path) -> Counter:
    """Write `{train,validation,test}.jsonl`; return how many problems were dropped, by reason."""
    dropped: Counter = Counter()
    rows: dict[str, list[dict]] = {}
    for name, read in (("mawps", read_mawps), ("svamp", read_svamp)):
        rows[name] = []
        for problem in read(source, dropped):
            try:
                rows[name].append(solved(problem))
            except ValueError as reason:
                dropped[f"{name}: {reason}"] += 1
    for split, chosen in split_rows(rows["mawps"], rows["svamp"], dropped).items():
        write_json_lines(output / f"{split}.jsonl", chosen)
        print(f"{split}: {len(chosen)} problems")
    return dropped


def main() -> None:
    """Build the files, and print what was dropped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of SVAMP.json and mawps_asdiv_train.csv")
    parser.add_argument("--output", type=Path, default=DATA_DIR)
    arguments = parser.parse_args()
    for reason, count in build(arguments.source, arguments.output).items():
        print(f"dropped {count}: {reason}")


if __name__ == "__main__":
    main()
