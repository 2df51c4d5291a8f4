"""The contents of a saved LoRA reward model, and what prevents one from sharing a base with other adapters."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig, PeftConfig, PeftModel
from safetensors import safe_open

from trl_ext.models.loading import resolve_model_path

HEADS = ("score", "classifier")
# Saved with the weights of a reward model: the token limits that it was trained with.
LIMITS_FILE = "reward_model.json"

# Initialisations that leave the base's weights unchanged; the others move a part of them into the adapter.
HARMLESS_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")

# Settings of an adapter that change the base for every adapter on it.
CHANGES_BASE = {
    "trainable_token_indices": "it trains tokens of the embedding",
    "layer_replication": "it replicates layers of the base",
    "kasa_config": "KaSA rewrites the base",
}

# Settings that prevent a reward adapter from running on the plain forward pass of another model's base.
NEEDS_ITS_OWN_MODEL = {
    "alora_invocation_tokens": "it switches itself on at invocation tokens",
    "arrow_config": "it routes between adapters",
    "target_parameters": "it adapts bare parameters, not modules",
    "use_bdlora": "its block-diagonal layout is not supported",
    "use_qalora": "it needs a quantized base",
    "monteclora_config": "it samples its weights",
}


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

    @property
    def weights(self) -> Path:
        """The file of its tensors."""
        return self.folder / "adapter_model.safetensors"


def read_reward_adapter(folder: str | Path, *, base: str | None = None) -> RewardAdapter:
    """Read an adapter's configuration and the header of its weights; no weights are read.

    Args:
        folder: a local folder.
        base: the base's folder or hub name, instead of the one that the configuration names.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: not LoRA, no trained score head, more than one label, or no base.
    """
    folder = Path(folder)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            hint = " (pickled weights are not read)" if (folder / "adapter_model.bin").is_file() else ""
            raise FileNotFoundError(f"{folder}: holds no {file}{hint}; give the folder of a saved LoRA reward model")
    kind = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{folder}/adapter_config.json: peft_type is {kind}; only LoRA reward models are supported")
    config = PeftConfig.from_pretrained(str(folder))
    shapes = tensor_shapes(folder / "adapter_model.safetensors")
    head = _head_of(folder, config, shapes)
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
        raise ValueError(f"{path}: not a complete safetensors file ({error}); save or copy it again") from error


def _head_of(folder: Path, config: LoraConfig, shapes: dict[str, tuple[int, ...]]) -> str:
    heads = [name for name in shapes if _module(name) in HEADS]
    if not heads:
        raise ValueError(
            f"{folder}: the adapter holds no score head, so its scores would be random: train it with "
            "task_type='SEQ_CLS', which saves the head, or give a merged model"
        )
    if len(heads) > 1 or not heads[0].endswith(".weight") or len(shapes[heads[0]]) != 2:
        raise ValueError(f"{folder}: expected a head of one matrix without a bias, got {', '.join(heads)}")
    labels = shapes[heads[0]][0]
    if labels != 1:
        raise ValueError(f"{folder}: the head gives {labels} labels; a reward model gives one (num_labels=1)")
    saved = config.modules_to_save or ()
    if config.task_type != "SEQ_CLS" and _module(heads[0]) not in saved:
        raise ValueError(
            f"{folder}/adapter_config.json: names no head, so PEFT would not load the one in the file: set task_type "
            f"to SEQ_CLS or modules_to_save to ['{_module(heads[0])}']"
        )
    return heads[0]


def _module(tensor_name: str) -> str:
    return tensor_name.split(".")[-2] if "." in tensor_name else ""


def adapter_obstacle(adapter: RewardAdapter) -> str | None:
    """Why this reward adapter cannot share a base with other adapters, in one line; None if it can."""
    obstacle = _base_change(adapter.config)
    if obstacle:
        return f"the adapter cannot share a base: {obstacle}"
    for setting, reason in NEEDS_ITS_OWN_MODEL.items():
        if getattr(adapter.config, setting, None):
            return f"the adapter cannot share a base: {reason} ({setting})"
    whole = sorted(set(adapter.config.modules_to_save or ()) - set(HEADS))
    if whole:
        return f"the adapter holds whole modules of the base beside its head: {', '.join(whole)}"
    others = [name for name in adapter.shapes if ".lora_" not in name and name != adapter.head]
    if others:
        return f"the adapter's file holds weights of the base, such as {others[0]} (resized embeddings?)"
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
        obstacle = _base_change(config)
        if obstacle:
            return f"the policy's adapter {name!r} changes its base: {obstacle}"
    if len(model.active_adapters) != 1:
        return f"the policy has {len(model.active_adapters)} active adapters, and one is expected"
    if not model.peft_config[model.active_adapters[0]].base_model_name_or_path:
        return "the policy does not know which base it was loaded from (base_model_name_or_path)"
    base = model.get_base_model()
    if getattr(base, "is_quantized", False):
        return "the policy's base is quantized, and reward adapters were not trained on that"
    for name, parameter in base.base_model.named_parameters():
        if hasattr(parameter, "device_mesh") or type(parameter).__name__ == "FlatParameter":
            return "the policy's weights are sharded by FSDP"
        if parameter.requires_grad and not any(part in name for part in (".lora_", "modules_to_save.")):
            return f"the policy trains weights of its base, such as {name}"
    return None


def _base_change(config: LoraConfig) -> str | None:
    if config.init_lora_weights not in HARMLESS_INITIALISATIONS:
        return f"init_lora_weights={config.init_lora_weights!r} rewrites the base"
    if config.bias != "none":
        return f"bias={config.bias!r} trains biases of the base"
    for setting, reason in CHANGES_BASE.items():
        if getattr(config, setting, None):
            return f"{reason} ({setting})"
    return None


def _same_model(first: str, second: str) -> bool:
    """Whether two folders or hub names are one model; folders are compared with links resolved."""
    if first == second:
        return True
    return os.path.isdir(first) and os.path.isdir(second) and os.path.samefile(first, second)


def _weights_obstacle(model, base: str) -> str | None:
    """Why the weights in memory are not those of the saved base, in one line; None if they are.

    A policy only names the base that it was loaded from. Whether an adapter was merged into it in memory, or its
    weights were trained, shows only in the weights: the first row of each is compared. A base without local
    safetensors files is not checked.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    prefix = f"{inner.base_model_prefix}."
    weights = {}
    for name, weight in inner.base_model.named_parameters():
        if weight.ndim and weight.numel():
            weights[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = weight
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
