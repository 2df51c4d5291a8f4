"""Checks of the model and of the configuration, some of them by a few forward passes before training."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import chain, pairwise

import torch

import trl_ext.losses  # noqa: F401  the losses register
from trl_ext.doctor.examine import Finding, check
from trl_ext.doctor.patient import Patient, as_text
from trl_ext.doctor.text import in_rows, messages_of
from trl_ext.models.scoring import score_responses
from trl_ext.registry import preference_losses

_HEAD = re.compile(r"\b(score|classifier)\b")
# What chat templates write around turns, and other texts rarely contain; `<|user|>` is often no token.
_MARKER = re.compile(r"<\|(?!user\||assistant\||system\|)[a-zA-Z0-9_]{2,30}\|>|<start_of_turn>|<end_of_turn>")
# The token that begins a turn -> how a model with this token knows a question and the beginning of its answer.
_TURNS = {
    "<|im_start|>": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "<|start_header_id|>": "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant"
    "<|end_header_id|>\n\n",
    "<start_of_turn>": "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
}


@check("adapter-layers", "warning", "trainer")
def adapter_layers(patient: Patient) -> Finding | str | None:
    """Let target_modules name the projections of all layers (all-linear), and check layers_to_transform."""
    layers = {n: m for n, m in patient.model.named_modules() if isinstance(getattr(m, "scaling", None), dict)}
    if not patient.is_adapter or not layers:
        return None
    if all(one.disable_adapters or not any(map(one.scaling.get, one.active_adapters)) for one in layers.values()):
        remedy = "Enable the adapter (model.enable_adapter_layers()), and set lora_alpha to a positive number."
        return Finding(f"all {len(layers)} adapter layers are disabled or scaled by 0", remedy, "error")
    reached = {match[1] for name in layers if (match := re.search(r"\.(\d+)\.", name))}
    total = getattr(patient.model.config.get_text_config(), "num_hidden_layers", 0)
    return f"the adapter is on {len(reached)} of {total} layers" if len(reached) < total / 2 else None


@check("reward-model", "error", "trainer", "reward policy")
def reward_model(patient: Patient) -> Finding | str | None:
    """Name the folder of a trained reward model, and not of a language model; load an adapter with its head."""
    if patient.kind == "reward":
        learned = [weight.requires_grad for name, weight in patient.model.named_parameters() if _HEAD.search(name)]
        remedy = "Give the adapter's LoraConfig task_type SEQ_CLS, or modules_to_save=['score']."
        frozen = learned and not any(learned) and patient.trainable
        return Finding("the score head is random and not trained", remedy) if frozen else None
    functions = getattr(patient.trainer, "reward_funcs", [])
    tokenizers = getattr(patient.trainer, "reward_processing_classes", [None] * len(functions))
    for model, tokenizer in zip(functions, tokenizers, strict=True):
        if not isinstance(model, torch.nn.Module):
            continue
        # transformers marks the weights that it has read.
        read = {name: getattr(weight, "_is_hf_initialized", False) for name, weight in model.named_parameters()}
        head = [name for name in read if _HEAD.search(name)]
        if any(read.values()) and head and not any(read[name] for name in head):
            return f"{head[0]} of the reward model {model.name_or_path!r} was not in its files, and is random"
        own, used = (str(name).rstrip("/") for name in (model.name_or_path, tokenizer.name_or_path))
        if len(tokenizer) > model.get_input_embeddings().num_embeddings or (own != used and own and used):
            remedy = "Leave reward_processing_classes out, or give the reward model's own tokenizer."
            what = f"the reward model {own!r} reads the tokens and the chat template of {used!r}"
            return Finding(what, remedy, "warning")
    return None


@check("dropout-on", "warning", "trainer", "preference policy")
def dropout_on(patient: Patient) -> str | None:
    """Set dropout to 0 in the model's and the adapter's configuration, or disable_dropout to true."""
    compared = patient.kind == "preference" or patient.setting("beta", 0) or patient.setting("num_iterations", 1) > 1
    modules = list(patient.model.modules())
    rates = [m.p if isinstance(m, torch.nn.Dropout) else getattr(m, "attention_dropout", 0) for m in modules]
    rate = max((rate for rate in rates if isinstance(rate, float)), default=0)
    # Adapters are usually trained with a little dropout, which acts on their small part of the output alone.
    on = compared and rate > (0.1 if patient.is_adapter else 0)
    return f"dropout of {rate:g} is on in training: part of each log-ratio is noise" if on else None


@check("learning-rate-off", "warning", "trainer")
def learning_rate_off(patient: Patient) -> str | None:
    """Adapters learn at about 1e-5 to 5e-4, large models as a whole at 1e-7 to 2e-5, and tiny ones at 1e-4 to 2e-3."""
    rate = patient.setting("learning_rate", 0.0)
    size = sum(getattr(weight, "ds_numel", weight.numel()) for weight in patient.model.parameters())
    low, high = (1e-5, 2e-2) if size < 100e6 else (1e-8, 1e-3 if patient.kind in ("sft", "reward") else 2e-4)
    low, high = (3e-6, 1e-2) if patient.is_adapter else (low, high)
    if low <= rate <= high:
        return None
    what = "an adapter" if patient.is_adapter else f"all of a model of {size / 1e6:.1f} million weights"
    return f"the learning rate {rate:g} is far from what trains {what}: {low:g} to {high:g}"


@check("sampling-differs", "warning", "settings", "policy")
def sampling_differs(patient: Patient) -> Finding | str | None:
    """Set the temperature by the argument `temperature`, which both use, and not in generation_kwargs."""
    options, trained = patient.setting("generation_kwargs") or {}, patient.setting("temperature", 1.0)
    sampler = getattr(getattr(patient.trainer, "generation_config", None), "temperature", None)
    sampled = options.get("temperature", sampler)
    if sampled is not None and abs(sampled - trained) >= 1e-6:
        return f"responses are sampled at temperature {sampled:g}, and log-probabilities are taken at {trained:g}"
    top_p, top_k, min_p = (options.get(name, patient.setting(name)) or 0 for name in ("top_p", "top_k", "min_p"))
    corrected = patient.setting("use_vllm", False) and patient.setting("vllm_importance_sampling_correction", False)
    if not corrected or not (0 < top_p < 1 or top_k > 0 or min_p > 0):
        return None
    what = (
        "vLLM's log-probabilities are of the tokens that top_p, top_k or min_p leave, and the trainer's of all tokens"
    )
    return Finding(what, "Set top_p 1, top_k 0 and no min_p, or vllm_importance_sampling_correction to false.")


@check("beta-off", "warning", "settings", "preference policy")
def beta_off(patient: Patient) -> str | None:
    """A KL coefficient is 0.001 to 0.3; losses of sums and of means of log-probabilities take different betas."""
    beta, loss = patient.setting("beta"), patient.setting("loss", "sigmoid")
    usual = (preference_losses[loss].default_beta if loss in preference_losses else 0.1) or 0.1
    low, high = (0, 3) if patient.kind == "policy" else (usual / 50, usual * 50)
    off = isinstance(beta, int | float) and not low <= beta <= high
    return f"beta is {beta:g}, far from what is usual for this loss ({low:g} to {high:g})" if off else None


def _responses(patient: Patient) -> list[tuple[list[int], list[int], str]]:
    """Tokens of prompts and of responses to learn (for a policy: of reference answers), and the prompts' texts."""
    if str(patient.trainer.accelerator.distributed_type).rpartition(".")[2] in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise ValueError("each process has only a part of the model")
    found = []
    for one in patient.examples:
        ids, start = one.ids, len(one.ids)
        if patient.kind == "policy" and patient.answers:
            answer = patient.answers.get(as_text(one.row["prompt"]), "")
            ids = [*ids, *patient.tokenizer(answer, add_special_tokens=False)["input_ids"]]
        elif one.side != "rejected" and any(one.learned[1:]):
            start = one.learned.index(True, 1)
        asked = " ".join(message["content"] for message in messages_of({"prompt": one.row.get("prompt")}))
        found += [(ids[:start][-512:], ids[start:][:256], asked)] if start < len(ids) else []
    if len(found) < 8:
        raise ValueError("there are no responses to compare with")
    return found


