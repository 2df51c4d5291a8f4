"""Row schemas, the benchmark loader and truncation, on rows written here and on real ones where they are at hand."""

import json
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
from pydantic import ValidationError
from trl.data_utils import is_conversational

from trl_ext.data import PreferenceRow, PromptRow, UnpairedRow, load_benchmark, truncate_pair

PAIR = {"prompt_text": "Name a fruit.", "chosen_text": "An apple.", "rejected_text": "A stone."}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def write_rows(path, *rows):
    """Write rows as JSONL; a string is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def pair(row_id, **changes):
    return {"row_id": row_id, **PAIR, **changes}


class TestTruncatePair:
    def test_prompt_keeps_its_end_and_responses_their_start(self):
        truncated = truncate_pair([1, 2, 3, 4], [5, 6, 7], [8, 9], max_prompt_tokens=3, max_response_tokens=2)
        assert truncated == ([2, 3, 4], [5, 6], [8, 9])

    def test_each_limit_alone(self):
        assert truncate_pair([1, 2], [3, 4], [5, 6], max_prompt_tokens=1) == ([2], [3, 4], [5, 6])
        assert truncate_pair([1, 2], [3, 4], [5, 6], max_response_tokens=1) == ([1, 2], [3], [5])

    def test_no_limit_copies(self):
        prompt = [1, 2]
        truncated, _, _ = truncate_pair(prompt, [3], [4])
        assert truncated == prompt and truncated is not prompt

    @pytest.mark.parametrize("name", ["max_prompt_tokens", "max_response_tokens"])
    @pytest.mark.parametrize("limit", [0, -1])
    def test_limit_below_one(self, name, limit):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got {limit}"):
            truncate_pair([1], [2], [3], **{name: limit})

    def test_index_by_index(self):
        generator = random.Random(0)
        for _ in range(100):
            prompt, chosen, rejected = ([generator.random() for _ in range(generator.randint(1, 9))] for _ in "123")
            limits = generator.randint(1, 9), generator.randint(1, 9)
            result = truncate_pair(
                prompt, chosen, rejected, max_prompt_tokens=limits[0], max_response_tokens=limits[1]
            )
            assert result[0] == [prompt[i] for i in range(len(prompt)) if i >= len(prompt) - limits[0]]
            assert result[1] == [chosen[i] for i in range(len(chosen)) if i < limits[1]]
            assert result[2] == [rejected[i] for i in range(len(rejected)) if i < limits[1]]


class TestUnpairedRow:
    def test_chat_and_plain(self):
        """Both strings by TRL's names stay strings; by any other name the prompt is a user's message."""
        chat = UnpairedRow.model_validate({"prompt_text": "Q", "completion": "A", "label": False, "source": "us"})
        assert (chat.prompt, chat.completion, chat.label) == ([user("Q")], [assistant("A")], False)
        assert chat.model_dump()["source"] == "us"
        plain = UnpairedRow.model_validate({"prompt": "Q", "completion": "A", "label": True})
        assert (plain.prompt, plain.completion, plain.label) == ("Q", "A", True)
        mixed = UnpairedRow.model_validate({"prompt": [user("Q")], "completion": [assistant("A")], "label": True})
        assert (mixed.prompt, mixed.completion) == ([user("Q")], [assistant("A")])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"label": 1}, "label: must be true or false, is 1"),
            ({"label": None}, "label: missing"),
            ({"completion": ""}, "completion: empty"),
            ({"completion": [user("A")]}, "completion: must be one assistant message"),
            ({"prompt": None}, "prompt: missing"),
        ],
    )
    def test_bad(self, changes, message):
        with pytest.raises(ValidationError, match=message):
            UnpairedRow.model_validate({"prompt": "Q", "completion": "A", "label": True, **changes})

    def test_a_file_of_them_is_known_by_its_first_row(self, tmp_path):
        rows = [{"prompt": f"Q{i}", "completion": f"A{i}", "label": i == 0, "score": i} for i in range(3)]
        loaded = load_benchmark(write_rows(tmp_path / "rows.jsonl", *rows))
        assert {name: split.column_names for name, split in loaded.items()} == {
            "train_prefs": ["row_id", "prompt", "completion", "label", "score"]
        }
        assert loaded["train_prefs"]["label"] == [True, False, False]
        write_rows(tmp_path / "train_prefs.jsonl", *rows)
        write_rows(tmp_path / "test_prefs.jsonl", PAIR, {**PAIR, "prompt_text": "another"})
        columns = {name: split.column_names for name, split in load_benchmark(tmp_path).items()}
        assert "label" in columns["train_prefs"] and "chosen" in columns["test_prefs"]

    def test_a_pair_among_them_is_a_bad_row(self, tmp_path):
        path = write_rows(tmp_path / "rows.jsonl", {"prompt_text": "Q", "completion": "A", "label": True}, PAIR)
        with pytest.raises(ValueError, match="line 2: completion: missing"):
            load_benchmark(path)


class TestPreferenceRow:
    @pytest.mark.parametrize(
        "fields",
        [
            PAIR,
            {**PAIR, "prompt_messages": [user("Name a fruit.")], "prompt_text": "another rendering"},
            {
                "prompt": [user("Name a fruit.")],
                "chosen": [assistant("An apple.")],
                "rejected": [assistant("A stone.")],
            },
            {"prompt": "Name a fruit.", "chosen_text": "An apple.", "rejected_text": "A stone."},
            {
                "chosen": [user("Name a fruit."), assistant("An apple.")],
                "rejected": [user("Name a fruit."), assistant("A stone.")],
            },
            {
                "prompt": "Name a fruit.",
                "chosen": [user("Name a fruit."), assistant("An apple.")],
                "rejected": [user("Name a fruit."), assistant("A stone.")],
            },
        ],
        ids=["texts", "messages first", "TRL", "text prompt", "implicit prompt", "prompt beside conversations"],
    )
    def test_one_row_in_every_format(self, fields):
        row = PreferenceRow.model_validate(fields)
        assert row.model_dump(exclude_none=True) == {
            "prompt": [user("Name a fruit.")],
            "chosen": [assistant("An apple.")],
            "rejected": [assistant("A stone.")],
        }
        assert (row.prompt_text, row.chosen_text, row.rejected_text) == tuple(PAIR.values())
        assert row.conversational

    def test_plain_strings_stay_plain(self):
        row = PreferenceRow(prompt="The sky is", chosen=" blue.", rejected=" green.")
        assert (row.prompt, row.chosen, row.rejected, row.conversational) == ("The sky is", " blue.", " green.", False)
        assert (row.chosen_text, row.rejected_text) == (" blue.", " green.")
        assert row.prompt_messages == [user("The sky is")]

    def test_implicit_prompt_of_several_turns(self):
        turns = [user("a"), assistant("b"), user("c")]
        row = PreferenceRow(chosen=[*turns, assistant("d")], rejected=[*turns, assistant("e")])
        assert (row.prompt, row.chosen_text, row.rejected_text) == (turns, "d", "e")

    def test_what_validation_returns_is_valid(self):
        row = PreferenceRow.model_validate({**PAIR, "row_id": 7, "avg_confidence": 1, "kind": "list", "extra": None})
        assert (row.row_id, row.avg_confidence, row.kind) == ("7", 1.0, "list")
        assert PreferenceRow.model_validate(row.model_dump()) == row

    def test_other_keys_of_a_message_are_left_out(self):
        row = PreferenceRow.model_validate({**PAIR, "prompt_messages": [{**user("Hi"), "language": "English"}]})
        assert row.prompt == [user("Hi")]

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"prompt_text": " \n"}, "prompt_text: empty"),
            ({"prompt_messages": []}, "prompt_messages: must be text or a non-empty list"),
            ({"prompt_messages": [user("a"), {"role": "user"}]}, "prompt_messages: message 2 must have a role"),
            ({"prompt_messages": [user("a"), user("")]}, "prompt_messages: empty"),
            ({"prompt_messages": [user("a"), assistant("b")]}, "prompt_messages: last message is from 'assistant'"),
            ({"prompt_text": None}, "prompt: missing"),
            ({"chosen_text": ""}, "chosen_text: empty"),
            ({"rejected_text": "\t "}, "rejected_text: empty"),
            ({"rejected_text": None}, "rejected: missing"),
            ({"chosen_text": 5}, "chosen_text: must be text or a non-empty list"),
            ({"chosen_text": "A stone."}, "chosen_text: equal to rejected_text"),
            ({"chosen_text": [user("x")]}, "chosen_text: must be one assistant message"),
            ({"rejected_text": "\ud83d"}, "rejected_text: holds an unpaired surrogate"),
            ({"note": "\udc00"}, "note: holds an unpaired surrogate"),
            ({"score": float("nan")}, "score: is nan, not a finite number"),
        ],
    )
    def test_errors_name_the_field(self, changes, message):
        with pytest.raises(ValidationError, match=message):
            PreferenceRow.model_validate({**PAIR, **changes})

    @pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "high"])
    def test_confidence_out_of_range(self, value):
        with pytest.raises(ValidationError) as error:
            PreferenceRow.model_validate({**PAIR, "avg_confidence": value})
        assert error.value.errors()[0]["loc"] == ("avg_confidence",)

    def test_prompt_that_contradicts_the_conversations(self):
        with pytest.raises(ValidationError, match="prompt: differs from the turns"):
            PreferenceRow(prompt="b", chosen=[user("a"), assistant("c")], rejected=[user("a"), assistant("d")])


class TestPromptRow:
    @pytest.mark.parametrize(
        "fields", [{"prompt_text": "Hi"}, {"prompt_messages": [user("Hi")]}, {"prompt": [user("Hi")]}]
    )
    def test_messages(self, fields):
        assert PromptRow.model_validate(fields).prompt == [user("Hi")]

    def test_plain(self):
        row = PromptRow(prompt="Once upon")
        assert (row.prompt, row.conversational) == ("Once upon", False)

    def test_system_message_may_not_end_it(self):
        with pytest.raises(ValidationError, match="last message is from 'system', must be from 'user'"):
            PromptRow(prompt_messages=[{"role": "system", "content": "Be brief."}])

    def test_missing(self):
        with pytest.raises(ValidationError, match="prompt: missing"):
            PromptRow(row_id="a")


class TestFolder:
    def test_columns_and_format(self, tmp_path):
        write_rows(
            tmp_path / "train_prefs.jsonl",
            pair("a", avg_confidence=1, avg_preference_strength=2, kind="list", count=3, good=True, score=1),
            pair("b", avg_confidence=0.5, avg_preference_strength=4, kind="say", count=4, good=False, score=1.5),
        )
        write_rows(tmp_path / "test_gen.jsonl", {"row_id": "g", "prompt_text": "Hi", "reference_response_text": "Yo"})
        write_rows(tmp_path / "notes.jsonl", "not read")
        benchmark = load_benchmark(tmp_path)
        assert list(benchmark) == ["train_prefs", "test_gen"]
        assert benchmark["train_prefs"][0] == {
            "row_id": "a",
            "prompt": [user("Name a fruit.")],
            "chosen": [assistant("An apple.")],
            "rejected": [assistant("A stone.")],
            "avg_confidence": 1.0,
            "avg_preference_strength": 2.0,
            "kind": "list",
            "count": 3,
            "good": True,
            "score": 1.0,
        }
        assert benchmark["train_prefs"]["score"][:] == [1.0, 1.5]
        assert benchmark["test_gen"][0] == {"row_id": "g", "prompt": [user("Hi")], "reference_response_text": "Yo"}
        assert all(is_conversational(split[0]) for split in benchmark.values())

    def test_splits_may_name_any_file(self, tmp_path):
        write_rows(tmp_path / "mine.jsonl", pair("a"))
        write_rows(tmp_path / "questions.jsonl", {"prompt_text": "2 + 2?", "answer": "4"})
        benchmark = load_benchmark(str(tmp_path), splits=["questions", "mine"])
        assert list(benchmark) == ["questions", "mine"]
        assert benchmark["mine"].column_names == ["row_id", "prompt", "chosen", "rejected"]
        assert benchmark["questions"][0] == {"row_id": "questions:1", "prompt": [user("2 + 2?")], "answer": "4"}
        assert list(load_benchmark(tmp_path, splits="mine")) == ["mine"]

    def test_missing_row_ids_are_made_from_file_and_line(self, tmp_path):
        write_rows(tmp_path / "test_gen.jsonl", {"prompt_text": "a"}, "", {"prompt_text": "b"})
        assert load_benchmark(tmp_path)["test_gen"]["row_id"][:] == ["test_gen:1", "test_gen:3"]

    def test_plain_strings(self, tmp_path):
        write_rows(tmp_path / "train_prefs.jsonl", {"prompt": "The sky is", "chosen": " blue.", "rejected": " red."})
        [row] = load_benchmark(tmp_path)["train_prefs"]
        assert row == {"row_id": "train_prefs:1", "prompt": "The sky is", "chosen": " blue.", "rejected": " red."}
        assert not is_conversational(row)

    def test_text_survives(self, tmp_path):
        """A byte-order mark, Windows line ends and line separators inside a string."""
        text = "é 😀 \u2028 \\n"
        line = json.dumps({"row_id": "a", "prompt_text": text}, ensure_ascii=False)
        (tmp_path / "test_gen.jsonl").write_bytes(b"\xef\xbb\xbf" + (line + "\r\n\r\n").encode())
        assert load_benchmark(tmp_path)["test_gen"][0]["prompt"] == [user(text)]

    def test_columns_that_are_dropped(self, tmp_path, caplog):
        write_rows(
            tmp_path / "train_prefs.jsonl",
            pair("a", score=1.0, tags=["x"], mixed=1, messages="m", huge=2**80),
            pair("b", score=None, tags=["y"], mixed="1", messages="m", huge=2**80),
            pair("c", tags=["z"], mixed=1, messages="m", huge=2**80),
        )
        with caplog.at_level(logging.WARNING):
            benchmark = load_benchmark(tmp_path)
        assert benchmark["train_prefs"].column_names == ["row_id", "prompt", "chosen", "rejected"]
        warnings = sorted(record.getMessage().split(": ", 1)[1] for record in caplog.records)
        unsuitable = "it does not hold strings, booleans or 64-bit numbers throughout"
        assert warnings == [
            f"dropped column 'huge': {unsuitable}",
            "dropped column 'messages': TRL would mistake the format of the data set by it",
            f"dropped column 'mixed': {unsuitable}",
            "dropped column 'score': only 1 of 3 rows have it",
            f"dropped column 'tags': {unsuitable}",
        ]

    def test_responses_beside_a_prompt_do_not_mislead_trl(self, tmp_path):
        write_rows(
            tmp_path / "test_gen.jsonl", {"prompt_text": "a", "chosen": "b", "rejected": "c", "completion": "d"}
        )
        assert load_benchmark(tmp_path)["test_gen"].column_names == ["row_id", "prompt"]


class TestBadRows:
    def error(self, path, **arguments):
        with pytest.raises(ValueError) as error:
            load_benchmark(path, **arguments)
        assert "\n" not in str(error.value)
        return str(error.value)

    @pytest.mark.parametrize(
        "line, expected",
        [
            ('{"row_id": x}', "line 2: bad JSON: Expecting value at column 12"),
            ("[1]", "line 2: bad JSON: expected an object, got list"),
            (pair("x", chosen_text=""), "line 2, row_id x: chosen_text: empty"),
            (pair("x", rejected_text="An apple."), "line 2, row_id x: chosen_text: equal to rejected_text"),
            ({"row_id": "x", "prompt_text": "p"}, "line 2, row_id x: chosen: missing (or chosen_text)"),
            (pair("x", avg_confidence=2), "line 2, row_id x: avg_confidence: Input should be less than or equal to 1"),
            (pair("x", score=float("nan")), "line 2, row_id x: score: is nan, not a finite number"),
            (pair("a"), "line 2, row_id a: row_id: already used on line 1"),
            (
                {"row_id": "x", "prompt": "p", "chosen": "c", "rejected": "r"},
                "line 2, row_id x: prompt: plain strings, but earlier rows are messages",
            ),
        ],
    )
    def test_place_and_field(self, tmp_path, line, expected):
        path = write_rows(tmp_path / "train_prefs.jsonl", pair("a"), line)
        for source in (path, tmp_path):
            assert f"{path}: 1 bad row: {expected} (" in self.error(source)

    def test_not_utf8(self, tmp_path):
        path = tmp_path / "test_gen.jsonl"
        path.write_bytes(b'{"prompt_text": "a"}\n{"prompt_text": "\xff"}\n')
        assert "line 2: byte 18 of the line is not UTF-8" in self.error(tmp_path)

    def test_five_are_shown_and_the_rest_counted(self, tmp_path):
        path = write_rows(
            tmp_path / "train_prefs.jsonl", *[pair(str(i), chosen_text=" ") for i in range(8)], pair("8")
        )
        message = self.error(path)
        assert "8 bad rows: line 1, row_id 0: " in message
        assert "line 5, row_id 4: chosen_text: empty; and 3 more (" in message
        assert "line 6" not in message

    @pytest.mark.parametrize(
        ("name", "row", "expected"),
        [
            ("train_prefs", {"question": "q", "best": "a"}, "prompt, chosen, rejected; found question, best"),
            ("train_prefs", {"prompt": "q", "chosen": "a", "worse": "b"}, "rejected; found prompt, chosen, worse"),
            ("train_gen", {"question": "q"}, "prompt; found question"),
            ("mine", {"question": "q"}, "prompt, chosen, rejected for pairs, or prompt alone; found question"),
        ],
    )
    def test_wrong_columns_are_told_once(self, tmp_path, name, row, expected):
        path = write_rows(tmp_path / f"{name}.jsonl", *[row] * 8)
        source = path if name == "mine" else tmp_path
        assert f"{expected}: rename them (8 bad rows)" in self.error(source)
        assert self.error(source).startswith(f"{path}: expected the columns prompt")

    def test_rows_that_lack_the_same_field_are_told_once(self, tmp_path):
        lacking = [{"prompt": "p", "chosen": str(i)} for i in range(6)]
        path = write_rows(tmp_path / "mine.jsonl", {"prompt": "p", "chosen": "c", "rejected": "r"}, *lacking)
        assert f"{path}: 6 bad rows: lines 2-7: rejected: missing (or rejected_text) (" in self.error(path)

    def test_skipping_counts_by_reason(self, tmp_path, caplog):
        path = write_rows(
            tmp_path / "train_prefs.jsonl",
            pair("a"),
            "{",
            pair("b", chosen_text=""),
            pair("c", rejected_text=" "),
            pair("a", prompt_text="another"),
            pair("d"),
        )
        with caplog.at_level(logging.WARNING):
            benchmark = load_benchmark(path, skip_bad_rows=True)
        assert benchmark["train_prefs"]["row_id"][:] == ["a", "d"]
        assert benchmark["train_prefs"][0]["prompt"] == [user("Name a fruit.")]
        [record] = caplog.records
        expected = f"{path}: dropped 4 of 6 rows (2 empty response, 1 bad JSON, 1 duplicate row_id): lines 2-5"
        assert record.getMessage() == expected

    def test_nothing_remains(self, tmp_path):
        write_rows(tmp_path / "train_prefs.jsonl", pair("a", chosen_text=""), "{")
        message = self.error(tmp_path, skip_bad_rows=True)
        assert "every row is bad, none of 2 remains (1 empty response, 1 bad JSON)" in message

    @pytest.mark.parametrize("content", ["", "\n \n"])
    def test_empty_file(self, tmp_path, content):
        path = tmp_path / "train_gen.jsonl"
        path.write_text(content)
        assert f"{path}: empty" in self.error(path)


class TestSources:
    def test_file_of_pairs_or_of_prompts(self, tmp_path):
        pairs = write_rows(tmp_path / "test_gen.jsonl", pair("a"))
        prompts = write_rows(tmp_path / "anything.jsonl", {"prompt_text": "p"})
        assert list(load_benchmark(pairs)) == ["train_prefs"]
        assert list(load_benchmark(str(prompts))) == ["train_gen"]
        with pytest.raises(ValueError, match="loads as the split 'train_gen'; it has no split 'test_gen'"):
            load_benchmark(prompts, splits=["test_gen"])

    def test_missing_file_lists_what_is_there(self, tmp_path):
        write_rows(tmp_path / "train_prefs.jsonl", pair("a"))
        with pytest.raises(FileNotFoundError, match=r"train\.jsonl; .* holds train_prefs\.jsonl"):
            load_benchmark(tmp_path / "train.jsonl")
        with pytest.raises(FileNotFoundError, match=r"no file test_gen\.jsonl .* holds train_prefs\.jsonl"):
            load_benchmark(tmp_path, splits=["test_gen"])

    def test_folder_without_known_splits(self, tmp_path):
        write_rows(tmp_path / "mine.jsonl", pair("a"))
        with pytest.raises(FileNotFoundError, match=r"choose others with splits=\[\.\.\.\]; .* holds mine\.jsonl"):
            load_benchmark(tmp_path)

    @pytest.mark.parametrize(
        "name", ["no_such.jsonl", "./no_such", "../no_such", "/no/such", "a/b/c", "~/no_such_folder"]
    )
    def test_path_like_names_do_not_go_to_the_hub(self, name, monkeypatch):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("asked the hub"))
        with pytest.raises(FileNotFoundError, match="no such benchmark file or folder: .*such|a/b/c"):
            load_benchmark(name)

    def test_no_splits(self, tmp_path):
        with pytest.raises(ValueError, match="splits is empty"):
            load_benchmark(tmp_path, splits=[])

    def test_toy(self):
        folder = Path(__file__).parents[1] / "trl_ext" / "toy" / "data"
        benchmark = load_benchmark()
        for name, split in benchmark.items():
            assert len(split) == len((folder / f"{name}.jsonl").read_bytes().splitlines())
        assert {"train_prefs", "test_prefs", "train_gen", "test_gen"} <= set(benchmark)
        assert benchmark["train_prefs"][0]["chosen"][0]["role"] == "assistant"


class TestHub:
    def serve(self, monkeypatch, **rows_of_split):
        splits = {name: datasets.Dataset.from_list(rows) for name, rows in rows_of_split.items()}
        monkeypatch.setattr(datasets, "load_dataset", lambda name: datasets.DatasetDict(splits))

    def test_train_and_test_are_named_by_content(self, monkeypatch):
        conversation = [user("Name a fruit."), assistant("An apple.")]
        other = [user("Name a fruit."), assistant("A stone.")]
        row = {"prompt": "Name a fruit.", "chosen": conversation, "rejected": other, "score_chosen": 6.0}
        self.serve(monkeypatch, train=[row], test=[row], train_gen=[{"prompt": [user("Hi")]}], sft=[{"text": "x"}])
        benchmark = load_benchmark("someone/pairs")
        assert list(benchmark) == ["train_prefs", "test_prefs", "train_gen"]
        assert benchmark["test_prefs"][0] == {
            "row_id": "test:0",
            "prompt": [user("Name a fruit.")],
            "chosen": [assistant("An apple.")],
            "rejected": [assistant("A stone.")],
            "score_chosen": 6.0,
        }

    def test_splits_by_either_name(self, monkeypatch):
        self.serve(monkeypatch, train=[{"prompt": "p"}], other=[{"prompt": "q"}])
        benchmark = load_benchmark("someone/prompts", splits=["train_gen", "other", "train"])
        assert {name: split["prompt"][:] for name, split in benchmark.items()} == {
            "train_gen": ["p"],
            "other": ["q"],
            "train": ["p"],
        }
        with pytest.raises(ValueError, match="no split 'test'; its splits are train, other"):
            load_benchmark("someone/prompts", splits=["test"])

    def test_errors_give_the_row(self, monkeypatch):
        self.serve(monkeypatch, train=[{"prompt": "p", "chosen": "a", "rejected": "b"}] * 2)
        assert len(load_benchmark("x/y")["train_prefs"]) == 2
        self.serve(monkeypatch, train=[{"prompt": "p", "chosen": "a", "rejected": text} for text in "ba"])
        with pytest.raises(ValueError, match=r"x/y\[train\]: 1 bad row: row 1: chosen: equal to rejected"):
            load_benchmark("x/y")

    def test_unknown_name(self, monkeypatch):
        def fail(name):
            raise datasets.exceptions.DatasetNotFoundError(name)

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(FileNotFoundError, match="'tou' is neither 'toy', nor a local file or folder"):
            load_benchmark("tou")


def test_fifty_thousand_rows_in_seconds(tmp_path):
    write_rows(
        tmp_path / "train_prefs.jsonl", *[pair(str(i), chosen_text="good " * 80, score=i) for i in range(50_000)]
    )
    start = time.process_time()
    assert len(load_benchmark(tmp_path)["train_prefs"]) == 50_000
    assert time.process_time() - start < 15


def real_benchmark():
    folder = os.environ.get("TRL_EXT_BENCHMARK_DATA") or Path(__file__).parents[2] / "shared" / "data"
    return Path(folder) / "wildchat_benchmark"


@pytest.mark.skipif(not real_benchmark().is_dir(), reason="TRL_EXT_BENCHMARK_DATA has no wildchat_benchmark")
class TestRealBenchmark:
    def test_every_row_arrives_unchanged(self):
        benchmark = load_benchmark(real_benchmark())
        assert {name: len(split) for name, split in benchmark.items()} == {"test_prefs": 256, "test_gen": 256}
        lines = (real_benchmark() / "test_prefs.jsonl").read_text("utf-8").split("\n")
        for line, row in zip(lines, benchmark["test_prefs"], strict=False):
            raw = json.loads(line)
            expected = {name: raw[name] for name in raw if name not in PAIR and name != "prompt_messages"}
            expected["prompt"] = [
                {"role": turn["role"], "content": turn["content"]} for turn in raw["prompt_messages"]
            ]
            expected["chosen"], expected["rejected"] = (
                [assistant(raw["chosen_text"])],
                [assistant(raw["rejected_text"])],
            )
            assert row == expected

    def test_public_files(self):
        names = ["public_test_prefs_256", "public_test_gen_prompts_128", "public_test_gen_base_responses_128"]
        benchmark = load_benchmark(real_benchmark(), splits=names)
        assert [len(split) for split in benchmark.values()] == [256, 128, 128]
        prompts, responses = benchmark[names[1]], benchmark[names[2]]
        assert prompts["row_id"][:] == responses["row_id"][:]
        assert prompts["prompt"][:] == responses["prompt"][:]


def test_torch_is_loaded_by_what_needs_it_alone():
    """In a process of its own: this one has loaded torch long since."""
    script = """
import sys
import trl_ext.data
from trl_ext.data import load_benchmark, load_math, load_prompt_template
assert load_math("toy", "test")[0]["answer"] and "{question}" in load_prompt_template("r1_zero")
assert "torch" not in sys.modules, "trl_ext.data loads torch"
from trl_ext.data import PackedSFTDataset
assert "torch" in sys.modules and PackedSFTDataset.__module__ == "trl_ext.data.packed_sft"
assert {"PackedSFTDataset", "load_math"} <= set(trl_ext.data.__all__)
try:
    trl_ext.data.load_maths
except AttributeError as error:
    assert "'trl_ext.data' has no attribute 'load_maths'" in str(error)
else:
    raise AssertionError("a name that does not exist")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
