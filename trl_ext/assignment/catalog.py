"""The functions that an assignment can ask for: where the library has each, what it is asked for, what it is tried on.

`python -m trl_ext.assignment --list` prints the table.
"""

from __future__ import annotations

from trl_ext.assignment import cases
from trl_ext.assignment.course_catalog import add_course_tasks
from trl_ext.assignment.task import Task
from trl_ext.registry import nearest

TASKS: dict[str, Task] = {}


def task(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    if name in TASKS:
        return TASKS[name]
    known = list(TASKS)
    same = [each for each in known if each.rpartition(".")[2] == name.rpartition(".")[2]]
    hint = f"; did you mean {' or '.join(map(repr, same))}?" if same else nearest(name, known)
    raise ValueError(f"unknown function {name!r}{hint} python -m trl_ext.assignment --list names all {len(known)}")


def _add(room: str, module: str, kind: str, shapes: str, tasks: dict[str, tuple], **common) -> None:
    for name, (summary, build, *more) in tasks.items():
        settings = {**common, **(more[0] if more else {})}
        shape = settings.pop("shapes", shapes)
        full = f"{room}.{name}"
        TASKS[full] = Task(full, f"{module}:{name}", kind, summary, shape, build, **settings)


_pair = cases.preference
_SCORES = (
    "h_w and h_l are scores.chosen_log_ratio and scores.rejected_log_ratio, margin is scores.margin, h_w - h_l, and "
    "l(u) = -log sigmoid(u)."
)
_ANY_ORDER = {
    "unordered": True,
    "special": ("far apart",),
    "notes": _SCORES
    + " The tests take the losses in any order; a trainer that accumulates micro-batches needs entry i to be the loss "
    "of response i.",
}
_NO_REFERENCE = {"reference": False, "lengths": True}
_add(
    "losses",
    "trl_ext.losses.preference",
    "preference loss",
    "every tensor of scores [B]; returns [B]",
    {
        "dpo": ("the DPO loss of each pair", _pair(), {"special": ("far apart",)}),
        "cdpo": ("the conservative DPO loss of each pair", _pair(label_smoothing=(0.1, 0.3))),
        "robust_dpo": ("the robust DPO loss of each pair", _pair(label_smoothing=(0.1, 0.3))),
        "ipo": (
            "the IPO loss of each pair",
            _pair(lengths=True, length_normalized=(None, None, True)),
            {"variants": 3},
        ),
        "hinge": ("the hinge loss of each pair", _pair(betas=(0.05, 0.3))),
        "dpop": ("the DPO-Positive loss of each pair", _pair(penalty=(5.0, 50.0))),
        "apo_zero": ("the APO-zero loss of each pair", _pair()),
        "apo_down": ("the APO-down loss of each pair", _pair()),
        "nca": ("the NCA loss of each pair", _pair(betas=(0.01, 0.1))),
        "sppo": ("the SPPO loss of each pair", _pair(betas=(0.05, 0.2))),
        "aot": ("the AOT loss of each chosen response", _pair(betas=(0.2, 0.05)), _ANY_ORDER),
        "aot_paired": ("the paired AOT loss of each pair", _pair(betas=(0.2, 0.05)), _ANY_ORDER),
        "simpo": ("the SimPO loss of each pair", _pair(**_NO_REFERENCE, betas=(2.0, 1.0), gamma=(None, 0.7))),
        "repo": ("the RePO loss of each pair", _pair(**_NO_REFERENCE, betas=(None,), gamma=(0.6, 3.0))),
        "cpo": ("the CPO loss of each pair", _pair(**_NO_REFERENCE, nll_weight=(1.0, 0.3))),
        "orpo": ("the ORPO loss of each pair", _pair(**_NO_REFERENCE)),
    },
    in_float32=True,
    notes=_SCORES,
)
_add(
    "losses",
    "trl_ext.losses.reward",
    "reward model's loss",
    "scores [B]; returns [B]",
    {"bradley_terry": ("the Bradley-Terry loss of each pair of scores", cases.bradley_terry, {"variants": 4})},
    in_float32=True,
    special=("far apart",),
)
_add(
    "losses",
    "trl_ext.losses.unpaired",
    "unpaired loss",
    "log_ratio and desirable [B], kl_log_ratio [K]; returns [B]",
    {"kto": ("the KTO loss of each response", cases.kto)},
    in_float32=True,
)
_add(
    "losses",
    "trl_ext.losses.policy",
    "ratio",
    "log-probabilities [B, T]; returns [B, T]",
    {
        "token_log_ratio": (
            "the log-ratio of each token",
            cases.token_ratio,
            {"paper": "Schulman et al. 2017, arXiv 1707.06347, equation 6."},
        ),
        "sequence_log_ratio": (
            "the length-normalised log-ratio of each response",
            cases.sequence_ratio,
            {"shapes": "log-probabilities and mask [B, T]; returns [B, 1]", "special": ("nan",)},
        ),
    },
    in_float32=True,
)
_add(
    "losses",
    "trl_ext.losses.policy",
    "surrogate",
    "log_ratio [B, T] or [B, 1], advantages [B]; returns the shape of log_ratio",
    {
        "clipped_surrogate": (
            "PPO's clipped loss of each ratio",
            cases.surrogate(clip_low=(0.2, 0.1), clip_high=(0.2, 0.28), dual_clip=(None, None, 1.1)),
            {"variants": 6},
        ),
        "unclipped_surrogate": (
            "the importance-weighted loss of each ratio",
            cases.surrogate(),
            {"paper": "Schulman et al. 2017, arXiv 1707.06347, equation 6."},
        ),
        "quadratic_ratio": ("the loss with a quadratic pull to ratio 1", cases.surrogate(strength=(0.5, 2.0))),
        "cispo": (
            "the CISPO loss of each token",
            cases.cispo,
            {"variants": 3, "shapes": "log_ratio, log_probs [B, T], advantages [B]; returns [B, T]"},
        ),
        "reinforce": (
            "the policy-gradient loss of each token",
            cases.reinforce,
            {"shapes": "log_probs [B, T], advantages [B] or [B, 1]; returns [B, T]"},
        ),
    },
    in_float32=True,
)
_add(
    "losses",
    "trl_ext.losses.policy",
    "aggregation",
    "losses and mask [B, T]; returns a scalar",
    {
        "aggregate": (
            "the four reductions of token losses to a scalar",
            cases.aggregate,
            {
                "variants": 4,
                "special": ("nan", "empty row"),
                "paper": "GRPO: arXiv 2402.03300; DAPO: 2503.14476; Dr.GRPO: 2503.20783.",
            },
        )
    },
    in_float32=True,
)
_add(
    "losses",
    "trl_ext.losses.kl",
    "KL estimator",
    "log-probabilities of any one shape; returns that shape",
    {"kl_estimate": ("the k1, k2 and k3 estimates of the KL divergence", cases.kl_estimate, {"variants": 3})},
    in_float32=True,
    notes="The tests stay below any bound of an exponent.",
)
_add(
    "losses",
    "trl_ext.losses.masking",
    "mask helper",
    "values and mask [B, T]; returns a scalar, or [B] for dim 1",
    {
        "masked_sum": ("the sum where the mask is 1", cases.masked()),
        "masked_mean": ("the mean where the mask is 1", cases.masked()),
        "masked_normalize": ("the sum where the mask is 1, over a constant", cases.masked(constant=(4.0, 7.0))),
    },
    variants=6,
    special=("nan",),
    in_float32=True,
    paper="Liu et al. 2025, arXiv 2503.20783, on what the sum is divided by.",
)
_add(
    "losses",
    "trl_ext.losses.value",
    "value function",
    "values, old values and returns [B, T]; returns [B, T]",
    {
        "clipped_value_loss": ("the clipped loss of each value", cases.clipped_value_loss, {"variants": 3}),
        "whiten": (
            "values with mean 0 and standard deviation 1",
            cases.whiten,
            {"shapes": "values and mask [B, T]; returns [B, T]", "paper": "Ziegler et al. 2019, arXiv 1909.08593."},
        ),
    },
)
_ddof = {"std_ddof": (0, 0, 1), "eps": (1e-6, 0.1)}
_add(
    "advantages",
    "trl_ext.advantages",
    "advantage",
    "rewards [N], the responses to a prompt standing together; returns [N]",
    {
        "group_normalized": (
            "GRPO's group-normalised rewards",
            cases.advantage(**_ddof),
            {"variants": 6, "special": ("equal",)},
        ),
        "group_centered": ("rewards less their group's mean", cases.advantage()),
        "leave_one_out": ("rewards less the mean of the group's others", cases.advantage()),
        "group_rank": ("centred ranks within the group", cases.group_rank),
        "greedy_baseline": ("rewards less that of the greedy response", cases.greedy_baseline),
        "batch_normalized": ("group-centred rewards over the batch's deviation", cases.advantage(eps=(1e-6, 0.1))),
        "mean_normalized": ("group-centred rewards over their mean", cases.advantage(low=0.1)),
        "length_weighted": ("rewards less their length-weighted mean", cases.length_weighted),
        "no_baseline": ("the rewards themselves", cases.advantage(), {"notes": "", "paper": "Williams 1992."}),
        "clip_advantages": (
            "advantages within a limit",
            cases.clip_advantages,
            {"shapes": "advantages [N]; returns [N]", "notes": ""}
            | {"paper": "Mnih et al. 2015, who clip rewards alike."},
        ),
        "gae": (
            "generalised advantage estimates and returns",
            cases.gae,
            {"variants": 6, "shapes": "rewards, values and mask [B, T]; returns two tensors [B, T]", "notes": ""},
        ),
    },
    notes="A group of equal rewards has advantages of exactly 0. The tests' rewards are all finite.",
)
_add(
    "assignment",
    "trl_ext.assignment.references",
    "whole loss",
    "log-probabilities and mask [B, T], advantages [B]; returns a scalar",
    {
        "grpo_loss": ("the whole loss of GRPO", cases.whole_loss(kl_coef=(0.0, 0.05))),
        "dr_grpo_loss": ("the whole loss of Dr.GRPO", cases.whole_loss(kl_coef=(0.0, 0.05), max_new_tokens=(8, 12))),
        "gspo_loss": ("the whole loss of GSPO", cases.whole_loss(kl_coef=(0.0, 0.05))),
    },
)
_add(
    "assignment",
    "trl_ext.assignment.references",
    "log-probability helper",
    "",
    {
        "sequence_log_probs": (
            "the summed log-probability of each response",
            cases.sequence_log_probs,
            {"shapes": "logits [B, T, V], ids and mask [B, T]; returns [B]", "in_float32": True}
            | {"paper": "Rafailov et al. 2023, arXiv 2305.18290, section 4."},
        ),
        "split_minibatches": (
            "a rollout cut into minibatches",
            cases.split_minibatches,
            {"variants": 3, "shapes": "tensors [N, ...]; returns a list of dicts of [minibatch_size, ...]"}
            | {"paper": "Schulman et al. 2017, arXiv 1707.06347, algorithm 1."},
        ),
    },
)
add_course_tasks(_add)