def _losses(model: torch.nn.Module, rows: list[tuple[list[int], list[int], str]]) -> torch.Tensor:
    """The loss of each token of 16 responses, in nats, [tokens]."""
    prompts, responses, _ = zip(*rows[:16], strict=True)
    return -torch.cat(score_responses(model, prompts, responses, batch_size=2))


def frequency_loss(responses: list[list[int]], vocabulary: int) -> float:
    """The mean loss of each response's tokens, in nats, by their frequencies in the other responses, plus one each."""
    counts, loss = Counter(chain.from_iterable(responses)), 0.0
    for response in responses:
        size = counts.total() - len(response) + vocabulary
        own = Counter(response)
        loss -= sum(number * math.log((counts[token] - number + 1) / size) for token, number in own.items())
    return loss / counts.total()


@check("text-unknown", "error", "trainer", "sft preference policy")
def text_unknown(patient: Patient) -> Finding | str | None:
    """Check that tokenizer and model belong together, that all weights were loaded, and the chat template."""
    rows, size = _responses(patient), patient.model.get_input_embeddings().num_embeddings
    losses = _losses(patient.model, rows)
    loss, frequencies = losses.mean().item(), frequency_loss([response for _, response, _ in rows], size)
    if loss < frequencies:
        return None
    if losses.std() < 0.15 * math.log(size):
        remedy = "This is right only for training from scratch."
        return Finding("the model predicts all tokens alike: its weights are random", remedy, "info")
    return (
        f"the model's loss on the responses is {loss:.1f} nats a token, and token frequencies give {frequencies:.1f}"
    )


