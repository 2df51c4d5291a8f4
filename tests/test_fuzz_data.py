"""Damaged files of rows: refused in one line that says where, with no row lost, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import logging
import os
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz import count_rows, run_cases
from trl_ext import files
from trl_ext.data import load_benchmark
from trl_ext.data.math import load_math
from trl_ext.data.packed_sft import PackedSFTDataset
from trl_ext.data.rows import first_few, read_jsonl
from trl_ext.evaluation.submissions.assets import load_thresholds
from trl_ext.evaluation.submissions.row_files import RowFile
from trl_ext.evaluation.submissions.rows import read_pair_scores, read_responses
from trl_ext.files import brief, parse_json, read_json, read_yaml

GOOD = b'{"row_id": "a", "prompt_text": "p"}\n'


def refused(read, *arguments, **keywords) -> str:
    """The message of a refusal, which is one printable line of at most 500 characters."""
    with pytest.raises((ValueError, OSError)) as caught:
        read(*arguments, **keywords)
    message = str(caught.value)
    assert len(message) <= 500 and message.isprintable(), message
    return message


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_150_damaged_files(tmp_path):
    defects = [case for case in run_cases(150, 3, tmp_path, commands=False) if case.defect]
    assert not defects, defects[:3]


def test_rows_are_counted_independently():
    """A blank line, a byte-order mark and a line of spaces are no rows; what does not parse is one."""
    assert count_rows(b"\xef\xbb\xbf\n{}\n \r\n[\n{}") == 3


class TestParsing:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"a": 1, "b": 2, "a": 1}', "bad JSON: the key 'a' stands twice in one object"),
            ('{"m": [{"role": "x", "role": "y"}]}', "bad JSON: the key 'role' stands twice in one object"),
            ("[" * 100_000, "bad JSON: nested deeper than 64 levels"),
            ("[" * 65 + "]" * 65, "bad JSON: nested deeper than 64 levels"),
            ('{"a":' * 65 + "1" + "}" * 65, "bad JSON: nested deeper than 64 levels"),
            ("9" * 4301, "bad JSON: an integer of over 4300 digits"),
            ('{"a": "\\ud800"}', "a: holds an unpaired surrogate"),
            ('{"\\udc00": 1}', "\\udc00: holds an unpaired surrogate"),
            ('{"m": [{"content": "\\uDFFF"}]}', "m: holds an unpaired surrogate"),
        ],
    )
    def test_refused(self, text, message):
        assert refused(parse_json, text) == message

    def test_accepted(self):
        """64 levels, many brackets that are not deep, a surrogate pair, and an escaped backslash before u."""
        assert parse_json("[" * 64 + "]" * 64) is not None
        assert parse_json("[" + "[]," * 1000 + "[]]") == [[]] * 1001
        assert parse_json('"\\ud83d\\ude00"') == "😀"
        assert parse_json('"\\\\ud800"') == "\\ud800"

    def test_brief(self):
        assert brief("a\nb\x1b[0m") == "a\\nb\\x1b[0m"
        assert brief("x" * 61) == "x" * 57 + "..."
        assert brief("x" * 60) == "x" * 60

    def test_first_few_are_five_or_fewer_where_they_are_long(self):
        assert first_few(list("abcdefg")) == "a; b; c; d; e; and 2 more"
        assert first_few(["x" * 150] * 4, limit=320) == f"{'x' * 150}; {'x' * 150}; and 2 more"


class TestFormats:
    @pytest.mark.parametrize(
        ("content", "what"),
        [
            (gzip.compress(GOOD, mtime=0), "gzip"),
            (b"PK\x03\x04" + GOOD * 3, "zip archive"),
            (GOOD.decode().encode("utf-16"), "UTF-16"),
            (GOOD.decode().encode("utf-16-le"), "UTF-16"),
            (GOOD.decode().encode("utf-16-be"), "UTF-16"),
        ],
    )
    def test_other_formats_are_named_even_where_bad_rows_are_skipped(self, tmp_path, content, what):
        path = write(tmp_path / "rows.jsonl", content)
        for keywords in ({}, {"skip_bad_rows": True}):
            assert what in refused(load_benchmark, path, **keywords)
        assert what in refused(load_math, path)

    def test_byte_order_mark_alone_is_an_empty_file(self, tmp_path):
        path = write(tmp_path / "rows.jsonl", b"\xef\xbb\xbf\n")
        assert refused(load_benchmark, path) == f"{path}: empty; expected at least one row"

    @pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path.name), os.mkfifo])
    def test_a_split_that_is_no_file_is_not_passed_over(self, tmp_path, make):
        """The folder's other split reads well, and loading it alone would lose this one without a word."""
        write(tmp_path / "test_gen.jsonl", GOOD)
        make(tmp_path / "train_gen.jsonl")
        assert "train_gen.jsonl is no file" in refused(load_benchmark, tmp_path)

    def test_home_of_nobody(self):
        for read in (load_benchmark, load_math):
            assert "~nobody-of-this-name" in refused(read, "~nobody-of-this-name/rows.jsonl")


