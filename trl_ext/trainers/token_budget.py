"""How many tokens a packed pass has, and whether it keeps its activations: as configured, or as memory allows.

A pass that runs out of memory is undone, with the passes of its optimizer step before it, and repeated in halves. The
update and its log are the same as without the failure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from peft import PeftModel
from transformers import Trainer
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_ext.models.batches import temporarily
from trl_ext.models.packing import packed_inputs, unwrapped
from trl_ext.models.packing.plan import plan_batch
from trl_ext.models.shared_backbone import preserved_random_state
from trl_ext.processes import warn_once_per_run

logger = logging.getLogger(__name__)

# The share of free memory that a pass may take by estimate. The rest is for the head's tiles, the gradients of
# activations, and the gaps between blocks. On several processes the last backward pass of a step cannot be repeated.
SHARE_OF_ONE, SHARE_OF_SEVERAL = 0.8, 0.6
# The lengths of the passes that are measured.
_MEASURED = (256, 768)


class TokenBudget:
    """The tokens of a packed pass.

    `auto` begins with the padded size of the largest micro-batch of a step: a packed pass encodes no more tokens than
    the micro-batch would without packing. On a GPU, after the first optimizer step has allocated its states, a pass
    takes as many tokens as memory allows. Unless the configuration says whether activations are recomputed, they are
    kept if those of a padded micro-batch, or of a pass of the given size, fit.

    Args:
        trainer: a trainer that packs its model.
        setting: tokens of a pass, or "auto".

    Attributes:
        tokens: the budget of the latest optimizer step.
        by_memory: whether memory may still decide anything.
        may_keep: whether it may decide that activations are kept.
        keeps: whether activations are kept; None before memory has decided that.
        most: tokens of a pass by memory; None for no limit.
        lowered: tokens of a pass on this process after memory did not suffice; None before.
        limit: tokens above which a pass is divided as it begins; None while no pass has had more.
    """

    def __init__(self, trainer, setting: str):
        self.trainer = trainer
        self.given = None if setting == "auto" else int(setting)
        # A process of FSDP2 holds a part of the model, and waits for the others within every pass.
        self.may_keep = trainer.args.recomputes_by_memory and not trainer.is_fsdp_enabled
        self.by_memory = not trainer.is_fsdp_enabled and (self.given is None or self.may_keep)
        self.tokens: int | None = None
        self.keeps: bool | None = None
        self.most: int | None = None
        self.lowered: int | None = None
        self.limit: int | None = None
        self._agreed = False

    def divides(self) -> bool:
        """Whether the next optimizer step is divided into passes. Every process must call this, and gets one answer.

        A process may have checked packing before the others, as when it alone has scored rows. Steps are divided once
        all processes have.
        """
        accelerator, packing = self.trainer.accelerator, self.trainer.packing
        packs = packing.packs_all()
        if not self._agreed and accelerator.num_processes > 1:
            known = torch.tensor([[packs, packing.active]], device=accelerator.device)
            ready, active = accelerator.gather(known).T
            packs = bool(ready.all())
            self._agreed = packs or not active.any()
        return packs

    def of(self, micro_batch: int) -> int:
        """The budget of the next optimizer step, whose largest micro-batch has so many tokens with its padding.

        Every process must call this.
        """
        trainer = self.trainer
        self.tokens = micro_batch if self.given is None else self.given
        # An update that was skipped may be the first, and then the optimizer has no states yet.
        skipped = trainer.accelerator.optimizer_step_was_skipped or trainer.update_guard.in_a_row
        if self.by_memory and trainer.state.global_step > 0 and not skipped:
            self.by_memory = False
            self._decide(self.tokens)
        if self.keeps and self.may_keep:
            # transformers turns it on where a training begins.
            recompute(trainer, False)
        limits = self.tokens if self.most is None else self.most, self.lowered
        self.tokens = min(limit for limit in limits if limit is not None)
        return self.tokens

    def note(self, tokens: list[int], micro_batches: int) -> None:
        """Take note of the tokens of a step's passes, for the description of packing.

        A step has no more passes than micro-batches, so that a pass may exceed the budget. It is then divided when it
        begins.
        """
        exceeds = max(tokens) > self.tokens and not self.trainer.is_fsdp_enabled
        if exceeds and (self.given is not None or self.most is not None):
            self.limit = self.tokens
        how = "" if self.keeps is None else f", activations {'kept' if self.keeps else 'recomputed'}"
        told = f"{len(tokens)} passes for {micro_batches} micro-batches by a budget of {self.tokens} tokens{how}"
        if not self.trainer.packing.passes:
            warn_once_per_run(f"tokens_per_pass: {told}")
        self.trainer.packing.passes = told

    def _decide(self, needed: int) -> None:
        trainer, model = self.trainer, self.trainer.model
        free = free_memory(trainer.accelerator.device)
        if free is None:
            return
        free -= sum(own.numel() * own.element_size() for own in model.parameters() if own.requires_grad)
        try:
            fixed, kept, recomputed = activation_bytes(trainer)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            # Passes stay as large as padded ones are.
            free, fixed, kept, recomputed = 0, 0.0, 1.0, 1.0
        several = trainer.accelerator.num_processes > 1
        free = max((SHARE_OF_SEVERAL if several else SHARE_OF_ONE) * free - fixed, 0)
        if several:
            free = trainer.accelerator.gather(torch.tensor(free, device=trainer.accelerator.device)).min().item()
        # What did not fit with recomputation does not fit without.
        may_keep = self.may_keep and self.lowered is None
        self.keeps = not model.is_gradient_checkpointing or (may_keep and free / kept >= needed)
        if self.given is None:
            self.most = max(int(free / (kept if self.keeps else recomputed)), needed)
        warn_once_per_run(
            f"tokens_per_pass: at most {self.most or self.given}, with activations "
            f"{'kept' if self.keeps else 'recomputed'}, for which {free / 2**30:.1f} GiB are left"
        )

    def lower(self, tokens: int) -> str:
        """Take less memory than a pass of so many tokens did; returns what has changed, in a few words."""
        if self.keeps and self.may_keep:
            self.may_keep = self.keeps = False
            recompute(self.trainer, True)
            return "its activations are recomputed"
        self.limit = self.lowered = max(min(self.lowered or tokens, tokens // 2), 1)
        return f"passes have at most {self.lowered} tokens, if they can be divided"


def token_budget(trainer, *, obstacle: str | None = None) -> TokenBudget | None:
    """The budget of a trainer's passes; None if it has none or, with one line why for a number, cannot use one.

    A window is divided only while its passes are packed, `Packing.packs_all`.

    Args:
        trainer: a trainer that has tried to pack its model.
        obstacle: why the split of a window changes the update, if it does.
    """
    setting = str(trainer.args.tokens_per_pass)
    if setting == "off":
        return None
    if trainer.packing is None or not trainer.packing.active:
        obstacle = "passes are not packed"
    elif trainer.is_deepspeed_enabled:
        obstacle = "it has not been tried under DeepSpeed"
    elif isinstance(trainer.model, PeftModel) and trainer.model.active_peft_config.is_prompt_learning:
        obstacle = "passes with virtual tokens are not packed"
    if obstacle is not None:
        if setting != "auto":
            warn_once_per_run(f"tokens_per_pass: off, {obstacle}")
        return None
    return TokenBudget(trainer, setting)


# ---- Memory ----


def free_memory(device: torch.device) -> int | None:
    """Bytes that tensors on a CUDA device may still take, torch's own reserve included; None for other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def recompute(trainer, on: bool) -> None:
    """Recompute the activations of the layers in the backward pass, or keep them."""
    model = unwrapped(trainer.model)
    if on:
        model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    elif model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()


