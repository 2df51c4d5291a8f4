"""`share_prefixes`: packed forward passes under any trainer of TRL.

TRL's trainers ask a language model for log-probabilities of labels, through TRL's fused LM head, and a reward model
for scores. The hook intercepts both calls, runs them on a packed row, and returns outputs in the expected layout.
"""

from __future__ import annotations

import functools
import logging
import types
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from trl_ext.models.packing.attention import BACKENDS, PLAN_KEYWORD, let_take_plans, takes_plans
from trl_ext.models.packing.canary import LONGEST_WINDOW, difference
from trl_ext.models.packing.head import tiles_for
from trl_ext.models.packing.obstacles import (
    forward_functions,
    has_active_dropout,
    has_embedding_noise,
    has_fused_head,
    is_classifier,
    packing_obstacle,
    sliding_window,
)
from trl_ext.models.packing.planner import Plan, plan_batch
from trl_ext.processes import is_main_process

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_trl_ext_packing"
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Arguments that trainers and models with adapters pass with the batch and that change nothing here. TRL's
# RewardTrainer passes on the column `margin`, which no model reads.
_HARMLESS = frozenset({"use_cache", "num_items_in_batch", "margin"})


class Packing:
    """Packed forward passes of one model, with their statistics.

    Attributes:
        model: the transformers model, without wrappers.
        reason: why its passes are not packed, in a few words; None while they are, or may be.
        backend: the attention back-end in use; None until the first pass, which chooses it.
        largest_difference: between packed and padded log-probabilities, or hidden states, of the canary; None until
            the first pass.
        padded_tokens: positions of the packed batches, including padding.
        packed_tokens: tokens that were encoded for them.
        quiet: whether to omit the log line when packing is used; the line for unused packing is always logged.
        left_padded: number of passes that were not packed, by reason.
        skipped: back-ends that were tried first, and why each is not used.
    """

    def __init__(self, model: nn.Module, *, quiet: bool = False):
        self.model = model
        self.quiet = quiet
        self.reason = packing_obstacle(model)
        self.backend: str | None = None
        self.largest_difference: float | None = None
        self.padded_tokens = 0
        self.packed_tokens = 0
        self.left_padded: Counter[str] = Counter()
        self.skipped: dict[str, str] = {}
        self._forward = model.forward
        self._hooked = None
        if self.reason is None:
            let_take_plans(model.config._attn_implementation)
            self._hooked = _hooked_forward(model)
            model.forward = types.MethodType(self._hooked, model)

    @property
    def is_reached(self) -> bool:
        """Whether the model's calls come here, even through a mixed-precision wrapper."""
        return self._hooked is not None and self._hooked in forward_functions(self.model)

    @property
    def active(self) -> bool:
        """Whether passes are packed, as far as is known now."""
        return self.reason is None

    @property
    def is_refused(self) -> bool:
        """Whether the model itself rules packing out, for the stored reason."""
        return self.reason is not None and packing_obstacle(self.model) == self.reason

    def describe(self) -> str:
        """One line: the back-end in use, or why packing is off."""
        if not self.active:
            return f"packing: off, rows are padded: {self.reason}"
        if self.backend is None:
            return "packing: undecided until the first batch"
        how = f"{self.backend} attention"
        how += "".join(f"; not {name}: {why}" for name, why in self.skipped.items())
        return (
            f"packing: on, without padding and with common prefixes encoded once ({how}; differs from the padded "
            f"forward by at most {self.largest_difference:.1e})"
        )

    def remove(self) -> None:
        """Restore the model's own forward pass."""
        self.reason = "it was taken off"
        if self._hooked is not None and getattr(self.model.forward, "__func__", None) is self._hooked:
            if getattr(self._forward, "__func__", None) is type(self.model).forward:
                # Removes a reference cycle, so that the model is freed when it is dropped.
                del self.model.forward
            else:
                self.model.forward = self._forward
        self._hooked = None

    # ---- Batches ----

    def plan(self, input_ids: Tensor | None, attention_mask: Tensor | None, labels=None, **kwargs: Any) -> Plan | None:
        """The plan of a batch, or None if the model should process it unchanged; counts either case."""
        if not self.active or torch.compiler.is_compiling():
            return None
        reason = self._obstacle(input_ids, attention_mask, kwargs)
        # Before looking at the batch, which differs between processes: if parameters are sharded, all processes must
        # run the canary at the same call.
        if reason is None and self.backend is None:
            self._settle()
            if not self.active:
                return None
        window = sliding_window(self.model.config)
        if reason is None and window is not None and LONGEST_WINDOW < window < input_ids.shape[1]:
            reason = "is longer than a sliding window that the first batch's check does not reach"
        plan = None
        if reason is None:
            # If a prefix were encoded once, rows would not draw their dropout independently.
            plan = plan_batch(input_ids, attention_mask, labels, share=not has_active_dropout(self.model))
        if plan is None:
            self.left_padded[reason or "has a mask or labels of another form"] += 1
            return None
        plan.derived["backend"] = self.backend
        self.padded_tokens += input_ids.numel()
        self.packed_tokens += plan.tokens
        return plan

    def _obstacle(self, input_ids, attention_mask, kwargs) -> str | None:
        """Why a call cannot be packed, whatever its rows."""
        if not takes_plans(self.model.config._attn_implementation):
            return "its attention was exchanged"
        usual = {"return_dict": True}
        given = (name for name, value in kwargs.items() if value is not None and value is not usual.get(name, False))
        extra = sorted(name for name in given if name not in _HARMLESS)
        if extra:
            return f"takes {', '.join(extra)}"
        if input_ids is None or attention_mask is None or attention_mask.dim() != 2:
            return "takes no tokens with a mask of rows"
        if getattr(self.model.config, "output_router_logits", False):
            return "balances the load of experts"
        if has_embedding_noise(self.model):
            return "adds noise to its embeddings"
        return None

    def _settle(self) -> None:
        """Choose the first back-end that agrees with the padded forward, or turn packing off."""
        for backend in BACKENDS if self.model.device.type == "cuda" else ("sdpa",):
            try:
                largest, agrees = self._try(backend)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # Whatever a kernel or a model raises, the padded forward still works.
                self.skipped[backend] = str(error).splitlines()[0] if str(error) else type(error).__name__
                continue
            if agrees:
                self.backend, self.largest_difference = backend, largest
                break
            self.skipped[backend] = f"is {largest:.1e} off the padded forward"
        else:
            reasons = (
                f"{name} attention {why}" if why.startswith("is ") else why for name, why in self.skipped.items()
            )
            self.reason = "; ".join(dict.fromkeys(reasons))
        if not (self.quiet and self.active):
            _announce(self.describe())

    def _try(self, backend: str) -> tuple[float, bool]:
        classifier = is_classifier(self.model)

        def packed(input_ids, attention_mask, labels):
            plan = plan_batch(input_ids, attention_mask, None if classifier else labels)
            plan.derived["backend"] = backend
            if classifier:
                return self.hidden_states(plan)[plan.columns[labels != -100]]
            return _packed_log_probs(self, plan, labels).log_probs[labels[:, 1:] != -100]

        def padded(input_ids, attention_mask, labels):
            batch = {"input_ids": input_ids, "attention_mask": attention_mask}
            if classifier:
                return self.model.base_model(**batch, use_cache=False).last_hidden_state[labels != -100]
            return self.call(**batch, labels=labels, fused_lm_head=True).log_probs[labels[:, 1:] != -100]

        return difference(self.model, packed, padded)

    # ---- Passes ----

    def call(self, *args: Any, **kwargs: Any):
        """The model's own forward pass: padded, or packed if a plan is given as keyword."""
        # Calls the function, so that a copy of the model calls itself.
        function = getattr(self._forward, "__func__", None)
        with tiles_for(self.model.device):
            return self._forward(*args, **kwargs) if function is None else function(self.model, *args, **kwargs)

    def hidden_states(self, plan: Plan, backbone: nn.Module | None = None) -> Tensor:
        """Last hidden states of a packed row, [T, hidden size]; `plan.columns` maps them to the batch."""
        backbone = self.model.base_model if backbone is None else backbone
        return backbone(**packed_inputs(plan), use_cache=False).last_hidden_state[0]


