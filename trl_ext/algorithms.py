"""The table of online algorithms, and the objective that a name and its overrides stand for.

`python -m trl_ext.algorithms` prints the table. An algorithm is a row: how rewards become advantages, of what the
importance ratio is, the surrogate loss, its reduction, and the KL term, each as its paper has it. Standard deviations
are the population's (the papers do not say) save where a row follows a source that takes the sample's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from torch import Tensor

from trl_ext.advantages import ADVANTAGES, AdvantageEstimator, options_of
from trl_ext.losses import policy
from trl_ext.losses.policy_objective import CHOICES, KNOBS, PolicyLoss, check_choice
from trl_ext.registry import Algorithm, nearest, policy_algorithms

# Name to `Algorithm`, in the order of the table.
algorithms = policy_algorithms

_CLIP = {"surrogate": "clip", "epsilon": 0.2}
_REINFORCE = {"surrogate": "reinforce", "ratio": "none"}
_POPULATION = {"std_ddof": 0, "advantage_eps": 1e-6}
# CS336, and its test snapshots.
_SAMPLE = {"std_ddof": 1, "advantage_eps": 1e-6}
_DR_GRPO_FIXED = {
    "advantage": (("group_centered", "leave_one_out"), "Dr.GRPO does not divide by the standard deviation"),
    "aggregation": (("constant", "sum"), "Dr.GRPO does not normalise by a response's length"),
}
_GSPO_FIXED = {
    "ratio": (("sequence",), "GSPO's ratio is that of the whole sequence"),
    "aggregation": (("sequence_mean",), "GSPO counts each sequence once, whatever its length"),
    "surrogate": (("clip",), "GSPO clips its ratio"),
}


def _only(advantage: str, reason: str) -> dict:
    return {"advantage": ((advantage,), reason)}


def _add(name: str, summary: str, paper: str, **settings: Any) -> None:
    function = {
        "clip": policy.clipped_surrogate,
        "no_clip": policy.unclipped_surrogate,
        "cispo": policy.cispo,
        "reinforce": policy.reinforce,
    }[settings["surrogate"]]
    policy_algorithms.add(Algorithm(name, function, summary=summary, paper=paper, **settings))


# The paper's KL coefficient; its groups are of 64, and those of later work of 8 to 16. Nothing is fixed: this is the
# row to start one's own combination from.
_add("grpo", "Group-normalised rewards, clipped token ratio", "2402.03300", **_CLIP, **_POPULATION, beta=0.04)
_add(
    "dr_grpo",
    "GRPO without the standard deviation and without length normalisation",
    "2503.20783",
    **_CLIP,
    advantage="group_centered",
    aggregation="constant",
    fixed=_DR_GRPO_FIXED,
)
_add(
    "gspo",
    "One length-normalised ratio per sequence, clipped",
    "2507.18071",
    **_POPULATION,
    surrogate="clip",
    epsilon=3e-4,
    epsilon_high=4e-4,
    ratio="sequence",
    fixed=_GSPO_FIXED,
)
_add(
    "rloo",
    "REINFORCE with the mean of the other responses as baseline",
    "2402.14740",
    **_REINFORCE,
    advantage="leave_one_out",
    aggregation="sum",
    beta=0.03,
    kl_estimator="k1",
    kl_in="reward",
    group_size=4,
    fixed=_only("leave_one_out", "RLOO is its leave-one-out baseline"),
)
# The KL coefficient of PPO, as the paper's was not checked.
_add(
    "remax",
    "REINFORCE with the greedy response's reward as baseline",
    "2310.10505",
    **_REINFORCE,
    advantage="greedy_baseline",
    aggregation="sum",
    beta=0.05,
    kl_estimator="k1",
    kl_in="reward",
    group_size=1,
    fixed=_only("greedy_baseline", "ReMax is its greedy baseline"),
)
_add(
    "reinforce",
    "Rewards times log-probabilities",
    "Williams 1992; CS336",
    **_REINFORCE,
    advantage="no_baseline",
    fixed={**_only("no_baseline", "plain REINFORCE has no baseline"), "ratio": (("none",), "it has no ratio")},
)
_add(
    "reinforce_with_baseline",
    "Group-normalised rewards times log-probabilities",
    "CS336",
    **_REINFORCE,
    **_SAMPLE,
    fixed={"ratio": (("none",), "it has no ratio")},
)
_add(
    "grpo_no_clip",
    "GRPO with an unclipped ratio",
    "CS336",
    surrogate="no_clip",
    **_SAMPLE,
    fixed={"surrogate": (("no_clip",), "it is GRPO without the clip")},
)
_add(
    "dapo",
    "GRPO with a higher upper clip and a mean over tokens; no KL",
    "2503.14476",
    **_CLIP,
    **_POPULATION,
    epsilon_high=0.28,
    aggregation="token_mean",
    group_size=16,
    fixed={
        "surrogate": (("clip",), "DAPO clips, higher above than below"),
        "ratio": (("token",), "DAPO's ratio is of each token"),
        "aggregation": (("token_mean",), "DAPO averages over tokens"),
    },
)
_add(
    "cispo",
    "Capped ratio as a weight; no token loses its gradient",
    "2506.13585, 2510.13786",
    surrogate="cispo",
    ratio_cap=5.0,
    **_POPULATION,
    aggregation="token_mean",
    fixed={
        "surrogate": (("cispo",), "CISPO is its capped weight"),
        "ratio": (("token",), "CISPO weighs each token"),
        "aggregation": (("token_mean",), "CISPO averages over tokens"),
    },
)
_add(
    "gopo",
    "Ranks within the group in place of rewards",
    "2602.03876",
    **_CLIP,
    advantage="group_rank",
    advantage_options={"scale": 2.0},
    aggregation="token_mean",
    fixed=_only("group_rank", "GOPO takes ranks"),
)
# The mean over tokens, here and for OPO, keeps the estimator's weights equal across responses.
_add(
    "max_rl",
    "Rewards over their mean: likelihood of a right answer, for rewards of 0 and 1",
    "2602.02710",
    **_CLIP,
    advantage="mean_normalized",
    advantage_eps=1e-6,
    aggregation="token_mean",
    fixed=_only("mean_normalized", "MaxRL divides by the mean"),
)
_add(
    "opo",
    "On-policy with the length-weighted optimal baseline",
    "2505.23585",
    **_REINFORCE,
    advantage="length_weighted",
    aggregation="token_mean",
    fixed=_only("length_weighted", "OPO is its length-weighted baseline"),
)
# KL coefficient and eps are those of its implementation in OpenRLHF.
_add(
    "reinforce_plus_plus_baseline",
    "Group mean as baseline, then normalised over the batch",
    "2501.03262",
    **_CLIP,
    advantage="batch_normalized",
    std_ddof=0,
    advantage_eps=1e-8,
    advantage_options={"std_of": "advantages"},
    aggregation="token_mean",
    beta=0.01,
    kl_estimator="k2",
    fixed=_only("batch_normalized", "REINFORCE++ normalises over the batch"),
)
_BERKELEY = {**_CLIP, "advantage_clip": 5.0, "beta": 0.01, "kl_aggregation": "token_mean"}
_add("berkeley_grpo", "The course's GRPO: KL averaged by itself", "Berkeley course", **_BERKELEY, **_POPULATION)
_add(
    "berkeley_dr_grpo",
    "The course's Dr.GRPO: KL averaged by itself",
    "Berkeley course",
    **_BERKELEY,
    advantage="group_centered",
    aggregation="constant",
    fixed=_DR_GRPO_FIXED,
)
_add(
    "berkeley_gspo",
    "The course's GSPO: clip 0.2, KL averaged by itself",
    "Berkeley course",
    **_BERKELEY,
    **_POPULATION,
    ratio="sequence",
    fixed=_GSPO_FIXED,
)

# Overrides of the advantage, and of the loss.
_ADVANTAGE_SETTINGS = ("advantage", "std_ddof", "advantage_eps", "advantage_clip")
_LOSS_SETTINGS = tuple(f.name for f in fields(PolicyLoss) if f.name not in ("options", "function"))


class PolicyObjective(PolicyLoss):
    """A named algorithm with its settings resolved: rewards to advantages, and scores to a loss.

    Args:
        algorithm: a name of the table, `file.py:function`, or a row of one's own.
        options: keyword options of a surrogate of one's own; `strength` for `quadratic_ratio`.
        overrides: settings of `Algorithm` and `loss_constant` to replace; None leaves the algorithm's own.

    Attributes beside those of `PolicyLoss`: `algorithm` (the row), `advantage` (its name), `std_ddof`,
    `advantage_eps`, `advantage_clip`.

    Raises:
        ValueError: an unknown name, a value out of range, or settings that contradict the algorithm's name or one
            another or that nothing would read; the message names the flags and what to use instead.
    """

    def __init__(self, algorithm: str | Algorithm, *, options: dict[str, Any] | None = None, **overrides: Any):
        known = [*_ADVANTAGE_SETTINGS, *_LOSS_SETTINGS]
        for name in overrides:
            if name not in known:
                raise ValueError(f"no setting {name!r}{nearest(name, known)} Known: {', '.join(known)}")
        self.algorithm = algorithm if isinstance(algorithm, Algorithm) else policy_algorithms.find(algorithm)
        given = {name: value for name, value in overrides.items() if value is not None}
        self._check_given(given)
        self._estimator = self._resolve_advantage(given)
        self.advantage, self.advantage_clip = self._estimator.name, self._estimator.clip
        self.std_ddof, self.advantage_eps = self._estimator.std_ddof, self._estimator.eps
        own = self.algorithm.surrogate == "own"
        function = self.algorithm.function if own else None
        super().__init__(**self._loss_settings(given), options=dict(options or {}), function=function)

    @property
    def needs_greedy(self) -> bool:
        """Whether advantages need the reward of a greedy response to each prompt."""
        return self._estimator.needs_greedy

    @property
    def group_relative(self) -> bool:
        """Whether responses to one prompt are compared, so that a group of one has no signal."""
        return self._estimator.group_relative

    def advantages(
        self,
        rewards: Tensor,
        group_size: int,
        *,
        greedy_rewards: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Advantages of N responses, groups standing together: see `AdvantageEstimator`. [N]."""
        return self._estimator(rewards, group_size, greedy_rewards=greedy_rewards, lengths=lengths)

    @property
    def _function_name(self) -> str:
        return self.algorithm.name

    def describe(self) -> str:
        """One line that names the algorithm and its settings, for logs and reports."""
        settings = self.to_dict()
        del settings["algorithm"]
        if not self.needs_reference:
            settings = {
                name: value for name, value in settings.items() if name != "beta" and not name.startswith("kl")
            }
        options = settings.pop("options")
        parts = [
            f"{name} {value}"
            for name, value in {**settings, **options}.items()
            if value is not None and value is not False
        ]
        return f"{self.algorithm.name} ({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings, ready for JSON."""
        names = (*_ADVANTAGE_SETTINGS, *_LOSS_SETTINGS, "options")
        return {"algorithm": self.algorithm.name, **{name: getattr(self, name) for name in names}}

    # ---- Resolution of overrides ----

    def _check_given(self, given: dict[str, Any]) -> None:
        name, row = self.algorithm.name, self.algorithm
        if row.surrogate == "own" and "surrogate" in given:
            raise ValueError(
                f"--algorithm {name} and --surrogate {given['surrogate']} contradict each other: {name} has a "
                "surrogate of its own; leave --surrogate out"
            )
        for flag, value in given.items():
            if flag in CHOICES:
                check_choice(flag, value, CHOICES[flag])
        if isinstance(given.get("advantage"), str):
            check_choice("advantage", given["advantage"], tuple(ADVANTAGES))
        for flag, (permitted, reason) in row.fixed.items():
            value = given.get(flag)
            if value is None or value in permitted:
                continue
            shown = getattr(value, "__name__", value)
            # What goes with it in a combination that is possible.
            partner = {"reinforce": " --ratio none", "none": " --surrogate reinforce"}.get(shown, "")
            raise ValueError(
                f"--algorithm {name} and --{flag} {shown} contradict each other: {reason}; use --{flag} "
                f"{' or '.join(permitted)}, or --algorithm grpo --{flag} {shown}{partner}"
            )
        high = row.epsilon_high
        if high is not None and "epsilon_high" not in given and given.get("epsilon", 0) > high:
            raise ValueError(
                f"--algorithm {name} and --epsilon {given['epsilon']} contradict each other: its epsilon_high is "
                f"{high}, below that; give --epsilon_high as well"
            )

    def _resolve_advantage(self, given: dict[str, Any]) -> AdvantageEstimator:
        row = self.algorithm
        advantage = given.get("advantage", row.advantage)
        # The row's own settings go where they are read; those of an override are refused where they are not.
        read = options_of(advantage)
        std_ddof = given.get("std_ddof", row.std_ddof if "std_ddof" in read else None)
        eps = given.get("advantage_eps", row.advantage_eps if "eps" in read else None)
        return AdvantageEstimator(
            advantage,
            std_ddof=std_ddof,
            eps=eps,
            options=row.advantage_options if advantage == row.advantage else {},
            clip=given.get("advantage_clip", row.advantage_clip),
        )

    def _loss_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        settings = {name: given.get(name, getattr(self.algorithm, name, None)) for name in _LOSS_SETTINGS}
        for knob in {knob for knobs in KNOBS.values() for knob in knobs}:
            # The row's own knobs go with its own surrogate.
            if knob not in KNOBS[settings["surrogate"]] and knob not in given:
                settings[knob] = None
        return settings


def _table() -> list[dict[str, Any]]:
    rows = []
    for name in algorithms:
        row = algorithms[name]
        settings = PolicyObjective(name).to_dict()
        rows.append({**settings, "group_size": row.group_size, "paper": row.paper, "summary": row.summary})
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    clip = f"{row['epsilon']:g}/{row['epsilon_high']:g}" if row["epsilon"] is not None else ""
    surrogate = f"{row['surrogate']} {clip or row['ratio_cap'] or ''}".strip()
    divergence = f"{row['beta']:g} {row['kl_estimator']} in {row['kl_in']}" if row["beta"] else "none"
    return [row["algorithm"], row["advantage"], row["ratio"], surrogate, row["aggregation"], divergence, row["paper"]]


def main(arguments: list[str] | None = None) -> None:
    """Print the table, aligned or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m trl_ext.algorithms", description="List the online algorithms.")
    parser.add_argument("--json", action="store_true", help="print every setting as JSON")
    rows = _table()
    if parser.parse_args(arguments).json:
        print(json.dumps(rows, indent=2))
        return
    lines = [["algorithm", "advantage", "ratio", "surrogate", "aggregation", "KL", "paper"], *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
