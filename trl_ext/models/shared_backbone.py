"""Saved LoRA reward models, and one frozen base that several of them share, with the policy's adapter or without."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from trl_ext.models.loading import resolve_model_path
from trl_ext.models.packing import last_tokens, share_prefixes
from trl_ext.models.scoring import score_sequences

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

# Saved with the weights of a reward model: the token limits that it was trained with.
LIMITS_FILE = "reward_model.json"
# LoRA initialisations that leave the base's weights alone; the others move a part of them into the adapter.
_HARMLESS_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")


# ---- Saved reward models ----


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
    def obstacle(self) -> str | None:
        """Why it cannot share a base with other adapters, in one line; None if it can."""
        if setting := _changes_base(self.config):
            return f"the adapter cannot share a base with {setting}"
        others = [name for name in self.shapes if ".lora_" not in name and name != self.head]
        return f"the adapter's file holds weights of the base, such as {others[0]}" if others else None


def read_reward_adapter(folder: str | Path, *, base: str | None = None) -> RewardAdapter:
    """Read an adapter's configuration and the header of its weights; no weights are read.

    Args:
        folder: a local folder.
        base: the base's folder or hub name, instead of the one that the configuration names.

    Raises:
        FileNotFoundError: the base is not on this machine.
        ValueError: not LoRA, a file is missing, no trained score head, more than one label, or no base.
    """
    from peft import LoraConfig, PeftConfig
    from transformers.utils import cached_file

    folder = Path(folder)
    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder}: peft_type is {config.peft_type.value}; only LoRA reward models are supported")
    shapes = tensor_shapes(folder / "adapter_model.safetensors")
    head = head_of(folder, shapes)
    named = base or config.base_model_name_or_path
    if not named:
        raise ValueError(f"{folder}/adapter_config.json: names no base_model_name_or_path; say which with base=")
    try:
        base = resolve_model_path(named)
        cached_file(base, "config.json")
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{folder}: its base {named} is not on this machine; say with base= where it is"
        ) from error
    return RewardAdapter(folder, config, base, head, shapes)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a safetensors file, from its header."""
    from safetensors import safe_open

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
    heads = [name for name in shapes if name.endswith(".weight") and {"score", "classifier"} & {*name.split(".")}]
    if not heads:
        raise ValueError(
            f"{folder}: no score head, so the scores would be random: train a reward model from it first, an adapter "
            "with task_type='SEQ_CLS'"
        )
    labels = shapes[heads[-1]][0]
    if labels != 1:
        raise ValueError(f"{folder}: the head gives {labels} labels; a reward model gives one (num_labels=1)")
    return heads[-1]


def _changes_base(config: LoraConfig) -> str | None:
    """A setting with which an adapter changes its base; None without one."""
    if config.bias != "none":
        return f"bias={config.bias!r}"
    if config.layer_replication:
        return f"layer_replication={config.layer_replication}"
    if config.init_lora_weights not in _HARMLESS_INITIALISATIONS:
        return f"init_lora_weights={config.init_lora_weights!r}"
    return None


def load_classifier(name_or_path: str, *, dtype: torch.dtype, device=None, has_head: bool = False):
    """A frozen model for sequence classification with one label, unsharded on this process, in evaluation mode.

    Without `has_head` it is the base of an adapter that brings the head: its own is random, without a warning. The
    random state does not change. The device defaults to this process's GPU, or the CPU if there is none.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    if not has_head:
        logging.set_verbosity_error()
    try:
        with preserved_random_state(), _unsharded():
            model = AutoModelForSequenceClassification.from_pretrained(
                name_or_path, num_labels=1, dtype=dtype, use_safetensors=True
            )
    finally:
        logging.set_verbosity(verbosity)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.requires_grad_(False).eval().to(device)


@contextmanager
def _unsharded() -> Iterator[None]:
    """Load models unsharded here; under ZeRO-3 they would otherwise be sharded, and no engine would gather them."""
    from transformers.integrations import deepspeed

    reference = getattr(deepspeed, "_hf_deepspeed_config_weak_ref", None)
    config = reference() if reference is not None else None
    if config is None:
        yield
        return
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(config)


def preserved_random_state():
    """A context that restores torch's generators, on the CPU and on this process's GPU."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices=devices)


# ---- One base under several adapters ----


