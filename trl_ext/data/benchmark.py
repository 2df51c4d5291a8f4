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

KNOWN_SPLITS = ("train_prefs", "validation_prefs", "test_prefs", "train_gen", "validation_gen", "test_gen")
GENERIC_SPLITS = ("train", "validation", "test")
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
            name: build_split(split, pairs=_is_preference_split(name, split), skip_bad_rows=skip_bad_rows)
            for name, split in raw.items()
        }
    )


def known_score(name: str | os.PathLike) -> Callable[..., float] | None:
    """The score `f(prompt_text, response, *, finished=True)` of an embedded benchmark; None for any other data."""
    return import_module(EMBEDDED[name]).score if name in EMBEDDED else None


def _read(name_or_path: str | os.PathLike, wanted: list[str] | None) -> dict[str, RawSplit]:
    if name_or_path in EMBEDDED:
        return _read_folder(import_module(EMBEDDED[name_or_path]).DATA_DIR, wanted)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _read_folder(path, wanted)
    if path.is_file():
        return _read_file(path, wanted)
    if _looks_like_path(name_or_path):
        there = list_folder(path.parent) if path.parent.is_dir() else f"there is no folder {path.parent} either"
        raise FileNotFoundError(f"no such benchmark file or folder: {path}; {there}")
    return _read_hub(str(name_or_path), wanted)


def _is_preference_split(name: str, split: RawSplit) -> bool:
    if name in KNOWN_SPLITS:
        return name.endswith("_prefs")
    return split.kind != "prompt"


def _read_folder(folder: Path, wanted: list[str] | None) -> dict[str, RawSplit]:
    names = [name for name in KNOWN_SPLITS if (folder / f"{name}.jsonl").is_file()] if wanted is None else wanted
    if not names:
        known = ", ".join(f"{name}.jsonl" for name in KNOWN_SPLITS)
        raise FileNotFoundError(f"none of {known} is there: choose others with splits=[...]; {list_folder(folder)}")
    return {name: read_jsonl(split_file(folder, name)) for name in names}


def _read_file(path: Path, wanted: list[str] | None) -> dict[str, RawSplit]:
    split = read_jsonl(path)
    name = "train_prefs" if _is_preference_split("", split) else "train_gen"
    if wanted not in (None, [name]):
        raise ValueError(f"{path} is one file and loads as the split {name!r}; it has no split {wanted[0]!r}")
    return {name: split}


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
    # `train`, `validation` and `test` are renamed according to their content.
    source_names = {}
    for split in source:
        renamed = f"{split}_gen" if kind_of(source[split].column_names) == "prompt" else f"{split}_prefs"
        source_names[renamed if split in GENERIC_SPLITS and renamed not in source else split] = split
    names = [split for split in KNOWN_SPLITS if split in source_names] if wanted is None else wanted
    missing = [split for split in names if split not in source_names and split not in source]
    if missing or not names:
        problem = f"no split {missing[0]!r}" if missing else f"none of the splits {', '.join(KNOWN_SPLITS)}"
        raise ValueError(f"hub data set {name} has {problem}; its splits are {', '.join(source)}")
    stems = {split: source_names.get(split, split) for split in names}
    return {
        split: RawSplit(f"{name}[{stem}]", stem, unit="row", rows=list(enumerate(source[stem])))
        for split, stem in stems.items()
    }


def _looks_like_path(name_or_path: str | os.PathLike) -> bool:
    """True if the text cannot be the name of a hub data set, which has at most one slash."""
    name = os.fspath(name_or_path).replace(os.sep, "/")
    is_text = isinstance(name_or_path, str)
    return not is_text or name.endswith(".jsonl") or name.count("/") > 1 or name.startswith((".", "/", "~"))
