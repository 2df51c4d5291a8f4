"""Online algorithms: one class with the settings of an algorithm, its advantages and its loss, and the table.

`python -m trl_ext.algorithms` prints the table, and `--explain NAME` prints one row with the source of its functions.
A new algorithm is one entry in the table below. An algorithm of your own is a function with `@policy_algorithm`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from trl_ext.advantages import ADVANTAGES, INPUTS, clip_advantages, function_of, options_of
from trl_ext.losses.policy import (
    PolicyScores,
    bounded_ratio,
    cispo,
    clipped_shares,
    clipped_surrogate,
    gmpo,
    reinforce,
    sapo,
    unclipped_surrogate,
)
from trl_ext.losses.reductions import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    MAX_EXPONENT,
    aggregate,
    kl_estimate,
    masked_sum,
)
from trl_ext.names import check_choice, nearest
from trl_ext.registry import Entry, Registry

# ---- Settings ----


def _setting(meaning: str) -> Any:
    default = "" if "Default: " in meaning else " Default: the algorithm's own."
    return field(default=None, metadata={"help": f"{meaning}{default}"})


@dataclass(kw_only=True)
class AlgorithmSettings:
    """The settings of an online algorithm; in a configuration, None keeps the algorithm's own.

    In Python, `advantage` may also be a function `f(rewards, group_size, ...) -> [N]`.
    """

    advantage: str | None = _setting("How rewards become advantages, e.g. group_normalized, leave_one_out.")
    std_ddof: int | None = _setting("0 for the population's standard deviation, 1 for the sample's (TRL's).")
    advantage_eps: float | None = _setting("Added to the standard deviation.")
    advantage_clip: float | None = _setting("Advantages are clipped to plus and minus this.")
    surrogate: str | None = _setting("clip, no_clip, cispo, reinforce, sapo or gmpo.")
    ratio: str | None = _setting("Importance ratio: token, sequence or none.")
    aggregation: str | None = _setting("sequence_mean, token_mean, constant or sum.")
    epsilon: float | None = _setting("The ratio is clipped below 1 - epsilon.")
    epsilon_high: float | None = _setting("The ratio is clipped above 1 + epsilon_high.")
    dual_clip: float | None = _setting("Cap on the loss where the advantage is negative, in advantages.")
    ratio_cap: float | None = _setting("Cap on the ratio of cispo.")
    loss_constant: float | None = _setting(
        "Tokens that `constant` divides by. Default: max_completion_length, the token budget."
    )
    beta: float | None = _setting("Coefficient of the KL divergence to the reference; 0 loads none.")
    kl_estimator: str | None = _setting("k1, k2 or k3.")
    kl_in: str | None = _setting("Where the KL term goes: loss or reward.")
    kl_ratio_correction: bool | None = _setting("Multiply the KL term in the loss by the ratio, as TRL does.")
    kl_aggregation: str | None = _setting("token_mean to average the KL term apart from the surrogate.")


SETTINGS = tuple(setting.name for setting in fields(AlgorithmSettings))
SURROGATES: dict[str, Callable[..., Tensor]] = {
    "clip": clipped_surrogate,
    "no_clip": unclipped_surrogate,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
}
_CHOICES = {
    "surrogate": tuple(SURROGATES),
    "ratio": ("token", "sequence", "none"),
    "aggregation": AGGREGATIONS,
    "kl_estimator": KL_ESTIMATORS,
    "kl_in": ("loss", "reward"),
    "kl_aggregation": ("inside", "token_mean"),
}
_RANGES = {
    "std_ddof": (lambda value: value in (0, 1), "0 (population) or 1 (sample)"),
    **dict.fromkeys(
        ("advantage_eps", "epsilon", "epsilon_high", "beta"), (lambda value: value >= 0, "a number from 0 up")
    ),
    **dict.fromkeys(("advantage_clip", "loss_constant"), (lambda value: value > 0, "positive")),
    "dual_clip": (lambda value: value > 1, "above 1, where it would cut off the unclipped loss"),
    "ratio_cap": (lambda value: value >= 1, "at least 1: it is the cap itself and not its distance from 1"),
}
# Values of a row that names none.
_DEFAULTS = {"advantage": "group_normalized", "ratio": "token", "aggregation": "sequence_mean", "epsilon": 0.2}
_DEFAULTS |= {"ratio_cap": 5.0, "beta": 0.0, "kl_estimator": "k3", "kl_in": "loss", "kl_ratio_correction": False}
# The parameters of the advantage that settings set.
_PARAMETERS = {"std_ddof": "std_ddof", "advantage_eps": "eps"}
_OF_SURROGATES = ("epsilon", "epsilon_high", "dual_clip", "ratio_cap")
_OF_KL = tuple(name for name in SETTINGS if name.startswith("kl_"))
# Values that differ by a factor only, which the learning rate absorbs: they are the same algorithm.
_EQUAL_BUT_FOR_A_FACTOR = (("group_centered", "leave_one_out"), ("constant", "sum"))


def _check_value(flag: str, value: Any) -> None:
    """Raise ValueError, naming the flag, for a name that is no choice or a number not finite or out of range."""
    if flag in _CHOICES:
        check_choice(flag, value, _CHOICES[flag])
    if flag in _RANGES:
        permitted, description = _RANGES[flag]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not permitted(value):
            raise ValueError(f"--{flag} must be {description}, got {value!r}")


# ---- An algorithm ----


@dataclass
class Algorithm(AlgorithmSettings, Entry):
    """An online algorithm: from rewards to advantages, and from scores to the loss.

    Settings that are not given have their defaults; `replace` gives others. `@policy_algorithm(name, ...)` registers
    your own function as an algorithm, with the attributes below and the settings that belong to no built-in surrogate.

    Attributes:
        function: the surrogate. If given, your own `f(scores, *, option=default)` of `PolicyScores`, which returns one
            loss per token, [B, T], or per response, [B, 1]; the setting `surrogate` is then `own`. If it has a keyword
            `beta`, it is passed the coefficient and compares with the reference itself: no KL term is added.
        summary: one line for the table.
        surrogate_options: keyword options of your own function, or the temperatures of `sapo`.
        advantage_options: options of the advantage that are not settings.
        group_size: responses per prompt.
        rollout: settings of the trainer's rollouts that define the algorithm, such as `resample_groups`: 0 is refused.
        reads_sampler: whether your own function compares with the probabilities that the sampler recorded,
            `scores.behaviour_log_probs`; vLLM's importance ratio then does not multiply its loss.
        defined_by: the settings whose values make the algorithm what its name says.

    Raises:
        ValueError: an unknown name, a value out of range, settings that contradict the algorithm's name or one
            another or that nothing would read; the message names the flags and what to use instead.
    """

    function: Callable | None = None
    summary: str = ""
    surrogate_options: Mapping[str, Any] = field(default_factory=dict)
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    group_size: int = 8
    rollout: Mapping[str, float] = field(default_factory=dict)
    reads_sampler: bool = False
    defined_by: tuple[str, ...] = ()

    def __post_init__(self):
        self._own = {name: getattr(self, name) for name in SETTINGS if getattr(self, name) is not None}
        given = {}
        if self.function is not None:
            self.surrogate = "own"
            self.summary = self.summary or (inspect.getdoc(self.function) or "").partition("\n")[0]
            # Your own function has keyword options where a built-in surrogate has settings.
            given = {name: value for name, value in self._own.items() if name in ("surrogate", *_OF_SURROGATES)}
            self._check_name(given)
        self._own["surrogate"] = self.surrogate or "clip"
        self._resolve(given)

    def replace(self, *, surrogate_options: Mapping[str, Any] | None = None, **settings: Any) -> Algorithm:
        """The algorithm with other settings; None keeps the algorithm's own.

        A setting that only the replaced advantage, surrogate or KL term reads is left out.
        """
        for name in settings:
            if name not in SETTINGS:
                raise ValueError(f"no setting {name!r}{nearest(name, list(SETTINGS))} Known: {', '.join(SETTINGS)}")
        given = {name: value for name, value in settings.items() if value is not None}
        self._check_name(given)
        replaced = copy.copy(self)
        if given.get("advantage", self._own.get("advantage")) != self._own.get("advantage"):
            replaced.advantage_options = {}
        replaced.surrogate_options = dict(surrogate_options or self.surrogate_options)
        replaced._resolve(given)
        replaced._own = {**self._own, **given}
        replaced._check_surrogate_options()
        return replaced

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are read, by the loss or for the reward."""
        return self.beta > 0

    @property
    def group_relative(self) -> bool | None:
        """Whether a group of one response has no signal; None if the advantage is your own."""
        is_own = self.advantage_function not in ADVANTAGES.values()
        return None if is_own else self.advantage not in ("greedy_baseline", "no_baseline")

    def reads(self, name: str) -> bool:
        """Whether the advantage has this parameter, such as `greedy_rewards` of `trl_ext.advantages.INPUTS`."""
        return name in options_of(self.advantage_function)

    def rollout_setting(self, name: str, given: float | None) -> float:
        """A setting of the trainer's rollouts: the given one, or if it is None the algorithm's own; 0 if it has none.

        Raises:
            ValueError: 0 is given for one that defines the algorithm.
        """
        own = self.rollout.get(name, 0)
        if own and given is not None and not given:
            reason = f"it is {self.summary}; leave it out, or use an algorithm without it"
            raise _contradiction("algorithm", self.name, name, given, reason)
        return own if given is None else given

    def describe(self) -> str:
        """One line that names the algorithm and its settings, for logs and reports."""
        settings = {name: getattr(self, name) for name in SETTINGS}
        if not self.needs_reference:
            settings = {name: value for name, value in settings.items() if not name.startswith(("beta", "kl_"))}
        settings |= self.surrogate_options
        parts = [f"{name} {value}" for name, value in settings.items() if value is not None and value is not False]
        return f"{self.name} ({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """The settings, ready for JSON."""
        settings = {name: getattr(self, name) for name in SETTINGS}
        return {"algorithm": self.name, **settings, "options": dict(self.surrogate_options)}

    # ---- From rewards to advantages ----

    def advantages(self, rewards: Tensor, group_size: int, **inputs: Tensor) -> Tensor:
        """Advantages of rewards, [N]. [N].

        Args:
            rewards: a reward that is not finite marks a response that could not be scored.
            group_size: responses per prompt.
            inputs: those of `trl_ext.advantages.INPUTS` that the advantage has a parameter for, such as
                `greedy_rewards`, [N / group_size] (a ValueError if it is missing); others are ignored.
        """
        known = {name: inputs.get(name) for name in INPUTS if self.reads(name)}
        for name, value in known.items():
            if value is None:
                raise ValueError(f"the advantage {self.advantage!r} needs {name}, and there are none")
        options = {option: getattr(self, flag) for flag, option in _PARAMETERS.items() if self.reads(option)}
        advantages = self.advantage_function(rewards, group_size, **known, **options, **self.advantage_options)
        if advantages.shape != rewards.shape:
            raise ValueError(
                f"the advantage {self.advantage!r} returned shape {list(advantages.shape)} for {len(rewards)} "
                "rewards; it must return one advantage for each"
            )
        return advantages if self.advantage_clip is None else clip_advantages(advantages, self.advantage_clip)

    def reward_penalty(self, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
        """The KL penalty on each response's reward: beta times the sum of the estimates over its tokens. [B]."""
        divergence = kl_estimate(log_probs.detach(), ref_log_probs.detach(), self.kl_estimator)
        return self.beta * masked_sum(divergence, mask, dim=-1)

    # ---- From scores to the loss ----

    def loss(
        self,
        scores: PolicyScores,
        *,
        weights: Tensor | None = None,
        token_count: Tensor | float | None = None,
        row_count: float | None = None,
        constant: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to minimise, and what it shows about this micro-batch.

        Args:
            scores: the scores of B responses; `ref_log_probs` are needed for a KL term in the loss.
            weights: further factors of the surrogate, but not of the KL term, [B, T] or [B, 1]: importance weights
                for another sampler, or a mask of tokens.
            token_count, row_count: see `aggregate`; also used for a separate mean of the KL term.
            constant: the generation budget, for the aggregation `constant`.

        Returns:
            The loss, and detached scalars under the names that trainers log: those of `clipped_shares`,
            `log_ratio/clamped` (share of tokens with a log-ratio clamped at 20, where a term of the loss has no
            gradient), and with a reference `kl` (the mean of k3 over the tokens).

        Raises:
            ValueError: reference log-probabilities or the constant are needed and missing.
        """
        scores = scores.without_padding(self.ratio)
        losses = self._surrogate_losses(scores)
        if weights is not None:
            losses = losses * torch.where(scores.mask != 0, weights, 0)
        reduction = {"constant": self.loss_constant or constant, "token_count": token_count, "row_count": row_count}
        if not self._adds_kl:
            loss = aggregate(losses, scores.mask, self.aggregation, **reduction)
        elif self.kl_aggregation is None:
            loss = aggregate(losses + self._kl_term(scores), scores.mask, self.aggregation, **reduction)
        else:
            loss = aggregate(losses, scores.mask, self.aggregation, **reduction)
            loss = loss + aggregate(self._kl_term(scores), scores.mask, self.kl_aggregation, **reduction)
        return loss, self._metrics(scores)

    def _surrogate_losses(self, scores: PolicyScores) -> Tensor:
        """The surrogate of each token, [B, T], or of each response, [B, 1]."""
        advantages, options = scores.advantages, self.surrogate_options
        match self.surrogate:
            case "clip":
                clip = {"clip_low": self.epsilon, "clip_high": self.epsilon_high, "dual_clip": self.dual_clip}
                return clipped_surrogate(scores.log_ratio, advantages, **clip)
            case "no_clip":
                return unclipped_surrogate(scores.log_ratio, advantages)
            case "cispo":
                return cispo(scores.log_ratio, scores.log_probs, advantages, ratio_cap=self.ratio_cap)
            case "reinforce":
                return reinforce(scores.log_probs, advantages)
            case "sapo":
                return sapo(scores.log_ratio, advantages, **options)
            case "gmpo":
                return gmpo(scores.log_ratio, scores.mask, advantages, **options)
        losses = self.function(scores, **({"beta": self.beta} if self.takes_beta else {}), **options)
        rows, tokens = scores.log_probs.shape
        if not isinstance(losses, Tensor) or losses.shape not in ((rows, tokens), (rows, 1)):
            got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise ValueError(
                f"the policy algorithm {self.name!r} returned {got} for {rows} responses of {tokens} tokens; it must "
                f"return one loss per token, [{rows}, {tokens}], or per response, [{rows}, 1], without reducing them"
            )
        return losses

    @property
    def _adds_kl(self) -> bool:
        return self.needs_reference and self.kl_in == "loss" and not self.takes_beta

    def _kl_term(self, scores: PolicyScores) -> Tensor:
        """Beta times the estimate of the KL divergence at each token. [B, T]."""
        if scores.ref_log_probs is None:
            raise ValueError(f"--beta {self.beta:g} needs the reference's log-probabilities, and there are none")
        divergence = self.beta * kl_estimate(scores.log_probs, scores.ref_log_probs, self.kl_estimator)
        return divergence * bounded_ratio(scores.log_ratio) if self.kl_ratio_correction else divergence

    @torch.no_grad()
    def _metrics(self, scores: PolicyScores) -> dict[str, Tensor]:
        metrics, mask = {}, scores.mask != 0
        if self.surrogate == "clip":
            metrics = clipped_shares(scores, self.epsilon, self.epsilon_high)
        elif self.surrogate == "cispo":
            capped = (bounded_ratio(scores.log_ratio) > self.ratio_cap) & (scores.advantages > 0)
            metrics["cispo_clip_ratio"] = _mean(capped.float(), mask)
        clamped = torch.zeros_like(mask)
        # CISPO's gradient does not flow through the ratio.
        if self.surrogate in ("clip", "no_clip", "sapo", "gmpo") or (self._adds_kl and self.kl_ratio_correction):
            clamped = clamped | (scores.log_ratio > MAX_EXPONENT)
        if self._adds_kl and self.kl_estimator == "k3":
            clamped = clamped | (scores.ref_log_probs - scores.log_probs > MAX_EXPONENT)
        metrics["log_ratio/clamped"] = _mean(clamped.float(), mask)
        if scores.ref_log_probs is not None:
            metrics["kl"] = _mean(kl_estimate(scores.log_probs, scores.ref_log_probs, "k3"), mask)
        return metrics

    # ---- Resolution of settings, and checks ----

    def _resolve(self, given: Mapping[str, Any]) -> None:
        """Set every setting: the given ones, the row's own where something reads them, and defaults."""
        settings = {**dict.fromkeys(SETTINGS), **_DEFAULTS, **self._own, **given}
        self.advantage_function = function_of(settings["advantage"])
        settings["advantage"] = getattr(self.advantage_function, "__name__", str(settings["advantage"]))
        if settings["surrogate"] != "own":
            self.function = SURROGATES[settings["surrogate"]]
        vars(self).update(settings)
        for flag, (other, reason) in self._unread().items():
            if flag in given and given[flag] is not False:
                raise _contradiction(flag, given[flag], other, settings[other], reason)
            # The row's settings of its own advantage, surrogate and KL term are not another's.
            setattr(self, flag, _DEFAULTS.get(flag) if flag in _OF_KL else None)
        for flag, option in _PARAMETERS.items():
            if self.reads(option) and getattr(self, flag) is None:
                setattr(self, flag, options_of(self.advantage_function)[option].default)
        for flag in SETTINGS:
            value = getattr(self, flag)
            if value is not None and (flag, value) != ("surrogate", "own"):
                _check_value(flag, value)
        for is_wrong, one, other, reason in self._contradictions():
            if is_wrong:
                raise _contradiction(one, getattr(self, one), other, getattr(self, other), reason)
        self.kl_aggregation = None if self.kl_aggregation == "inside" else self.kl_aggregation
        self.epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high

    def _unread(self) -> dict[str, tuple[str, str]]:
        """Settings that nothing reads: the setting because of which, and what to do if it is given."""
        give = "give your function an option for it" if self.surrogate == "own" else "use --surrogate {}"
        unread = {}
        for flag, option in _PARAMETERS.items():
            if not self.reads(option):
                unread[flag] = "advantage", f"the estimator does not read {flag}; use --advantage group_normalized"
        for flag in _OF_SURROGATES:
            reader = "cispo" if flag == "ratio_cap" else "clip"
            if self.surrogate != reader:
                unread[flag] = "surrogate", f"the surrogate does not read {flag}; {give.format(reader)}"
        if self.aggregation != "constant":
            unread["loss_constant"] = "aggregation", "nothing else divides by it; use --aggregation constant"
        if not self.beta:
            unread |= dict.fromkeys(_OF_KL, ("beta", "there is no KL term; use --beta above 0"))
        return {flag: (other, f"{reason}, or leave {flag} out") for flag, (other, reason) in unread.items()}

    def _contradictions(self) -> Iterator[tuple[bool, str, str, str]]:
        """What is wrong, the two settings that contradict each other, why, and what to use instead."""
        surrogate, ratio, kind = self.surrogate, self.ratio, self.kl_estimator
        in_reward, corrects = self.beta and self.kl_in == "reward", self.beta and self.kl_ratio_correction
        itself = self.takes_beta and (not self.beta or self.kl_in != "loss")
        # fmt: off
        yield (itself, "kl_in" if self.beta else "beta", "surrogate",
               "it compares with the reference itself, times a beta above 0; leave settings of a KL term out")
        yield (surrogate == "reinforce" and ratio != "none", "surrogate", "ratio",
               "it has no importance ratio; use --ratio none, or --surrogate no_clip for a ratio without a clip")
        yield (surrogate not in ("reinforce", "own") and ratio == "none", "ratio", "surrogate",
               "this surrogate is of the importance ratio; use --ratio token, or --surrogate reinforce")
        yield (surrogate == "gmpo" and ratio != "token", "ratio", "surrogate",
               "this surrogate is of the token's ratio; use --ratio token, or --surrogate clip")
        yield (ratio == "sequence" and self.aggregation == "token_mean", "ratio", "aggregation",
               "one ratio per response, counted once per token, would weight responses by their length; use "
               "--aggregation sequence_mean, or --ratio token")
        yield (in_reward and kind != "k1", "kl_in", "kl_estimator",
               f"a detached {kind} in the reward follows the gradient of no divergence; use --kl_estimator k1, or "
               "--kl_in loss")
        for flag in ("kl_ratio_correction", "kl_aggregation"):
            yield (in_reward and getattr(self, flag) in (True, "token_mean"), "kl_in", flag,
                   "it concerns a KL term in the loss; leave it out, or use --kl_in loss")
        yield (corrects and ratio == "none", "kl_ratio_correction", "ratio",
               "there is no ratio to correct with; use --ratio token, or leave the correction out")
        yield (corrects and kind == "k2", "kl_ratio_correction", "kl_estimator",
               "k2 has the reverse KL's gradient without it, and not with it; use --kl_estimator k3 or k1")
        # fmt: on

    def _check_name(self, given: Mapping[str, Any]) -> None:
        """Refuse settings that contradict the algorithm's name."""
        for flag in given:
            if flag == "advantage":
                function_of(given[flag])
            else:
                _check_value(flag, given[flag])
        if self.surrogate == "own" and "surrogate" in given:
            reason = f"{self.name} has a surrogate of its own; leave --surrogate out"
            raise _contradiction("algorithm", self.name, "surrogate", given["surrogate"], reason)
        for flag in self.defined_by:
            own = getattr(self, flag)
            permitted = next((equal for equal in _EQUAL_BUT_FOR_A_FACTOR if own in equal), (own,))
            if given.get(flag, own) not in permitted:
                shown = getattr(given[flag], "__name__", given[flag])
                use = f"use --{flag} {' or '.join(permitted)}, or --algorithm grpo"
                reason = f'it is "{self.summary}"; {use}'
                raise _contradiction("algorithm", self.name, flag, shown, reason)
        high = self._own.get("epsilon_high")
        if high is not None and "epsilon_high" not in given and given.get("epsilon", 0) > high:
            reason = f"its epsilon_high is {high}, below that; give --epsilon_high as well"
            raise _contradiction("algorithm", self.name, "epsilon", given["epsilon"], reason)

    def _check_surrogate_options(self) -> None:
        name = self.name if self.surrogate == "own" else self.surrogate
        if self.surrogate not in ("own", "sapo", "gmpo") and self.surrogate_options:
            option = next(iter(self.surrogate_options))
            raise ValueError(f"{name!r} has no option {option!r}: its settings are flags of their own")
        Entry(name, self.function).check_options(self.surrogate_options)


def _contradiction(one: str, value: Any, other: str, other_value: Any, reason: str) -> ValueError:
    return ValueError(f"--{one} {value} and --{other} {other_value} contradict each other: {reason}")


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the counted tokens; 0 if none count."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


# ---- The table ----

# Name to `Algorithm`, in the order of the table.
algorithms = Registry("policy algorithm", Algorithm)
policy_algorithm = algorithms.register


def _add(name: str, summary: str, paper: str, **settings: Any) -> None:
    algorithms.add(Algorithm(name, paper=paper, summary=summary, **settings))


# A row defines how rewards become advantages, the unit of the importance ratio, the surrogate loss, its reduction, and
# the KL term, each as in its paper. Standard deviations are the population's (the papers do not say), unless a row
# follows a source that uses the sample's.
_POPULATION = {"std_ddof": 0, "advantage_eps": 1e-6}
# Used by CS336 and its test snapshots.
_SAMPLE = {"std_ddof": 1, "advantage_eps": 1e-6}
_CLIP = {"surrogate": "clip", "epsilon": 0.2}
_REINFORCE = {"surrogate": "reinforce", "ratio": "none"}
_TOKENS = {"aggregation": "token_mean"}
_DR_GRPO = {"advantage": "group_centered", "aggregation": "constant", "defined_by": ("advantage", "aggregation")}
_GSPO = {"ratio": "sequence", "defined_by": ("ratio", "aggregation", "surrogate")}
_DAPO = {
    **_CLIP,
    **_POPULATION,
    **_TOKENS,
    "epsilon_high": 0.28,
    "group_size": 16,
    "defined_by": ("surrogate", "ratio", "aggregation"),
}
_BERKELEY = {**_CLIP, "advantage_clip": 5.0, "beta": 0.01, "kl_aggregation": "token_mean"}
_OF_ADVANTAGE = {"defined_by": ("advantage",)}
_OF_TOKEN_RATIO = {"defined_by": ("surrogate", "ratio", "aggregation")}

# fmt: off
# The paper's KL coefficient; the paper uses groups of 64, later work 8 to 16. Nothing defines the name: start your own
# combination from this row.
_add("grpo", "Group-normalised rewards, clipped token ratio", "2402.03300", **_CLIP, **_POPULATION, beta=0.04)
_add("dr_grpo", "GRPO without the standard deviation and without length normalisation", "2503.20783",
     **_CLIP, **_DR_GRPO)
_add("gspo", "One length-normalised ratio per sequence, clipped", "2507.18071", surrogate="clip", epsilon=3e-4,
     epsilon_high=4e-4, **_POPULATION, **_GSPO)
_add("rloo", "REINFORCE with the mean of the other responses as baseline", "2402.14740", **_REINFORCE,
     advantage="leave_one_out", **_OF_ADVANTAGE, aggregation="sum", beta=0.03,
     kl_estimator="k1", kl_in="reward", group_size=4)
# PPO's KL coefficient, since the paper's was not checked.
_add("remax", "REINFORCE with the greedy response's reward as baseline", "2310.10505", **_REINFORCE,
     advantage="greedy_baseline", **_OF_ADVANTAGE, aggregation="sum", beta=0.05,
     kl_estimator="k1", kl_in="reward", group_size=1)
_add("reinforce", "Rewards times log-probabilities", "Williams 1992; CS336", **_REINFORCE, advantage="no_baseline",
     defined_by=("advantage", "ratio"))
_add("reinforce_with_baseline", "Group-normalised rewards times log-probabilities", "CS336", **_REINFORCE,
     **_SAMPLE, defined_by=("ratio",))
_add("grpo_no_clip", "GRPO with an unclipped ratio", "CS336", surrogate="no_clip", **_SAMPLE,
     defined_by=("surrogate",))
_add("dapo", "GRPO with a higher upper clip and a mean over tokens; no KL", "2503.14476", **_DAPO)
# The paper's share: 4,096 of 20,480 tokens. The rounds are those after which its recipe in verl stops.
_add("dapo_full", "DAPO's loss with its dynamic sampling and its punishment of long responses", "2503.14476", **_DAPO,
     rollout={"resample_groups": 10, "overlong_share": 0.2})
_add("cispo", "Capped ratio as a weight; no token loses its gradient", "2506.13585, 2510.13786", surrogate="cispo",
     ratio_cap=5.0, **_POPULATION, **_TOKENS, **_OF_TOKEN_RATIO)
_add("gopo", "Ranks within the group in place of rewards", "2602.03876", **_CLIP, **_TOKENS,
     advantage="group_rank", **_OF_ADVANTAGE, advantage_options={"scale": 2.0})
# Averaging over tokens, here and for OPO, keeps the estimator's weights equal across responses.
_add("max_rl", "Rewards over their mean: likelihood of a right answer, for rewards of 0 and 1", "2602.02710", **_CLIP,
     **_TOKENS, advantage="mean_normalized", **_OF_ADVANTAGE, advantage_eps=1e-6)
_add("opo", "On-policy with the length-weighted optimal baseline", "2505.23585", **_REINFORCE, **_TOKENS,
     advantage="length_weighted", **_OF_ADVANTAGE)
# The KL coefficient and eps are those of its implementation in OpenRLHF.
_add("reinforce_plus_plus_baseline", "Group mean as baseline, then normalised over the batch", "2501.03262", **_CLIP,
     **_TOKENS, advantage="batch_normalized", **_OF_ADVANTAGE, std_ddof=0,
     advantage_eps=1e-8, advantage_options={"std_of": "advantages"}, beta=0.01, kl_estimator="k2")
_add("sapo", "A gate on the ratio that closes smoothly in place of the clip", "2511.20347", surrogate="sapo",
     **_POPULATION, **_OF_TOKEN_RATIO)
_add("gmpo", "Geometric mean of a response's clipped ratios", "2507.20673", surrogate="gmpo", **_POPULATION,
     **_OF_TOKEN_RATIO)
_add("berkeley_grpo", "The course's GRPO: KL averaged by itself", "Berkeley course", **_BERKELEY, **_POPULATION)
_add("berkeley_dr_grpo", "The course's Dr.GRPO: KL averaged by itself", "Berkeley course", **_BERKELEY, **_DR_GRPO)
_add("berkeley_gspo", "The course's GSPO: clip 0.2, KL averaged by itself", "Berkeley course", **_BERKELEY,
     **_POPULATION, **_GSPO)
# fmt: on
