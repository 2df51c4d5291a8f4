"""Where a model comes from: the embedded one, a local folder, or the hub."""

from __future__ import annotations

from pathlib import Path

from trl_ext.toy import MODEL_DIR


def resolve_model_path(name_or_path: str) -> str:
    """Turn `toy` into the folder of the embedded model; return a hub name or an existing folder as it is.

    Raises:
        FileNotFoundError: the name looks like a path, and no such folder exists or it holds no `config.json`.
    """
    if name_or_path == "toy":
        return str(MODEL_DIR)
    path = Path(name_or_path)
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
            raise FileNotFoundError(f"the folder {name_or_path!r} holds no config.json: it is not a saved model")
        return name_or_path
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1 or path.exists():
        raise FileNotFoundError(
            f"no model folder {name_or_path!r}: give a folder, a hub name such as Qwen/Qwen2.5-1.5B-Instruct, or toy"
        )
    return name_or_path
