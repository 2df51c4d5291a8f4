"""PPO's value function: a head on the policy's trunk, or on a separate model.

Its parameters are part of the policy's module tree, below `value_head`, so that the optimizer, gradient clipping and
distributed engines find them. The policy's files do not contain them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import disable_dropout_in_model

from trl_ext.files import replacing
from trl_ext.models import resolve_model_path
from trl_ext.models.packing import packing_of, unwrapped
from trl_ext.models.shared_backbone import preserved_random_state
from trl_ext.rewards import RewardModel
from trl_ext.trainers.policies import is_zero3
from trl_ext.trainers.policy.trainer import ScoredTokens

VALUE_FILE = "value_head.safetensors"
HEAD = "value_head"


class ValueModel:
    """Estimates the value before each token of responses: a float32 linear head on hidden states.

    Attributes:
        kind: its name in the configuration.
        trainer: its `PPOTrainer`, which already has its policy.
        policy: the policy, unwrapped.
    """

    kind: str

    def __init__(self, trainer):
        self.trainer, self.policy = trainer, trainer.model

    def score(self, score: Callable[[], ScoredTokens], inputs: dict) -> ScoredTokens:
        """The scores of responses under the policy, by `score()`, and their values, with gradient if enabled."""
        raise NotImplementedError

    def parameters(self, state_dict: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Its own parameters by their name in the policy, with the frozen ones, or those of a state of the policy."""
        weights = dict(self.policy.named_parameters()) if state_dict is None else state_dict
        return {name: weight for name, weight in weights.items() if HEAD in name.split(".")}

    def save(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write `value_head.safetensors`, from the state of the policy if an engine has gathered it."""
        own = self.parameters(state_dict).items()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in own}
        with replacing(Path(folder) / VALUE_FILE) as path:
            save_file(tensors, path)

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Read the file that `save` wrote; a ValueError if there is none, or one of another kind or size."""
        path, own = Path(folder) / VALUE_FILE, self.parameters()
        saved = load_file(path) if path.is_file() else {}
        if {name: weight.shape for name, weight in saved.items()} != {name: one.shape for name, one in own.items()}:
            raise ValueError(f"{path} does not hold the value function of this run's value_model {self.kind}")
        for name, weight in own.items():
            weight.copy_(saved[name])
            weight.requires_grad_(True)


class SharedValueModel(ValueModel):
    """A head on the hidden states of the policy's own pass; the value loss trains the trunk as well."""

    kind = "shared"

    def __init__(self, trainer):
        super().__init__(trainer)
        _add_head(self.policy, _new_head(self.policy))

    def score(self, score: Callable[[], ScoredTokens], inputs: dict) -> ScoredTokens:
        passes: list[Tensor] = []
        latest: list[Tensor] = []

        def of_trunk(trunk, args, output) -> None:
            values = _estimate(self.policy.value_head, output.last_hidden_state)
            packing = packing_of(self.policy)
            plan = None if packing is None else packing.scored_plan
            latest[:] = [values if plan is None else pad(plan.spread(values), (0, 1))]

        # Packing's check of itself also runs the trunk; the second hook marks the end of a requested pass.
        with (
            unwrapped(self.policy).base_model.register_forward_hook(of_trunk),
            self.policy.register_forward_hook(lambda *_: passes.extend(latest)),
        ):
            scored = score()
        scored.values = _before(torch.cat(passes), inputs["completion_ids"].size(1))
        return scored


class SeparateValueModel(ValueModel):
    """A separate model under the head, fully trained.

    The value head starts as a reward model's head, or at zero on a language model. A ValueError if the engine shards
    parameters, or if the model has another vocabulary than the policy.
    """

    kind = "separate"

    def __init__(self, trainer):
        super().__init__(trainer)
        trunk, head = _load_value_model(trainer)
        _add_head(self.policy, nn.ModuleDict({"trunk": trunk, "head": head}))

    def score(self, score: Callable[[], ScoredTokens], inputs: dict) -> ScoredTokens:
        scored, parts = score(), ("prompt", "completion")
        ids, mask = (torch.cat([inputs[f"{part}_{name}"] for part in parts], dim=1) for name in ("ids", "mask"))
        scored.values = self.values(ids, mask, inputs["completion_ids"].size(1), self.trainer.rows_per_pass)
        return scored

    def values(self, input_ids: Tensor, attention_mask: Tensor, count: int, rows_per_pass: int) -> Tensor:
        """Estimates before each of the last `count` tokens of prompts and responses. [B, count]."""
        trunk, head = self.policy.value_head["trunk"], self.policy.value_head["head"]
        with self.trainer.accelerator.autocast():
            parts = []
            for ids, mask in zip(input_ids.split(rows_per_pass), attention_mask.split(rows_per_pass), strict=True):
                positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
                output = trunk(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
                parts.append(_estimate(head, output.last_hidden_state))
        return _before(torch.cat(parts), count)


VALUE_MODELS = {own.kind: own for own in (SharedValueModel, SeparateValueModel)}


def _load_value_model(trainer) -> tuple[nn.Module, nn.Linear]:
    """The trunk and the head of `value_model_name_or_path`, in float32, ready for training."""
    args, device = trainer.args, trainer.accelerator.device
    name = resolve_model_path(args.value_model_name_or_path)
    if is_zero3(trainer.accelerator):
        raise ValueError("value_model separate does not go with ZeRO-3: it is loaded whole; use value_model shared")
    if AutoTokenizer.from_pretrained(name).get_vocab() != trainer.processing_class.get_vocab():
        raise ValueError(f"the value model {name} reads other tokens than the policy: use value_model shared")
    if _is_reward_model(name):
        model = RewardModel(name, dtype="float32", packing="off").load(device).model
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


def _before(values: Tensor, count: int) -> Tensor:
    """Values after each token as those before each of the last `count` tokens."""
    return values[:, -count - 1 : -1]


def _estimate(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Apply the head in float32, whatever the policy's own precision."""
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.float()).squeeze(-1)
