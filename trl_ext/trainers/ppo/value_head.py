"""PPO's value function: a head on the policy's trunk, on a separate adapter, or on a separate model.

Its parameters are part of the policy's module tree, below `value_head` or in the adapter `value`, so that the
optimizer, gradient clipping and distributed engines find them. The policy's files do not contain them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import disable_dropout_in_model

from trl_ext.files import replacing
from trl_ext.models import resolve_model_path
from trl_ext.models.packing import packing_of
from trl_ext.models.shared_backbone import preserved_random_state, save_without
from trl_ext.rewards import RewardModel
from trl_ext.trainers.policies import is_zero3
from trl_ext.trainers.policy.scoring import reading_hidden_states

VALUE_FILE = "value_head.safetensors"
HEAD, ADAPTER = "value_head", "value"


class ValueModel:
    """Estimates the value before each token of responses: a float32 linear head on hidden states.

    Args:
        trainer: a `PPOTrainer` that already has its policy.

    Attributes:
        kind: its name in the configuration.
        policy: the policy, unwrapped.
    """

    kind: str

    def __init__(self, trainer):
        self.trainer = trainer
        self.policy = trainer.model

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wrap this around a forward pass of the policy over responses to read their values."""
        yield

    def values(self, input_ids: Tensor, attention_mask: Tensor, count: int, batch_size: int | None) -> Tensor:
        """Estimates before each of the last `count` tokens of prompts and responses, with gradient if enabled.

        Passes take `batch_size` rows, or all if it is None. [B, count].
        """
        size = batch_size or len(input_ids)
        parts = [
            self._every_value(ids, attended)
            for ids, attended in zip(input_ids.split(size), attention_mask.split(size), strict=True)
        ]
        return torch.cat(parts)[:, -count - 1 : -1]

    def _every_value(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The value after each token, [B, L]."""
        raise NotImplementedError

    def parameters(self) -> dict[str, nn.Parameter]:
        """Its own parameters by their name in the policy, including those that are currently frozen."""
        return {name: weight for name, weight in self.policy.named_parameters() if _is_own(name)}

    # ---- Files ----

    def save(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write `value_head.safetensors`, from the state of the policy if an engine has gathered it."""
        source = self.parameters() if state_dict is None else state_dict
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in source.items() if _is_own(name)}
        with replacing(Path(folder) / VALUE_FILE) as path:
            save_file(tensors, path)

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Read the file that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file holds a value function of another kind or size.
        """
        path = Path(folder) / VALUE_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no value function to go on with; is it a checkpoint of PPO?")
        own, saved = self.parameters(), load_file(path)
        if saved.keys() != own.keys() or any(saved[name].shape != own[name].shape for name in own):
            raise ValueError(
                f"{path}: its value function is not of this run's value_model {self.kind}, or of another base: resume "
                "with the settings that it was trained with"
            )
        for name, weight in own.items():
            weight.copy_(saved[name])
            weight.requires_grad_(True)


class SharedValueModel(ValueModel):
    """A head on the policy's own hidden states, read from the forward pass that gives the log-probabilities.

    It needs no additional pass, and the value loss trains the trunk as well.
    """

    kind = "shared"

    def __init__(self, trainer):
        super().__init__(trainer)
        _add_head(self.policy, _new_head(self.policy))

    @contextmanager
    def reading(self) -> Iterator[None]:
        with reading_hidden_states(self.policy, self._value_of) as self._read:
            yield

    def values(self, input_ids: Tensor, attention_mask: Tensor, count: int, batch_size: int | None) -> Tensor:
        values = self._read(count)
        del self._read
        return values

    def _value_of(self, hidden: Tensor) -> Tensor:
        return _estimate(self.policy.value_head, hidden.detach() if self.trainer.fits_values_only else hidden)


class AdapterValueModel(ValueModel):
    """A head on the hidden states of the policy's base under a separate LoRA adapter, which initially changes nothing.

    It needs one more forward pass over each batch. The policy's adapter and the value function share no gradient.

    Raises:
        ValueError: the policy has no LoRA adapter.
    """

    kind = "adapter"

    def __init__(self, trainer):
        super().__init__(trainer)
        if not is_peft_model(self.policy):
            raise ValueError(
                "value_model adapter needs a policy with a LoRA adapter: full fine-tuning changes the base below it; "
                "use value_model shared or separate"
            )
        self._active = self.policy.active_adapters[0]
        config = self.policy.peft_config[self._active]
        if not isinstance(config, LoraConfig):
            raise ValueError(
                f"value_model adapter is made like the policy's, which must be LoRA, not {config.peft_type}"
            )
        config = deepcopy(config)
        config.init_lora_weights, config.modules_to_save, config.inference_mode = True, None, False
        if trainer.args.disable_dropout:
            config.lora_dropout = 0.0
        trained = _trained(self.policy)
        with preserved_random_state():
            # Under ZeRO-3 all adapters must have the base's dtype.
            has_float32 = any(weight.dtype == torch.float32 for weight in trained)
            self.policy.add_adapter(ADAPTER, config, autocast_adapter_dtype=has_float32)
        _add_head(self.policy, _new_head(self.policy))
        save_without(self.policy, {ADAPTER: self.policy.value_head.weight})
        for weight in (*trained, *self.parameters().values()):
            weight.requires_grad_(True)

    def _every_value(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        trainer, head, packing = self.trainer, self.policy.value_head, packing_of(self.policy)
        with (
            self._switched_on(),
            # The backward pass would recompute checkpointed layers under the policy's adapter.
            disable_gradient_checkpointing(self.policy, trainer.args.gradient_checkpointing_kwargs),
            trainer.accelerator.autocast(),
        ):
            plan = None if packing is None else packing.plan(input_ids, attention_mask)
            if plan is not None:
                values = _estimate(head, packing.hidden_states(plan))
                return values[plan.columns].masked_fill(~plan.present, 0)
            return _estimate(head, _hidden_states(self.policy.get_base_model().base_model, input_ids, attention_mask))

    @contextmanager
    def _switched_on(self) -> Iterator[None]:
        # PEFT freezes adapters that it switches off: here, and where TRL scores with the reference.
        trained = {*_trained(self.policy), *self.parameters().values()}
        self.policy.set_adapter(ADAPTER)
        try:
            yield
        finally:
            self.policy.set_adapter(self._active)
            for weight in trained:
                weight.requires_grad_(True)


class SeparateValueModel(ValueModel):
    """A separate model under the head, fully trained.

    The value head starts as a reward model's head, or at zero on a language model.

    Raises:
        ValueError: the engine shards parameters, or the model has another vocabulary than the policy.
    """

    kind = "separate"

    def __init__(self, trainer):
        super().__init__(trainer)
        trunk, head = _load_value_model(trainer)
        _add_head(self.policy, nn.ModuleDict({"trunk": trunk, "head": head}))

    def _every_value(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        own = self.policy.value_head
        with self.trainer.accelerator.autocast():
            return _estimate(own["head"], _hidden_states(own["trunk"], input_ids, attention_mask))


VALUE_MODELS = {own.kind: own for own in (SharedValueModel, AdapterValueModel, SeparateValueModel)}


def _load_value_model(trainer) -> tuple[nn.Module, nn.Linear]:
    """The trunk and the head of `value_model_name_or_path`, in float32, ready for training."""
    args, device = trainer.args, trainer.accelerator.device
    name = resolve_model_path(args.value_model_name_or_path)
    if is_zero3(trainer.accelerator):
        raise ValueError("value_model separate does not go with ZeRO-3: it is loaded whole; use value_model adapter")
    if AutoTokenizer.from_pretrained(name).get_vocab() != trainer.processing_class.get_vocab():
        raise ValueError(
            f"the value model {name} reads other tokens than the policy: give one with the policy's tokenizer, or use "
            "value_model shared"
        )
    if _is_reward_model(name):
        model = RewardModel(name, packing="off").load(device).model
        if isinstance(model, PeftModel):
            model = model.merge_and_unload()
        head = getattr(model, "score", None) or model.classifier
        trunk, head = model.base_model, head.float()
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True).to(device)
        trunk, head = model.base_model, _new_head(model)
    for module in (trunk, head):
        module.requires_grad_(True).train()
    if args.disable_dropout:
        disable_dropout_in_model(trunk)
    if args.gradient_checkpointing:
        trunk.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    return trunk, head


def _is_reward_model(name: str) -> bool:
    if (Path(name) / "adapter_config.json").is_file():
        return True
    return any("SequenceClassification" in kind for kind in AutoConfig.from_pretrained(name).architectures or ())


def _is_own(name: str) -> bool:
    parts = name.split(".")
    return HEAD in parts or (ADAPTER in parts and any(part.startswith("lora_") for part in parts))


def _add_head(policy, head: nn.Module) -> None:
    policy.add_module(HEAD, head)
    if not is_peft_model(policy):
        # transformers leaves these out of the model's files, and does not report them as missing.
        names = {f"{HEAD}.{name}" for name in head.state_dict()}
        policy._keys_to_ignore_on_save = {*(policy._keys_to_ignore_on_save or ()), *names}


def _new_head(policy) -> nn.Linear:
    """A head that estimates 0, created without changing the random state."""
    embedding = policy.get_input_embeddings().weight
    with preserved_random_state():
        head = nn.Linear(policy.config.get_text_config().hidden_size, 1, device=embedding.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _trained(policy) -> list[nn.Parameter]:
    return [weight for weight in policy.parameters() if weight.requires_grad]


def _hidden_states(trunk: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    return trunk(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
    ).last_hidden_state


def _estimate(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Apply the head in float32, whatever the policy's own precision."""
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.float()).squeeze(-1)
