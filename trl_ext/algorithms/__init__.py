"""The table of online algorithms, and the objective for a name and its overrides.

`python -m trl_ext.algorithms` prints the table, and `--explain NAME` prints one row with the source of its functions.
A row defines how rewards become advantages, the unit of the importance ratio, the surrogate loss, its reduction, and
the KL term, each as in its paper. Standard deviations are the population's (the papers do not say), unless a row
follows a source that uses the sample's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trl_ext.advantages import (
    ADVANTAGES,
    INPUTS,
    clip_advantages,
    function_of,
    greedy_baseline,
    no_baseline,
    options_of,
)
from trl_ext.losses.policy import SURROGATES
from trl_ext.losses.policy_objective import PolicyLoss, settings_of
from trl_ext.registry import Algorithm, nearest, policy_algorithms
from trl_ext.settings import ADVANTAGE_SETTINGS, LOSS_SETTINGS, SETTINGS

# Name to `Algorithm`, in the order of the table.
algorithms = policy_algorithms

_POPULATION = {"std_ddof": 0, "advantage_eps": 1e-6}
# Used by CS336 and its test snapshots.
_SAMPLE = {"std_ddof": 1, "advantage_eps": 1e-6}
_CLIP = {"surrogate": "clip", "epsilon": 0.2}
_REINFORCE = {"surrogate": "reinforce", "ratio": "none"}
_TOKENS = {"aggregation": "token_mean"}
_DR_GRPO = {
    "advantage": "group_centered",
    "aggregation": "constant",
    "fixed": {"advantage": ("group_centered", "leave_one_out"), "aggregation": ("constant", "sum")},
}
_GSPO = {
    "ratio": "sequence",
    "fixed": {"ratio": ("sequence",), "aggregation": ("sequence_mean",), "surrogate": ("clip",)},
}
_DAPO = {
    **_CLIP,
    **_POPULATION,
    **_TOKENS,
    "epsilon_high": 0.28,
    "group_size": 16,
    "fixed": {"surrogate": ("clip",), "ratio": ("token",), "aggregation": ("token_mean",)},
}
_BERKELEY = {**_CLIP, "advantage_clip": 5.0, "beta": 0.01, "kl_aggregation": "token_mean"}


def _add(name: str, summary: str, paper: str, *, surrogate: str, **settings: Any) -> None:
    row = Algorithm(name, SURROGATES[surrogate], paper, surrogate=surrogate, summary=summary, **settings)
    policy_algorithms.add(row)


def _defined_by(**settings: str) -> dict[str, Any]:
    """Settings that define an algorithm, so that no other values may be used under its name."""
    return {**settings, "fixed": {flag: (value,) for flag, value in settings.items()}}


# fmt: off
# The paper's KL coefficient; the paper uses groups of 64, later work 8 to 16. Nothing is fixed: start your own
# combination from this row.
_add("grpo", "Group-normalised rewards, clipped token ratio", "2402.03300", **_CLIP, **_POPULATION, beta=0.04)
_add("dr_grpo", "GRPO without the standard deviation and without length normalisation", "2503.20783",
     **_CLIP, **_DR_GRPO)
_add("gspo", "One length-normalised ratio per sequence, clipped", "2507.18071", surrogate="clip", epsilon=3e-4,
     epsilon_high=4e-4, **_POPULATION, **_GSPO)
_add("rloo", "REINFORCE with the mean of the other responses as baseline", "2402.14740", **_REINFORCE,
     **_defined_by(advantage="leave_one_out"), aggregation="sum", beta=0.03,
     kl_estimator="k1", kl_in="reward", group_size=4)
# PPO's KL coefficient, since the paper's was not checked.
_add("remax", "REINFORCE with the greedy response's reward as baseline", "2310.10505", **_REINFORCE,
     **_defined_by(advantage="greedy_baseline"), aggregation="sum", beta=0.05,
     kl_estimator="k1", kl_in="reward", group_size=1)
_add("reinforce", "Rewards times log-probabilities", "Williams 1992; CS336", surrogate="reinforce",
     **_defined_by(advantage="no_baseline", ratio="none"))
_add("reinforce_with_baseline", "Group-normalised rewards times log-probabilities", "CS336", surrogate="reinforce",
     **_SAMPLE, **_defined_by(ratio="none"))
_add("grpo_no_clip", "GRPO with an unclipped ratio", "CS336", **_SAMPLE, **_defined_by(surrogate="no_clip"))
_add("dapo", "GRPO with a higher upper clip and a mean over tokens; no KL", "2503.14476", **_DAPO)
# The paper's share: 4,096 of 20,480 tokens. The rounds are those after which its recipe in verl stops.
_add("dapo_full", "DAPO's loss with its dynamic sampling and its punishment of long responses", "2503.14476", **_DAPO,
     rollout={"resample_groups": 10, "overlong_share": 0.2})
_add("cispo", "Capped ratio as a weight; no token loses its gradient", "2506.13585, 2510.13786",
     ratio_cap=5.0, **_POPULATION, **_defined_by(surrogate="cispo", ratio="token", aggregation="token_mean"))
_add("gopo", "Ranks within the group in place of rewards", "2602.03876", **_CLIP, **_TOKENS,
     **_defined_by(advantage="group_rank"), advantage_options={"scale": 2.0})
# Averaging over tokens, here and for OPO, keeps the estimator's weights equal across responses.
_add("max_rl", "Rewards over their mean: likelihood of a right answer, for rewards of 0 and 1", "2602.02710", **_CLIP,
     **_TOKENS, **_defined_by(advantage="mean_normalized"), advantage_eps=1e-6)
_add("opo", "On-policy with the length-weighted optimal baseline", "2505.23585", **_REINFORCE, **_TOKENS,
     **_defined_by(advantage="length_weighted"))
# The KL coefficient and eps are those of its implementation in OpenRLHF.
_add("reinforce_plus_plus_baseline", "Group mean as baseline, then normalised over the batch", "2501.03262", **_CLIP,
     **_TOKENS, **_defined_by(advantage="batch_normalized"), std_ddof=0,
     advantage_eps=1e-8, advantage_options={"std_of": "advantages"}, beta=0.01, kl_estimator="k2")
_add("sapo", "A gate on the ratio that closes smoothly in place of the clip", "2511.20347", **_POPULATION,
     **_defined_by(surrogate="sapo", ratio="token", aggregation="sequence_mean"))
_add("gmpo", "Geometric mean of a response's clipped ratios", "2507.20673", **_POPULATION,
     **_defined_by(surrogate="gmpo", ratio="token", aggregation="sequence_mean"))
_add("berkeley_grpo", "The course's GRPO: KL averaged by itself", "Berkeley course", **_BERKELEY, **_POPULATION)
_add("berkeley_dr_grpo", "The course's Dr.GRPO: KL averaged by itself", "Berkeley course", **_BERKELEY, **_DR_GRPO)
_add("berkeley_gspo", "The course's GSPO: clip 0.2, KL averaged by itself", "Berkeley course", **_BERKELEY,
     **_POPULATION, **_GSPO)
# fmt: on


class PolicyObjective(PolicyLoss):
    """A named algorithm with its settings resolved: rewards to advantages, and scores to a loss.

    Args:
        algorithm: a name from the table, `file.py:function`, or your own row.
        options: keyword options of your own surrogate, or the temperatures of `sapo`.
        overrides: settings of `trl_ext.settings.SETTINGS` to replace; None keeps the algorithm's own.

    Attributes in addition to those of `PolicyLoss`: `algorithm` (the row), `advantage` (its name), `std_ddof`,
    `advantage_eps`, `advantage_clip`, and `group_relative` (whether a group of one response has no signal; None if
    the advantage is your own).

    Raises:
        ValueError: an unknown name, a value out of range, settings that contradict the algorithm's name or one
            another or that nothing would read; the message names the flags and what to use instead.
    """

    def __init__(self, algorithm: str | Algorithm, *, options: dict[str, Any] | None = None, **overrides: Any):
        for name in overrides:
            if name not in SETTINGS:
                raise ValueError(f"no setting {name!r}{nearest(name, list(SETTINGS))} Known: {', '.join(SETTINGS)}")
        self.algorithm = algorithm if isinstance(algorithm, Algorithm) else policy_algorithms.find(algorithm)
        given = {name: value for name, value in overrides.items() if value is not None}
        self._check_given(given)
        self._resolve_advantage(given)
        baselines = (greedy_baseline, no_baseline)
        self.group_relative = self._advantage not in baselines if self._advantage in ADVANTAGES.values() else None
        own = self.algorithm.function if self.algorithm.surrogate == "own" else None
        super().__init__(**self._loss_settings(given), options=dict(options or {}), function=own)

    def reads(self, name: str) -> bool:
        """Whether advantages read an input of `trl_ext.advantages.INPUTS`, such as `greedy_rewards`."""
        return name in self._parameters

    def advantages(self, rewards: Tensor, group_size: int, **inputs: Tensor) -> Tensor:
        """Advantages of rewards, [N]. [N].

        Args:
            rewards: a reward that is not finite marks a response that could not be scored.
            group_size: responses per prompt.
            inputs: those of `trl_ext.advantages.INPUTS` that the advantage has a parameter for, such as
                `greedy_rewards`, [N / group_size] (a ValueError if it is missing); others are ignored.
        """
        known = {name: inputs.get(name) for name in INPUTS if name in self._parameters}
        for name, value in known.items():
            if value is None:
                raise ValueError(f"the advantage {self.advantage!r} needs {name}, and there are none")
        advantages = self._advantage(rewards, group_size, **known, **self._advantage_options)
        if advantages.shape != rewards.shape:
            raise ValueError(
                f"the advantage {self.advantage!r} returned shape {list(advantages.shape)} for {len(rewards)} "
                "rewards; it must return one advantage for each"
            )
        return advantages if self.advantage_clip is None else clip_advantages(advantages, self.advantage_clip)

    @property
    def _function_name(self) -> str:
        return self.algorithm.name if self.surrogate == "own" else self.surrogate

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
        return {"algorithm": self.algorithm.name, **{name: getattr(self, name) for name in (*SETTINGS, "options")}}

    # ---- Resolution of overrides ----

    def _check_given(self, given: dict[str, Any]) -> None:
        name, row = self.algorithm.name, self.algorithm
        if row.surrogate == "own" and "surrogate" in given:
            raise ValueError(
                f"--algorithm {name} and --surrogate {given['surrogate']} contradict each other: {name} has a "
                "surrogate of its own; leave --surrogate out"
            )
        # Report an unknown name before a contradiction.
        options_of(given.get("advantage", row.advantage))
        for flag in given.keys() & LOSS_SETTINGS.keys():
            LOSS_SETTINGS[flag].check(flag, given[flag])
        for flag, permitted in row.fixed.items():
            value = given.get(flag)
            if value is None or value in permitted:
                continue
            shown = getattr(value, "__name__", value)
            # The setting that must accompany it in a possible combination.
            partner = {"reinforce": " --ratio none", "none": " --surrogate reinforce"}.get(shown, "")
            raise ValueError(
                f'--algorithm {name} and --{flag} {shown} contradict each other: it is "{row.summary}"; use '
                f"--{flag} {' or '.join(permitted)}, or --algorithm grpo --{flag} {shown}{partner}"
            )
        high = row.epsilon_high
        if high is not None and "epsilon_high" not in given and given.get("epsilon", 0) > high:
            raise ValueError(
                f"--algorithm {name} and --epsilon {given['epsilon']} contradict each other: its epsilon_high is "
                f"{high}, below that; give --epsilon_high as well"
            )

    def _resolve_advantage(self, given: dict[str, Any]) -> None:
        row = self.algorithm
        advantage = given.get("advantage", row.advantage)
        self._advantage, self._parameters = function_of(advantage), options_of(advantage)
        self._advantage_options = dict(row.advantage_options if advantage == row.advantage else {})
        self.advantage = getattr(self._advantage, "__name__", str(advantage))
        self.advantage_clip = given.get("advantage_clip", row.advantage_clip)
        if self.advantage_clip is not None:
            ADVANTAGE_SETTINGS["advantage_clip"].check("advantage_clip", self.advantage_clip)
        for flag in ("std_ddof", "advantage_eps"):
            setting, value = ADVANTAGE_SETTINGS[flag], None
            parameter = self._parameters.get(setting.option)
            if parameter is not None:
                value = given.get(flag, getattr(row, flag))
                value = parameter.default if value is None else value
                setting.check(flag, value)
                self._advantage_options[setting.option] = value
            elif flag in given:
                raise ValueError(
                    f"--{flag} {given[flag]} and --advantage {self.advantage} contradict each other: this estimator "
                    f"does not read {flag}; leave it out, or use --advantage group_normalized"
                )
            setattr(self, flag, value)

    def _loss_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        settings = {name: given.get(name, getattr(self.algorithm, name)) for name in LOSS_SETTINGS}
        read = settings_of(SURROGATES[settings["surrogate"]]) if settings["surrogate"] in SURROGATES else {}
        for name, setting in LOSS_SETTINGS.items():
            # The row's settings of its own surrogate are not another's, and those of its KL term need a KL term.
            unread = setting.option and name not in read or name.startswith("kl_") and not settings["beta"]
            if unread and name not in given:
                settings[name] = None
        return settings
