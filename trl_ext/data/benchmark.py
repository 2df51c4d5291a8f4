"""Load the embedded toy benchmark, local JSONL files or a hub data set in the format that TRL trains on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from trl_ext.data.rows import RawSplit, build_split, list_folder, read_jsonl, split_file
from trl_ext.data.schemas import kind_of

if TYPE_CHECKING:
    import datasets

GENERIC_SPLITS = ("train", "validation", "test")
KNOWN_SPLITS = tuple(f"{split}_{kind}" for kind in ("prefs", "gen") for split in GENERIC_SPLITS)
# The benchmarks that come with the library, each a package with `DATA_DIR`, `MAX_NEW_TOKENS` and `score`.
EMBEDDED = {"toy": "trl_ext.toy", "instructions": "trl_ext.instructions"}


def load_benchmark(
    name_or_path: str | os.PathLike = "toy", *, splits: str | Sequence[str] | None = None, skip_bad_rows: bool = False
) -> datasets.DatasetDict:
    """Load preference pairs and prompts, and check every row.

    `name_or_path` is tried in this order:

    - `"toy"` or `"instructions"`, the benchmarks that come with the library;
    - a folder of `{split}.jsonl` files, from which the known splits are loaded: `train_prefs`, `validation_prefs`,
      `test_prefs`, `train_gen`, `validation_gen`, `test_gen`;
    - one JSONL file, which becomes `train_prefs` if its first row is a pair or a labelled response, and `train_gen` if
      it is a prompt;
    - a data set on the Hugging Face hub. Its splits `train`, `validation` and `test` become `*_prefs` or `*_gen`
      according to their content; the known splits keep their names.

    Preference splits have the columns `row_id`, `prompt`, `chosen`, `rejected`, or, if their first row has a `label`,
    `row_id`, `prompt`, `completion`, `label`. Prompt splits have `row_id` and `prompt`. Texts are messages, or strings
    if the source is in TRL's plain format (`trl_ext.data.schemas.convert_row`). Other columns of strings, numbers or
    booleans are kept if every row has them, and so are the criteria in `rubric`; others are dropped with a warning.

    Args:
        name_or_path: the source.
        splits: the splits to load instead of the known ones; any file of a folder, without `.jsonl`, or any split of
            a hub data set.
        skip_bad_rows: drop bad rows, with a count of each reason in the log, instead of raising.

    Raises:
        FileNotFoundError: the file, folder, split file or hub data set does not exist.
        ValueError: a split is empty or has bad rows; the message gives file, line, row_id and field of up to five.
    """
    from datasets import DatasetDict

    wanted = None if splits is None else [splits] if isinstance(splits, str) else list(splits)
    raw = _read(name_or_path, wanted)
    return DatasetDict(
        {
            # The names of the known splits say their kind.
            name: build_split(
                split,
                pairs=name.endswith("_prefs") if name in KNOWN_SPLITS else split.kind != "prompt",
                skip_bad_rows=skip_bad_rows,
            )
            for name, split in raw.items()
        }
    )


def known_score(name: str | os.PathLike) -> Callable[..., float] | None:
    """The score `f(prompt_text, response, *, finished=True)` of an embedded benchmark; None for any other data."""
    return import_module(EMBEDDED[name]).score if name in EMBEDDED else None


def _read(name_or_path: str | os.PathLike, wanted: list[str] | None) -> dict[str, RawSplit]:
    embedded = name_or_path in EMBEDDED
    path = import_module(EMBEDDED[name_or_path]).DATA_DIR if embedded else Path(name_or_path).expanduser()
    if path.is_dir():
        names = [name for name in KNOWN_SPLITS if (path / f"{name}.jsonl").is_file()] if wanted is None else wanted
        if not names:
            known = ", ".join(f"{name}.jsonl" for name in KNOWN_SPLITS)
            raise FileNotFoundError(f"none of {known} is there: choose others with splits=[...]; {list_folder(path)}")
        return {name: read_jsonl(split_file(path, name)) for name in names}
    if path.is_file():
        split = read_jsonl(path)
        name = "train_gen" if split.kind == "prompt" else "train_prefs"
        if wanted not in (None, [name]):
            raise ValueError(f"{path} is one file and loads as the split {name!r}; it has no split {wanted[0]!r}")
        return {name: split}
    name = str(name_or_path)
    # A name on the hub has at most one slash.
    if (
        isinstance(name_or_path, Path)
        or name.endswith(".jsonl")
        or name.count("/") > 1
        or name.startswith((".", "/", "~"))
    ):
        there = list_folder(path.parent) if path.parent.is_dir() else f"there is no folder {path.parent} either"
        raise FileNotFoundError(f"no such benchmark file or folder: {path}; {there}")
    return _read_hub(name, wanted)


def _read_hub(name: str, wanted: list[str] | None) -> dict[str, RawSplit]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HFValidationError

    try:
        source = load_dataset(name)
    except (DatasetNotFoundError, HFValidationError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{name!r} is neither a benchmark of the library ({', '.join(EMBEDDED)}), nor a local file or folder, nor "
            "a hub data set that can be reached"
        ) from error
    # The hub's name of each split: `train`, `validation` and `test` have another one by their content.
    stems = {split: split for split in source}
    for split in GENERIC_SPLITS:
        if split in source:
            kind = "gen" if kind_of(source[split].column_names) == "prompt" else "prefs"
            stems.setdefault(f"{split}_{kind}", split)
    names = [split for split in KNOWN_SPLITS if split in stems] if wanted is None else wanted
    missing = [split for split in names if split not in stems]
    if missing or not names:
        problem = f"no split {missing[0]!r}" if missing else f"none of the splits {', '.join(KNOWN_SPLITS)}"
        raise ValueError(f"hub data set {name} has {problem}; its splits are {', '.join(source)}")
    return {
        split: RawSplit(
            f"{name}[{stems[split]}]", stems[split], unit="row", rows=list(enumerate(source[stems[split]]))
        )
        for split in names
    }
