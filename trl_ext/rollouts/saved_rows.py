"""Save sampled responses to a file in complete parts, so that interrupted sampling can continue."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.files import write_text

if TYPE_CHECKING:
    from accelerate import Accelerator


def part_seed(seed: int, start: int, accelerator: Accelerator | None) -> int:
    """The seed of one part of the work on one process. Under FSDP all processes share it, as they do the same work."""
    alone = accelerator is None or str(accelerator.distributed_type).endswith("FSDP")
    return seed + 1_000_003 * (start + (0 if alone else accelerator.process_index))


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append the rows of a part and wait until they are on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())


def kept_rows(
    path: Path, order: Sequence[tuple[str, int]], save_every: int, accelerator: Accelerator | None = None
) -> list[dict[str, Any]]:
    """The rows saved by earlier calls, up to the last complete part; all processes get those that the first one reads.

    Args:
        path: the file of `append_rows`; rows after the last complete part are cut off.
        order: `row_id` and `sample` of all rows, in order.
        save_every: rows per part.
        accelerator: for a run with several processes, each of which must call this function.

    Raises:
        ValueError: a line is damaged, or the rows are not in this order.
    """
    kept = [_read_kept(path, order, save_every) if accelerator is None or accelerator.is_main_process else None]
    if accelerator is not None and accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(kept)
    return kept[0]


def _read_kept(path: Path, order: Sequence[tuple[str, int]], save_every: int) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    # Text after the last newline is a line whose writing was interrupted.
    lines = path.read_bytes().split(b"\n")[:-1]
    whole = len(lines) if len(lines) == len(order) else len(lines) // save_every * save_every
    rows = [_parsed(path, number, line) for number, line in enumerate(lines[:whole], start=1)]
    for number, found in enumerate(rows):
        wanted = order[number] if number < len(order) else None
        if (found.get("row_id"), found.get("sample")) != wanted:
            raise ValueError(
                f"{path}: line {number + 1} is row_id {found.get('row_id')}, sample {found.get('sample')}, and not "
                "what this evaluation has in its place: the file is of another one; remove it or choose another"
            )
    write_text(path, "".join(line.decode() + "\n" for line in lines[:whole]))
    return rows


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number} is damaged ({error}): remove the file to begin again") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}: line {number} holds no row: remove the file to begin again")
    return row
