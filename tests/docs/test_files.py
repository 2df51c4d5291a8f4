"""Files of users: JSON, YAML and rows come back as they were written, and faults are named by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trl_ext.data.rows import first_few
from trl_ext.files import brief, read_json, read_yaml, replacing


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


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_json, b'{\n"a": }', "bad JSON: Expecting value at line 2, column 6"),
        (read_json, b'{"a": "\xff"}', "invalid start byte"),
        (read_json, b"", "bad JSON: Expecting value at column 1"),
        (read_yaml, b"a: 1\nb: 2\na: 3\n", "repeated key 'a'"),
        (read_yaml, b"{x: {a: 1, a: 2}}\n", "repeated key 'a'"),
        (read_yaml, b"a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor for the tag"),
        (read_yaml, b"a: \xff", "invalid start byte"),
        (read_yaml, b"a: 1\n\tb: 2\n", "line 2"),
    ],
)
def test_a_damaged_file_is_named(read, content, message, tmp_path):
    path = write(tmp_path / "a.txt", content)
    text = refused(read, path)
    assert message in text and (text.startswith(f"{path}: ") if read is read_json else "a.txt" in text)
    assert "no file" in refused(read_json, tmp_path / "b.json")


def test_sound_files(tmp_path):
    """The same key in two mappings, a merged mapping, and a byte-order mark."""
    assert read_json(write(tmp_path / "a.json", b'\xef\xbb\xbf{"a": 1}')) == {"a": 1}
    path = write(tmp_path / "a.yaml", b"\xef\xbb\xbfa: {x: 1}\nb: {x: 2}\nc: {<<: {y: 1, z: 1}, z: 2}\n")
    assert read_yaml(path) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"y": 1, "z": 2}}
