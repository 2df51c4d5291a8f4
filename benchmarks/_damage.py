"""Ways to damage files of rows and YAML configurations, each a function of a random generator."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
# What stands in a file's place: its bytes, or how to put something else there.
Damaged = bytes | Callable[[Path], None]

ODD_VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    "",
    " ",
    "text",
    [],
    [[]],
    {},
    {"a": 1},
    [None],
    [{"role": "user"}],
    10**30,
)
ODD_KEYS = (
    "",
    " ",
    "\x00",
    "__class__",
    "model_config",
    "conversational",
    "line\nbreak",
    "é" * 50,
    "\u202e",
    "messages",
)
HUGE = 2**20


def lines_of(rows: Rows) -> list[bytes]:
    return [json.dumps(row, ensure_ascii=False).encode() for row in rows]


def join(lines: list[bytes], end: bytes = b"\n") -> bytes:
    return b"".join(line + end for line in lines)


def _with_field(generator: random.Random, rows: Rows, value: Any) -> bytes:
    """One field of one row replaced."""
    row = generator.choice(rows)
    row[generator.choice(list(row))] = value
    return join(lines_of(rows))


def _with_text(generator: random.Random, rows: Rows, text: str, *, as_key: bool = False) -> bytes:
    """JSON text in the place of one field's value, or of one key, which may be what `json.dumps` cannot write."""
    index = generator.randrange(len(rows))
    row = dict(rows[index])
    name = generator.choice(list(row))
    marker = "@@fuzz@@"
    if as_key:
        row = {(marker if key == name else key): value for key, value in row.items()}
    elif generator.random() < 0.3:
        row["extra"] = marker
    else:
        row[name] = marker
    lines = lines_of(rows)
    lines[index] = json.dumps(row, ensure_ascii=False).replace(f'"{marker}"', text).encode()
    return join(lines)


def _with_line(generator: random.Random, rows: Rows, line: bytes) -> bytes:
    lines = lines_of(rows)
    lines.insert(generator.randrange(len(lines) + 1), line)
    return join(lines)


def _with_bytes(generator: random.Random, rows: Rows, inserted: bytes) -> bytes:
    content = join(lines_of(rows))
    position = generator.randrange(len(content))
    return content[:position] + inserted + content[position:]


def _truncated(generator: random.Random, rows: Rows) -> bytes:
    content = join(lines_of(rows))
    return content[: generator.randrange(1, len(content))]


def _flipped_bytes(generator: random.Random, rows: Rows) -> bytes:
    content = bytearray(join(lines_of(rows)))
    for _ in range(generator.randint(1, 20)):
        content[generator.randrange(len(content))] = generator.randrange(256)
    return bytes(content)


def _nested(generator: random.Random) -> str:
    depth = generator.choice((90, 150, 260, 700, 1100, 5000, 100_000))
    opening, closing = generator.choice((("[", "]"), ('{"a":', "}"), ('[{"role":', "}]")))
    return opening * depth + "1" + closing * depth


def _huge_value(generator: random.Random) -> Any:
    return generator.choice((f"{'a' * 2 * HUGE}", "\\boxed{" + "{" * HUGE, "\n" * HUGE, ["x"] * HUGE, "<<" * HUGE))


def _duplicated_key(generator: random.Random, rows: Rows) -> bytes:
    index = generator.randrange(len(rows))
    lines, name = lines_of(rows), generator.choice(list(rows[index]))
    again = json.dumps({name: generator.choice(["other", rows[index][name]])}, ensure_ascii=False).encode()
    lines[index] = again[:-1] + b", " + lines[index][1:]
    return join(lines)


def _mixed_formats(generator: random.Random, rows: Rows) -> bytes:
    others = [
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"prompt_text": "p"},
        {"prompt": [{"role": "user", "content": "p"}]},
        {"question": "q", "answer": "1"},
        {"nums": [1, 2], "target": 3},
    ]
    for _ in range(generator.randint(1, 3)):
        rows.insert(generator.randrange(len(rows) + 1), dict(generator.choice(others)))
    return join(lines_of(rows))


def _zipped(generator: random.Random, rows: Rows) -> bytes:
    file = io.BytesIO()
    method = generator.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(generator.choice(("rows.jsonl", "../../rows.jsonl")), join(lines_of(rows)))
    return file.getvalue()


def _without_field(generator: random.Random, rows: Rows) -> bytes:
    row = generator.choice(rows)
    del row[generator.choice(list(row))]
    return join(lines_of(rows))


def _control_characters(generator: random.Random, rows: Rows) -> bytes:
    text = generator.choice(("a\nb", "\x1b[31mred\x1b[0m", "\r", "\x00", "\u2028", "\x85", "a" * 3000, "../../etc/x"))
    for row in generator.sample(rows, generator.randint(1, len(rows))):
        row[generator.choice(("row_id", generator.choice(list(row))))] = text
    return join(lines_of(rows))


