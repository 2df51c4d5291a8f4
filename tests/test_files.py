"""Files of users: JSON, YAML and rows come back as they were written, and faults are named by file and line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ext.data import load_benchmark
from trl_ext.data.math import load_math
from trl_ext.data.rows import first_few, read_jsonl
from trl_ext.evaluation.submissions.assets import load_thresholds
from trl_ext.evaluation.submissions.row_files import RowFile
from trl_ext.evaluation.submissions.rows import read_pair_scores, read_responses
from trl_ext.files import brief, parse_json, read_json, read_yaml, replacing, write_json_lines


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


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = write(tmp_path / "a.txt", b"before")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    with replacing(path) as temporary:
        temporary.write_text("after")
    assert path.read_text() == "after" and list(tmp_path.iterdir()) == [path]


def test_messages_are_short_and_printable():
    assert brief("a\nb\x1b[0m") == "a\\nb\\x1b[0m"
    assert brief("x" * 61) == "x" * 57 + "..." and brief("x" * 60) == "x" * 60
    assert first_few(list("abcdefg")) == "a; b; c; d; e; and 2 more"
    assert first_few(["x" * 150] * 4, limit=320) == f"{'x' * 150}; {'x' * 150}; and 2 more"


def test_messages_do_not_grow_with_the_data(tmp_path):
    rows = [json.dumps({"row_id": "r" * 10_000, "k" * 10_000: 1}) for _ in range(50)]
    path = write(tmp_path / "rows.jsonl", "\n".join(rows).encode())
    for read in (load_benchmark, load_math):
        assert "50 bad rows" in refused(read, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n"a": }', "bad JSON: Expecting value at line 2, column 6"),
        (b'{"a": "\xff"}', "invalid start byte"),
        (b"", "bad JSON: Expecting value at column 1"),
    ],
)
def test_damaged_json_names_the_file(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)
    assert refused(read_json, path).startswith(f"{path}: ") and message in refused(read_json, path)
    assert "no file" in refused(read_json, tmp_path / "b.json")
    assert read_json(write(path, b'\xef\xbb\xbf{"a": 1}')) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: 2\na: 3\n", "repeated key 'a'"),
        (b"{x: {a: 1, a: 2}}\n", "repeated key 'a'"),
        (b"a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor for the tag"),
        (b"a: \xff", "invalid start byte"),
        (b"a: 1\n\tb: 2\n", "line 2"),
    ],
)
def test_damaged_yaml_names_the_file(tmp_path, content, message):
    path = write(tmp_path / "a.yaml", content)
    assert message in (text := refused(read_yaml, path)) and "a.yaml" in text


def test_yaml(tmp_path):
    """The same key in two mappings, a merged mapping, and a byte-order mark."""
    path = write(tmp_path / "a.yaml", b"\xef\xbb\xbfa: {x: 1}\nb: {x: 2}\nc: {<<: {y: 1, z: 1}, z: 2}\n")
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
quick = settings(deadline=None, max_examples=25, derandomize=True)


@quick
@given(values)
def test_values_come_back_as_they_were(value):
    """`repr` tells 1 from 1.0 and from True."""
    assert repr(parse_json(json.dumps(value))) == repr(value)
    assert repr(parse_json(json.dumps(value, ensure_ascii=False))) == repr(value)


@quick
@given(st.lists(prompt_texts, min_size=1, max_size=5))
def test_prompts_come_back_as_they_were(prompts):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_json_lines(path, [{"row_id": str(i), "prompt": text} for i, text in enumerate(prompts)])
        assert load_benchmark(path)["train_gen"]["prompt"][:] == prompts


@quick
@given(st.lists(lines, max_size=6))
def test_every_line_is_loaded_or_reported(content):
    """Only a file that begins as an array is refused as a whole."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "rows.jsonl", b"".join(line + b"\n" for line in content))
        try:
            split = read_jsonl(path)
        except ValueError as error:
            assert "a JSON array" in str(error)
            return
    positions = [position for position, _ in split.rows] + [problem.position for problem in split.problems]
    assert sorted(positions) == [number for number, line in enumerate(content, start=1) if line.strip()]


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

    @pytest.mark.parametrize("content", [b"[1]", b"\xff", b""])
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
