"""The contents of a saved LoRA reward model, and what prevents one from sharing a base with other adapters."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig, PeftConfig, PeftModel
from safetensors import safe_open

from trl_ext.models.loading import resolve_model_path

HEADS = ("score", "classifier")
# Saved with the weights of a reward model: the token limits that it was trained with.
LIMITS_FILE = "reward_model.json"

# LoRA initialisations that leave the base's weights alone; the others move a part of them into the adapter.
HARMLESS_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class RewardAdapter:
    """A saved LoRA reward model.

    Attributes:
        folder: its folder.
        config: its LoRA settings.
        base: folder or hub name of the model it was trained on.
        head: the name of its head's tensor, [1, H].
        shapes: shape of every tensor by name.
    """

    folder: Path
    config: LoraConfig
    base: str
    head: str
    shapes: dict[str, tuple[int, ...]]


def read_reward_adapter(folder: str | Path, *, base: str | None = None) -> RewardAdapter:
    """Read an adapter's configuration and the header of its weights; no weights are read.

    Args:
        folder: a local folder.
        base: the base's folder or hub name, instead of the one that the configuration names.

    Raises:
        FileNotFoundError: the base is not on this machine.
        ValueError: not LoRA, a file is missing, no trained score head, more than one label, or no base.
    """
    folder = Path(folder)
    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder}: peft_type is {config.peft_type.value}; only LoRA reward models are supported")
    shapes = tensor_shapes(folder / "adapter_model.safetensors")
    head = head_of(folder, shapes)
    base = base or config.base_model_name_or_path
    if not base:
        raise ValueError(f"{folder}/adapter_config.json: names no base_model_name_or_path; say which with base=")
    return RewardAdapter(folder, config, _base_here(folder, base), head, shapes)


def _base_here(folder: Path, base: str) -> str:
    from transformers.utils import cached_file

    try:
        base = resolve_model_path(base)
        cached_file(base, "config.json")
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{folder}: its base {base} is not on this machine; say with base= where it is"
        ) from error
    return base


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a safetensors file, from its header."""
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise ValueError(f"{path}: no complete safetensors file ({error}); save or copy it again") from error


def head_of(folder: Path, shapes: dict[str, tuple[int, ...]]) -> str:
    """The name of the score head's matrix, [1, H], among the tensors of a reward model.

    Raises:
        ValueError: there is no head, or it gives several labels.
    """
    heads = [name for name in shapes if name.endswith(".weight") and {*HEADS} & {*name.split(".")}]
    if not heads:
        raise ValueError(
            f"{folder}: no score head, so the scores would be random: train a reward model from it first, an adapter "
            "with task_type='SEQ_CLS'"
        )
    labels = shapes[heads[-1]][0]
    if labels != 1:
        raise ValueError(f"{folder}: the head gives {labels} labels; a reward model gives one (num_labels=1)")
    return heads[-1]


def adapter_obstacle(adapter: RewardAdapter) -> str | None:
    """Why this reward adapter cannot share a base with other adapters, in one line; None if it can."""
    setting = _changes_base(adapter.config)
    if setting:
        return f"the adapter cannot share a base with {setting}"
    others = [name for name in adapter.shapes if ".lora_" not in name and name != adapter.head]
    if others:
        return f"the adapter's file holds weights of the base, such as {others[0]}"
    return None


def sharing_obstacle(model, model_base: str, adapter: RewardAdapter) -> str | None:
    """Why this reward adapter cannot be added to a model with base `model_base`, in one line; None if it can."""
    if not _same_model(adapter.base, model_base):
        return f"it was trained on {adapter.base}, and the backbone is {model_base}"
    return adapter_obstacle(adapter) or _weights_obstacle(model, adapter.base)


def policy_obstacle(model) -> str | None:
    """Why no reward adapter can be added to this policy's base, in one line; None if one can."""
    if not isinstance(model, PeftModel):
        return f"the policy is a {type(model).__name__}, not a model with a LoRA adapter: its own weights are trained"
    for name, config in model.peft_config.items():
        if not isinstance(config, LoraConfig):
            return f"the policy's adapter {name!r} is {config.peft_type.value}, not LoRA"
        setting = _changes_base(config)
        if setting:
            return f"the policy's adapter {name!r} may change its base with {setting}"
    if len(model.active_adapters) != 1:
        return f"the policy has {len(model.active_adapters)} active adapters, and one is expected"
    base = model.get_base_model()
    if getattr(base, "is_quantized", False):
        return "the policy's base is quantized, and reward adapters were not trained on that"
    for name, parameter in base.base_model.named_parameters():
        if parameter.requires_grad and not any(part in name for part in (".lora_", "modules_to_save.")):
            return f"the policy trains weights of its base, such as {name}"
    return None


def _changes_base(config: LoraConfig) -> str | None:
    """A setting with which an adapter changes its base; None without one."""
    if config.bias != "none":
        return f"bias={config.bias!r}"
    if config.init_lora_weights not in HARMLESS_INITIALISATIONS:
        return f"init_lora_weights={config.init_lora_weights!r}"
    return None


def _same_model(first: str, second: str) -> bool:
    """Whether two folders or hub names are one model; folders are compared with links resolved."""
    return first == second or (os.path.isdir(first) and os.path.isdir(second) and os.path.samefile(first, second))


def _weights_obstacle(model, base: str) -> str | None:
    """Why the weights in memory are not those of the saved base, in one line; None if they are.

    A policy only names the base that it was loaded from. Whether an adapter was merged into it in memory, or its
    weights were trained, shows only in the weights: the first row of each is compared. A base without local
    safetensors files is not checked.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    prefix = f"{inner.base_model_prefix}."
    weights = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): weight
        for name, weight in inner.base_model.named_parameters()
        if weight.ndim and weight.numel()
    }
    for path in _weight_files(base):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                weight = weights.get(name.removeprefix(prefix))
                if weight is None:
                    continue
                saved = file.get_slice(name)[:1].to(weight.dtype)
                if saved.shape[1:] != weight.shape[1:] or not saved.equal(weight[:1].detach().cpu()):
                    return f"the base in memory is not {base} as it is saved: {name} differs"
    return None


def _weight_files(base: str) -> list[Path]:
    folder = Path(base)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(base, local_files_only=True))
        except (OSError, ValueError):
            return []
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