def _all_bad(generator: random.Random, rows: Rows) -> bytes:
    kinds = (b"{", b"[]", b"null", b'{"row_id": "%s"}' % (b"x" * 2000), b"\xff", b'{"%s": 1}' % (b"k" * 5000))
    return join([generator.choice(kinds) for _ in range(generator.randint(1, 200))])


def _linked_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _linked_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def _without_permission(path: Path) -> None:
    path.write_bytes(b'{"row_id": "a"}\n')
    path.chmod(0)


def _utf16(generator: random.Random, rows: Rows) -> bytes:
    encoding = generator.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-32"))
    return join(lines_of(rows)).decode().encode(encoding)


def _byte_order_mark(generator: random.Random, rows: Rows) -> bytes:
    mark, lines = b"\xef\xbb\xbf", lines_of(rows)
    if generator.random() < 0.5:
        return mark + join(lines)
    lines[generator.randrange(len(lines))] = mark + lines[0]
    return join(lines)


def _integer(generator: random.Random) -> str:
    return generator.choice(("-", "")) + "9" * generator.choice((19, 25, 400, 4299, 4301, 100_000))


def _surrogate(generator: random.Random, rows: Rows) -> bytes:
    half = generator.choice(("\\ud800", "\\uDFFF", "a\\uD83D", "\\udc00\\ud800"))
    value = generator.choice((f'"{half}"', f'["{half}"]', f'[{{"role": "user", "content": "{half}"}}]'))
    as_key = generator.random() < 0.3
    return _with_text(generator, rows, f'"{half}"' if as_key else value, as_key=as_key)


MUTATIONS: dict[str, Callable[[random.Random, Rows], Damaged]] = {
    "as it was": lambda generator, rows: join(lines_of(rows)),
    "truncated": _truncated,
    "bytes flipped": _flipped_bytes,
    "wrong type": lambda generator, rows: _with_field(generator, rows, generator.choice(ODD_VALUES)),
    "field missing": _without_field,
    "huge field": lambda generator, rows: _with_field(generator, rows, _huge_value(generator)),
    "field of 100 MB": lambda generator, rows: _with_field(
        generator, rows, "a" * ((100 if generator.random() < 0.1 else 17) * HUGE)
    ),
    "huge key": lambda generator, rows: _with_text(generator, rows, f'"{"k" * HUGE}"', as_key=True),
    "odd key": lambda generator, rows: _with_text(
        generator, rows, json.dumps(generator.choice(ODD_KEYS)), as_key=True
    ),
    "many keys": lambda generator, rows: _with_line(
        generator, rows, json.dumps({f"key {i}": i for i in range(10_000)} | rows[0]).encode()
    ),
    "deep nesting": lambda generator, rows: _with_text(generator, rows, _nested(generator)),
    "duplicate key": _duplicated_key,
    "duplicate row": lambda generator, rows: join(lines_of([*rows, generator.choice(rows)])),
    "NaN or Infinity": lambda generator, rows: _with_text(
        generator, rows, generator.choice(("NaN", "Infinity", "-Infinity", "1e999", "[NaN]"))
    ),
    "huge integer": lambda generator, rows: _with_text(generator, rows, _integer(generator)),
    "unpaired surrogate": _surrogate,
    "control characters": _control_characters,
    "NUL bytes": lambda generator, rows: _with_bytes(generator, rows, b"\0" * generator.choice((1, 3, 4096))),
    "invalid UTF-8": lambda generator, rows: _with_bytes(
        generator, rows, generator.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"))
    ),
    "UTF-16 or UTF-32": _utf16,
    "byte-order mark": _byte_order_mark,
    "CRLF": lambda generator, rows: join(lines_of(rows), b"\r\n"),
    "CR": lambda generator, rows: join(lines_of(rows), b"\r"),
    "blank lines": lambda generator, rows: join(lines_of(rows), generator.choice((b"\n\n", b"\n \t\n", b"\n\r\n"))),
    "two rows on a line": lambda generator, rows: _with_line(generator, rows, b"".join(lines_of(rows[:2]))),
    "not an object": lambda generator, rows: _with_line(
        generator, rows, generator.choice((b"[]", b"1", b"null", b'"row"', b"NaN", b"{}", b"-"))
    ),
    "one JSON array": lambda generator, rows: json.dumps(rows, indent=generator.choice((None, 2))).encode(),
    "mixed formats": _mixed_formats,
    "all rows bad": _all_bad,
    "empty": lambda generator, rows: generator.choice((b"", b"\n", b" \r\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n")),
    "random bytes": lambda generator, rows: generator.randbytes(generator.randint(1, 5000)),
    "gzip": lambda generator, rows: gzip.compress(join(lines_of(rows)), mtime=0),
    "zip": _zipped,
    "folder": lambda generator, rows: Path.mkdir,
    "link to itself": lambda generator, rows: _linked_to_itself,
    "link to nothing": lambda generator, rows: _linked_to_nothing,
    "no permission": lambda generator, rows: _without_permission,
    "pipe": lambda generator, rows: os.mkfifo,
    "missing": lambda generator, rows: lambda path: None,
}

