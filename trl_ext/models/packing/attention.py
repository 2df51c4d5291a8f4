"""Attention over a packed row: each segment attends causally to its own path, and to nothing else.

It replaces the model's attention function in transformers under the same name, so that anything transformers and its
kernels derive from the name stays right. Without a plan it calls the original function. Back-ends, in the order in
which they are tried: `varlen`, one call of torch's FlashAttention for all segments (CUDA, half precision); `sdpa`, one
call of scaled dot-product attention for each segment (any device).
"""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trl_ext.models.packing.plan import Paths, Plan

# The keyword that carries a plan through the layers, so that recomputation of checkpoints also receives it.
PLAN_KEYWORD = "packing_plan"
BACKENDS = ("varlen", "sdpa")
# Keywords that do not change the attention of a packed call.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "output_hidden_states"})


def takes_plans(name: str) -> bool:
    """Whether the attention function registered as `name` supports packing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return getattr(ALL_ATTENTION_FUNCTIONS.get(name), "takes_plans", False)


def let_take_plans(name: str) -> None:
    """Register packed attention over the attention function `name`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if takes_plans(name):
        return
    original = ALL_ATTENTION_FUNCTIONS[name]

    @wraps(original)
    def packed_attention(module, query, key, value, attention_mask, *args, **kwargs):
        plan = kwargs.pop(PLAN_KEYWORD, None)
        if plan is None:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        return attend(plan, module, query, key, value, *args, **kwargs), None

    packed_attention.takes_plans = True
    ALL_ATTENTION_FUNCTIONS.register(name, packed_attention)


def attend(
    plan: Plan | Paths,
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> Tensor:
    """Attention of every token of a packed row to its path.

    Args:
        plan: the plan of the packed row of T tokens; its `backend` in `derived` names the back-end, `sdpa` by default.
            Or its paths, without dropout, for `varlen`.
        module: the attention layer.
        query: [1, heads, T, head size].
        key, value: [1, key heads, T, head size].
        scaling: factor of the scores; None for the inverse square root of the head size.
        dropout: dropout rate of the attention weights.
        sliding_window: the number of tokens of its path that a token sees, including itself; None for all.

    Returns:
        [1, T, heads, head size].

    Raises:
        NotImplementedError: the layer needs a feature that is not implemented here, such as a soft cap.
    """
    given = (name for name, value in kwargs.items() if value is not None and value is not False)
    unknown = [name for name in given if name not in _HARMLESS]
    if unknown:
        raise NotImplementedError(f"its attention takes {', '.join(unknown)}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise NotImplementedError("its attention is not causal")
    if torch.is_autocast_enabled(query.device.type):
        # Rotary angles may have raised queries and keys to float32, while values are in half precision.
        precision = torch.get_autocast_dtype(query.device.type)
        query, key, value = (states.to(precision) for states in (query, key, value))
    # [T, heads, head size], since segments are sliced and gathered along tokens.
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    if isinstance(plan, Plan) and not dropout and plan.derived.get("backend") == "varlen":
        plan = plan.paths
    if isinstance(plan, Paths):
        return _varlen(plan, query, key, value, scaling, sliding_window)[None]
    return _sdpa(plan, query, key, value, scaling, sliding_window, dropout)[None]


class _OfPaths(torch.autograd.Function):
    """The keys or values of all paths, [K, heads, head size], from those of the packed row, [T, heads, head size].

    A token on several paths receives the sum of their gradients. It is rounded once, as that of a padded pass is, and
    not after each path.
    """

    @staticmethod
    def forward(states: Tensor, index: Tensor) -> Tensor:
        return states.index_select(0, index)

    @staticmethod
    def setup_context(context, inputs: tuple, output: Tensor) -> None:
        states, index = inputs
        context.save_for_backward(index)
        context.tokens = len(states)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = context.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(context.tokens, *gradient.shape[1:], dtype=wide)
        return total.index_add_(0, index, gradient.to(wide)).to(gradient.dtype), None


def _sdpa(plan: Plan, query, key, value, scaling, window, dropout) -> Tensor:
    if plan.shares:
        key, value = (_OfPaths.apply(states, plan.key_index) for states in (key, value))
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for own_query, own_key, own_value in zip(
        query.split(plan.query_lengths), key.split(plan.key_lengths), value.split(plan.key_lengths), strict=True
    ):
        added, length = len(own_query), len(own_key)
        windowed = window is not None and length > window
        mask = _lower_right(plan, added, length, window if windowed else None, query.device)
        repeated = grouped and mask is not None and query.is_cuda
        if repeated:
            # With both a mask and grouped heads, CUDA offers only its slowest kernel.
            groups = query.shape[1] // key.shape[1]
            own_key, own_value = (states.repeat_interleave(groups, dim=1) for states in (own_key, own_value))
        output = scaled_dot_product_attention(
            *(states.transpose(0, 1)[None] for states in (own_query, own_key, own_value)),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=grouped and not repeated,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _lower_right(plan: Plan, added: int, length: int, window: int | None, device) -> Tensor | None:
    """The mask of the last `added` of `length` tokens, [added, length]; None for plain causality over all."""
    if added == length and window is None:
        return None
    place = ("mask", added, length, window)
    if place not in plan.derived:
        own = torch.arange(length - added, length, device=device)[:, None]
        other = torch.arange(length, device=device)[None]
        mask = other <= own
        if window is not None:
            mask &= other > own - window
        plan.derived[place] = mask
    return plan.derived[place]


def _varlen(paths: Paths, query, key, value, scaling, window) -> Tensor:
    """Call the operator by which torch trains nested tensors.

    `torch.nn.attention.varlen`, of newer versions, calls the same kernel through Python in each direction.
    """
    if paths.index is not None:
        key, value = (_OfPaths.apply(states, paths.index) for states in (key, value))
    # No dropout, causality without a window, and no debug mask.
    options = 0.0, window is None, False
    output, *_ = torch.ops.aten._flash_attention_forward(
        *(states.contiguous() for states in (query, key, value)),
        *paths[1:],
        *options,
        scale=scaling,
        # transformers counts the token itself in its window.
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return output
