"""Workloads for the benchmarks: batches of token ids with the lengths of a real data set.

`wildchat` has the lengths of the course's 256 held-out pairs, from `lengths.json`, and random ids; `long` has prompts
of 700 tokens and responses of 256; `toy` has the ids of the embedded benchmark. Prompts differ from their first token
on, and so do responses to the same prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

KINDS = ("wildchat", "long", "toy")
# Lower ids are reserved for the special tokens of the embedded tokenizer.
FIRST_ID = 16
LONG_PROMPT, LONG_RESPONSE, LONG_PAIRS = 700, 256, 256
# Number of training pairs used from the embedded benchmark.
TOY_PAIRS = 512
# Prompts per generation batch of the policy workload.
GENERATION_PROMPTS = 16


class Pair(NamedTuple):
    """Token ids of a preference pair."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


@dataclass
class Group:
    """Token ids of a prompt and of its responses."""

    prompt: list[int]
    responses: list[list[int]]


@cache
def wildchat_lengths() -> tuple[tuple[int, int, int], ...]:
    """Lengths of the prompt, chosen and rejected response of each of the 256 pairs, in file order."""
    path = Path(__file__).with_name("lengths.json")
    return tuple(tuple(pair) for pair in json.loads(path.read_text(encoding="utf-8"))["pairs"])


class Writer:
    """Draws sequences of random ids. Sequences from one writer start with different ids until all ids are used."""

    def __init__(self, vocabulary: int, seed: int = 0):
        self._random = random.Random(seed)
        self._ids = range(FIRST_ID, vocabulary)
        self._drawn = 0

    def __call__(self, length: int) -> list[int]:
        self._drawn += 1
        first = self._ids[self._drawn % len(self._ids)]
        return [first, *self._random.choices(self._ids, k=length - 1)]


def pairs(kind: str, *, vocabulary: int) -> list[Pair]:
    """The pairs of a workload, one of `KINDS`, in order; `vocabulary` bounds the ids, but for `toy`'s own."""
    if kind == "toy":
        return _toy_pairs()
    lengths = wildchat_lengths() if kind == "wildchat" else [(LONG_PROMPT, LONG_RESPONSE, LONG_RESPONSE)] * LONG_PAIRS
    write = Writer(vocabulary)
    return [Pair(*map(write, row)) for row in lengths]


def groups(kind: str, size: int, *, vocabulary: int) -> list[Group]:
    """The prompts of a workload with `size` responses each; lengths are drawn from all responses of the workload."""
    rows = pairs(kind, vocabulary=vocabulary)
    if kind == "toy":
        rows = list({tuple(pair.prompt): pair for pair in rows}.values())
    responses = [response for pair in rows for response in pair[1:]]
    draw, write = random.Random(1), Writer(vocabulary, seed=1)
    return [
        Group(pair.prompt, [write(len(response)) for response in draw.choices(responses, k=size)]) for pair in rows
    ]


def generation_batches(rows: Sequence[Group], prompts: int = GENERATION_PROMPTS) -> Iterator[Sequence[Group]]:
    """Groups that a policy trainer samples together and pads to the same width."""
    for start in range(0, len(rows) - prompts + 1, prompts):
        yield rows[start : start + prompts]


@cache
def _toy_pairs() -> list[Pair]:
    from transformers import AutoTokenizer

    from trl_ext import load_benchmark
    from trl_ext.models import resolve_model_path

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("toy"))

    def encode(messages: list[dict], **keywords) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **keywords)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    rows = load_benchmark("toy", splits="train_prefs")["train_prefs"].select(range(TOY_PAIRS))
    written = []
    for row in rows:
        prompt = encode(row["prompt"], add_generation_prompt=True)
        sides = (encode(row["prompt"] + row[side])[len(prompt) :] for side in ("chosen", "rejected"))
        written.append(Pair(prompt, *sides))
    return written