def activation_bytes(trainer) -> tuple[float, float, float]:
    """Bytes that a packed pass of the trained model holds for its backward pass.

    They are measured on forward passes of random tokens. A pass whose layers are recomputed holds the input of each,
    and the activations of one layer at a time with about as much again for their gradients.

    Returns:
        What does not depend on the number of tokens, such as weights in half precision; what each token takes; and
        what it takes if layers are recomputed.
    """
    backbone = unwrapped(trainer.model).base_model
    layers = [layer for layer in backbone.modules() if isinstance(layer, GradientCheckpointingLayer)]
    weights = {own.untyped_storage().data_ptr() for own in backbone.parameters()}
    held: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for layer in layers:
            stack.enter_context(temporarily(layer, gradient_checkpointing=False))
        stack.enter_context(preserved_random_state())
        stack.enter_context(trainer.accelerator.autocast())
        for tokens in _MEASURED:
            ids = torch.randint(backbone.config.get_text_config().vocab_size, (1, tokens))
            plan = plan_batch(ids, torch.ones_like(ids), device=trainer.accelerator.device)
            plan.derived["backend"] = trainer.packing.backend
            # While the pass is alive, no two of its tensors are at one address.
            storages: dict[int, int] = {}
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                states = backbone(**packed_inputs(plan)).last_hidden_state
            held.append(sum(storages.values()))
            inputs = len(layers) * states.nbytes / tokens
            del states
    per_token = (held[1] - held[0]) / (_MEASURED[1] - _MEASURED[0])
    recomputed = min(inputs + 2 * per_token / max(len(layers), 1), per_token)
    return max(held[0] - _MEASURED[0] * per_token, 0.0), per_token, recomputed


# ---- Passes that did not fit ----


class PassTooLarge(Exception):
    """A pass has more tokens than the limit, and nothing of it is computed yet; `pieces` are to take its place."""

    def __init__(self, pieces: list[dict[str, Any]]):
        super().__init__(pieces)
        self.pieces = pieces