class TestBounds:
    def test_a_line_over_the_limit_is_one_bad_row(self, tmp_path, monkeypatch):
        """Lines of 40 bytes at most; the long one spans several reads and must not become several rows."""
        monkeypatch.setattr(files, "MAX_LINE_BYTES", 40)
        path = write(tmp_path / "rows.jsonl", GOOD + b"x" * 200 + b"\n" + GOOD.replace(b"a", b"b") + b"y" * 100)
        split = read_jsonl(path)
        assert [position for position, _ in split.rows] == [1, 3]
        assert [(problem.position, problem.reason) for problem in split.problems] == [(2, "too long"), (4, "too long")]

    def test_a_field_of_100_megabytes(self, tmp_path):
        """Of which no more than a few times the limit of 16 MB is held."""
        path = tmp_path / "rows.jsonl"
        with open(path, "wb") as file:
            file.write(GOOD + b'{"prompt_text": "')
            for _ in range(100):
                file.write(b"a" * 2**20)
            file.write(b'"}\n')
        tracemalloc.start()
        start = time.process_time()
        split = read_jsonl(path)
        seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(split.rows) == 1
        assert split.problems[0].message == "too long: over 16 MB"
        assert seconds < 5 and peak < 64 * 2**20

    def test_messages_do_not_grow_with_the_data(self, tmp_path):
        rows = [json.dumps({"row_id": "r" * 10_000, "k" * 10_000: 1}) for _ in range(50)]
        path = write(tmp_path / "rows.jsonl", "\n".join(rows).encode())
        for read in (load_benchmark, load_math):
            assert "50 bad rows" in refused(read, path)

    def test_an_unclosed_box_is_read_once(self, tmp_path):
        text = json.dumps({"problem": "x", "solution": "\\boxed{" + "{" * 4_000_000})
        path = write(tmp_path / "rows.jsonl", text.encode())
        start = time.process_time()
        assert "no solution with a closed" in refused(load_math, path)
        assert time.process_time() - start < 5


