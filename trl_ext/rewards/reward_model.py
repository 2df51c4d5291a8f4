"""Saved reward models as reward functions, each on a copy of its own or on a base shared with others."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trl_ext.data import encode_turn
from trl_ext.data.conversation import Messages
from trl_ext.models import packing_of, resolve_model_path, score_sequences, share_prefixes
from trl_ext.models.loading import check_vocabulary, with_adapter
from trl_ext.models.packing import unwrapped
from trl_ext.models.shared_backbone import (
    LIMITS_FILE,
    RewardAdapter,
    SharedBackbone,
    head_of,
    load_classifier,
    preserved_random_state,
    read_reward_adapter,
    tensor_shapes,
)
from trl_ext.names import check_choice
from trl_ext.processes import warn_once_per_run

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RewardModel:
    """Scores completions of prompts with a saved reward model: a full model with a score head, or a LoRA adapter.

    The constructor reads only configurations and the headers of weights; `load`, `share` or the first score loads
    the model. The object is also a reward function for TRL's trainers.

    Args:
        folder_or_hub_name: where the model was saved.
        name: the name to log rewards under; None for the folder's name, preceded by its parent's if the folder has a
            generic name (`reward-model-toy/best` becomes `reward-model-toy-best`).
        batch_size: completions per forward pass.
        dtype: the type of its own copy: float32, bfloat16 or float16; None for bfloat16 on a GPU that has it, and
            float32 elsewhere. The score head is in float32. A shared backbone keeps its owner's type and packing.
        base: folder or hub name of an adapter's base, if it differs from the one in the adapter's configuration.
        packing: `auto` to score without padding and to encode common prefixes once, if the model allows it; `off`
            for padded batches.

    Attributes:
        limits: `max_prompt_tokens`, beyond which prompts lose their beginning, and `max_response_tokens`, beyond which
            completions lose their end; None for no limit. `RewardTrainer` saves them; none if unknown.
        adapter: its LoRA adapter; None for a full model.

    Raises:
        FileNotFoundError: the folder does not exist or holds no model, or the base or tokenizer is missing.
        ValueError: the model is not a reward model with one label, or an argument is out of range.
    """

    def __init__(
        self,
        folder_or_hub_name: str | Path,
        *,
        name: str | None = None,
        batch_size: int = 16,
        dtype: str | None = None,
        base: str | None = None,
        packing: Literal["auto", "off"] = "auto",
    ):
        if dtype is None:
            has_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = "bfloat16" if has_bfloat16 else "float32"
        check_choice("dtype", dtype, DTYPES)
        self.folder, self.adapter = find_reward_model(folder_or_hub_name, base=base)
        *_, parent, last = Path(folder_or_hub_name).absolute().parts
        says_little = last in ("best", "last", "final", "model", "adapter") or last.startswith("checkpoint-")
        self.name = self.__name__ = name or (f"{parent}-{last}" if says_little else last)
        limits = self.folder / LIMITS_FILE
        saved = json.loads(limits.read_text(encoding="utf-8")) if limits.is_file() else {}
        self.limits = {name: saved.get(name) for name in ("max_prompt_tokens", "max_response_tokens")}
        self.batch_size, self.dtype, self.packing = batch_size, DTYPES[dtype], packing
        self.model = None
        self.backbone: SharedBackbone | None = None

    @cached_property
    def tokenizer(self):
        """The tokenizer that encodes completions."""
        from transformers import AutoTokenizer

        has_own = (self.folder / "tokenizer_config.json").is_file()
        return AutoTokenizer.from_pretrained(self.folder if has_own or not self.adapter else self.adapter.base)

    @cached_property
    def pad_token_id(self) -> int:
        """The padding token, used to find the last token of a row, as in training."""
        if self.adapter is None:
            from transformers import AutoConfig

            saved = AutoConfig.from_pretrained(self.folder).get_text_config().pad_token_id
            if saved is not None:
                return saved
        tokenizer = self.tokenizer
        return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def load(self, device=None) -> RewardModel:
        """Load the model, or move the loaded copy. Does nothing if the model shares a backbone.

        Without a device, a loaded copy stays in place, and others go onto this process's GPU, or the CPU without one.
        ValueError if an adapter does not match its base in shape, or tensors are missing.
        """
        if self.backbone is not None:
            return self
        if self.model is None:
            source = self.adapter.base if self.adapter else str(self.folder)
            model = load_classifier(source, dtype=self.dtype, device=device, has_head=self.adapter is None)
            check_vocabulary(model, self.tokenizer)
            model.config.get_text_config().pad_token_id = self.pad_token_id
            if self.adapter:
                # `AutoModelForSequenceClassification.from_pretrained(folder)` leaves the head random.
                with preserved_random_state():
                    model = with_adapter(model, self.folder).requires_grad_(False).eval().to(model.device)
            if self.dtype != torch.float32:
                # A score in half precision would have steps of 0.4% or 0.05%.
                (head,) = [part for name, part in unwrapped(model).named_children() if name in ("score", "classifier")]
                head.float().register_forward_pre_hook(lambda head, inputs: (inputs[0].float(),))
            self.model = model
            if self.packing == "auto":
                share_prefixes(self.model, quiet=True)
        elif device is not None:
            self.model = self.model.to(device)
        return self

    def share(self, backbone: SharedBackbone) -> RewardModel:
        """Score on this backbone from now on, and drop the model's own copy; ValueError if it cannot run there."""
        if self.backbone is not backbone:
            if self.adapter is None:
                raise ValueError(f"the reward model {self.folder} has no adapter, so it cannot share a backbone")
            self._shared_name = backbone.add_reward_adapter(self.folder, base=self.adapter.base)
            packing = None if self.model is None else packing_of(self.model)
            if packing is not None:
                packing.remove()
            self.backbone, self.model = backbone, None
        return self

    def score(
        self,
        prompts: Sequence[Messages | str],
        completions: Sequence[Messages | str],
        *,
        finished: Sequence[bool] | None = None,
        progress: str | None = None,
    ) -> Tensor:
        """One score for each completion, in float32 on the CPU, [N].

        Args:
            prompts: messages, or plain texts.
            completions: texts, or lists of the one assistant message.
            finished: False for a completion that was truncated at a length limit: it has no end-of-turn token and is
                scored at its last token. None if all completions ended.
            progress: label of the progress bar; None for no bar.

        Raises:
            ValueError: the lengths differ, or a completion cannot be encoded.
        """
        if not all(finished or ()) and self.pad_token_id == self.tokenizer.eos_token_id:
            pads = f"reward model {self.name} pads with its end-of-turn token"
            warn_once_per_run(f"{pads}, so a truncated completion scores as a complete one: use missing_eos_penalty")
        finished = [True] * len(completions) if finished is None else finished
        # One token more than a limit shows whether a text exceeds it.
        limits = {limit_name: limit and limit + 1 for limit_name, limit in self.limits.items()}
        most_prompt, most_response = self.limits.values()
        sequences = []
        for index, (prompt, completion, ended) in enumerate(zip(prompts, completions, finished, strict=True)):
            try:
                ids = encode_turn(self.tokenizer, prompt, completion, finished=bool(ended), **limits)
            except ValueError as error:
                raise ValueError(f"reward model {self.name}: completion {index}: {error}") from error
            for (limit_name, limit), own in zip(self.limits.items(), ids, strict=True):
                if limit is not None and len(own) > limit:
                    warn_once_per_run(f"reward model {self.name} reads no more than {limit} tokens: its {limit_name}")
            sequences.append([*ids[0][-(most_prompt or 0) :], *ids[1][:most_response]])
        model = (self.backbone or self.load()).model
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if positions and max(map(len, sequences), default=0) > positions:
            warn_once_per_run(f"reward model {self.name} reads no more than {positions} tokens: its positions")
            sequences = [sequence[-positions:] for sequence in sequences]
        options = {"batch_size": self.batch_size, "pad_token_id": self.pad_token_id, "progress": progress}
        if self.backbone is not None:
            return self.backbone.score(self._shared_name, sequences, **options)
        return score_sequences(model, sequences, **options)

    def __call__(self, prompts, completions, finished: Sequence[bool] | None = None, **kwargs: Any) -> list[float]:
        """TRL's reward signature; other columns and hooks that it passes are not used."""
        return self.score(prompts, completions, finished=finished).tolist()