class TokenBudgets:
    """Mixin before a trainer whose loss step calls `begin_pass`, and after `StepMetrics`.

    The trainer sets `packing` and `token_budget`. A pass that runs out of memory is repeated in smaller passes. On
    several processes, this is impossible in the backward pass that exchanges gradients, the last of a step.
    """

    token_budget: TokenBudget | None = None
    # The passes of the optimizer step in progress, and the sum of the losses that transformers has received for it.
    _begun: list[dict[str, Any]] | tuple[()] = ()
    _received: torch.Tensor | float = 0.0
    _in_forward = _divides = False

    def get_batch_samples(self, *args: Any, **kwargs: Any):
        # A step begins.
        self._begun, self._received = [], 0.0
        return super().get_batch_samples(*args, **kwargs)

    def begin_pass(self, inputs: dict[str, Any]) -> None:
        """Remember a training pass that the loss step begins; raises PassTooLarge for one that is to be divided."""
        if self.token_budget is None or not self.model.training:
            return
        if self._divides and self.token_budget.limit is not None and len(pieces := self._pieces(dict(inputs))) > 1:
            raise PassTooLarge(pieces)
        self._begun = [*self._begun, dict(inputs)]
        self._in_forward = True

    @contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:
        with super().compute_loss_context_manager():
            yield
        self._in_forward = False

    def halves(self, one: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        """The tokens of a pass, and the pass in two, or as it is if it cannot be divided."""
        raise NotImplementedError

    def pieces_of(self, one: dict[str, Any], parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The parts of a pass, in order, with what their loss needs; the pass alone if it cannot be divided now."""
        return parts

    @contextmanager
    def in_place_of(self, inputs: Any, one: dict[str, Any]) -> Iterator[Any]:
        """What `training_step` receives in place of `inputs` to compute this pass."""
        yield one

    def training_step(self, model, inputs, *args: Any, **kwargs: Any):
        if self.token_budget is None:
            return super().training_step(model, inputs, *args, **kwargs)
        # The passes of the step that are computed; those to compute now, None for the given one; and the loss that
        # was returned for passes which are among these again.
        earlier, parts, received = self._begun, None, 0.0
        while True:
            self._begun, self._divides = earlier, parts is None
            try:
                loss = self._in_parts(model, inputs, parts, *args, **kwargs) - received
                break
            except PassTooLarge as error:
                parts = error.pieces
                continue
            except RuntimeError as error:
                if not self._may_repeat(error, len(earlier)):
                    raise
            # The error, which held on to the activations, is gone.
            parts = self._undo([*earlier, *(parts or self._begun[-1:])])
            earlier, received = [], self._received
        self._received = self._received + loss
        return loss

    def _in_parts(self, model, inputs: Any, parts: list[dict[str, Any]] | None, *args: Any, **kwargs: Any):
        """Compute a micro-batch as it is, or these passes in its place; returns the sum of their losses."""
        if parts is None:
            return super().training_step(model, inputs, *args, **kwargs)
        total = 0.0
        for part in parts[:-1]:
            with self.in_place_of(inputs, part) as given, self.accelerator.no_sync(model), self._offloading():
                # Of transformers: TRL's counts its calls.
                total = total + Trainer.training_step(self, model, given, *args, **kwargs)
        with self.in_place_of(inputs, parts[-1]) as given:
            return total + super().training_step(model, given, *args, **kwargs)

    def _offloading(self) -> AbstractContextManager:
        return getattr(self, "maybe_activation_offload_context", None) or nullcontext()

    def _may_repeat(self, error: RuntimeError, before: int) -> bool:
        # Memory may also end where a rollout is sampled, before a pass begins.
        if not should_reduce_batch_size(error) or len(self._begun) <= before or self.is_fsdp_enabled:
            return False
        if self.accelerator.num_processes > 1:
            # The other processes wait for no second exchange of gradients or buffers.
            exchanges = self.accelerator.sync_gradients and not self._in_forward
            in_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")
            if exchanges or in_each or self.args.ddp_broadcast_buffers:
                return False
        lowers = self.token_budget.keeps and self.token_budget.may_keep
        one = self._begun[-1]
        return lowers or len(self.pieces_of(one, self.halves(one)[1])) > 1

    def _undo(self, passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Undo these passes, the optimizer step so far; returns them with those that are too large divided."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        with self._offloading():
            # What it holds of the failed pass is dropped.
            pass
        clear_device_cache(garbage_collection=True)
        self.forget_step()
        tokens, _ = self.halves(self._begun[-1])
        change = self.token_budget.lower(tokens)
        logger.warning(
            f"step {self.state.global_step + 1}: memory does not suffice for a pass of {tokens} tokens; from now on "
            f"{change}, and the step so far is repeated"
        )
        return [piece for one in passes for piece in self._pieces(one)]

    def _pieces(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        """A pass in as many parts as it takes for them to fit, as far as it can be divided."""
        parts = self._divided(one)
        return self.pieces_of(one, parts) if len(parts) > 1 else [one]

    def _divided(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        tokens, halves = self.halves(one)
        limit = self.token_budget.limit
        if limit is None or tokens <= limit or len(halves) == 1:
            return [one]
        return [part for half in halves for part in self._divided(half)]
