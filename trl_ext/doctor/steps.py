"""Checks of the first steps: their metrics, which metrics.jsonl has too, and the responses sampled in them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable

import torch

from trl_ext.doctor.examine import Finding, check
from trl_ext.doctor.patient import Patient

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def _always(values: list[float], holds: Callable[[float], bool]) -> bool:
    """Whether something holds in every logged step, of which there are at least two."""
    return len(values) >= 2 and all(map(holds, values))


@check("rewards-equal", "error", "steps", "policy")
def rewards_equal(patient: Patient) -> Finding | None:
    """The reward does not depend on the response: check what the reward function is given and returns."""
    rewards = patient.logged("reward") or patient.logged("rollouts/reward")
    shares, steps = patient.logged("frac_reward_zero_std"), f"in {len(rewards)} logged steps"
    equal = _always(patient.logged("reward_std"), lambda value: value <= 1e-7)
    dead = _always(shares, lambda value: value >= 0.9) and patient.setting("num_generations", 8) > 1
    if not (equal or dead):
        return None
    if not equal:
        remedy = "Raise num_generations or the temperature, or choose prompts of medium difficulty."
        return Finding(f"the rewards of {min(shares):.0%} of the groups were equal {steps}", remedy, "warning")
    if set(rewards) == {1}:
        remedy = "Use harder prompts, and check that the reward function can fail a wrong answer."
        return Finding(f"every reward was 1 {steps}", remedy, "warning")
    if set(rewards) == {0}:
        count = len(patient.sampled) or len(rewards) * patient.setting("generation_batch_size", 0)
        # A task that is solved once in a hundred responses can be learned.
        few = f", of {count} responses: up to {3 / count:.0%} may be right (95% bound)" if 0 < count < 300 else ""
        remedy = "Print a few responses with their rewards; the task may be too hard, or no answer be recognised."
        return Finding(f"every reward was 0 {steps}{few}", remedy, "warning" if few else "")
    return Finding(f"all rewards of a step were equal {steps}")


@check("parser-never-matches", "error", "steps", "policy")
def parser_never_matches(patient: Patient) -> str | None:
    """Let the prompt ask for the form that the reward reads, or let the reward read these."""
    sampled = patient.sampled
    right = [one for one in sampled if _agrees(one.text, patient.answers.get(one.prompt))]
    # A reward of the form is often 0 in the first steps, beside one that finds the answer.
    if len(right) < 3 or any(value > 0 for one in right for value in one.rewards.values()):
        return None
    zero = [name for name in sampled[0].rewards if all(one.rewards.get(name) == 0 for one in sampled)]
    nearest = sorted(right, key=lambda one: len(one.text))[:3]
    shown = "; ".join(f"{one.text[-60:]!r} for {patient.answers[one.prompt][-30:]!r}" for one in nearest)
    what = f"all {len(sampled)} responses, and {len(right)} hold the right answer, such as {shown}"
    return f"{zero[0]} was 0 for {what}" if zero else None


def _agrees(text: str, answer: str | None) -> bool:
    """Whether the last number is that of the reference; without numbers, whether a short reference is in the text."""
    if not answer:
        return False
    expected, found = ([one.replace(",", "") for one in _NUMBER.findall(of)] for of in (answer, text))
    if expected:
        # A worked solution ends with its answer; a short text is the answer.
        count = len(expected) if len(answer) <= 40 else 1
        return found[-count:] == expected[-count:]
    return 3 < len(answer) <= 40 and answer.strip().lower() in text.lower()


@check("identical-samples", "error", "settings steps", "policy")
def identical_samples(patient: Patient) -> Finding | str | None:
    """Set the temperature to about 1 and top_k to 0, and check that sampling is on and its seed is not reset."""
    temperature, top_k = patient.setting("temperature", 1.0), patient.setting("top_k", 0)
    if patient.setting("num_generations", 1) > 1 and (temperature <= 0.05 or top_k == 1):
        return f"the temperature {temperature:g} and top_k {top_k} make the responses of a group identical"
    groups = itertools.groupby(patient.sampled, key=lambda one: (one.step, one.prompt))
    groups = [texts for _, group in groups if len(texts := [one.text for one in group]) > 1]
    same = [texts[0] for texts in groups if len(set(texts)) == 1]
    if len(groups) < 4 or len(same) < 0.9 * len(groups):
        return None
    what = f"the responses of a group were identical in {len(same)} of {len(groups)} groups, as {same[0][:60]!r}"
    return Finding(what, severity="warning")


@check("responses-truncated", "warning", "steps", "policy")
def responses_truncated(patient: Patient) -> Finding | None:
    """Raise the limit if responses need it; otherwise check the chat template, and which token generation stops at."""
    shares = patient.logged("completions/clipped_ratio")
    if not _always(shares, lambda share: share >= 0.9):
        return None
    options = patient.setting("generation_kwargs") or {}
    stop = patient.setting("stop") or options.get("stop_strings") or options.get("stop")
    what = f"at least {min(shares):.0%} of the responses were truncated at each step"
    remedy = "Compare the stop texts with a few responses, with spaces and line breaks." if stop else ""
    return Finding(what + f", and few ended at a stop text ({stop!r})" * bool(stop), remedy)


@check("loss-is-zero", "info", "steps", "policy")
def loss_is_zero(patient: Patient) -> str | None:
    """The ratio is 1 and the advantages of a group add up to 0; judge a run by its rewards and KL."""
    first = patient.first_step
    no_loss = abs(first.get("loss", 1.0)) <= 1e-3 and not first.get("clip_ratio/region_mean")
    normal = no_loss and first.get("grad_norm", 0.0) >= 1e-4
    return "a loss of 0 and no clipped ratio in the first step are normal" if normal else None


@check("reference-moves", "error", "trainer steps", "preference policy other")
def reference_moves(patient: Patient) -> str | None:
    """Leave ref_model out, or load it a second time, and keep its weights out of the optimizer."""
    if not patient.logs:
        reference = {weight.data_ptr() for weight in patient.reference.parameters()} if patient.reference else set()
        shared = [weight for weight in patient.trainable if weight.numel() and weight.data_ptr() in reference]
        return f"the reference shares {len(shared)} trained weights with the policy" if shared else None
    if patient.moved.get("reference") and not patient.setting("sync_ref_model", False):
        return f"the reference's weights changed by up to {patient.moved['reference']:g} in training"
    beta, name = patient.setting("beta", 0.1), "kl" if patient.kind == "policy" else "rewards/margins"
    # Log-probabilities of a cached reference and of the policy differ by their rounding.
    rounding = 0 if name == "kl" else 1e-6 * beta * max(1, *map(abs, patient.logged("logps/chosen")), 1)
    values, rates = patient.logged(name), patient.updates
    # The first steps of a long warm-up change nothing that rounding leaves, and the last row shows earlier updates.
    moves = beta and len(rates) > 1 and max(rates) >= 0.1 * patient.setting("learning_rate", 0.0)
    equal = moves and len(values) > 2 and all(abs(value) <= rounding for value in values)
    return f"{name} is 0 in all {len(values)} logged steps: policy and reference are one" if equal else None


@check("ratio-not-one", "warning", "steps", "policy")
def ratio_not_one(patient: Patient) -> str | None:
    """Turn dropout off, give both the same temperature, and check that the sampler receives the trainer's weights."""
    clipped = patient.first_step.get("clip_ratio/region_mean", 0)
    if clipped > 0.001:
        return f"{clipped:.1%} of the ratios are clipped at the first update"
    # Each rollout is scored by the trainer before it is learned from, so this difference stays small at every step.
    gaps = patient.logged("sampling/sampling_logp_difference/mean")
    grows = len(gaps) > 2 and max(gaps) == gaps[-1] > max(0.05, 4 * gaps[0])
    what = f"log-probabilities of sampler and trainer differ by {max(gaps, default=0):.2g}"
    what += f", and first by {gaps[0]:.2g}: the sampler's weights are not updated" if grows else ""
    return what if grows or max(gaps, default=0) > 0.2 else None