def packed_inputs(plan: Plan) -> dict[str, Any]:
    """The inputs of a model or its backbone for a packed row."""
    return {
        "input_ids": plan.input_ids,
        "position_ids": plan.position_ids,
        # Four dimensions, so that transformers builds no T x T mask; nothing reads it.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=plan.input_ids.device),
        PLAN_KEYWORD: plan,
    }


def share_prefixes(*models, quiet: bool = False) -> Packing:
    """Make a trainer's forward passes leave out padding, and encode prefixes that rows have in common once.

    For TRL's trainers; this library's do it themselves. Losses, gradients, metrics and checkpoints are the same up to
    rounding, on fewer tokens. Call it after creating the trainer and before training:

        trainer = trl.DPOTrainer(...)
        share_prefixes(trainer.model, trainer.ref_model)

    At the first batch, three rows go through both the packed and the padded forward pass. If these differ by more than
    rounding, or the model cannot be packed, rows stay padded and one log line says why. Single batches that cannot be
    packed also stay padded, without a log line: `left_padded` counts them. While dropout is active, padding is left
    out but prefixes are not shared, so that each row draws its own dropout.

    Args:
        models: a causal language model with TRL's fused LM head, which trainers add, or one for sequence
            classification; bare, with adapters, or wrapped for distributed training. None is ignored.
        quiet: omit the log line when packing is used, but not the one that says why it is not.

    Returns:
        The packing of the first model: whether it is `active`, the `reason` if not, token counts, and `remove()`.

    Raises:
        ValueError: no model, or a language model without the fused head.
    """
    inner = [unwrapped(model) for model in models if model is not None]
    if not inner:
        raise ValueError("no model to share prefixes in")
    for model in inner:
        _hook(model, quiet=quiet or model is not inner[0])
    return packing_of(inner[0])


