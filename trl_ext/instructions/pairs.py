"""Build the preference pairs of the benchmark from sampled responses, which the score orders.

    python -m trl_ext.instructions.pairs SAMPLES.jsonl --split train [--output FOLDER]

SAMPLES.jsonl is what `recipes/best_of_n.py` writes for the prompts of the split.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, permutations
from pathlib import Path
from typing import Any

from trl_ext.files import write_json_lines
from trl_ext.instructions.scoring import DATA_DIR

PAIRS_OF_A_PROMPT = 3


def pair_up(samples: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Up to three pairs (chosen, rejected) of the samples of one prompt: those whose rewards differ most.

    Responses that were cut at the token limit are left out. Otherwise most pairs would differ in that alone, and
    training on them shortens responses instead of making them meet their requirements. Equal responses count once.

    Args:
        samples: rows with `response_text`, `reward` and `finished`.
    """
    samples = {sample["response_text"]: sample for sample in samples if sample["finished"]}.values()

    def difference(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> float:
        return pair[0]["reward"] - pair[1]["reward"]

    pairs = [pair for pair in permutations(samples, 2) if difference(pair) > 0]
    return sorted(pairs, key=difference, reverse=True)[:PAIRS_OF_A_PROMPT]


def build_pairs(samples: Iterable[Mapping[str, Any]], prompts: Iterable[Mapping[str, Any]]) -> Iterator[dict]:
    """Rows of a preference split, in the order of the samples.

    Args:
        samples: rows with `row_id`, `response_text`, `reward` and `finished`; those of a prompt follow one another.
        prompts: rows of a prompt split of the benchmark.

    Raises:
        ValueError: samples belong to a prompt that is not among `prompts`.
    """
    known = {row["row_id"]: row for row in prompts}
    for row_id, own in groupby(samples, key=lambda sample: sample["row_id"]):
        if row_id not in known:
            raise ValueError(f"row_id {row_id} is of no prompt of this split: name the split that was sampled")
        prompt = known[row_id]
        for chosen, rejected in pair_up(list(own)):
            texts = {"chosen_text": chosen["response_text"], "rejected_text": rejected["response_text"]}
            yield {
                "row_id": hashlib.sha256("\n".join([row_id, *texts.values()]).encode()).hexdigest()[:32],
                "prompt_messages": prompt["prompt_messages"],
                "prompt_text": prompt["prompt_text"],
                **texts,
                "chosen_score": chosen["reward"],
                "rejected_score": rejected["reward"],
            }


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samples", type=Path, help="samples.jsonl of recipes/best_of_n.py")
    parser.add_argument("--split", required=True, choices=("train", "validation", "test"), help="what was sampled")
    parser.add_argument("--output", type=Path, default=DATA_DIR, help="folder to write (default: the embedded data)")
    given = parser.parse_args()
    rows = list(build_pairs(_read(given.samples), _read(DATA_DIR / f"{given.split}_gen.jsonl")))
    write_json_lines(given.output / f"{given.split}_prefs.jsonl", rows)
    prompts = len({row["prompt_text"] for row in rows})
    print(f"{given.split}_prefs: {len(rows)} pairs of {prompts} prompts")


if __name__ == "__main__":
    main()
