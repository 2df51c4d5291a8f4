"""Files: written whole or not at all, and JSON read strictly, within bounds on its size and depth."""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

# Far above any conversation, and low enough that one damaged line cannot fill the memory.
MAX_LINE_BYTES = 16 * 2**20
CHUNK_BYTES = 2**16
# Python's parser, pydantic and pyarrow each fail in a way of their own at some depth above this.
MAX_NESTING = 64
MAX_YAML_BYTES = 2**18
# What files begin with that are not text in UTF-8, and what to do about it.
_OTHER_FORMATS = {
    b"\x1f\x8b": "compressed by gzip: decompress it first",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"PK\x05\x06": "a zip archive: unpack it first",
    b"BZh": "compressed by bzip2: decompress it first",
    b"\xfd7zXZ": "compressed by xz: decompress it first",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: decompress it first",
    b"PAR1": "a Parquet file: give JSON lines",
    b"\xff\xfe": "in UTF-16 or UTF-32: save it as UTF-8",
    b"\xfe\xff": "in UTF-16: save it as UTF-8",
    b"\x00\x00\xfe\xff": "in UTF-32: save it as UTF-8",
    b"{\x00": "in UTF-16 or UTF-32: save it as UTF-8",
    b"\x00{": "in UTF-16: save it as UTF-8",
}
_HALF_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a temporary path in the same folder; move it to `path` if the block succeeds, remove it if not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex[:8]}{path.suffix}")
    # With the rights of any new file: those that `tempfile` makes can be read by their owner alone.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically. NaN and infinities are refused, since JSON has none."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_json_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of one JSON object per line atomically."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def parse_json(text: str) -> Any:
    """The value of a JSON text, which a user may have written or a disk damaged.

    NaN and infinities are taken as Python's parser takes them: it is for the reader of a field to refuse them by name.

    Raises:
        ValueError: bad JSON, a key that stands twice in one object, half of a surrogate pair, which can be neither
            stored nor tokenized, over 64 levels of nesting, or an integer of over 4300 digits; the message is one
            short phrase, with the column where there is one.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"bad JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise ValueError(f"bad JSON: nested deeper than {MAX_NESTING} levels") from None
    except _DuplicateKey as error:
        raise ValueError(f"bad JSON: the key {error} stands twice in one object") from None
    except ValueError:
        raise ValueError("bad JSON: an integer of over 4300 digits") from None
    # Most texts have too few brackets to be deep, which is quicker to tell.
    if text.count("[") + text.count("{") > MAX_NESTING and _depth(value) > MAX_NESTING:
        raise ValueError(f"bad JSON: nested deeper than {MAX_NESTING} levels")
    if _HALF_SURROGATE.search(text):
        _refuse_half_surrogates(value)
    return value


def read_json(path: str | Path) -> Any:
    """The value in a JSON file, as `parse_json` reads it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is too large, not UTF-8, or not JSON; the message names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {brief(path, 200)}")
    with open(path, "rb") as file:
        refuse_other_formats(file, path)
        content = file.read(MAX_LINE_BYTES + 1)
    if len(content) > MAX_LINE_BYTES:
        raise ValueError(f"{path}: over {MAX_LINE_BYTES // 2**20} MB of JSON; is it the right file?")
    try:
        return parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start + 1} is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_yaml(path: str | Path) -> Any:
    """The value in a YAML file: plain data, without aliases, and no key twice in one mapping.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is too large, not UTF-8, or not such YAML; the message names the file, and mostly the line.
    """
    import yaml

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {brief(path, 200)}")
    with open(path, "rb") as file:
        content = file.read(MAX_YAML_BYTES + 1)
    if len(content) > MAX_YAML_BYTES:
        raise ValueError(f"{path}: over {MAX_YAML_BYTES // 2**10} kB; is it the right file?")
    try:
        return yaml.load(content.decode("utf-8-sig"), Loader=_strict_loader())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start + 1} is not UTF-8") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {brief(' '.join(str(error).split()), 240)}") from None


@cache
def _strict_loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, which would follow aliases of aliases and take the last of two equal keys."""

        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.YAMLError(f"an alias on line {mark.line + 1}: write the value out")
            self.nesting = getattr(self, "nesting", 0) + 1
            if self.nesting > MAX_NESTING:
                raise yaml.YAMLError(f"nested deeper than {MAX_NESTING} levels")
            node = super().compose_node(parent, index)
            self.nesting -= 1
            return node

        def construct_mapping(self, node, deep=False):
            lines: dict[tuple[str, str], int] = {}
            keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
            for key in (key for key in keys if isinstance(key, yaml.ScalarNode)):
                line = key.start_mark.line + 1
                if (key.tag, key.value) in lines:
                    first = lines[key.tag, key.value]
                    raise yaml.YAMLError(f"the key {brief(key.value)!r} stands on line {first} and on line {line}")
                lines[key.tag, key.value] = line
            return super().construct_mapping(node, deep)

    return Loader


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file that are not blank, numbered from 1, without a byte-order mark at its start.

    None stands for a line of over 16 MB, of which no more than that is ever held.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(CHUNK_BYTES)
            yield number, None
            continue
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield number, line.rstrip()


def refuse_other_formats(file: BinaryIO, path: str | Path) -> None:
    """Raise ValueError where a file begins as an archive, another encoding or a binary format does; read none of it.

    A damaged or stored archive has lines that read as good rows among those that do not.
    """
    start = file.peek(8)[:8]
    for mark, what in _OTHER_FORMATS.items():
        if start.startswith(mark):
            raise ValueError(f"{path}: expected JSON in UTF-8, and the file is {what}")


def local_path(name: str | os.PathLike) -> Path:
    """A path as a user writes it, with `~` for a home folder.

    Raises:
        FileNotFoundError: there is no such home folder, or the name is too long for any file.
    """
    try:
        path = Path(name).expanduser()
        path.is_file()
    except RuntimeError as error:
        raise FileNotFoundError(f"{brief(name)}: {error}") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise FileNotFoundError(f"no file of so long a name: {brief(name)}") from None
    return path


def brief(value: Any, limit: int = 60) -> str:
    """A value for a message: on one line, without control characters, cut after `limit` characters."""
    text = value if isinstance(value, str) else str(value)
    # What is not shown need not be looked at.
    shown = text[: limit + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


class _DuplicateKey(Exception):
    """The name of a key that stands twice."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        # `add` gives None: the first name that was seen before.
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _DuplicateKey(repr(brief(twice)))
    return found


def _depth(value: Any) -> int:
    """Levels of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [entry for entry in level if isinstance(entry, dict | list)]:
        depth += 1
        level = [entry for group in level for entry in (group.values() if isinstance(group, dict) else group)]
    return depth


def _refuse_half_surrogates(value: Any) -> None:
    entries = value.items() if isinstance(value, dict) else [("the value", value)]
    for name, entry in entries:
        try:
            json.dumps([name, entry], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{brief(name)}: holds an unpaired surrogate") from None
