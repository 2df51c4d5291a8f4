"""Check that a folder holds a reward model, from its configuration and the headers of its weights."""

from __future__ import annotations

import json
from pathlib import Path

from trl_ext.models import resolve_model_path
from trl_ext.models.reward_adapter import LIMITS_FILE, RewardAdapter, head_of, read_reward_adapter, tensor_shapes

# Files that a reward model is loaded from. Pickled weights are not downloaded.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def find_reward_model(folder_or_hub_name: str | Path, *, base: str | None = None) -> tuple[Path, RewardAdapter | None]:
    """The folder of a reward model, and its adapter; None for a full model.

    A hub name is downloaded, or taken from the hub's cache. No weights are read.

    Raises:
        FileNotFoundError: the folder does not exist or holds no model.
        ValueError: the model is not a reward model with one label.
    """
    folder = _local_folder(str(folder_or_hub_name))
    if (folder / "adapter_config.json").is_file():
        return folder, read_reward_adapter(folder, base=base)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: neither config.json nor adapter_config.json: no saved model")
    if base is not None:
        raise ValueError(f"{folder}: base={base} is for adapters, and this is a full model")
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes |= tensor_shapes(path)
    if not shapes:
        raise FileNotFoundError(f"{folder}: no *.safetensors with weights; save the model again (save_pretrained)")
    head_of(folder, shapes)
    return folder, None


def read_limits(folder: Path) -> dict[str, int | None]:
    """The `max_prompt_tokens` and `max_response_tokens` that a reward model was trained with; 512 if not recorded."""
    path = folder / LIMITS_FILE
    if not path.is_file():
        return {"max_prompt_tokens": 512, "max_response_tokens": 512}
    saved = json.loads(path.read_text(encoding="utf-8"))
    return {name: saved[name] for name in ("max_prompt_tokens", "max_response_tokens")}


def require_tokenizer(folder: Path, adapter: RewardAdapter | None) -> str:
    """The folder or hub name of the reward model's tokenizer: its own, otherwise its base's."""
    candidates = [str(folder)] if adapter is None else [str(folder), adapter.base]
    for name in candidates:
        # A base on the hub is checked when it is loaded.
        if not Path(name).is_dir() or (Path(name) / "tokenizer_config.json").is_file():
            return name
    raise FileNotFoundError(
        f"{folder}: no tokenizer_config.json here{' or at its base' if adapter else ''}; save the tokenizer there"
    )


def _local_folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    try:
        name = resolve_model_path(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; recipes/reward_model.py trains a reward model") from None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no reward model {name!r}: there is no such folder, and the hub has none of that name within reach"
        ) from error