def _rounded(patient: Patient) -> Finding | None:
    """Whether weights in 16 bits lose Adam's updates, which are about as large as the learning rate."""
    rate, low = patient.setting("learning_rate", 0.0), [one for one in patient.trainable if one.dtype.itemsize == 2]
    # DeepSpeed's optimizer has copies in float32. Less than half a unit in the last place is lost.
    adam = "adam" in str(patient.setting("optim", "adamw")).lower() and not patient.trainer.is_deepspeed_enabled
    some = [(one.detach().flatten()[:100_000].float().abs(), torch.finfo(one.dtype).eps) for one in low]
    lost = [(values * eps / 4 > rate).float().mean().item() for values, eps in some]
    remedy = "Load the weights in float32 (dtype float32) and set bf16=True for mixed precision, or train an adapter."
    finding = Finding(f"updates of {rate:g} are less than the rounding of most weights", remedy, "warning")
    return finding if lost and rate and adam and sum(lost) >= 0.8 * len(lost) else None


@check("weights-do-not-move", "error", "trainer steps")
def weights_do_not_move(patient: Patient) -> Finding | str | None:
    """Load an adapter with is_trainable=True, or set requires_grad_(True) on what is to be trained."""
    norms, rates = patient.logged("grad_norm"), patient.updates
    if not patient.logs:
        return _rounded(patient) if patient.trainable else "none of the model's weights requires a gradient"
    if _always(norms, lambda norm: norm == 0):
        remedy = "All advantages or margins are 0, or all labels are masked: see the other findings."
        return Finding(f"the gradient was 0 in all {len(norms)} logged steps", remedy)
    # In float16 the first updates are skipped until the loss is scaled.
    judged = not patient.setting("fp16", False) or len(norms) >= 20
    if judged and _always(norms, lambda norm: not math.isfinite(norm)):
        remedy = "Train in float32 or bfloat16, and look for rows with an infinite loss."
        return Finding(f"the gradient was not finite in all {len(norms)} logged steps", remedy)
    if patient.moved.get("policy") != 0 or len(rates) < 2 or not any(0 < norm < math.inf for norm in norms):
        return None
    remedy = "The optimizer holds other weights, or its updates are smaller than the weights' rounding."
    return Finding(f"the weights are the same after {len(rates)} updates (rate up to {max(rates):g})", remedy)
