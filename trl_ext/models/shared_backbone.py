"""One frozen base with several LoRA adapters: the policy's, and those of reward models, each with a score head."""

from __future__ import annotations

import types
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import torch
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from trl_ext.models.loading import resolve_model_path
from trl_ext.models.packing import last_tokens, packing_of, share_prefixes
from trl_ext.models.reward_adapter import (
    RewardAdapter,
    policy_obstacle,
    read_reward_adapter,
    sharing_obstacle,
)
from trl_ext.models.sequence_scores import score_sequences


class SharedBackbone:
    """Scores sequences with several LoRA reward models on one copy of the base they were trained on.

    The base is the policy's own, whose adapter is still trained, or a frozen copy that no policy uses (`load`). Only
    the reward adapters' LoRA weights are added to the model. Their heads stay outside it, so that no checkpoint,
    optimizer or engine sees them. `model.save_pretrained` saves only the other adapters.

    Args:
        model: a `PeftModel` of a causal language model, unwrapped, with exactly one active LoRA adapter.

    Raises:
        ValueError: the model's base is or will be changed, or cannot be shared for another reason.
    """

    def __init__(self, model: PeftModel):
        obstacle = policy_obstacle(model)
        if obstacle:
            raise ValueError(obstacle)
        self.model = model
        self.base_name_or_path: str = model.peft_config[model.active_adapters[0]].base_model_name_or_path
        self._heads: dict[str, Tensor] = {}
        save_without(model, self._heads)

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
        adapter = read_reward_adapter(folder, base=base)
        obstacle = sharing_obstacle(self.model, self.base_name_or_path, adapter)
        if obstacle:
            raise ValueError(obstacle)
        taken = getattr(self.model, "peft_config", {})
        name = next(name for name in (f"reward{i}" for i in range(len(taken) + 1)) if name not in taken)
        tensors = load_file(adapter.folder / "adapter_model.safetensors")
        head = tensors.pop(adapter.head).float()
        with preserved_random_state():
            self._inject(adapter, name, tensors)
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
        with _restored(self.model):
            self.model.base_model.enable_adapter_layers()
            self.model.set_adapter(name, inference_mode=True)
            scorer = _Scorer(self.model, self._heads[name], pad_token_id)
            return score_sequences(
                scorer, sequences, batch_size=batch_size, pad_token_id=pad_token_id, progress=progress
            )

    def _inject(self, adapter: RewardAdapter, name: str, tensors: dict[str, Tensor]) -> None:
        config = deepcopy(adapter.config)
        config.modules_to_save, config.task_type, config.inference_mode = None, None, True
        # Loading replaces every weight; other initialisations would first look at the base or at data.
        config.init_lora_weights = True
        first = not isinstance(self.model, PeftModel)
        with _restored(self.model):
            if first:
                self.model = get_peft_model(self.model, config, adapter_name=name)
            else:
                self.model.add_adapter(name, config, autocast_adapter_dtype=_has_float32_adapter(self.model))
            try:
                _load_exactly(self.model, name, tensors, adapter.folder)
            except ValueError:
                if first:
                    self.model = self.model.unload()
                else:
                    self.model.delete_adapter(name)
                raise
        for parameter_name, parameter in self.model.named_parameters():
            if f".{name}." in f"{parameter_name}.":
                parameter.requires_grad_(False)


class _Scorer(nn.Module):
    """The backbone under its active adapter with one head, called like a model for sequence classification."""

    def __init__(self, model: PeftModel, head: Tensor, pad_token_id: int):
        super().__init__()
        self.transformer = model.get_base_model().base_model
        self.packing = packing_of(model)
        self.head = head.to(next(self.parameters()).device)
        self.pad_token_id = pad_token_id

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        last = last_tokens(input_ids, self.pad_token_id)
        plan = None if self.packing is None else self.packing.plan(input_ids, attention_mask)
        if plan is not None:
            places = plan.columns.gather(1, last[:, None])[:, 0]
            hidden = self.packing.hidden_states(plan, self.transformer)[places]
            with torch.autocast(hidden.device.type, enabled=False):
                return SimpleNamespace(logits=linear(hidden.float(), self.head))
        hidden = self.transformer(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        # At every position, as in a separate copy: selecting rows first would change the rounding.
        with torch.autocast(hidden.device.type, enabled=False):
            scores = linear(hidden.float(), self.head)
        return SimpleNamespace(logits=scores[torch.arange(len(scores), device=scores.device), last])


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


@contextmanager
def _restored(model) -> Iterator[None]:
    """Restore the active adapter, whether it is disabled, and which parameters have gradients on exit."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if any(layer.merged for layer in layers):
        raise ValueError("an adapter is merged into the base: unmerge it before another one is used")
    active = model.active_adapters if isinstance(model, PeftModel) else []
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


def _has_float32_adapter(model: PeftModel) -> bool:
    """Whether the model's adapters have float32 weights: under ZeRO-3 all of them must have the base's dtype."""
    return any(p.dtype == torch.float32 for name, p in model.named_parameters() if ".lora_" in name)


def _load_exactly(model: PeftModel, name: str, tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        result = set_peft_model_state_dict(model, tensors, adapter_name=name)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise ValueError(f"{folder}: the adapter does not fit the base: {' '.join(lines[:2])}") from error
    missing = [key for key in result.missing_keys if f".{name}." in f"{key}."]
    for kind, keys in (("lacks", missing), ("has, and the base has no place for,", result.unexpected_keys)):
        if keys:
            raise ValueError(f"{folder}: the adapter {kind} {len(keys)} tensors, such as {keys[0]}")


def save_without(model: PeftModel, heads: MutableMapping[str, Tensor]) -> None:
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
