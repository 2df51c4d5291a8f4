"""Files: atomic writes, and JSON and YAML with errors that name the file and the line."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; move it to `path` if the block succeeds, remove it if not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex[:8]}{path.suffix}")
    # With the permissions of any new file: only the owner can read the files that `tempfile` creates.
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
    """Write a JSON file atomically. NaN and infinities are rejected, since JSON has none."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_json_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of one JSON object per line atomically."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def parse_json(text: str) -> Any:
    """The value of a JSON text, which may have a byte-order mark. NaN and infinities are read as numbers.

    Raises:
        ValueError: bad JSON; the message is a short phrase with the line and column.
    """
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"bad JSON: {error.msg} at {line}column {error.colno}") from None


def read_json(path: str | Path) -> Any:
    """The value in a JSON file, as `parse_json` reads it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, or not JSON; the message names the file.
    """
    try:
        return parse_json(existing_file(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_yaml(path: str | Path) -> Any:
    """The value in a YAML file of plain data.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, not YAML, or a key is given twice; the message names the file and the line.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, which would take the last of two equal keys."""

        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value]
            for position, (key, _) in enumerate(node.value):
                if key.value in keys[:position]:
                    raise yaml.constructor.ConstructorError(None, None, f"repeated key {key.value!r}", key.start_mark)
            return super().construct_mapping(node, deep)

    # As in YAML 1.2, `on` and `off` are words and not truth values.
    truth = "tag:yaml.org,2002:bool"
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.items()
    Loader.yaml_implicit_resolvers = {first: [one for one in found if one[0] != truth] for first, found in resolvers}
    Loader.add_implicit_resolver(truth, re.compile("^(true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
    try:
        return yaml.load(existing_file(path).read_text(encoding="utf-8-sig"), Loader=Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {brief(' '.join(str(error).split()), 240)}") from None


def brief(value: Any, limit: int = 60) -> str:
    """Shorten a value for a message: one line, without control characters, cut after `limit` characters."""
    shown = str(value)[: limit + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def existing_file(path: str | Path) -> Path:
    """The path of a file that exists, and FileNotFoundError if there is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {brief(path, 200)}")
    return Path(path)


# Characters that start markup or HTML, and everything that readers treat as the end of a line.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#!])")
# Signs that some readers treat as markup, and in which others show a backslash; a colon of `:smile:` or of a URL.
_SIGNS = re.compile(r"[|~$@]|:(?=//|[a-z0-9_+-]+:)")
_BREAKS = re.compile("[\\s\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def markdown_line(text: str) -> str:
    """Escape text as one line of Markdown that shows it unchanged, without markup or HTML."""
    text = _MARKUP.sub(r"\\\1", _BREAKS.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;"))
    return _SIGNS.sub(lambda sign: f"&#{ord(sign[0])};", text)
