"""Use a saved reward model as a reward function, on its own copy or on a base shared with other models."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trl_ext.data import encode_turn
from trl_ext.data.conversation import Messages
from trl_ext.models import packing_of, score_sequences, share_prefixes
from trl_ext.models.reward_adapter import policy_obstacle, sharing_obstacle
from trl_ext.models.shared_backbone import SharedBackbone, load_classifier, preserved_random_state
from trl_ext.rewards.checks import find_reward_model, read_limits, require_tokenizer

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RewardModel:
    """Scores completions of prompts with a saved reward model: a full model with a score head, or a LoRA adapter.

    The constructor reads and checks only configuration files and the headers of weights. The weights are loaded at
    the first score or by `load`; they are not loaded if `share` puts the adapter on an existing backbone. The object
    is also a reward function for TRL's trainers.

    Args:
        folder_or_hub_name: where the model was saved.
        name: the name to log rewards under; None for the folder's name, preceded by its parent's if the folder has a
            generic name (`reward-model-toy/best` becomes `reward-model-toy-best`).
        max_prompt_tokens, max_response_tokens: longer prompts lose their beginning, longer completions their end; None
            for no limit. The default is the limit used in training, which `RewardTrainer` saves with the model, or
            512 if unknown.
        batch_size: completions per forward pass.
        dtype: the type of its own copy: float32, bfloat16 or float16. A shared backbone keeps its owner's type.
        base: folder or hub name of an adapter's base, if it differs from the one in the adapter's configuration.
        tokenizer: None for the one saved with the model or with its base.
        packing: `auto` to score without padding and to encode common prefixes once, if the model allows it; `off`
            for padded batches. A shared backbone keeps its owner's setting.

    Attributes:
        name: as above.
        is_adapter: whether it is a LoRA adapter.
        base_name_or_path: an adapter's base; None for a full model.

    Raises:
        FileNotFoundError: the folder does not exist or holds no model, or the base or tokenizer is missing.
        ValueError: the model is not a reward model with one label, or an argument is out of range.
    """

    def __init__(
        self,
        folder_or_hub_name: str | Path,
        *,
        name: str | None = None,
        max_prompt_tokens: int | Literal["as_trained"] | None = "as_trained",
        max_response_tokens: int | Literal["as_trained"] | None = "as_trained",
        batch_size: int = 16,
        dtype: str = "float32",
        base: str | None = None,
        tokenizer=None,
        packing: Literal["auto", "off"] = "auto",
    ):
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.folder, self.adapter = find_reward_model(folder_or_hub_name, base=base)
        if packing not in ("auto", "off"):
            raise ValueError(f"packing must be auto or off, got {packing!r}")
        trained = read_limits(self.folder)
        limits = {
            name: trained[name] if given == "as_trained" else given
            for name, given in (("max_prompt_tokens", max_prompt_tokens), ("max_response_tokens", max_response_tokens))
        }
        for argument, value in {**limits, "batch_size": batch_size}.items():
            if value is not None and value < 1:
                raise ValueError(f"{argument} must be at least 1, got {value}")
        self.name = name or telling_name(str(folder_or_hub_name))
        self.__name__ = self.name
        self.limits = limits
        self.batch_size = batch_size
        self.dtype = DTYPES[dtype]
        self.packing = packing
        self._tokenizer = tokenizer
        self._tokenizer_from = require_tokenizer(self.folder, self.adapter) if tokenizer is None else None
        self.model = None
        self.backbone: SharedBackbone | None = None
        self._said_that_ends_do_not_show = False

    @property
    def is_adapter(self) -> bool:
        return self.adapter is not None

    @property
    def base_name_or_path(self) -> str | None:
        return self.adapter.base if self.adapter else None

    @property
    def tokenizer(self):
        """The tokenizer that encodes completions."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_from)
        return self._tokenizer

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

        Args:
            device: None to leave a loaded copy in place, or to load onto this process's GPU, or the CPU without one.

        Raises:
            ValueError: an adapter does not match its base in shape, or tensors are missing.
        """
        if self.backbone is not None:
            return self
        if self.model is None:
            source = self.base_name_or_path or str(self.folder)
            model = load_classifier(source, dtype=self.dtype, device=device, has_head=not self.is_adapter)
            model.config.get_text_config().pad_token_id = self.pad_token_id
            self.model = _with_adapter(model, self.folder) if self.adapter else model
            if self.packing == "auto":
                share_prefixes(self.model, quiet=True)
        elif device is not None:
            self.model = self.model.to(device)
        return self

    def can_share(self, policy) -> str | None:
        """None if the model can run on this policy's backbone; otherwise a one-line reason.

        Args:
            policy: the policy, unwrapped: a `PeftModel` of a causal language model.
        """
        if self.adapter is None:
            return "it is a full model, not an adapter"
        obstacle = policy_obstacle(policy)
        if obstacle:
            return obstacle
        base = policy.peft_config[policy.active_adapters[0]].base_model_name_or_path
        return sharing_obstacle(policy, base, self.adapter)

    def share(self, backbone: SharedBackbone) -> RewardModel:
        """Score on this backbone from now on, and drop the model's own copy.

        Raises:
            ValueError: the model cannot run on this backbone.
        """
        if self.adapter is None:
            raise ValueError(f"{self.folder}: a full model cannot share a backbone; only adapters can")
        if self.backbone is not backbone:
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
        refuse_empty: bool = False,
        progress: str | None = None,
    ) -> Tensor:
        """One score for each completion.

        Args:
            prompts: messages, or plain texts.
            completions: texts, or lists of the one assistant message.
            finished: False for a completion that was cut at a length limit: it has no end-of-turn token and is
                scored at its last token. None if all completions ended.
            refuse_empty: raise for a completion without text; meant for texts that were not sampled. Otherwise an
                empty completion is scored by the tokens around it, since a policy may sample one.
            progress: label of the progress bar; None for no bar.

        Returns:
            Float32 scores on the CPU, [N].

        Raises:
            ValueError: the lengths differ, a completion cannot be encoded, or an empty completion is refused.
        """
        if finished is not None and not all(finished):
            self._say_whether_ends_show()
        if refuse_empty:
            self._refuse_empty(completions)
        sequences = self._encode(prompts, completions, finished)
        options = {"batch_size": self.batch_size, "pad_token_id": self.pad_token_id, "progress": progress}
        if self.backbone is not None:
            return self.backbone.score(self._shared_name, sequences, **options)
        return score_sequences(self.load().model, sequences, **options)

    def __call__(self, prompts, completions, finished: Sequence[bool] | None = None, **kwargs: Any) -> list[float]:
        """TRL's reward signature; other columns and hooks that it passes are not used."""
        return self.score(prompts, completions, finished=finished).tolist()

    def _refuse_empty(self, completions: Sequence[Messages | str]) -> None:
        for index, completion in enumerate(completions):
            # The encoding rejects anything that is not a message.
            text = completion if isinstance(completion, str) else completion[-1]["content"] if completion else "?"
            if not text.strip():
                raise ValueError(
                    f"reward model {self.name}: completion {index} is empty: a score of no text says nothing; leave "
                    "it out"
                )

    def _say_whether_ends_show(self) -> None:
        if self.pad_token_id == self.tokenizer.eos_token_id and not self._said_that_ends_do_not_show:
            self._said_that_ends_do_not_show = True
            logger.warning(
                "reward model %s: its padding token is the end-of-turn token, so scores are read before it, and a "
                "completion that was cut scores as if it had ended; said once",
                self.name,
            )

    def _encode(self, prompts, completions, finished) -> list[list[int]]:
        for argument, values in (("prompts", prompts), ("finished", finished)):
            if values is not None and len(values) != len(completions):
                raise ValueError(f"{argument}: {len(values)} for {len(completions)} completions; give one for each")
        finished = [True] * len(completions) if finished is None else finished
        sequences = []
        for index, (prompt, completion, ended) in enumerate(zip(prompts, completions, finished, strict=True)):
            try:
                turn = encode_turn(self.tokenizer, prompt, completion, finished=bool(ended), **self.limits)
            except ValueError as error:
                raise ValueError(f"reward model {self.name}: completion {index}: {error}") from error
            if not any(turn):
                raise ValueError(
                    f"reward model {self.name}: completion {index} and its prompt are empty: there is nothing to score"
                )
            sequences.append([*turn[0], *turn[1]])
        return sequences


def telling_name(path: str) -> str:
    """The last part of a path, preceded by its parent's name if the last part is generic, such as `best`."""
    *parents, last = [part for part in Path(path).absolute().parts if part not in ("/", "\\")] or ["reward"]
    says_little = last in ("best", "last", "final", "model", "adapter") or last.startswith("checkpoint-")
    return f"{parents[-1]}-{last}" if says_little and parents else last


def _with_adapter(model, folder: Path):
    """The base with a saved adapter and its head."""
    from peft import PeftModel

    # `AutoModelForSequenceClassification.from_pretrained(folder)` leaves the head random in transformers 5.17.
    with preserved_random_state(), warnings.catch_warnings():
        # PEFT only warns about missing tensors and keeps their initial values, so the scores would be wrong.
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = PeftModel.from_pretrained(model, str(folder))
        except (UserWarning, RuntimeError) as error:
            problem = " ".join(line.strip() for line in str(error).splitlines()[:2])
            raise ValueError(f"{folder}: the adapter does not fit its base {model.name_or_path}: {problem}") from error
    return adapted.requires_grad_(False).eval().to(model.device)
