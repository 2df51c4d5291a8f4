"""Losses, advantages and masks that an assignment can ask for."""

from __future__ import annotations

from trl_ext.assignment.catalog import cases
from trl_ext.assignment.catalog.task import Task, group

LOSS_TASKS: dict[str, Task] = {}

# ---- Preference and reward losses ----

SCORES = (
    "h_w and h_l are scores.chosen_log_ratio and scores.rejected_log_ratio, margin is scores.margin, h_w - h_l, and "
    "l(u) = -log sigmoid(u)."
)
MEANS = "A mean is over the tokens of a response: chosen_length and rejected_length are their numbers."
SMOOTHING = "e is label_smoothing, the probability that a label is wrong."
ANY_ORDER = (
    "The tests take the losses in any order; a trainer that accumulates micro-batches needs entry i to be the loss of "
    "response i."
)
pair, pair_of_means = cases.preference, cases.preference_without_reference
add = group(LOSS_TASKS, "preference loss", "every tensor of scores [B]; returns [B]", in_float32=True, notes=SCORES)
add("losses.dpo", "the DPO loss of each pair", pair(), special=("far apart",))
for _name, _title in (("cdpo", "conservative"), ("robust_dpo", "robust")):
    smoothed = pair(label_smoothing=(0.1, 0.3))
    add(f"losses.{_name}", f"the {_title} DPO loss of each pair", smoothed, notes=f"{SCORES} {SMOOTHING}")
add("losses.ipo", "the IPO loss of each pair", pair(lengths=True, length_normalized=(None, None, True)), variants=3)
add("losses.hinge", "the hinge loss of each pair", pair(betas=(0.05, 0.3)))
add(
    "losses.dpop",
    "the DPO-Positive loss of each pair",
    pair(penalty=(5.0, 50.0)),
    notes=f"{SCORES} penalty multiplies by how much the chosen response has become less likely.",
)
add("losses.apo_zero", "the APO-zero loss of each pair", pair())
add("losses.apo_down", "the APO-down loss of each pair", pair())
add("losses.nca", "the NCA loss of each pair", pair(betas=(0.01, 0.1)))
add("losses.sppo", "the SPPO loss of each pair", pair(betas=(0.05, 0.2)))
aot = {"special": ("far apart",), "unordered": True, "notes": f"{SCORES} {ANY_ORDER}"}
add("losses.aot", "the AOT loss of each chosen response", pair(betas=(0.2, 0.05)), **aot)
add("losses.aot_paired", "the paired AOT loss of each pair", pair(betas=(0.2, 0.05)), **aot)
means = {"notes": f"{SCORES} There is no reference. {MEANS}"}
add("losses.simpo", "the SimPO loss of each pair", pair_of_means(betas=(2.0, 1.0), gamma=(None, 0.7)), **means)
add(
    "losses.repo",
    "the RePO loss of each pair",
    pair_of_means(betas=(None,), gamma=(0.6, 3.0)),
    notes=f"{means['notes']} gamma is the margin beyond which a pair costs nothing.",
)
add("losses.cpo", "the CPO loss of each pair", pair_of_means(nll_weight=(1.0, 0.3)), **means)
add("losses.orpo", "the ORPO loss of each pair", pair_of_means(), **means)

add = group(LOSS_TASKS, "reward model's loss", "scores [B]; returns [B]", in_float32=True)
summary = "the Bradley-Terry loss of each pair of scores"
add("losses.bradley_terry", summary, cases.bradley_terry, variants=4, special=("far apart",))
add = group(LOSS_TASKS, "unpaired loss", "log_ratio and desirable [B], kl_log_ratio [K]; returns [B]", in_float32=True)
notes = "The divergence is the mean of kl_log_ratio, at least 0."
add("losses.kto", "the KTO loss of each response", cases.kto, notes=notes)

# ---- Policy losses ----

PPO = "Schulman et al. 2017, arXiv 1707.06347, equation 6."
add = group(LOSS_TASKS, "ratio", "log-probabilities [B, T]; returns [B, T]", in_float32=True)
add("losses.token_log_ratio", "the log-ratio of each token", cases.token_ratio, paper=PPO)
add(
    "losses.sequence_log_ratio",
    "the length-normalised log-ratio of each response",
    cases.sequence_ratio,
    shapes="log-probabilities and mask [B, T]; returns [B, 1]",
    special=("nan",),
)
shapes = "log_ratio [B, T] or [B, 1], advantages [B]; returns the shape of log_ratio"
add = group(LOSS_TASKS, "surrogate", shapes, in_float32=True)
clips = cases.surrogate(clip_low=(0.2, 0.1), clip_high=(0.2, 0.28), dual_clip=(None, None, 1.1))
add("losses.clipped_surrogate", "PPO's clipped loss of each ratio", clips, variants=6)
add("losses.unclipped_surrogate", "the importance-weighted loss of each ratio", cases.surrogate(), paper=PPO)
add(
    "losses.quadratic_ratio",
    "the loss with a quadratic pull to ratio 1",
    cases.surrogate(strength=(0.5, 2.0)),
    notes="The pull is half of strength times the squared distance of the ratio from 1.",
)
add(
    "losses.cispo",
    "the CISPO loss of each token",
    cases.cispo,
    variants=3,
    shapes="log_ratio, log_probs [B, T], advantages [B]; returns [B, T]",
)
shapes = "log_probs [B, T], advantages [B] or [B, 1]; returns [B, T]"
add("losses.reinforce", "the policy-gradient loss of each token", cases.reinforce, shapes=shapes)
add = group(LOSS_TASKS, "aggregation", "losses and mask [B, T]; returns a scalar", in_float32=True)
add(
    "losses.aggregate",
    "the four reductions of token losses to a scalar",
    cases.aggregate,
    variants=4,
    special=("nan", "empty row"),
    paper="GRPO: arXiv 2402.03300; DAPO: 2503.14476; Dr.GRPO: 2503.20783.",
)
add = group(LOSS_TASKS, "KL estimator", "log-probabilities of any one shape; returns that shape", in_float32=True)
summary = "the k1, k2 and k3 estimates of the KL divergence"
add(
    "losses.kl_estimate",
    summary,
    cases.kl_estimate,
    variants=3,
    notes="The tests stay below any bound of an exponent.",
)