YAML_KEYS = ("model_name_or_path", "loss", "beta", "max_steps", "report_to", "bf16", "learning_rate")
VALID_YAML = "model_name_or_path: toy\nloss: dpo\nbeta: 0.1\nmax_steps: 3\nreport_to: none\nlearning_rate: 1e-4\n"


def _laughs(generator: random.Random) -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    key = generator.choice(("beta", "report_to", "model_init_kwargs", "learning_rate", "unknown"))
    return "\n".join([*lines[1:0:-1], *lines]) if key == "unknown" else "\n".join([*_in_values(lines), f"{key}: *a9"])


def _in_values(lines: list[str]) -> list[str]:
    """The anchors inside the value of one known key, where unknown keys do not give them away."""
    return ["model_init_kwargs:", *(f"  {line}" for line in lines)]


def _yaml_nested(generator: random.Random) -> str:
    depth = generator.choice((50, 200, 1000, 20_000))
    kind = generator.choice(("[", "{a: "))
    close = "]" if kind == "[" else "}"
    key = generator.choice(("beta", "model_init_kwargs", "unknown"))
    return f"{key}: {kind * depth}1{close * depth}\n"


def _yaml_value(generator: random.Random) -> str:
    key = generator.choice(("model_name_or_path", "loss", "beta", "max_steps", "report_to", "bf16", "splits"))
    value = generator.choice(("[1, 2]", "{a: b}", "yes", "2001-01-01", "!!binary aGk=", "0x1F", "~", "''", ".nan"))
    return f"{VALID_YAML}{key}_: 1\n" if generator.random() < 0.1 else f"{key}: {value}\n"


YAML_MUTATIONS: dict[str, Callable[[random.Random], Damaged]] = {
    "YAML as it was": lambda generator: VALID_YAML.encode(),
    "YAML truncated": lambda generator: VALID_YAML[: generator.randrange(len(VALID_YAML))].encode(),
    "YAML deep nesting": lambda generator: _yaml_nested(generator).encode(),
    "YAML aliases": lambda generator: _laughs(generator).encode(),
    "YAML alias of itself": lambda generator: generator.choice(
        (b"beta: &a [*a]", b"&a : *a", b"model_init_kwargs: &a {b: *a}")
    ),
    "YAML duplicate key": lambda generator: (VALID_YAML + generator.choice(("beta: 0.2\n", "loss: ipo\n"))).encode(),
    "YAML tag": lambda generator: generator.choice(
        (
            b"beta: !!python/object/apply:os.system ['true']\n",
            b"!!python/name:os.system : 1\n",
            b"beta: !unknown 1\n",
            b"beta: !!set {a, b}\n",
            b"beta: !!omap [a: 1]\n",
        )
    ),
    "YAML wrong type": lambda generator: _yaml_value(generator).encode(),
    "YAML odd key": lambda generator: generator.choice(
        (b"1: 2\n", b"? [a, b]\n: 1\n", b"~: 1\n", b"? {a: b}\n: 1\n", b"k" * 100_000 + b": 1\n", b'"a\\nb": 1\n')
    ),
    "YAML not UTF-8": lambda generator: generator.choice((b"loss: \xff\n", VALID_YAML.encode("utf-16"), b"\x80")),
    "YAML tab": lambda generator: b"loss: dpo\n\tbeta: 1\n",
    "YAML control character": lambda generator: generator.choice(
        (b"loss: \x00\n", b"loss: \x1b[31m\n", b'loss: "\\0"\n')
    ),
    "YAML not a mapping": lambda generator: generator.choice(
        (b"", b"- a\n", b"text", b"---\na: 1\n---\nb: 2\n", b"1\n")
    ),
    "YAML huge value": lambda generator: (
        generator.choice((b"loss: ", b"beta: ", b"max_steps: ")) + b"9" * 200_000 + b"\n"
    ),
    "YAML huge text": lambda generator: (
        generator.choice((b"loss: ", b"max_steps: ", b"bf16: ")) + b"x" * 200_000 + b"\n"
    ),
    "YAML folder": lambda generator: Path.mkdir,
    "YAML link to itself": lambda generator: _linked_to_itself,
    "YAML random bytes": lambda generator: generator.randbytes(generator.randint(1, 500)),
}


@contextmanager
def place(path: Path, damaged: Damaged) -> Iterator[None]:
    """Put something in a file's place for the block, and what was there back after it."""
    kept = path.with_name(f".kept-{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        path.rename(kept)
    try:
        path.write_bytes(damaged) if isinstance(damaged, bytes) else damaged(path)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if kept.exists():
            kept.rename(path)
