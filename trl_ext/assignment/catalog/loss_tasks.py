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
MEANS = (
    f"{SCORES} There is no reference. A mean is over the tokens of a response: chosen_length and rejected_length are "
    "their numbers."
)
SMOOTHING = {"notes": f"{SCORES} e is label_smoothing, the probability that a label is wrong."}
PENALTY = {"notes": f"{SCORES} penalty multiplies by how much the chosen response has become less likely."}
ANY_ORDER = (
    "The tests take the losses in any order; a trainer that accumulates micro-batches needs entry i to be the loss of "
    "response i."
)
AOT = {"special": ("far apart",), "unordered": True, "notes": f"{SCORES} {ANY_ORDER}"}
pair, betas = cases.preference, {"beta": (0.1, 0.5)}
smoothed, normalized = betas | {"label_smoothing": (0.1, 0.3)}, betas | {"length_normalized": (None, None, True)}
add = group(LOSS_TASKS, "preference loss", "every tensor of scores [B]; returns [B]", in_float32=True, notes=SCORES)
add("losses.dpo", "the DPO loss of each pair", pair, betas, special=("far apart",))
add("losses.cdpo", "the conservative DPO loss of each pair", pair, smoothed, **SMOOTHING)
add("losses.robust_dpo", "the robust DPO loss of each pair", pair, smoothed, **SMOOTHING)
add("losses.ipo", "the IPO loss of each pair", pair, normalized, variants=3)
add("losses.hinge", "the hinge loss of each pair", pair, {"beta": (0.05, 0.3)})
add("losses.dpop", "the DPO-Positive loss of each pair", pair, betas | {"penalty": (5.0, 50.0)}, **PENALTY)
add("losses.apo_zero", "the APO-zero loss of each pair", pair, betas)
add("losses.apo_down", "the APO-down loss of each pair", pair, betas)
add("losses.nca", "the NCA loss of each pair", pair, {"beta": (0.01, 0.1)})
add("losses.sppo", "the SPPO loss of each pair", pair, {"beta": (0.05, 0.2)})
add("losses.aot", "the AOT loss of each chosen response", pair, {"beta": (0.2, 0.05)}, **AOT)
add("losses.aot_paired", "the paired AOT loss of each pair", pair, {"beta": (0.2, 0.05)}, **AOT)

MARGIN = f"{MEANS} gamma is the margin beyond which a pair costs nothing."
pair = cases.preference_without_reference
add = group(LOSS_TASKS, "preference loss", "every tensor of scores [B]; returns [B]", in_float32=True, notes=MEANS)
add("losses.simpo", "the SimPO loss of each pair", pair, {"beta": (2.0, 1.0), "gamma": (None, 0.7)})
add("losses.repo", "the RePO loss of each pair", pair, {"gamma": (0.6, 3.0)}, notes=MARGIN)
add("losses.cpo", "the CPO loss of each pair", pair, betas | {"nll_weight": (1.0, 0.3)})
add("losses.orpo", "the ORPO loss of each pair", pair, betas)

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
summary, shapes = (
    "the length-normalised log-ratio of each response",
    "log-probabilities and mask [B, T]; returns [B, 1]",
)
add("losses.sequence_log_ratio", summary, cases.sequence_ratio, shapes=shapes, special=("nan",))

shapes = "log_ratio [B, T] or [B, 1], advantages [B]; returns the shape of log_ratio"
add = group(LOSS_TASKS, "surrogate", shapes, in_float32=True)
clips = {"clip_low": (0.2, 0.1), "clip_high": (0.2, 0.28), "dual_clip": (None, None, 1.1)}
add("losses.clipped_surrogate", "PPO's clipped loss of each ratio", cases.surrogate, clips, variants=6)
add("losses.unclipped_surrogate", "the importance-weighted loss of each ratio", cases.surrogate, paper=PPO)
caps, shapes = {"ratio_cap": (1.2, 1.0, 5.0)}, "log_ratio, log_probs [B, T], advantages [B]; returns [B, T]"
add("losses.cispo", "the CISPO loss of each token", cases.cispo, caps, variants=3, shapes=shapes)
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
summary, notes = "the k1, k2 and k3 estimates of the KL divergence", "The tests stay below any bound of an exponent."
add("losses.kl_estimate", summary, cases.kl_estimate, {"kind": ("k3", "k1", "k2")}, variants=3, notes=notes)

