"""Checks of the model and of the configuration."""

from __future__ import annotations

import re
from typing import Any

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


@check("adapter-misses-layers", "warning", "model")
def adapter_misses_layers(patient: Patient) -> Found | None:
    total = getattr(patient.model.config.get_text_config(), "num_hidden_layers", 0)
    if not patient.is_adapter or not total:
        return None
    names = [n for n, module in patient.model.named_modules() if isinstance(getattr(module, "scaling", None), dict)]
    layers = {match[1] for name in names if (match := re.search(r"\.(\d+)\.", name))}
    if not names or len(layers) >= total / 2:
        return None
    kinds = sorted({name.rpartition(".")[2] for name in names})
    return Found(
        f"the adapter is on {', '.join(kinds)} in {len(layers)} of {total} layers: most of the model does not change",
        "let target_modules name the projections of all layers (all-linear), and check layers_to_transform",
    )


@check("reward-head-frozen", "error", "model", "reward")
def reward_head_frozen(patient: Patient) -> Found | None:
    head = [(name, w) for name, w in patient.model.named_parameters() if re.search(r"\b(score|classifier)\b", name)]
    if not head or not patient.trainable or any(weight.requires_grad for _, weight in head):
        return None
    return Found(
        f"the score head ({head[0][0]}) is not trained: scores are those of a random direction",
        "give the adapter's LoraConfig task_type SEQ_CLS, or modules_to_save=['score']",
    )


def _reward_models(patient: Patient) -> list[tuple[torch.nn.Module, Any]]:
    """The models among the rewards of one of TRL's trainers, each with its tokenizer."""
    functions = getattr(patient.trainer, "reward_funcs", [])
    tokenizers = getattr(patient.trainer, "reward_processing_classes", [None] * len(functions))
    return [pair for pair in zip(functions, tokenizers, strict=True) if isinstance(pair[0], torch.nn.Module)]


@check("reward-model-untrained", "error", "model", "policy")
def reward_model_untrained(patient: Patient) -> Found | None:
    for model, _ in _reward_models(patient):
        # transformers marks the weights that it has read.
        read = {name: getattr(weight, "_is_hf_initialized", False) for name, weight in model.named_parameters()}
        head = [name for name in read if re.search(r"\b(score|classifier)\b", name)]
        if not any(read.values()) or not head or any(read[name] for name in head):
            continue
        return Found(
            f"{head[0]} of the reward model {model.name_or_path!r} was not in its files, and is random",
            "name the folder of a trained reward model, and not of a language model; load an adapter with its head",
        )
    return None


@check("reward-model-template", "warning", "model", "policy")
def reward_model_template(patient: Patient) -> Found | None:
    for model, tokenizer in _reward_models(patient):
        size = model.get_input_embeddings().num_embeddings
        own, used = (str(name).rstrip("/") for name in (model.name_or_path, tokenizer.name_or_path))
        if len(tokenizer) <= size and (own == used or not own or not used):
            continue
        return Found(
            f"the reward model {own!r} of {size} tokens reads what the tokenizer of {used!r} writes, with "
            f"{len(tokenizer)} tokens and its own chat template",
            "leave reward_processing_classes out, or give the reward model's own tokenizer",
        )
    return None


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
    # Adapters are usually trained with a little dropout, which acts on their small part of the output alone.
    if not compared or max(rates, default=0) <= (0.1 if patient.is_adapter else 0):
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


@check("ipo-target-unreachable", "warning", "data", "preference")
def ipo_target_unreachable(patient: Patient) -> Found | None:
    beta, types = patient.setting("beta", 0.1), patient.setting("loss_type") or []
    if patient.setting("loss", "ipo" if "ipo" in types else "") != "ipo" or beta <= 0:
        return None
    means = "ipo" in types or bool((patient.setting("loss_kwargs") or {}).get("length_normalized"))
    length = sum(sum(one.learned) for one in patient.examples) / len(patient.examples)
    target = 1 / (2 * beta) / (1 if means else length)
    if target < 4:
        return None
    return Found(
        f"with beta {beta:g}, IPO wants a margin of {target:.2g} nats for each token (log-probabilities are "
        f"{'averaged over' if means else 'summed over'} responses of {length:.0f} tokens): it is never reached",
        "TRL averages over tokens, and the paper sums: a beta for sums is multiplied by the length to suit means",
    )


@check("temperature-not-shared", "warning", "configuration", "policy")
def temperature_not_shared(patient: Patient) -> Found | None:
    trained = patient.setting("temperature", 1.0)
    sampler = getattr(getattr(patient.trainer, "generation_config", None), "temperature", None)
    sampled = (patient.setting("generation_kwargs") or {}).get("temperature", sampler)
    if sampled is None or abs(sampled - trained) < 1e-6:
        return None
    return Found(
        f"responses are sampled at temperature {sampled:g}, and their log-probabilities are taken at {trained:g}: the "
        "ratio of the two policies is wrong from the first update on",
        "set the temperature by the argument `temperature`, which both use, and not in generation_kwargs",
    )


@check("reward-weights-negative", "warning", "configuration", "policy")
def reward_weights_negative(patient: Patient) -> Found | None:
    weights = patient.setting("reward_weights") or []
    if not weights or max(weights) > 0:
        return None
    return Found(
        f"no reward has a positive weight ({', '.join(f'{weight:g}' for weight in weights)}): training will lower the "
        "rewards",
        "give positive weights to what is to be high; a single penalty may keep its negative one",
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