@check("template-of-another-model", "error", "trainer")
def template_of_another_model(patient: Patient) -> Finding | str | None:
    """Use the chat template that the model was trained with, whose special tokens it has."""
    known = patient.tokenizer.get_vocab()
    marked = [(one, set(_MARKER.findall(patient.tokenizer.decode(one.ids)))) for one in patient.examples]
    found = [one for one, markers in marked if markers - known.keys()]
    used = set().union(*(markers for _, markers in marked))
    what = f"{', '.join(sorted(used - known.keys()))} are no tokens of this model, and are spelled with ordinary ones,"
    # Single rows may be about such tokens.
    finding = in_rows(patient, found, marked, 0.5, what) if len(found) > 1 else None
    begin = next((one for one in _TURNS if known.get(one) in patient.special_ids and one not in used), None)
    asked = [messages_of({"prompt": one.row.get("prompt")}) for one in patient.examples]
    if finding or not begin or not all(asked) or patient.kind not in ("sft", "preference", "policy"):
        return finding
    encode, rows = patient.tokenizer, _responses(patient)
    turns = [(encode(_TURNS[begin].format(text), add_special_tokens=False)["input_ids"], r, "") for _, r, text in rows]
    loss, other = (_losses(patient.model, some).mean().item() for some in (rows, turns))
    what = f"the loss on the responses is {loss:.2f} nats a token, and {other:.2f} in turns of this model's {begin}"
    return what if loss - other >= 0.5 else None


@check("start-off-reference", "warning", "trainer steps", "preference policy")
def start_off_reference(patient: Patient) -> Finding | str | None:
    """Load both from the same files with the same precision; a reference of an earlier stage may be intended."""
    if not patient.logs and patient.reference is None:
        return None
    if not patient.logs:
        policy, reference = (_losses(model, _responses(patient)) for model in (patient.model, patient.reference))
        gap = (policy - reference).abs().mean().item()
        return f"policy and reference differ by {gap:.2f} nats for each token before training" if gap > 0.1 else None
    values = patient.logged("kl") if patient.kind == "policy" else []
    # A single rare token can make the estimate of one step large; a NaN is not below the limit either.
    if any(not (one <= 10 or other <= 10) for one, other in pairwise(values)):
        remedy = "Lower the learning rate, or compare policy and reference if it is this large in the first step."
        return Finding("the KL to the reference was above 10 nats in consecutive steps", remedy, "error")
    first, loss = patient.first_step, patient.setting("loss")
    has_reference = loss not in preference_losses or preference_losses[loss].needs_reference
    if first.get("kl", 0.0) > 0.02:
        return f"the KL to the reference was {first['kl']:.3g} nats in the first step, before any update"
    for side in ("chosen", "rejected") if has_reference else ():
        ratio = first.get(f"rewards/{side}", 0.0) / (patient.setting("beta", 0.1) or 1.0)
        if abs(ratio) > max(0.2, 0.01 * abs(first.get(f"logps/{side}", 0.0))):
            return f"the {side} responses had a log-ratio of {ratio:.2f} nats in the first step, before any update"
    return None