WHOLE = (
    "log_probs, old_log_probs and ref_log_probs are token log-probabilities in nats: of the policy, of the policy "
    "that sampled, and of the reference. clip is how far the ratio may move from 1. kl_coef is the coefficient of "
    "the KL term, the k3 estimate averaged over all tokens. Gradient flows to log_probs only."
)
BUDGET = f"{WHOLE} max_new_tokens is the longest response that generation permits, in tokens."
shapes, kl = "log-probabilities and mask [B, T], advantages [B]; returns a scalar", {"kl_coef": (0.0, 0.05)}
add = group(LOSS_TASKS, "whole loss", shapes, notes=WHOLE)
add("assignment.grpo_loss", "the whole loss of GRPO", cases.whole_loss, kl)
add("assignment.gspo_loss", "the whole loss of GSPO", cases.whole_loss, kl)
budgets = kl | {"max_new_tokens": (8, 12)}
add("assignment.dr_grpo_loss", "the whole loss of Dr.GRPO", cases.whole_loss, budgets, notes=BUDGET)

# ---- Masks, values and advantages ----

paper = "Liu et al. 2025, arXiv 2503.20783, on what the sum is divided by."
shapes, special = "values and mask [B, T]; returns a scalar, or [B] for dim 1", ("nan",)
add = group(LOSS_TASKS, "mask helper", shapes, in_float32=True, variants=6, special=special, paper=paper)
add("losses.masked_sum", "the sum where the mask is 1", cases.masked)
add("losses.masked_mean", "the mean where the mask is 1", cases.masked)
summary = "the sum where the mask is 1, over a constant"
add("losses.masked_normalize", summary, cases.masked, {"constant": (4.0, 7.0)})

add = group(LOSS_TASKS, "value function", "values, old values and returns [B, T]; returns [B, T]")
add("losses.clipped_value_loss", "the clipped loss of each value", cases.clipped_value_loss, variants=3)
add(
    "losses.whiten",
    "values with mean 0 and standard deviation 1",
    cases.whiten,
    {"shift_mean": (True, False)},
    shapes="values and mask [B, T]; returns [B, T]",
    paper="Ziegler et al. 2019, arXiv 1909.08593.",
    notes="1e-8 is added to the standard deviation.",
)

GROUPS = "A group of equal rewards has advantages of exactly 0. The tests' rewards are all finite."
EPS, MEAN_EPS = (f"eps is added to the {what}. {GROUPS}" for what in ("standard deviation", "group's mean"))
shapes = "rewards [N], with the responses to one prompt next to each other; returns [N]"
add = group(LOSS_TASKS, "advantage", shapes, notes=GROUPS)
summary, options = "GRPO's group-normalised rewards", {"std_ddof": (0, 0, 1), "eps": (1e-6, 0.1)}
add("advantages.group_normalized", summary, cases.advantage, options, variants=6, special=("equal",), notes=EPS)
add("advantages.group_centered", "rewards less their group's mean", cases.advantage)
add("advantages.leave_one_out", "rewards less the mean of the group's others", cases.advantage)
add("advantages.group_rank", "centred ranks within the group", cases.group_rank, {"scale": (1.0, 2.0)})
add("advantages.greedy_baseline", "rewards less that of the greedy response", cases.greedy_baseline)
summary = "group-centred rewards over the batch's deviation"
add("advantages.batch_normalized", summary, cases.advantage, {"eps": (1e-6, 0.1)}, notes=EPS)
summary = "group-centred rewards over their mean"
add("advantages.mean_normalized", summary, cases.positive_rewards, notes=MEAN_EPS)
add("advantages.length_weighted", "rewards less their length-weighted mean", cases.length_weighted)
add("advantages.no_baseline", "the rewards themselves", cases.advantage, notes="", paper="Williams 1992.")
add(
    "advantages.clip_advantages",
    "advantages within a limit",
    cases.clip_advantages,
    {"limit": (1.0, 2.5)},
    shapes="advantages [N]; returns [N]",
    notes="The limit is on both sides of 0.",
    paper="Mnih et al. 2015, who clip rewards alike.",
)
add(
    "advantages.gae",
    "generalised advantage estimates and returns",
    cases.gae,
    {"gamma": (1.0, 0.9), "lam": (0.95, 0.5, 1.0)},
    variants=6,
    shapes="rewards, values and mask [B, T]; returns two tensors [B, T]",
    notes="Value and advantage after the last token that counts are 0. A return is the advantage plus the value.",
)
