"""Checks of the model and of the configuration."""

from __future__ import annotations

import torch

import trl_ext.losses  # noqa: F401  the losses register
from trl_ext.doctor.patient import Patient
from trl_ext.doctor.report import Found
from trl_ext.doctor.table import check
from trl_ext.registry import preference_losses

# ---- Model ----


@check("nothing-trainable", "error", "model")
def nothing_trainable(patient: Patient) -> Found | None:
    if patient.trainable:
        return None
    total = sum(1 for _ in patient.model.parameters())
    return Found(
        f"none of the model's {total} weights requires a gradient",
        "load an adapter with is_trainable=True, or set requires_grad_(True) on what is to be trained",
    )


@check("adapter-without-effect", "error", "model")
def adapter_without_effect(patient: Patient) -> Found | None:
    if not patient.is_adapter:
        return None
    layers = [module for module in patient.model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    silent = [one for one in layers if one.disable_adapters or not any(one.scaling[n] for n in one.active_adapters)]
    if not layers or len(silent) < len(layers):
        return None
    why = "disabled" if silent[0].disable_adapters else "scaled by 0 (lora_alpha 0)"
    return Found(
        f"all {len(layers)} adapter layers are {why}: training them changes nothing",
        "enable the adapter (model.enable_adapter_layers()), and set lora_alpha to a positive number",
    )


@check("reference-is-policy", "error", "model", "preference policy other")
def reference_is_policy(patient: Patient) -> Found | None:
    if patient.reference is None:
        return None
    reference = {weight.data_ptr() for weight in patient.reference.parameters() if weight.numel()}
    shared = [weight for weight in patient.trainable if weight.numel() and weight.data_ptr() in reference]
    if not shared:
        return None
    return Found(
        f"the reference model shares {len(shared)} of {len(patient.trainable)} trained weights with the policy: "
        "every log-ratio and KL stays 0",
        "leave ref_model out, or load it a second time (copy.deepcopy before training)",
    )


@check("dropout-on", "warning", "model", "preference policy")
def dropout_on(patient: Patient) -> Found | None:
    compared = patient.kind == "preference" or patient.setting("beta", 0) or patient.setting("num_iterations", 1) > 1
    rates = set()
    for module in patient.model.modules():
        rate = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0)
        rates |= {rate} if isinstance(rate, float) and rate > 0 else set()
    if not compared or not rates:
        return None
    return Found(
        f"dropout of {max(rates):g} is on in training, and log-probabilities of the policy are compared with others: "
        "part of each log-ratio is noise",
        "set dropout to 0 in the model's and the adapter's configuration, or disable_dropout to true where it applies",
    )


@check("updates-round-to-nothing", "warning", "model")
def updates_round_to_nothing(patient: Patient) -> Found | None:
    rate, optimizer = patient.setting("learning_rate", 0.0), str(patient.setting("optim", "adamw")).lower()
    low = [weight for weight in patient.trainable if weight.dtype in (torch.bfloat16, torch.float16)]
    # DeepSpeed's optimizer has copies in float32.
    if not low or not rate or "adam" not in optimizer or getattr(patient.trainer, "is_deepspeed_enabled", False):
        return None
    # Adam's updates are about as large as the learning rate; less than half a unit in the last place is lost.
    lost = total = 0
    for weight in low:
        some = weight.detach().flatten()[:100_000].float().abs()
        lost += int((some * torch.finfo(weight.dtype).eps / 4 > rate).sum())
        total += len(some)
    if lost < 0.8 * total:
        return None
    return Found(
        f"the trained weights are {str(low[0].dtype).removeprefix('torch.')}, and updates of {rate:g} are less than "
        f"their rounding for {lost / total:.0%} of them",
        "load the weights in float32 (dtype float32) and use bf16=True for mixed precision, or train an adapter",
    )


@check("learning-rate-off", "warning", "model")
def learning_rate_off(patient: Patient) -> Found | None:
    rate = patient.setting("learning_rate", 0.0)
    size = sum(getattr(weight, "ds_numel", weight.numel()) for weight in patient.model.parameters())
    if patient.is_adapter:
        what, low, high = "an adapter", 3e-6, 1e-2
    elif size < 100e6:
        what, low, high = f"all of a model of {size / 1e6:.1f} million weights", 1e-5, 2e-2
    else:
        high = 1e-3 if patient.kind in ("sft", "reward") else 2e-4
        what, low = f"all of a model of {size / 1e6:.0f} million weights", 1e-8
    if low <= rate <= high:
        return None
    return Found(
        f"the learning rate {rate:g} is far from what trains {what}: {low:g} to {high:g}",
        "adapters learn at about 1e-5 to 5e-4, large models as a whole at 1e-7 to 2e-5, and tiny ones at 1e-4 to 2e-3",
    )


# ---- Configuration ----


@check("warmup-outlasts-run", "error", "configuration")
def warmup_outlasts_run(patient: Patient) -> Found | None:
    steps, warmup = patient.planned_steps, patient.setting("warmup_steps", 0)
    ratio = patient.setting("warmup_ratio", 0.0) or (warmup if 0 < warmup < 1 else 0.0)
    if str(patient.setting("lr_scheduler_type", "")).lower().endswith("constant"):
        return None
    if not steps or (warmup < steps or warmup <= 1) and ratio < 1:
        return None
    return Found(
        f"the learning rate warms up over {warmup:g} steps, and the run has {steps}: it never reaches its value",
        "lower warmup_steps to a tenth of the run or less; steps are optimizer updates, and not batches or rollouts",
    )


@check("beta-off", "warning", "configuration", "preference policy")
def beta_off(patient: Patient) -> Found | None:
    beta, loss = patient.setting("beta"), patient.setting("loss", "sigmoid")
    if patient.kind == "policy":
        if not beta or beta <= 3 or not isinstance(beta, int | float):
            return None
        return Found(
            f"the KL coefficient beta is {beta:g}: the reward hardly counts", "lower beta; 0.001 to 0.3 is usual"
        )
    usual = (preference_losses[loss].default_beta if loss in preference_losses else 0.1) or 0.1
    if not isinstance(beta, int | float) or usual / 50 <= beta <= usual * 50:
        return None
    return Found(
        f"beta is {beta:g}, and {usual:g} is usual for the loss {loss!r}: the loss is "
        + ("saturated after a few updates" if beta > usual else "nearly linear, and nothing holds the policy"),
        f"set beta to about {usual:g}; losses of sums and of means of log-probabilities take different ones",
    )


@check("greedy-sampling", "error", "configuration", "policy")
def greedy_sampling(patient: Patient) -> Found | None:
    temperature, top_k = patient.setting("temperature", 1.0), patient.setting("top_k", 0)
    if patient.setting("num_generations", 1) < 2 or (temperature > 0.05 and top_k != 1):
        return None
    return Found(
        f"responses are sampled at temperature {temperature:g} and top_k {top_k}: those of a group are identical, and "
        "no advantage is left",
        "set temperature to about 1 and top_k to 0",
    )