def find_reward_model(folder_or_hub_name: str | Path, *, base: str | None = None) -> tuple[Path, RewardAdapter | None]:
    """The folder of a reward model, downloaded if need be, and its adapter, None for a full model."""
    try:
        folder = Path(resolve_model_path(str(folder_or_hub_name)))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; recipes/reward_model.py trains a reward model") from None
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            # Pickled weights are not downloaded.
            files = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
            folder = Path(snapshot_download(str(folder_or_hub_name), allow_patterns=files))
        except (OSError, ValueError) as error:
            message = f"no reward model {str(folder)!r}: there is no such folder, and none on the hub within reach"
            raise FileNotFoundError(message) from error
    if (folder / "adapter_config.json").is_file():
        return folder, read_reward_adapter(folder, base=base)
    if base is not None:
        raise ValueError(f"{folder}: base={base} is for adapters, and this is a full model")
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes |= tensor_shapes(path)
    if not shapes:
        raise FileNotFoundError(f"{folder}: no *.safetensors with weights; save the model again (save_pretrained)")
    head_of(folder, shapes)
    return folder, None


def share_or_load(
    models: Sequence[RewardModel],
    policy=None,
    mode: Literal["auto", "always", "never"] = "auto",
    *,
    policy_reason: str | None = None,
    device=None,
) -> list[str]:
    """Load reward models with as few copies of their bases as possible.

    Adapters go onto the policy's backbone if they can. Otherwise, adapters with the same base share a frozen copy of
    it. Every other model gets its own copy. Models that already share a backbone keep it.

    Args:
        policy: the policy under training, unwrapped; None if there is none to share with.
        mode: `auto`; `never` to give every model its own copy; `always` to raise ValueError if a model cannot use the
            policy's backbone.
        policy_reason: why the policy's backbone cannot be used, if the caller knows (a sharded engine).
        device: the device for copies; None for this process's GPU, or the CPU without one.

    Returns:
        For each model, a line that says where it was placed and, if not on the policy's backbone, why.
    """
    lines: dict[RewardModel, str] = {}
    alone: dict[RewardModel, str] = {}
    reason = "sharing is switched off" if mode == "never" else policy_reason
    backbone = None
    for model in models:
        try:
            if model.backbone is None:
                if model.adapter is None or reason or policy is None:
                    full = model.adapter is None and mode != "never" and "it is a full model, not an adapter"
                    raise ValueError(full or reason or "there is no policy")
                backbone = backbone or SharedBackbone(policy)
                model.share(backbone)
            where = "the policy's" if model.backbone is backbone else "a shared"
            lines[model] = f"on {where} backbone, {model.adapter.base}"
        except ValueError as error:
            alone[model] = str(error)
            if mode == "always":
                raise ValueError(f"reward model {model.name} cannot sit on the policy's backbone: {error}") from None
    groups = defaultdict(list)
    for model in alone:
        if mode == "auto" and model.adapter is not None and model.adapter.obstacle is None:
            groups[model.adapter.base, model.dtype, model.packing].append(model)
    for (base, dtype, packing), group in groups.items():
        if len(group) > 1:
            frozen = SharedBackbone.load(base, dtype=dtype, device=device, packed=packing == "auto")
            for model in group:
                with suppress(ValueError):
                    model.share(frozen)
                    lines[model] = f"on one frozen copy of {base} with others: {alone[model]}"
    for model, why in alone.items():
        if model.backbone is None:
            model.load(device)
            lines[model] = f"a copy of its own: {why}"
    return [f"{model.name}: {lines[model]}" for model in models]
