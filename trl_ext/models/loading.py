"""Where a model comes from: the embedded one, a local folder, or the hub."""

from __future__ import annotations

from pathlib import Path

from trl_ext.toy import MODEL_DIR


def resolve_model_path(name_or_path: str) -> str:
    """Turn `toy` into the folder of the embedded model; return a hub name or an existing folder as it is.

    What cannot be a hub name, or stands in a folder that is there (`runs/aot-tyo` beside `runs/aot-toy`), is taken for
    a mistyped path and refused at once: the hub would be asked for it again and again, for over a minute offline.

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
    if _looks_like_path(name_or_path):
        raise FileNotFoundError(
            f"no model folder {name_or_path!r}: give a folder, a hub name such as Qwen/Qwen2.5-1.5B-Instruct, or toy"
            + _siblings(path)
        )
    return name_or_path


def _looks_like_path(name: str) -> bool:
    path = Path(name)
    is_no_hub_name = name.startswith((".", "/", "~", "runs/")) or name.endswith("/") or name.count("/") > 1
    return is_no_hub_name or path.exists() or ("/" in name and path.parent.is_dir())


def _siblings(path: Path) -> str:
    """The saved models in the folder that was named, for the eye to find the right one."""
    if not path.parent.is_dir():
        return ""
    files = ("config.json", "adapter_config.json")
    names = sorted(child.name for child in path.parent.iterdir() if any((child / file).is_file() for file in files))
    return f"; {path.parent} holds {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}" if names else ""
