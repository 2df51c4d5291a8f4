"""Checks of what the first steps logged. The same checks read the metrics.jsonl of a run."""

from __future__ import annotations

import math

from trl_ext.doctor.patient import Patient
from trl_ext.doctor.report import Found
from trl_ext.doctor.table import check
from trl_ext.rollouts.diagnostics import diagnose_generations

_NEEDED = 2


def _always(values: list[float], holds) -> bool:
    return len(values) >= _NEEDED and all(holds(value) for value in values)


def _rewards(patient: Patient) -> tuple[list[float], bool]:
    """The mean rewards, and whether all rewards of each step were equal."""
    names = ("reward", "rollouts/reward")
    rewards = next((values for name in names if (values := patient.logged(name))), [])
    deviations = patient.logged("reward_std")
    return rewards, _always(deviations, lambda value: value <= 1e-7)


@check("rewards-all-zero", "error", "steps", "policy")
def rewards_all_zero(patient: Patient) -> Found | None:
    rewards, equal = _rewards(patient)
    if not equal or not _always(rewards, lambda value: value == 0):
        return None
    count = len(patient.sampled) or len(rewards) * patient.setting("generation_batch_size", 0)
    # A task that is solved once in a hundred responses can be learned.
    few = f", which had {count} responses: up to {3 / count:.0%} may be right (95% bound)" if 0 < count < 300 else ""
    return Found(
        f"every reward was 0 in {len(rewards)} logged steps{few}",
        "the task is too hard, or the reward function never recognises an answer: print a few responses with their "
        "rewards, fine-tune on demonstrations first, or begin with easier prompts",
        severity="warning" if few else None,
    )


@check("rewards-all-one", "warning", "steps", "policy")
def rewards_all_one(patient: Patient) -> Found | None:
    rewards, equal = _rewards(patient)
    if not equal or not _always(rewards, lambda value: value == 1):
        return None
    return Found(
        f"every reward was 1 in {len(rewards)} logged steps: there is nothing to learn from them",
        "use harder prompts, and check that the reward function can fail a wrong answer",
    )


@check("rewards-constant", "error", "steps", "policy")
def rewards_constant(patient: Patient) -> Found | None:
    rewards, equal = _rewards(patient)
    if not equal or _always(rewards, lambda value: value in (0, 1)):
        return None
    return Found(
        f"all rewards of a step were equal in {len(rewards)} logged steps (about {rewards[-1]:g})",
        "the reward does not depend on the response: check what the reward function is given and returns",
    )


@check("dead-groups", "warning", "steps", "policy")
def dead_groups(patient: Patient) -> Found | None:
    shares = patient.logged("frac_reward_zero_std")
    alone = patient.setting("num_generations", 8) < 2
    if alone or _rewards(patient)[1] or not _always(shares, lambda value: value >= 0.9):
        return None
    return Found(
        f"the rewards of a group were all equal in {min(shares):.0%} of the groups or more, in each of {len(shares)} "
        "logged steps: these groups have no advantage",
        "raise num_generations or the temperature, choose prompts of medium difficulty, or resample such groups",
    )


def _share_cut(patient: Patient) -> float:
    """The least share of truncated responses in a logged step; 0 with fewer than two steps."""
    shares = patient.logged("completions/clipped_ratio")
    return min(shares) if len(shares) >= _NEEDED else 0.0


def _stop_texts(patient: Patient) -> list[str]:
    options = patient.setting("generation_kwargs") or {}
    stop = patient.setting("stop") or (options.get("stop_strings") or options.get("stop") if options else None)
    return [stop] if isinstance(stop, str) else list(stop or [])


@check("responses-all-cut", "warning", "steps", "policy")
def responses_all_cut(patient: Patient) -> Found | None:
    share = _share_cut(patient)
    if share < 0.9 or (share >= 0.99 and _stop_texts(patient)):
        return None
    what = "every response was" if share >= 0.99 else f"at each step {share:.0%} of the responses or more were"
    return Found(
        f"{what} truncated at max_completion_length ({patient.setting('max_completion_length')})",
        "raise the limit if responses need it; if they run on, the model does not emit an end token: check the chat "
        "template, and which token generation stops at",
    )


@check("stop-texts-never-occur", "warning", "steps", "policy")
def stop_texts_never_occur(patient: Patient) -> Found | None:
    texts = _stop_texts(patient)
    if _share_cut(patient) < 0.99 or not texts:
        return None
    return Found(
        f"no response ended with a stop text ({', '.join(map(repr, texts))}) or an end token before the limit",
        "compare the stop texts with a few responses, with spaces and line breaks, and let the prompt ask for them",
    )


@check("kl-explodes", "error", "steps", "policy")
def kl_explodes(patient: Patient) -> Found | None:
    values = patient.logged("kl")
    large = [value > 10 or math.isnan(value) for value in values]
    # A single rare token can make the estimate of one step large.
    if not any(map(all, zip(large, large[1:], strict=False))):
        return None
    return Found(
        f"the KL to the reference reached {max(values, key=lambda v: math.inf if math.isnan(v) else v):g} nats",
        "lower the learning rate; if it is this large in the first step, the reference is another model, or is loaded "
        "with another precision or template",
    )


