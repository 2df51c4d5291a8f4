"""The teacher of a distillation: another model, an adapter on the policy's base, that base, or the policy itself."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from peft import PeftConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head, use_adapter

from trl_ext.models.loading import find_policy, resolve_model_path, with_adapter
from trl_ext.models.packing import share_prefixes
from trl_ext.models.packing.hook import unwrapped
from trl_ext.models.reward_adapter import policy_obstacle
from trl_ext.models.shared_backbone import preserved_random_state, save_without
from trl_ext.processes import warn_once_per_run
from trl_ext.trainers.policy.scoring import count_from_the_first_token, reading_hidden_states

ADAPTER = "teacher"
# Settings of models whose logits are not the output of their head.
_SCALES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


class Teacher:
    """Scores responses of the policy, without gradient.

    Args:
        trainer: a `DistillationTrainer` that already has its policy.
        given: a model, its name, or None for the policy itself. A model is taken to have the policy's tokenizer.

    Attributes:
        model: the model that is called, which may be the policy.
        name: for logs and results.

    Raises:
        ValueError: it cannot be loaded, its tokens are not the policy's, or its logits cannot be compared.
    """

    def __init__(self, trainer, given):
        self._trainer = trainer
        policy = trainer.accelerator.unwrap_model(trainer.model)
        self.model, self._adapter = policy, nullcontext
        self.name = given if isinstance(given, str) else getattr(given, "name_or_path", "the policy")
        if isinstance(given, str):
            try:
                self._find(trainer, policy, given)
            except OSError as error:
                # The recipe would blame the policy.
                raise ValueError(f"the teacher {given} could not be loaded: {error}") from error
        elif given is not None:
            self.model = given
        self.is_policy = self.model is policy
        if not self.is_policy:
            self.model.requires_grad_(False).eval().to(trainer.accelerator.device)
            whole, args = unwrapped(self.model), trainer.args
            add_fused_lm_head(whole, trainer.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
            count_from_the_first_token(self.model)
            if trainer.packing is not None:
                share_prefixes(self.model, quiet=True)
        if trainer.args.divergence == "full":
            check_logits(policy, self.model)

    def _find(self, trainer, policy, name: str) -> None:
        args = trainer.args
        path, base, is_adapter = find_policy(name)
        has_tokenizer = not Path(path).is_dir() or (Path(path) / "tokenizer_config.json").is_file()
        check_tokenizer(name, AutoTokenizer.from_pretrained(path if has_tokenizer else base), trainer._tokenizer)
        own = is_peft_model(policy) and policy.peft_config[policy.active_adapters[0]].base_model_name_or_path
        shares = own and base == resolve_model_path(own) and policy_obstacle(policy) is None and not trainer.use_vllm
        # An adapter with a head of its own would lend it to the teacher.
        adapters = [policy.peft_config[policy.active_adapters[0]]] if own else []
        adapters += [PeftConfig.from_pretrained(path)] if is_adapter else []
        shares = shares and not any(adapter.modules_to_save for adapter in adapters)
        if shares:
            self._adapter = lambda: use_adapter(policy, ADAPTER if is_adapter else None)
            if not is_adapter:
                return
            with preserved_random_state():
                policy.load_adapter(path, ADAPTER, is_trainable=False)
            for module in policy.modules():
                if isinstance(module, LoraLayer):
                    # The policy is in training mode when the teacher scores.
                    module.lora_dropout[ADAPTER] = torch.nn.Identity()
            save_without(policy, {ADAPTER: None})
            return
        given = {"dtype": policy.dtype, **(args.teacher_model_init_kwargs or {})}
        with preserved_random_state():
            model = AutoModelForCausalLM.from_pretrained(base, **given)
            self.model = with_adapter(model, path).merge_and_unload() if is_adapter else model

    @torch.no_grad()
    def log_probs(self, inputs: dict) -> Tensor:
        """Log-probabilities of the responses' tokens at the sampling temperature, [n, T]."""
        # The response is at the end, however long the teacher's own prompt.
        own = {name.removeprefix("teacher_"): value for name, value in inputs.items() if name.startswith("teacher_")}
        checkpointing = self._trainer.args.gradient_checkpointing_kwargs
        with self._adapter(), disable_gradient_checkpointing(self.model, checkpointing):
            return self._trainer.rollout_log_probs({**inputs, **own}, self.model)

    def hidden_states(self, inputs: dict) -> Tensor:
        """Last hidden states before each token of the responses, [n, T, H]."""
        with reading_hidden_states(self.model) as read:
            self.log_probs(inputs)
        return read(inputs["completion_ids"].shape[1])

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        return apply_head(self.model, hidden)


def check_tokenizer(name: str, own, policy) -> None:
    """Raise ValueError if a token has another id than to the policy, and say if the chat template differs."""
    known, wanted = own.get_vocab(), policy.get_vocab()
    if known != wanted:
        differing = min((token for token in {*known, *wanted} if known.get(token) != wanted.get(token)), key=len)
        raise ValueError(
            f"the teacher {name} reads other tokens than the policy: {differing!r} is {known.get(differing)} to it "
            f"and {wanted.get(differing)} to the policy; give a teacher with the policy's tokenizer"
        )
    if own.chat_template != policy.chat_template:
        warn_once_per_run(f"the teacher {name} has another chat template than the policy, whose prompts it is given")


def check_logits(*models) -> None:
    """Raise ValueError for models whose logits are not the output of their head, as divergence full needs them."""
    for model in models:
        config = model.config.get_text_config()
        scaled = [name for name in _SCALES if getattr(config, name, None) not in (None, 1)]
        if scaled:
            raise ValueError(
                f"divergence full takes logits from the head, and {model.name_or_path} changes them by "
                f"{scaled[0]}: use divergence sampled_token"
            )


def apply_head(model, hidden: Tensor) -> Tensor:
    """Logits of hidden states, by the model's own head."""
    head = unwrapped(model).get_output_embeddings()
    return head(hidden.to(head.weight.dtype))