class TestRows:
    def test_every_skipped_row_is_named(self, tmp_path, caplog):
        path = write(tmp_path / "rows.jsonl", GOOD + b"{\n[\n" + GOOD.replace(b"a", b"b") + b"\xff\n")
        with caplog.at_level(logging.INFO, logger="trl_ext"):
            assert load_benchmark(path, skip_bad_rows=True)["train_gen"]["row_id"][:] == ["a", "b"]
        warning, *rows = [record.getMessage() for record in caplog.records]
        assert warning == f"{path}: dropped 3 of 5 rows (2 bad JSON, 1 not UTF-8): lines 2-3, 5"
        assert [row.partition("dropped ")[2].partition(":")[0] for row in rows] == ["line 2", "line 3", "line 5"]

    def test_integers_beyond_a_float_among_floats(self, tmp_path):
        """10^400 is no float; the column is dropped with a word, where the conversion used to overflow."""
        rows = f'{{"prompt_text": "p", "x": 1.5}}\n{{"prompt_text": "q", "x": {10**400}}}\n'
        path = write(tmp_path / "rows.jsonl", rows.encode())
        assert load_benchmark(path)["train_gen"].column_names == ["row_id", "prompt"]

    def test_surrogate_in_an_early_turn(self, tmp_path):
        row = {"prompt": [{"role": "system", "content": "\ud800"}, {"role": "user", "content": "p"}]}
        path = write(tmp_path / "rows.jsonl", json.dumps(row).encode())
        assert "line 1: prompt: holds an unpaired surrogate" in refused(load_benchmark, path)

    def test_answers_and_row_ids_of_problems(self, tmp_path):
        path = write(tmp_path / "rows.jsonl", f'{{"question": "q", "answer": {10**400}}}'.encode())
        assert load_math(path)[0]["answer"] == str(10**400)
        for row_id in ("[1]", "true", '{"a": 1}', '""', "1.5"):
            write(path, f'{{"row_id": {row_id}, "question": "q", "answer": 1}}'.encode())
            assert "line 1: row_id: must be text or a whole number" in refused(load_math, path)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"[" * 100_000, "nested deeper than 64 levels"),
            (b'{"prompt": "a", "prompt": "b", "response": "c"}', "the key 'prompt' stands twice"),
            (b'{"prompt": "\\ud800", "response": "c"}', "prompt: holds an unpaired surrogate"),
            (b'{"prompt": "a", "response": 1, "n": ' + b"9" * 5000 + b"}", "an integer of over 4300 digits"),
        ],
    )
    def test_instruction_examples(self, tmp_path, line, message):
        path = write(tmp_path / "examples.jsonl", b'{"prompt": "a", "response": "b"}\n' + line)
        assert f"{path}: line 2: " in refused(PackedSFTDataset, None, path, 4, shuffle=False)
        assert message in refused(PackedSFTDataset, None, path, 4, shuffle=False)


class TestSubmissions:
    PROMPTS = [{"row_id": "a", "prompt_text": "p"}]

    def test_score_that_no_float_can_hold(self, tmp_path):
        row = f'{{"row_id": "a", "chosen_score": {10**400}, "rejected_score": 0}}'
        _, [problem] = read_pair_scores(write(tmp_path / "scores.jsonl", row.encode()), ["a"])
        assert problem.message.startswith("chosen_score must be a finite number, got '1000")

    def test_foreign_row_ids_cannot_write_on_the_screen(self, tmp_path):
        row = json.dumps({"row_id": "\x1b[31m\n" + "x" * 5000})
        _, problems = read_responses(write(tmp_path / "a.jsonl", row.encode()), self.PROMPTS, max_new_tokens=4)
        assert str(problems[0]).isprintable() and len(str(problems[0])) < 300

    def test_a_text_too_long_for_any_tokens_is_not_tokenized(self, tmp_path):
        """4 tokens of at most 1,000 characters each."""
        row = {"row_id": "a", "prompt_text": "p", "response_text": "x" * 4001, "generated_num_tokens": 4}
        path = write(tmp_path / "a.jsonl", json.dumps(row).encode())
        _, [problem] = read_responses(path, self.PROMPTS, max_new_tokens=4, count_tokens=lambda _: pytest.fail())
        assert problem.message == "over the token budget: the text has 4001 characters, for 4 tokens"

    @pytest.mark.parametrize(
        "content",
        [b"[1]", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 1}', b"9" * 5000, gzip.compress(b"{}", mtime=0), b""],
    )
    def test_damaged_json(self, tmp_path, content):
        path = write(tmp_path / "bars.json", content)
        assert "bars.json" in refused(load_thresholds, path)
        rows = write(tmp_path / "a.jsonl", b'{"row_id": "a"}\n')
        path.rename(tmp_path / "a.settings.json")
        assert "no a.settings.json says how it was made" in refused(RowFile, rows, {"rows": "x"}, ["a"])

    @pytest.mark.parametrize("name", ["../aot", "a/b", "_", "", "a" * 101, "a.b", "\x00", "a\nb"])
    def test_methods_names_stay_in_the_folder(self, name):
        assert "a method's name" in refused(load_thresholds, {name: 0.5})

    def test_going_on_from_damaged_rows(self, tmp_path):
        """A row that stands twice, one without its score, one with a list for its row_id, and a pipe."""
        path, how = tmp_path / "a.jsonl", {"rows": "scores of pairs"}
        (tmp_path / "a.settings.json").write_text(json.dumps(how))
        row = b'{"row_id": "a", "chosen_score": 1, "rejected_score": 0.5}\n'
        for content, message in (
            (row * 2, "line 2: row_id a stands there twice"),
            (b'{"row_id": "a", "chosen_score": 1}\n', "line 1: rejected_score is damaged, and is missing"),
            (row.replace(b'"a"', b'["a"]'), "line 1: row_id ['a'] is foreign"),
        ):
            write(path, content)
            assert message in refused(RowFile, path, how, ["a"])
        assert list(RowFile(write(path, row), how, ["a"]).rows) == ["a"]
        path.unlink()
        os.mkfifo(path)
        assert "a.jsonl is no ordinary file" in refused(RowFile, path, how, ["a"])