WHOLE = (
    "log_probs, old_log_probs and ref_log_probs are token log-probabilities in nats: of the policy, of the policy "
    "that sampled, and of the reference. clip is how far the ratio may move from 1. kl_coef is the coefficient of "
    "the KL term, the k3 estimate averaged over all tokens. Gradient flows to log_probs only."
)
add = group(
    LOSS_TASKS, "whole loss", "log-probabilities and mask [B, T], advantages [B]; returns a scalar", notes=WHOLE
)
add("assignment.grpo_loss", "the whole loss of GRPO", cases.whole_loss(kl_coef=(0.0, 0.05)))
add("assignment.gspo_loss", "the whole loss of GSPO", cases.whole_loss(kl_coef=(0.0, 0.05)))
add(
    "assignment.dr_grpo_loss",
    "the whole loss of Dr.GRPO",
    cases.whole_loss(kl_coef=(0.0, 0.05), max_new_tokens=(8, 12)),
    notes=f"{WHOLE} max_new_tokens is the longest response that generation permits, in tokens.",
)

# ---- Masks, values and advantages ----

paper = "Liu et al. 2025, arXiv 2503.20783, on what the sum is divided by."
shapes = "values and mask [B, T]; returns a scalar, or [B] for dim 1"
masked = {"variants": 6, "special": ("nan",), "paper": paper}
add = group(LOSS_TASKS, "mask helper", shapes, in_float32=True, **masked)
add("losses.masked_sum", "the sum where the mask is 1", cases.masked())
add("losses.masked_mean", "the mean where the mask is 1", cases.masked())
add("losses.masked_normalize", "the sum where the mask is 1, over a constant", cases.masked(constant=(4.0, 7.0)))
add = group(LOSS_TASKS, "value function")
shapes = "values, old values and returns [B, T]; returns [B, T]"
add("losses.clipped_value_loss", "the clipped loss of each value", cases.clipped_value_loss, shapes=shapes, variants=3)
add(
    "losses.whiten",
    "values with mean 0 and standard deviation 1",
    cases.whiten,
    shapes="values and mask [B, T]; returns [B, T]",
    paper="Ziegler et al. 2019, arXiv 1909.08593.",
    notes="1e-8 is added to the standard deviation.",
)
GROUPS = "A group of equal rewards has advantages of exactly 0. The tests' rewards are all finite."
EPS = {"notes": f"eps is added to the standard deviation. {GROUPS}"}
shapes = "rewards [N], with the responses to one prompt next to each other; returns [N]"
add = group(LOSS_TASKS, "advantage", shapes, notes=GROUPS)
build = cases.advantage(std_ddof=(0, 0, 1), eps=(1e-6, 0.1))
summary = "GRPO's group-normalised rewards"
add("advantages.group_normalized", summary, build, variants=6, special=("equal",), **EPS)
add("advantages.group_centered", "rewards less their group's mean", cases.advantage())
add("advantages.leave_one_out", "rewards less the mean of the group's others", cases.advantage())
add("advantages.group_rank", "centred ranks within the group", cases.group_rank)
add("advantages.greedy_baseline", "rewards less that of the greedy response", cases.greedy_baseline)
summary = "group-centred rewards over the batch's deviation"
add("advantages.batch_normalized", summary, cases.advantage(eps=(1e-6, 0.1)), **EPS)
notes = f"eps is added to the group's mean. {GROUPS}"
add("advantages.mean_normalized", "group-centred rewards over their mean", cases.advantage(low=0.1), notes=notes)
add("advantages.length_weighted", "rewards less their length-weighted mean", cases.length_weighted)
add("advantages.no_baseline", "the rewards themselves", cases.advantage(), notes="", paper="Williams 1992.")
add(
    "advantages.clip_advantages",
    "advantages within a limit",
    cases.clip_advantages,
    shapes="advantages [N]; returns [N]",
    notes="The limit is on both sides of 0.",
    paper="Mnih et al. 2015, who clip rewards alike.",
)
shapes = "rewards, values and mask [B, T]; returns two tensors [B, T]"
summary = "generalised advantage estimates and returns"
notes = "Value and advantage after the last token that counts are 0. A return is the advantage plus the value."
add("advantages.gae", summary, cases.gae, variants=6, shapes=shapes, notes=notes)