def packing_of(model) -> Packing | None:
    """The packing that `share_prefixes` put on a model, bare or wrapped; None if there is none."""
    packings = getattr(unwrapped(model), "__dict__", {}).get(_ATTRIBUTE)
    return packings[-1] if packings else None


def _hook(model: nn.Module, *, quiet: bool) -> None:
    packings: list[Packing] = model.__dict__.setdefault(_ATTRIBUTE, [])
    if packings:
        if packings[-1].is_reached or packings[-1].is_refused:
            return
        # Another trainer has put its head over the hook, and no longer calls it.
        packings[-1].reason = "it was taken over by another trainer"
    compiled = hasattr(model, "_orig_mod")
    if not compiled and not is_classifier(model) and not has_fused_head(model):
        raise ValueError(
            f"{type(model).__name__} has no fused LM head yet, which TRL's trainers put on it: make the trainer "
            "first, then call share_prefixes(trainer.model)"
        )
    packings.append(Packing(model, quiet=quiet))
    if not packings[-1].active:
        _announce(packings[-1].describe())


def _hooked_forward(model: nn.Module):
    """The function that receives the model's calls; a copy of the model finds the copy of its packing."""
    function = _classifier_forward if is_classifier(model) else _causal_forward
    index = len(model.__dict__.get(_ATTRIBUTE, ()))

    # Generation checks its arguments against the signature.
    @functools.wraps(getattr(model.forward, "__func__", model.forward))
    def forward(self, *args, **kwargs):
        return function(self.__dict__[_ATTRIBUTE][index], *args, **kwargs)

    return forward


def _causal_forward(packing: Packing, *args, fused_lm_head=False, **kwargs):
    batch = {name: kwargs.pop(name, None) for name in ("input_ids", "attention_mask", "labels")}
    plan = None
    if fused_lm_head and not args and batch["labels"] is not None:
        plan = packing.plan(**batch, **kwargs)
    if plan is not None:
        return _packed_log_probs(packing, plan, batch["labels"], kwargs.get("num_items_in_batch"))
    given = {name: value for name, value in batch.items() if value is not None}
    return packing.call(*args, **given, fused_lm_head=fused_lm_head, **kwargs)


def _packed_log_probs(packing: Packing, plan: Plan, labels: Tensor, num_items_in_batch=None):
    """TRL's fused output for a batch, computed on a packed row."""
    output = packing.call(
        **packed_inputs(plan), shift_labels=plan.shift_labels(labels), fused_lm_head=True, use_cache=False
    )
    mask = labels[:, 1:] != -100
    places = plan.columns[:, :-1]
    for name in _PER_TOKEN:
        values = getattr(output, name)
        if values is not None:
            setattr(output, name, values[0][places].masked_fill(~mask, 0))
    output.label_mask = mask
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    output.loss = -output.log_probs.sum() / count
    return output


def _classifier_forward(packing: Packing, input_ids=None, attention_mask=None, *args, **kwargs):
    plan, padding = None, packing.model.config.get_text_config().pad_token_id
    # Without a padding token, the model itself reports that it cannot find the ends of rows.
    if not args and kwargs.get("labels") is None and padding is not None:
        kwargs.pop("labels", None)
        plan = packing.plan(input_ids, attention_mask, **kwargs)
    places = None if plan is None else _score_places(packing, plan, input_ids, padding)
    if places is None:
        return packing.call(input_ids, attention_mask, *args, **kwargs)
    return SequenceClassifierOutputWithPast(logits=packing.model.score(packing.hidden_states(plan)[places]))


def _score_places(packing: Packing, plan: Plan, input_ids: Tensor, padding: int) -> Tensor | None:
    """Where in the packed row the scores of a batch are read, [B]; None if other tokens than the model's pad it."""
    last = last_tokens(input_ids, padding)[:, None]
    if plan.present.gather(1, last).all():
        return plan.columns.gather(1, last)[:, 0]
    packing.left_padded["is padded with another token than the model's"] += 1
    packing.padded_tokens -= input_ids.numel()
    packing.packed_tokens -= plan.tokens
    return None


def last_tokens(input_ids: Tensor, pad_token_id: int) -> Tensor:
    """The column at which a row's score is read, by transformers' rule: its last token that is not padding. [B].

    If padding is also the end-of-turn token, that is the token before the end-of-turn token.
    """
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    return (column * (input_ids != pad_token_id)).argmax(dim=1)


def unwrapped(model) -> nn.Module:
    """The transformers model inside a model with adapters or an engine's wrapper."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        else:
            return model


def _announce(line: str) -> None:
    """Log a line from the first process only."""
    if is_main_process():
        logger.warning(line)
