"""Build the preference pairs of the benchmark from sampled responses, which the score orders.

    python -m tools.instruction_pairs SAMPLES.jsonl [SAMPLES.jsonl ...] --split train [--output FOLDER]

SAMPLES.jsonl is what `recipes/best_of_n.py` writes for the prompts of the split; several files have different seeds.
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
# The longer response of a pair has at most this many times the tokens of the other.
LENGTH_RATIO = 1.75


def pair_up(samples: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Up to three pairs (chosen, rejected) of the samples of one prompt: those whose rewards differ most.

    Length must not tell the chosen response. Training on such pairs changes the length of responses instead of making
    them meet their requirements. Responses that were cut at the token limit are therefore left out, and so are pairs
    whose lengths are further apart than `LENGTH_RATIO`. Equal responses count once.

    Args:
        samples: rows with `response_text`, `generated_num_tokens`, `reward` and `finished`.
    """
    samples = {sample["response_text"]: sample for sample in samples if sample["finished"]}.values()

    def difference(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> float:
        return pair[0]["reward"] - pair[1]["reward"]

    def alike(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
        shorter, longer = sorted(sample["generated_num_tokens"] for sample in pair)
        return longer <= LENGTH_RATIO * shorter

    pairs = [pair for pair in permutations(samples, 2) if difference(pair) > 0 and alike(pair)]
    return sorted(pairs, key=difference, reverse=True)[:PAIRS_OF_A_PROMPT]


def build_pairs(samples: Iterable[Mapping[str, Any]], prompts: Iterable[Mapping[str, Any]]) -> Iterator[dict]:
    """Rows of a preference split, in the order of the samples.

    Args:
        samples: rows with `row_id`, and as in `pair_up`; those of a prompt follow one another.
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
    parser.add_argument("samples", type=Path, nargs="+", help="responses.jsonl of recipes/best_of_n.py")
    parser.add_argument("--split", required=True, choices=("train", "validation", "test"), help="what was sampled")
    parser.add_argument("--output", type=Path, default=DATA_DIR, help="folder to write (default: the embedded data)")
    given = parser.parse_args()
    samples = sorted((row for path in given.samples for row in _read(path)), key=lambda row: row["row_id"])
    rows = list(build_pairs(samples, _read(DATA_DIR / f"{given.split}_gen.jsonl")))
    write_json_lines(given.output / f"{given.split}_prefs.jsonl", rows)
    prompts = len({row["prompt_text"] for row in rows})
    print(f"{given.split}_prefs: {len(rows)} pairs of {prompts} prompts")


if __name__ == "__main__":
    main()
