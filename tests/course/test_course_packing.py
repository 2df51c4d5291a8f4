"""`PackedSFTDataset` and `iterate_batches` of the course: packed sequences, batches, and files that are refused."""

from __future__ import annotations

import gzip
import json
import math

import pytest
import torch

from tests.support.tiny import alpaca, build_tokenizer, with_special_tokens
from trl_ext import course

ROWS = [{"prompt": f"Question {n}?", "response": "Yes. " * n, "source": n} for n in range(1, 7)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    return path


def stream(tokenizer, rows) -> list[int]:
    """Documents letter by letter, one token each, with the end-of-text token after every one."""
    names = {" ": "\u0120", "\n": "\u010a"}
    ids = []
    for row in rows:
        text = alpaca(row["prompt"], row["response"])
        ids += [tokenizer.convert_tokens_to_ids(names.get(letter, letter)) for letter in text]
        ids.append(tokenizer.eos_token_id)
    return ids


@pytest.mark.parametrize("seq_length", [1, 10, 64])
@pytest.mark.parametrize("compressed", [False, True])
def test_packed_sequences(seq_length, compressed, path):
    if compressed:
        packed = gzip.compress(path.read_bytes())
        path = path.with_name("examples.jsonl.gz")
        path.write_bytes(packed)
    tokenizer = build_tokenizer()
    dataset = course.PackedSFTDataset(tokenizer, path, seq_length, shuffle=False)
    expected = stream(tokenizer, ROWS)
    assert len(dataset) == (len(expected) - 1) // seq_length
    for index, item in enumerate(dataset):
        start = index * seq_length
        assert item["input_ids"].tolist() == expected[start : start + seq_length]
        assert item["labels"].tolist() == expected[start + 1 : start + seq_length + 1]
        assert item["input_ids"].dtype == item["labels"].dtype == torch.long
    assert index == len(dataset) - 1
    item["labels"].fill_(-100)
    assert dataset[-1]["labels"].tolist() == expected[start + 1 : start + seq_length + 1], "a change is the item's own"


@pytest.mark.parametrize("surplus, count", [(0, 1), (1, 2)])
def test_a_sequence_needs_the_token_after_it(surplus, count, path):
    """Of 2 n tokens the last has no label, so that only one sequence of n is whole; of 2 n + 1, both are."""
    tokenizer = build_tokenizer()
    total = len(stream(tokenizer, ROWS[:1]))
    response = ROWS[0]["response"] + "!" * ((total + surplus) % 2)
    path.write_text(json.dumps({"prompt": ROWS[0]["prompt"], "response": response}))
    total += (total + surplus) % 2
    assert len(course.PackedSFTDataset(tokenizer, path, total // 2, shuffle=False)) == count


def test_one_end_between_documents(path):
    """Also of a tokenizer that puts tokens of its own before and after each text."""
    tokenizer = with_special_tokens(build_tokenizer(), "<|im_start|> $A <|im_end|>")
    dataset = course.PackedSFTDataset(tokenizer, path, 1, shuffle=False)
    ids = [item["input_ids"].item() for item in dataset] + [dataset[-1]["labels"].item()]
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    documents = tokenizer.decode(ids).split("<|im_end|>")
    assert documents == ["<|im_start|>" + alpaca(row["prompt"], row["response"]) for row in ROWS] + [""]
    assert (ids.count(start), ids.count(end)) == (len(ROWS), len(ROWS))


def test_shuffled_documents_stay_whole(path):
    tokenizer = build_tokenizer()

    def documents(seed):
        torch.manual_seed(seed)
        dataset = course.PackedSFTDataset(tokenizer, path, 1, shuffle=True)
        ids = [item["input_ids"].item() for item in dataset] + [dataset[-1]["labels"].item()]
        return tokenizer.decode(ids).split("<|im_end|>")[:-1]

    in_order = [alpaca(row["prompt"], row["response"]) for row in ROWS]
    assert documents(0) == documents(0) != documents(1)
    assert documents(0) != in_order and sorted(documents(0)) == sorted(in_order)


def test_batches(path):
    """Every sequence once per pass, in batches of 8 and a last one of the rest."""
    dataset = course.PackedSFTDataset(build_tokenizer(), path, 16, shuffle=False)
    in_order = [item["input_ids"].tolist() for item in dataset]
    batches = course.iterate_batches(dataset, 8, shuffle=False)
    assert len(batches) == math.ceil(len(dataset) / 8)
    shapes = [tuple(batch["labels"].shape) for batch in batches]
    assert shapes == [(8, 16)] * (len(dataset) // 8) + [(len(dataset) % 8, 16)]
    assert [row for batch in batches for row in batch["input_ids"].tolist()] == in_order
    torch.manual_seed(0)
    shuffled = course.iterate_batches(dataset, 8, shuffle=True)
    passes = [[row for batch in shuffled for row in batch["input_ids"].tolist()] for _ in "12"]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(in_order)
    assert passes[0] != in_order and passes[0] != passes[1]


@pytest.mark.parametrize(
    ("content", "seq_length", "phrases"),
    [
        (None, 0, "^seq_length must be at least 1, got 0$"),
        (None, 9999, r"examples.jsonl: \d+ tokens .* one sequence of 9999"),
        (json.dumps(ROWS[0]) + "\n{oops}\n", 8, "examples.jsonl: 1 bad row: line 2: bad JSON: .* at column 2"),
        ('{"prompt": "a"}\n', 8, "line 1: response: missing; the row has prompt"),
        ('{"prompt": 1, "response": "b"}\n', 8, "line 1: prompt: must be text, got 1"),
        ("\n", 8, "examples.jsonl: 0 tokens"),
    ],
)
def test_bad_files(content, seq_length, phrases, path):
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=phrases):
        course.PackedSFTDataset(build_tokenizer(), path, seq_length, shuffle=False)


def test_a_missing_file_and_a_missing_end(path, tmp_path):
    tokenizer = build_tokenizer()
    with pytest.raises(FileNotFoundError, match="no file .*nowhere.jsonl"):
        course.PackedSFTDataset(tokenizer, tmp_path / "nowhere.jsonl", 8, shuffle=False)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="end-of-text token .*: set tokenizer.eos_token"):
        course.PackedSFTDataset(tokenizer, path, 8, shuffle=False)
