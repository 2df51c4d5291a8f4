"""`share_prefixes`: packed forward passes under any trainer of TRL.

Two hooks on the backbone of a model, its part below the head, do all of it. One replaces a padded batch by a packed
row, and the other puts the hidden states of the row back where they are in the batch. The head on top, TRL's or a
reward model's, does not notice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trl_ext.models.batches import evaluating, temporarily
from trl_ext.models.packing.attention import BACKENDS, PLAN_KEYWORD, let_take_plans, takes_plans
from trl_ext.models.packing.plan import Paths, Plan, plan_batch
from trl_ext.processes import is_main_process

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_trl_ext_packing"
# TRL's RewardTrainer passes on the column `margin`, which no model reads.
_HARMLESS = frozenset({"margin"})
# Mean difference of hidden states from those of the padded pass, relative to their spread over tokens. In half
# precision, padding alone changes them by hundredths.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.1}
# Columns of the batch that is compared, at most. It does not reach the end of a longer sliding window.
_LONGEST = 640
# Tokens of the vocabulary that TRL's head scores at a time on a CPU. Its own tiles take more time, and differ by
# rounding.
_CPU_TILE = 2048
# Arguments of a call with TRL's head that do not reach the backbone, and what the head makes of each labelled token.
_OF_THE_HEAD = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Packing:
    """Packed forward passes of one model, with their statistics.

    Attributes:
        model: the transformers model, without wrappers.
        reason: why its passes are not packed, in a few words; None while they are, or may be.
        backend: the attention back-end in use; None until the first pass, which chooses it.
        largest_difference: between packed and padded hidden states of the first pass's check; None until then.
        padded_tokens: positions of the packed batches, including padding.
        packed_tokens: tokens that were encoded for them.
        quiet: whether to omit the log line when packing is used; the line for unused packing is always logged.
        compiles: whether the layers of packed passes are compiled, as far as is known now.
        passes: how many passes an optimizer step of a trainer has, and how large; empty if one for each micro-batch.
        left_padded: number of passes that were not packed, by reason.
        skipped: back-ends that were tried first, and why each is not used.
    """

    def __init__(self, model: nn.Module, *, quiet: bool = False, compile_layers: bool = False):
        self.model = model
        self.quiet = quiet
        self.compiles = compile_layers
        self.reason = packing_obstacle(model)
        self.backend: str | None = None
        self.largest_difference: float | None = None
        self.padded_tokens = 0
        self.packed_tokens = 0
        self.passes = ""
        self.left_padded: Counter[str] = Counter()
        self.skipped: dict[str, str] = {}
        self.hooks = []
        self._checks = False
        self._dropout = Dropout(model)
        # The labels of a call with TRL's head, and whether the backbone is to return the states before them alone.
        self._labels: Tensor | None = None
        self._of_labels = False
        self._plan: Plan | None = None
        self._head = None
        if self.reason is None:
            let_take_plans(model.config._attn_implementation)
            # Bound methods, so that a deep copy of the model has hooks of its own packing.
            self.hooks = [
                model.base_model.register_forward_pre_hook(self._pack, with_kwargs=True),
                model.base_model.register_forward_hook(self._unpack),
                model.register_forward_pre_hook(self._enter_head, with_kwargs=True),
                model.register_forward_hook(self._leave_head, always_call=True),
            ]

    @property
    def scored_plan(self) -> Plan | None:
        """Within a pass whose backbone returns the states before labels alone, [1, P, H]: its plan; otherwise None."""
        return self._plan if self._of_labels else None

    @property
    def active(self) -> bool:
        """Whether passes are packed, as far as is known now."""
        return self.reason is None

    def describe(self) -> str:
        """One line: the back-end in use, or why packing is off."""
        if not self.active:
            return f"packing: off, rows are padded: {self.reason}"
        if self.backend is None:
            return "packing: undecided until the first batch"
        how = f"{self.backend} attention" + ", compiled layers" * self.compiles
        how += f", {self.passes}" if self.passes else ""
        how += "".join(f"; not {name}: {why}" for name, why in self.skipped.items())
        return (
            f"packing: on, without padding and with common prefixes encoded once ({how}; differs from the padded "
            f"forward by at most {self.largest_difference:.1e})"
        )

    def packs_all(self) -> bool:
        """Whether training passes are packed, whatever their rows; False before this process has made the check.

        A single batch that has a mask of another form is padded nevertheless.
        """
        reaches = (sliding_window(self.model.config) or 0) <= _LONGEST - 16
        return self.active and self.backend is not None and self._obstacle({}) is None and reaches

    def draws_dropout(self) -> bool:
        """Whether a pass would now draw dropout, so that rows do not share prefixes."""
        return self._dropout.is_active()

    def remove(self) -> None:
        """Leave the model's passes padded from now on."""
        self.reason = "it was taken off"
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        if self.compiles:
            self._compile(False)
        # Also ends a reference cycle, so that the model is freed when it is dropped.
        vars(self.model.base_model).pop(_ATTRIBUTE, None)

    # ---- Batches ----

    def plan(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **kwargs) -> Plan | None:
        """The plan of a batch, or None if the model should process it unchanged; counts either case.

        Args:
            input_ids, attention_mask: [B, L].
            labels: the next-token labels that the head will score, -100 for none, [B, L].
            kwargs: what else the backbone is called with.
        """
        if not self.active or torch.compiler.is_compiling():
            return None
        reason, plan = self._obstacle(kwargs), None
        # Before looking at the batch, which differs between processes: if parameters are sharded, all processes must
        # run the check at the same call.
        if reason is None and self.backend is None:
            self._settle()
            if not self.active:
                return None
        if reason is None:
            # One copy to the host, on which everything about the batch is decided.
            given = [input_ids, attention_mask] if labels is None else [input_ids, attention_mask, labels]
            batch = torch.stack([part.to(input_ids.dtype) for part in given]).cpu()
            options = {"device": input_ids.device, "round_up": input_ids.is_cuda}
            # If a prefix were encoded once, rows would not draw their dropout independently.
            draws = self.draws_dropout()
            plan = plan_batch(*batch, share=not draws, **options)
            reason = _misfit(self.model, plan, batch[0])
        if reason is not None:
            self.left_padded[reason] += 1
            return None
        plan.derived.update(backend=self.backend, compiled=self.compiles and not draws)
        self.padded_tokens += input_ids.numel()
        self.packed_tokens += plan.tokens
        return plan

    def _obstacle(self, kwargs: dict[str, Any]) -> str | None:
        """Why a call of the backbone cannot be packed, whatever its rows."""
        config = self.model.config
        if not takes_plans(config._attn_implementation):
            return "its attention was exchanged"
        usual = {"return_dict": True}
        # What a call does not say, the backbone takes from its configuration.
        settings = ("output_hidden_states", "output_attentions", "output_router_logits")
        kwargs = kwargs | {name: getattr(config, name, None) for name in settings if kwargs.get(name) is None}
        given = (name for name, value in kwargs.items() if value is not None and value is not usual.get(name, False))
        if extra := sorted(name for name in given if name not in _HARMLESS):
            return f"takes {', '.join(extra)}"
        embedding = self.model.get_input_embeddings()
        if embedding.training and getattr(embedding, "neftune_noise_alpha", None):
            return "adds noise to its embeddings"
        return None

    @torch.no_grad()
    def _settle(self) -> None:
        """Choose the first back-end that agrees with the padded pass, or turn packing off."""
        model, device = self.model.base_model, self.model.device
        input_ids, attention_mask = (part.to(device) for part in _rows_to_compare(self.model.config))
        self._checks = True
        try:
            with evaluating(model):
                padded = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
                for backend in _backends(device):
                    if self._agrees(backend, backend, input_ids, attention_mask, padded):
                        self.backend = backend
                        break
                else:
                    self.reason = "; ".join(dict.fromkeys(self.skipped.values()))
                if self.compiles and self.active:
                    self._compile_if_it_agrees(input_ids, attention_mask, padded)
        finally:
            self._checks = False
        if not (self.quiet and self.active):
            _announce(self.describe())

    def _agrees(self, name: str, backend: str, input_ids: Tensor, attention_mask: Tensor, padded: Tensor) -> bool:
        """Whether packed hidden states are the padded ones up to rounding; `skipped` says why not."""
        plan = plan_batch(input_ids, attention_mask)
        plan.derived.update(backend=backend, compiled=name == "compiled layers")
        try:
            # With gradients, as in training, if layers are compiled.
            with torch.set_grad_enabled(plan.derived["compiled"]):
                packed = plan.unpack(self.model.base_model(**packed_inputs(plan)).last_hidden_state).detach()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Whatever a kernel or a model raises, the padded pass still works.
            self.skipped[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
            return False
        both = (states.flatten(0, 1).index_select(0, plan.places) for states in (packed, padded))
        largest, agrees = _difference(*both)
        if agrees:
            self.largest_difference = largest
        else:
            attention = name if name == "compiled layers" else f"{backend} attention"
            self.skipped[name] = f"{attention} is {largest:.1e} off the padded forward"
        return agrees

    def _compile_if_it_agrees(self, *compared: Tensor) -> None:
        if self.backend != "varlen":
            self.compiles = False
            self.skipped["compiled layers"] = "they need varlen attention, on a GPU in half precision"
            return
        self._compile(True)
        if not self._agrees("compiled layers", "varlen", *compared):
            self._compile(False)

    def _compile(self, on: bool) -> None:
        """Compile each layer's call for packed rows, and leave other calls as they are; or undo that."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.compiles = on
        layers = [layer for layer in self.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        for layer in layers:
            layer._compiled_call_impl = None
            if on:
                # A policy and its reference, with and without gradients and adapters, are compiled one by one.
                torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
                layer.compile(dynamic=True)
                layer._compiled_call_impl = partial(_call, layer._compiled_call_impl, layer._call_impl)

    # ---- Hooks ----

    def _pack(self, backbone: nn.Module, args: tuple, kwargs: dict[str, Any]):
        if self._checks:
            return None
        if not self._of_labels:
            self._plan = None
            # A language model makes a cache unless it is told not to, and no one reads that of a classifier.
            caches = kwargs.get("use_cache")
            if is_classifier(self.model) if caches is None else not caches:
                self._plan = self._plan_call(args, kwargs, self._labels)
        return None if self._plan is None else ((), packed_inputs(self._plan))

    def _plan_call(self, args: tuple, kwargs: dict[str, Any], labels: Tensor | None) -> Plan | None:
        """The plan of a call of the backbone with these arguments; None to process it unchanged."""
        given = {**dict(zip(("input_ids", "attention_mask"), args, strict=False)), **kwargs}
        input_ids, attention_mask, _ = (given.pop(name, None) for name in ("input_ids", "attention_mask", "use_cache"))
        rows = len(args) <= 2 and input_ids is not None and attention_mask is not None and attention_mask.dim() == 2
        if not rows or PLAN_KEYWORD in given:
            return None
        return self.plan(input_ids, attention_mask, labels, **given)

    def _unpack(self, backbone: nn.Module, args: tuple, output):
        plan = None if self._checks else self._plan
        if plan is None:
            return output
        states = output.last_hidden_state
        output.last_hidden_state = plan.read(states) if self._of_labels else plan.unpack(states)
        if plan.targets is not None and not self._of_labels:
            # The last column, which predicts nothing.
            output.last_hidden_state = pad(output.last_hidden_state, (0, 0, 0, 1))
        return output

    def _enter_head(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Give TRL's head the labelled positions alone, which it then need not search for on the device."""
        if not self.active or not kwargs.get("fused_lm_head"):
            return None
        self._labels = kwargs.get("labels") if kwargs.get("shift_labels") is None else None
        # The check of the first pass must run in the precision of the backbone's call.
        if self._labels is not None and self.backend is not None:
            others = {name: value for name, value in kwargs.items() if name not in _OF_THE_HEAD}
            self._plan = self._plan_call(args, others, self._labels)
            self._of_labels = True
        compact = self._of_labels and self._plan is not None
        settings = {"_CHUNKED_LOGPROB_CHUNK_SIZE": _CPU_TILE} if model.device.type == "cpu" else {}
        if compact or settings:
            # Whether the head searches for the labelled positions.
            settings["_use_triton"] = lambda device: not compact
            from trl.trainer import utils  # Whoever has put this head on the model has imported TRL.

            self._head = temporarily(utils, **settings)
            self._head.__enter__()
        return (args, {**kwargs, "labels": None, "shift_labels": self._plan.targets}) if compact else None

    def _leave_head(self, model: nn.Module, args: tuple, output):
        head, labels, plan = self._head, self._labels, self._plan if self._of_labels else None
        self._head, self._labels, self._plan, self._of_labels = None, None, None, False
        if head is not None:
            head.__exit__(None, None, None)
        if plan is not None and output is not None:
            for name in _OUTPUTS:
                values = getattr(output, name)
                setattr(output, name, None if values is None else plan.spread(values))
            output.label_mask = labels[:, 1:] != -100
        return output


def packed_inputs(plan: Plan) -> dict[str, Any]:
    """The inputs of a model or its backbone for a packed row."""
    return {
        "input_ids": plan.input_ids,
        "position_ids": plan.position_ids,
        # Four dimensions, so that transformers builds no T x T mask; nothing reads it.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=plan.input_ids.device),
        "use_cache": False,
        PLAN_KEYWORD: plan.paths if plan.derived.get("compiled") else plan,
    }


def _call(compiled: Callable, plain: Callable, *args: Any, **kwargs: Any):
    """Call a layer compiled if it receives the paths of a packed row; its recomputation receives them too."""
    return (compiled if isinstance(kwargs.get(PLAN_KEYWORD), Paths) else plain)(*args, **kwargs)


def _backends(device: torch.device) -> tuple[str, ...]:
    return BACKENDS if device.type == "cuda" else ("sdpa",)


def _misfit(model, plan: Plan | None, input_ids: Tensor) -> str | None:
    """Why a plan does not do for a batch and the head that follows; None if it does."""
    if plan is None:
        return "has a mask or labels of another form"
    if _LONGEST - 16 < (sliding_window(model.config) or 0) < input_ids.shape[1]:
        return "is longer than a sliding window that the first batch's check does not reach"
    if is_classifier(model):
        padding = model.config.get_text_config().pad_token_id
        # Without a padding token, the model itself reports that it cannot find the ends of rows.
        if padding is None or not plan.present.gather(1, last_tokens(input_ids, padding)[:, None]).all():
            return "is padded with another token than the model's"
    return None


def last_tokens(input_ids: Tensor, pad_token_id: int) -> Tensor:
    """The column at which a row's score is read, by transformers' rule: its last token that is not padding. [B].

    If padding is also the end-of-turn token, that is the token before the end-of-turn token.
    """
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    return (column * (input_ids != pad_token_id)).argmax(dim=1)


# ---- The check of the first pass ----


def _rows_to_compare(config) -> tuple[Tensor, Tensor]:
    """Two rows that share a prefix, padded on the right, and a short one padded on the left: ids and mask, [3, L].

    They exceed the model's sliding window if it is at most about 600 tokens, and are the same on every process.
    """
    text = config.get_text_config()
    width = min(max(32, (sliding_window(config) or 0) + 16), _LONGEST, text.max_position_embeddings)
    tokens = torch.randint(0, text.vocab_size, (3, width), generator=torch.Generator().manual_seed(0))
    tokens[1, : width // 2] = tokens[0, : width // 2]
    attended = torch.ones_like(tokens)
    attended[1, width - width // 4 :] = 0
    attended[2, : width - width // 3] = 0
    return tokens, attended


def _difference(packed: Tensor, padded: Tensor) -> tuple[float, bool]:
    """The largest difference of hidden states, [N, H], and whether the mean one is no more than rounding."""
    device, dtype = padded.device.type, padded.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elif device == "cuda" and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.float16  # TF32 has its precision.
    apart, spread = (packed.double() - padded.double()).abs(), padded.double().std(dim=0).mean()
    return apart.max().item(), apart.mean().item() <= TOLERANCES[dtype] * spread.item()


def _announce(line: str) -> None:
    """Log a line from the first process only."""
    if is_main_process():
        logger.warning(line)


# ---- Models ----


def share_prefixes(*models, quiet: bool = False, compile_layers: bool | None = None) -> Packing:
    """Make a trainer's forward passes leave out padding, and encode prefixes that rows have in common once.

    For TRL's trainers; this library's do it themselves. Losses, gradients, metrics and checkpoints are the same up to
    rounding, on fewer tokens. Call it before training:

        trainer = trl.DPOTrainer(...)
        share_prefixes(trainer.model, trainer.ref_model)

    At the first batch, three rows go through both the packed and the padded forward pass. If these differ by more than
    rounding, or the model cannot be packed, rows stay padded and one log line says why. Single batches that cannot be
    packed also stay padded, without a log line: `left_padded` counts them. While dropout is active, padding is left
    out but prefixes are not shared, so that each row draws its own dropout.

    Args:
        models: a causal language model or one for sequence classification; bare, with adapters, or wrapped for
            distributed training. None is ignored.
        quiet: omit the log line when packing is used, but not the one that says why it is not.
        compile_layers: compile the layers of packed passes without dropout, on a GPU in half precision. Compilation
            takes a minute or so at the first passes; batches of other lengths need no other one. None to leave a model
            that is packed already as it is.

    Returns:
        The packing of the first model: whether it is `active`, the `reason` if not, token counts, and `remove()`.

    Raises:
        TypeError: an argument is not a model of transformers, such as the trainer.
        ValueError: no model.
    """
    inner = [unwrapped(model) for model in models if model is not None]
    if others := [type(model).__name__ for model in inner if not hasattr(model, "base_model")]:
        raise TypeError(f"share_prefixes takes models, as trainer.model and trainer.ref_model, got {others[0]}")
    if not inner:
        raise ValueError("no model to share prefixes in")
    for model in inner:
        packing = packing_of(model)
        if packing is not None and (packing.hooks or packing_obstacle(model) == packing.reason):
            if compile_layers in (None, packing.compiles) or not packing.active:
                continue
            packing.remove()
        packing = Packing(model, quiet=quiet or model is not inner[0], compile_layers=bool(compile_layers))
        # On the backbone, which keeps the hooks in a copy that is freed of what trainers put on a model.
        vars(model.base_model)[_ATTRIBUTE] = packing
        if not packing.active:
            _announce(packing.describe())
    return packing_of(inner[0])


def packing_of(model) -> Packing | None:
    """The packing that `share_prefixes` put on a model, bare or wrapped; None if there is none."""
    backbone = getattr(unwrapped(model), "base_model", None)
    return vars(backbone).get(_ATTRIBUTE) if isinstance(backbone, nn.Module) else None


def unwrapped(model) -> nn.Module:
    """The transformers model inside a model with adapters or an engine's wrapper."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        else:
            return model


# ---- What cannot be packed ----


def packing_obstacle(model) -> str | None:
    """Why a model's forward passes cannot be packed, in a few words; None if no obstacle is known.

    Other obstacles, such as a soft cap of the attention scores, show when the first batch is tried.

    Args:
        model: a transformers model for causal language modelling or sequence classification, without wrappers.
    """
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if getattr(model, "_compiled_call_impl", None) is not None or hasattr(model, "_orig_mod"):
        return "it is compiled"
    text = model.config.get_text_config()
    if text is not model.config:
        return "it takes more than text"
    if is_classifier(model) and not isinstance(model, GenericForSequenceClassification):
        return "it reads its scores in a way of its own"
    if others := {*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}:
        return f"it has layers of the kind {', '.join(sorted(others))}"
    if (attention := text._attn_implementation) not in ALL_ATTENTION_FUNCTIONS:
        return f"its attention is {attention}: load it with attn_implementation sdpa or a flash attention"
    if not getattr(text, "rope_parameters", None):
        return "its positions are not rotary"
    # With several kinds of layers there is one set of parameters for each kind.
    sets = [value for value in text.rope_parameters.values() if isinstance(value, dict)] or [text.rope_parameters]
    if any(entry.get("rope_type") in ("dynamic", "longrope") for entry in sets):
        return "its rotary angles depend on the length of the batch"
    return None


def is_classifier(model) -> bool:
    """Whether the model is for sequence classification, as reward models are."""
    return type(model).__name__.endswith("ForSequenceClassification")


def sliding_window(config) -> int | None:
    """The window of the model's sliding attention layers; None if it has none."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    return (getattr(text, "sliding_window", None) or None) if kinds is None or "sliding_attention" in kinds else None


def may_draw(model: nn.Module) -> bool:
    """Whether any module of a model has dropout or router noise, in whatever mode."""
    return any(rate > 0 for module in model.modules() for rate in _rates(module))


class Dropout:
    """Tells whether a forward pass of a model would now draw dropout, or router noise.

    A look at every module takes milliseconds in a model with adapters, so those that may draw are remembered.

    Args:
        model: a transformers model, without wrappers.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._modules = 0
        # Modules that may draw, each with the layer of adapters that it belongs to and its adapter's name.
        self._drawing: list[tuple[nn.Module, Any, str]] = []

    def is_active(self) -> bool:
        """Whether any module would draw, with the rates, modes and adapters that are set now."""
        # Adapters that are added later bring modules of their own.
        if self._modules != (count := sum(1 for _ in self.model.modules())):
            self._modules, self._drawing = count, list(self._find())
        return any(
            module.training and any(rate > 0 for rate in _rates(module))
            for module, layer, name in self._drawing
            # Of several adapters only the active ones draw, and none while they are disabled.
            if layer is None or (not layer.disable_adapters and name in layer.active_adapters)
        )

    def _find(self) -> Iterator[tuple[nn.Module, Any, str]]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        owners = {own: (layer, name) for layer in layers for name, own in getattr(layer, "lora_dropout", {}).items()}
        for module in self.model.modules():
            if _rates(module):
                yield module, *owners.get(module, (None, ""))


def _rates(module: nn.Module) -> list[float]:
    """The dropout rates that a module has, 0 among them."""
    if "Dropout" in type(module).__name__:
        return [module.p]
    # Models store functional rates as numbers, `attention_dropout`, `residual_dropout` or `router_jitter_noise`, and
    # layers of adapters by the adapter's name, `rank_dropout`. Most modules are torch's, which have none.
    own = {} if type(module).__module__.startswith("torch.") else vars(module)
    named = [value for name, value in own.items() if "drop" in name or "jitter" in name]
    rates = [rate for value in named for rate in (value.values() if isinstance(value, dict) else [value])]
    return [rate for rate in rates if isinstance(rate, float)]