@check("policy-equals-reference", "error", "steps", "policy preference")
def policy_equals_reference(patient: Patient) -> Found | None:
    # A margin of log-probabilities of the cached reference and of the policy is not exactly 0 in float32.
    name, rounding = ("kl", 0.0) if patient.kind == "policy" else ("rewards/margins", 1e-5)
    values = patient.logged(name)
    # The first steps of a long warm-up change nothing that rounding leaves.
    if max(patient.updates, default=0.0) < 0.1 * patient.setting("learning_rate", 0.0):
        return None
    # The last row is measured after the updates of those before.
    if (
        len(values) < 3
        or len(patient.updates) < 2
        or any(abs(value) > rounding for value in values)
        or not patient.setting("beta", 0.1)
    ):
        return None
    return Found(
        f"{name} is 0 in all {len(values)} logged steps, after updates with a learning rate above 0",
        "the policy does not move, or the reference moves with it: check ref_model, and which weights are trained",
    )


@check("ratio-not-one", "warning", "steps", "policy")
def ratio_not_one(patient: Patient) -> Found | None:
    first = next((row for row in patient.logs if row.get("step") == 1), {})
    clipped = first.get("clip_ratio/region_mean") or 0
    # Each rollout is scored by the trainer before it is learned from, so this difference stays small at every step.
    name = "sampling/sampling_logp_difference/mean"
    worst = max((row for row in patient.logs if row.get(name) is not None), key=lambda row: row[name], default={})
    if clipped <= 0.001 and worst.get(name, 0) <= 0.2:
        return None
    what = (
        f"{clipped:.1%} of the ratios are clipped at the first update"
        if clipped > 0.001
        else f"log-probabilities differ by {worst[name]:.2f} at step {worst.get('step')}"
    )
    return Found(
        f"{what}, where sampler and trainer are the same policy",
        "turn dropout off, give both the same temperature, and check that the sampler has the trainer's weights",
    )


@check("gradient-always-clipped", "warning", "steps")
def gradient_always_clipped(patient: Patient) -> Found | None:
    limit, norms = patient.setting("max_grad_norm", 0.0), patient.logged("grad_norm")
    if not limit or not _always(norms, lambda value: value > 1000 * limit):
        return None
    return Found(
        f"the gradient's norm was {min(norms):g} or more at every step, and is clipped at {limit:g}",
        "raise max_grad_norm, lower the learning rate, or look for rows with an extreme loss",
    )


@check("no-gradient", "error", "steps")
def no_gradient(patient: Patient) -> Found | None:
    norms = patient.logged("grad_norm")
    zero = _always(norms, lambda value: value == 0)
    # In float16 the first updates are skipped until the loss is scaled as it should be.
    judged = not patient.setting("fp16", False) or len(norms) >= 20
    if not zero and not (judged and _always(norms, lambda value: not math.isfinite(value))):
        return None
    return Found(
        f"the gradient was {'exactly 0' if zero else 'not finite'} in all {len(norms)} logged steps",
        "all advantages or margins are 0, or all labels are masked: see the other findings"
        if zero
        else "train in float32 or bfloat16 and not in float16, and look for rows with an infinite loss",
    )


@check("weights-do-not-move", "error", "steps")
def weights_do_not_move(patient: Patient) -> Found | None:
    updates = patient.updates
    gradient = any(math.isfinite(norm) and norm > 0 for norm in patient.logged("grad_norm"))
    if patient.moved.get("policy") != 0 or len(updates) < 2 or not gradient:
        return None
    return Found(
        f"the watched weights are the same after {len(updates)} updates with a learning rate up to {max(updates):g}",
        "the optimizer holds other weights, or its updates are smaller than the weights' rounding",
    )


@check("reference-moves", "error", "steps", "policy preference other")
def reference_moves(patient: Patient) -> Found | None:
    moved = patient.moved.get("reference", 0.0)
    if not moved or patient.setting("sync_ref_model", False):
        return None
    return Found(
        f"the reference model's weights changed by up to {moved:g} in training",
        "keep its weights out of the optimizer, and do not share modules with the policy",
    )


@check("scores-all-equal", "error", "steps", "reward")
def scores_all_equal(patient: Patient) -> Found | None:
    least, most = patient.logged("min_reward"), patient.logged("max_reward")
    if len(least) < _NEEDED or len(least) != len(most) or any(a != b for a, b in zip(least, most, strict=True)):
        return None
    return Found(
        f"every response had the same score in {len(least)} logged steps",
        "the head is 0 and frozen, or reads a padding token: check the pad token, and which weights are trained",
    )


@check("responses-collapsed", "error", "responses")
def responses_collapsed(patient: Patient) -> Found | None:
    diagnosed = diagnose_generations(patient.responses) if patient.responses else None
    if diagnosed is None or not diagnosed.collapsed:
        return None
    return Found(
        f"the responses to held-out prompts repeat themselves ({'; '.join(diagnosed.collapse_reasons)})",
        "lower the learning rate, raise beta, or stop earlier; look at the responses of the checkpoints",
    )
