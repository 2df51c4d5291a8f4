"""Place reward models on the policy's backbone, on a shared frozen base, or each on its own copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from trl_ext.models import SharedBackbone
from trl_ext.models.reward_adapter import adapter_obstacle
from trl_ext.rewards.reward_model import RewardModel


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
    it. Every other model gets its own copy.

    Args:
        models: the reward models; those that already share a backbone keep it.
        policy: the policy under training, unwrapped; None if there is none to share with.
        mode: `auto`; `never` to give every model its own copy; `always` to raise if a model cannot use the policy's
            backbone.
        policy_reason: why the policy's backbone cannot be used, if the caller knows (a sharded engine).
        device: the device for copies; None for this process's GPU, or the CPU without one.

    Returns:
        For each model, a line that says where it was placed and, if not on the policy's backbone, why.

    Raises:
        ValueError: `mode` is `always` and a model cannot use the policy's backbone.
    """
    if mode not in ("auto", "always", "never"):
        raise ValueError(f"mode must be auto, always or never, got {mode!r}")
    reasons: dict[int, str] = {}
    lines: dict[int, str] = {}
    backbone = None
    for index, model in enumerate(models):
        if model.backbone is not None:
            lines[index] = "where it was, on a shared backbone"
        elif mode == "never":
            reasons[index] = "sharing is switched off"
        elif model.adapter is None:
            reasons[index] = "it is a full model, not an adapter"
        elif policy is None or policy_reason is not None:
            reasons[index] = policy_reason or "there is no policy"
        else:
            try:
                backbone = backbone or SharedBackbone(policy)
                model.share(backbone)
                lines[index] = f"on the policy's backbone, {model.base_name_or_path}"
            except ValueError as error:
                reasons[index] = str(error)
        if mode == "always" and index in reasons:
            raise ValueError(f"reward model {model.name} cannot sit on the policy's backbone: {reasons[index]}")
    if mode == "auto":
        lines |= _share_frozen(models, reasons, device)
    for index, reason in reasons.items():
        if index not in lines:
            models[index].load(device)
            lines[index] = f"a copy of its own: {reason}"
    return [f"{model.name}: {lines[index]}" for index, model in enumerate(models)]


def _share_frozen(models: Sequence[RewardModel], reasons: dict[int, str], device) -> dict[int, str]:
    """Put adapters with the same base onto one frozen copy; return a line for each adapter placed."""
    by_base = defaultdict(list)
    for index in reasons:
        model = models[index]
        if model.adapter is not None and adapter_obstacle(model.adapter) is None:
            by_base[model.base_name_or_path, model.dtype].append(index)
    lines = {}
    for (base, dtype), indices in by_base.items():
        if len(indices) < 2:
            continue
        packed = all(models[index].packing == "auto" for index in indices)
        backbone = SharedBackbone.load(base, dtype=dtype, device=device, packed=packed)
        for index in indices:
            try:
                models[index].share(backbone)
            except ValueError as error:
                reasons[index] = f"{reasons[index]}; and {error}"
            else:
                lines[index] = f"on one frozen copy of {base} with others: {reasons[index]}"
    return lines
