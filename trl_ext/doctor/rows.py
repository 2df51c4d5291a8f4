"""Rows of a dataset, as the doctor reads them."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

# Rows that are read as text and tokens, and rows that are only compared with each other.
SAMPLED_ROWS, COMPARED_ROWS = 48, 4000


def as_text(value: Any) -> str:
    """A value of a row as text to compare, without the keys that `datasets` adds with None, in one order."""
    if isinstance(value, list):
        plain = [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in value]
        return json.dumps(plain, sort_keys=True, default=str)
    return str(value)


def plain_text(value: Any) -> str:
    """What messages or a text say."""
    if isinstance(value, list):
        return "\n".join(str(message.get("content") or "") for message in value if isinstance(message, dict))
    return str(value)


def is_tokens(side: Any) -> bool:
    """Whether a response is token ids rather than a text or messages; an empty list is."""
    return isinstance(side, list) and all(isinstance(one, int) for one in side[:1])


def media_columns(dataset: Any) -> set[str]:
    """The columns of images, videos and sounds."""
    features = getattr(dataset, "features", None) or {}
    typed = {name for name, kind in features.items() if re.search(r"\b(Image|Video|Audio)\(", repr(kind))}
    return typed | {"image", "images"} & set(getattr(dataset, "column_names", None) or ())


def read_rows(dataset: Any, count: int) -> list[dict[str, Any]]:
    if dataset is None:
        return []
    if not hasattr(dataset, "__len__"):
        return list(itertools.islice(dataset, min(count, SAMPLED_ROWS)))
    total = len(dataset)
    picked = sorted({index * total // min(count, total) for index in range(min(count, total))})
    return [dataset[index] for index in picked]


def is_text(value: Any) -> bool:
    return isinstance(value, str | dict) or (
        isinstance(value, list) and value[:1] and isinstance(value[0], str | dict)
    )


def length_of(row: dict[str, Any], side: str) -> int:
    """Tokens of a row before the collator cuts it; 0 if unknown."""
    if side in row:
        return len(row.get("prompt_ids", ())) + len(row[side])
    return len(row.get("input_ids", ()))
