"""Saved policies, full models and adapters alike, ready to generate; and a hash by which to know their weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trl_ext.models import resolve_model_path

# Whatever changes what a model answers. Anything pickled is left alone.
HASHED = ("*.safetensors", "config.json", "adapter_config.json", "tokenizer.json", "*.jinja", "tokenizer_config.json")

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_policy(name_or_path: str | Path, *, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        name_or_path: `toy`, a folder of a full model or of an adapter, or a hub name.
        dtype: of the weights: auto (as saved), float32, bfloat16 or float16.
        device: None for the GPU where there is one, else the CPU.

    Raises:
        FileNotFoundError: no such model.
        ValueError: it is no causal language model, such as a reward model; its adapter does not fit its base; or an
            unknown dtype.
    """
    path, base, is_adapter = find_policy(name_or_path, dtype=dtype)

    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        has_tokenizer = not Path(path).is_dir() or (Path(path) / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(path if has_tokenizer else base)
    except (OSError, SafetensorError) as error:
        raise FileNotFoundError(f"the model {str(name_or_path)!r} could not be loaded: {error}") from error
    if tokenizer.pad_token is None:
        # As in GPT-2; the attention mask tells padding from the end of a text.
        tokenizer.pad_token = tokenizer.eos_token
    if is_adapter:
        model = _with_adapter(model, path)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.requires_grad_(False).eval().to(device), tokenizer


def find_policy(name_or_path: str | Path, *, dtype: str = "auto") -> tuple[str, str, bool]:
    """Where a policy and its base lie, and whether it is an adapter; nothing is loaded.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a reward model, or an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    path = resolve_model_path(str(name_or_path))
    adapter = _read(Path(path) / "adapter_config.json")
    base = resolve_model_path(adapter["base_model_name_or_path"]) if adapter else path
    _refuse_reward_models(name_or_path, adapter, _read(Path(base) / "config.json"))
    if not Path(base).is_dir():
        require_on_hub(base)
    return path, base, bool(adapter)


def model_sha256(name_or_path: str | Path) -> str:
    """A hash of a saved model: of its weights, configuration and tokenizer; of the name alone for one on the hub.

    An adapter's is of its base as well.

    Raises:
        FileNotFoundError: no such folder.
    """
    path = Path(resolve_model_path(str(name_or_path)))
    digest = hashlib.sha256()
    if not path.is_dir():
        digest.update(str(name_or_path).encode())
        return digest.hexdigest()
    adapter = _read(path / "adapter_config.json")
    if adapter:
        digest.update(model_sha256(adapter["base_model_name_or_path"]).encode())
    for file in sorted({file for pattern in HASHED for file in path.glob(pattern)}):
        digest.update(file.name.encode())
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: bad JSON: {error.msg} at line {error.lineno}") from error


def _refuse_reward_models(name: str | Path, adapter: dict[str, Any] | None, config: dict[str, Any] | None) -> None:
    """A missing language-model head would be made up at random, with no more than a warning."""
    architecture = ((config or {}).get("architectures") or [""])[0]
    if (adapter or {}).get("task_type") == "SEQ_CLS" or architecture.endswith("ForSequenceClassification"):
        raise ValueError(f"{name} is a reward model, which cannot generate: name a policy")


def require_on_hub(name: str) -> None:
    """Ask the hub once: loading a model that is not there asks for file after file, for over a minute offline."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "adapter_config.json")):
        return
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # of the hub's, of the network's and of the name's several kinds
        reason = " ".join(str(error).split())[:200]
        raise FileNotFoundError(
            f"no model {name!r}: there is no such folder, none of that name was downloaded before, and the hub gives "
            f"none: {reason}"
        ) from error


def _with_adapter(model, path: str):
    import warnings

    from peft import PeftModel
    from safetensors import SafetensorError

    with warnings.catch_warnings():
        # PEFT only warns, and leaves what is missing at its initial value: the answers would be the base's.
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            return PeftModel.from_pretrained(model, path)
        except (UserWarning, RuntimeError, SafetensorError) as error:
            problem = " ".join(line.strip() for line in str(error).splitlines()[:2])
            raise ValueError(f"{path}: the adapter does not fit its base {model.name_or_path}: {problem}") from error