class TestYaml:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"a: 1\nb: 2\na: 3\n", "the key 'a' stands on line 1 and on line 3"),
            (b"{a: 1, a: 2}\n", "the key 'a' stands on line 1 and on line 1"),
            (b"a: &x [1]\nb: *x\n", "an alias on line 2: write the value out"),
            (b"a: &x [*x]\n", "an alias on line 1"),
            (b"a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor for the tag"),
            (b"a: " + b"[" * 20_000 + b"]" * 20_000, "nested deeper than 64 levels"),
            (b"a: " + b"9" * 5000, "4300 digits"),
            (b"a: \xff", "byte 4 is not UTF-8"),
            (b"a: 1\n\tb: 2\n", "'\\t' that cannot start any token"),
            (b"a" * 300_000, "over 256 kB"),
        ],
    )
    def test_refused(self, tmp_path, content, message):
        path = write(tmp_path / "a.yaml", content)
        assert message in (text := refused(read_yaml, path)) and "a.yaml" in text

    def test_accepted(self, tmp_path):
        """The same key in two mappings, and a merge of a mapping that is written out."""
        path = write(tmp_path / "a.yaml", b"a: {x: 1}\nb: {x: 2}\nc: {<<: {y: 1}, z: 2}\n")
        assert read_yaml(path) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"y": 1, "z": 2}}


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(scalars | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=8)
prompt_texts = texts.filter(lambda text: text.strip())
lines = st.one_of(
    prompt_texts.map(lambda text: json.dumps({"prompt_text": text}).encode()),
    values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=30).map(lambda line: line.replace(b"\n", b" ")),
)
quick = settings(
    deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(values)
def test_values_come_back_as_they_were(value):
    """As those of Python's own parser do, up to the depth that is taken; `repr` tells 1 from 1.0 and from True."""
    assert repr(parse_json(json.dumps(value))) == repr(value)
    assert repr(parse_json(json.dumps(value, ensure_ascii=False))) == repr(value)


@quick
@given(st.lists(prompt_texts, min_size=1, max_size=5))
def test_prompts_come_back_as_they_were(prompts):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        files.write_json_lines(path, [{"row_id": str(i), "prompt": text} for i, text in enumerate(prompts)])
        assert load_benchmark(path)["train_gen"]["prompt"][:] == prompts


@quick
@given(st.lists(lines, max_size=6))
def test_loaded_and_reported_are_all(content):
    """Where a file is refused as a whole, it is for its first bytes, and no row is read."""
    data = b"".join(line + b"\n" for line in content)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "rows.jsonl", data)
        try:
            split = read_jsonl(path)
        except ValueError as error:
            assert "expected JSON in UTF-8" in str(error)
            return
    assert len(split.rows) + len(split.problems) == count_rows(data)
    positions = [position for position, _ in split.rows] + [problem.position for problem in split.problems]
    assert len(set(positions)) == len(positions)


def test_read_json_names_the_file(tmp_path):
    path = write(tmp_path / "a.json", b'{\n"a": }')
    assert refused(read_json, path) == f"{path}: bad JSON: Expecting value at line 2, column 6"