class SharedBackbone:
    """Scores sequences with several LoRA reward models on one copy of the base they were trained on.

    The base is the policy's own, whose adapter is still trained, or a frozen copy that no policy uses (`load`). Only
    the reward adapters' LoRA weights are added to the model. Their heads stay outside it, so that no checkpoint,
    optimizer or engine sees them. `model.save_pretrained` saves only the other adapters.

    Args:
        model: a `PeftModel` of a causal language model, unwrapped, with exactly one active LoRA adapter. Its base has
            the weights that it was loaded with.

    Raises:
        ValueError: the model's base will be changed, or cannot be shared for another reason.
    """

    def __init__(self, model: PeftModel):
        if obstacle := _policy_obstacle(model):
            raise ValueError(obstacle)
        self.model = model
        self.base_name_or_path: str = model.peft_config[model.active_adapters[0]].base_model_name_or_path
        self._heads: dict[str, Tensor] = {}
        _save_without(model, self._heads)

    @classmethod
    def load(
        cls, base_name_or_path: str, *, dtype: torch.dtype = torch.float32, device=None, packed: bool = True
    ) -> SharedBackbone:
        """A frozen copy of a base, only for reward adapters, if no policy with an adapter holds one.

        `packed` lets it score without padding and encode common prefixes once, if the model supports it.
        """
        backbone = cls.__new__(cls)
        backbone.base_name_or_path = resolve_model_path(base_name_or_path)
        backbone.model = load_classifier(backbone.base_name_or_path, dtype=dtype, device=device)
        if packed:
            share_prefixes(backbone.model, quiet=True)
        backbone._heads = {}
        return backbone

    @property
    def reward_adapters(self) -> tuple[str, ...]:
        """Names of the reward adapters, in the order in which they were added."""
        return tuple(self._heads)

    def add_reward_adapter(self, folder: str | Path, *, base: str | None = None) -> str:
        """Add a saved LoRA reward model to the backbone, frozen, and keep its head separately.

        Nothing else changes: not the active adapter, nor which parameters require gradients, nor which modules are in
        training mode, nor the state of the random number generators.

        Args:
            folder: a folder with `adapter_config.json` and `adapter_model.safetensors`.
            base: the folder or hub name of the base, if it has moved from where the adapter's configuration says.

        Returns:
            PEFT's name for the adapter, for `score`: `reward0`, `reward1` and so on.

        Raises:
            FileNotFoundError, ValueError: no such adapter, or one that would change the base or does not fit it.
        """
        from safetensors.torch import load_file

        adapter, own = read_reward_adapter(folder, base=base), self.base_name_or_path
        both_here = os.path.isdir(adapter.base) and os.path.isdir(own)
        if adapter.base != own and not (both_here and os.path.samefile(adapter.base, own)):
            raise ValueError(f"it was trained on {adapter.base}, and the backbone is {own}")
        if adapter.obstacle:
            raise ValueError(adapter.obstacle)
        taken = getattr(self.model, "peft_config", {})
        name = next(name for name in (f"reward{i}" for i in range(len(taken) + 1)) if name not in taken)
        tensors = load_file(adapter.folder / "adapter_model.safetensors")
        head = tensors.pop(adapter.head).float()
        with preserved_random_state(), _restored(self.model):
            self._inject(adapter, name, tensors)
        for parameter_name, parameter in self.model.named_parameters():
            if f".{name}." in f"{parameter_name}.":
                parameter.requires_grad_(False)
        self._heads[name] = head
        return name

    @torch.no_grad()
    def score(
        self,
        name: str,
        sequences: Sequence[Sequence[int]],
        *,
        batch_size: int = 16,
        pad_token_id: int = 0,
        progress: str | None = None,
    ) -> Tensor:
        """Scores of token sequences under one reward adapter, equal to those of `score_sequences` on a separate copy.

        Afterwards the active adapter, gradients and training modes of the model are as before.

        Args:
            name: the name that `add_reward_adapter` returned.
            sequences, batch_size, progress: as for `score_sequences`.
            pad_token_id: the reward model's padding token; the score is read at the last token that is not padding.

        Returns:
            Float32 scores on the CPU, without gradient, [N].
        """
        if name not in self._heads:
            names = ", ".join(self._heads) or "none"
            raise ValueError(f"no reward adapter {name!r} on this backbone; there are: {names}")

        def scores(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            transformer = self.model.get_base_model().base_model
            hidden = transformer(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
            # At every position, as in a separate copy: selecting rows first would change the rounding.
            with torch.autocast(hidden.device.type, enabled=False):
                scores = linear(hidden.float(), self._heads[name].to(hidden.device))[..., 0]
            return scores.gather(1, last_tokens(input_ids, pad_token_id)[:, None])[:, 0]

        with _restored(self.model):
            self.model.base_model.enable_adapter_layers()
            self.model.set_adapter(name, inference_mode=True)
            options = {"batch_size": batch_size, "pad_token_id": pad_token_id, "progress": progress}
            return score_sequences(self.model, sequences, function=scores, **options)

    def _inject(self, adapter: RewardAdapter, name: str, tensors: dict[str, Tensor]) -> None:
        from peft import get_peft_model

        config = deepcopy(adapter.config)
        config.modules_to_save, config.task_type, config.inference_mode = None, None, True
        # Loading replaces every weight; other initialisations would first look at the base or at data.
        config.init_lora_weights = True
        first = not hasattr(self.model, "peft_config")
        if first:
            self.model = get_peft_model(self.model, config, adapter_name=name)
        else:
            # Under ZeRO-3 all adapters must have the base's dtype.
            in_float32 = any(
                p.dtype == torch.float32 for named, p in self.model.named_parameters() if ".lora_" in named
            )
            self.model.add_adapter(name, config, autocast_adapter_dtype=in_float32)
        try:
            _load_exactly(self.model, name, tensors, adapter.folder)
        except ValueError:
            if first:
                self.model = self.model.unload()
            else:
                self.model.delete_adapter(name)
            raise


def _policy_obstacle(model) -> str | None:
    """Why no reward adapter can be added to this policy's base, in one line; None if one can."""
    from peft import LoraConfig, PeftModel

    if not isinstance(model, PeftModel):
        return f"the policy is a {type(model).__name__}, not a model with a LoRA adapter: its own weights are trained"
    for name, config in model.peft_config.items():
        if not isinstance(config, LoraConfig):
            return f"the policy's adapter {name!r} is {config.peft_type.value}, not LoRA"
        if setting := _changes_base(config):
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


@contextmanager
def _restored(model) -> Iterator[None]:
    """Restore the active adapter, whether it is disabled, and which parameters have gradients on exit."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if any(layer.merged for layer in layers):
        raise ValueError("an adapter is merged into the base: unmerge it before another one is used")
    active = model.active_adapters if hasattr(model, "peft_config") else []
    disabled = any(layer.disable_adapters for layer in layers)
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        if active:
            model.set_adapter(active[0])
            tuner = model.base_model
            (tuner.disable_adapter_layers if disabled else tuner.enable_adapter_layers)()
        # PEFT's switches turn gradients on and off as well.
        for parameter, requires_grad in gradients:
            parameter.requires_grad_(requires_grad)


def _load_exactly(model: PeftModel, name: str, tensors: dict[str, Tensor], folder: Path) -> None:
    from peft import set_peft_model_state_dict

    try:
        result = set_peft_model_state_dict(model, tensors, adapter_name=name)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise ValueError(f"{folder}: the adapter does not fit the base: {' '.join(lines[:2])}") from error
    missing = [key for key in result.missing_keys if f".{name}." in f"{key}."]
    for kind, keys in (("lacks", missing), ("has, and the base has no place for,", result.unexpected_keys)):
        if keys:
            raise ValueError(f"{folder}: the adapter {kind} {len(keys)} tensors, such as {keys[0]}")


def _save_without(model: PeftModel, heads: MutableMapping[str, Tensor]) -> None:
    """Make `model.save_pretrained` omit the adapters that `heads` names unless the caller selects adapters."""
    # A list, since several backbones may have been made of this model.
    model.reward_heads = [*getattr(model, "reward_heads", []), heads]

    def save_pretrained(self, save_directory, safe_serialization=True, selected_adapters=None, *args, **kwargs):
        """Like `PeftModel.save_pretrained`, but without the reward adapters by default."""
        if selected_adapters is None:
            rewards = {name for own in self.reward_heads for name in own}
            selected_adapters = [name for name in self.peft_config if name not in rewards]
        return type(self).save_pretrained(self, save_directory, safe_serialization, selected_adapters, *args, **kwargs)

    # A bound method instead of a closure over the model, so that a deep copy of the model saves the copy.
    model.save_pretrained = types.MethodType(save_pretrained, model)
