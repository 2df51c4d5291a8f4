"""A policy loss with its settings: a surrogate, a KL term, and the reduction of both to the scalar to minimise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trl_ext.losses.kl import MAX_EXPONENT, kl_estimate
from trl_ext.losses.masking import aggregate, masked_sum
from trl_ext.losses.policy import SURROGATES, PolicyScores, bounded_ratio
from trl_ext.registry import Entry
from trl_ext.settings import LOSS_SETTINGS, LossFields


def settings_of(function: Callable) -> dict[str, Any]:
    """Settings that a built-in surrogate reads as keyword parameters, with its defaults."""
    options = Entry("", function).options
    return {name: options[s.option] for name, s in LOSS_SETTINGS.items() if s.option in options}


@dataclass(kw_only=True)
class PolicyLoss(LossFields):
    """Computes the scalar to minimise from `PolicyScores`. Its settings are `trl_ext.settings.LOSS_SETTINGS`.

    Attributes:
        options: keyword options of the surrogate that are not settings: those of your own function, or the
            temperatures of `sapo`.
        function: the surrogate; if given, your own `f(scores, ...)`, which makes the setting `surrogate` `own`. If it
            has a keyword `beta`, it compares with the reference itself: no KL term is added.

    Raises:
        ValueError: an unknown name, a value out of range, settings that contradict each other or that nothing would
            read; the message names the flags.
    """

    options: dict[str, Any] = field(default_factory=dict)
    function: Callable | None = None

    def __post_init__(self):
        if self.function is None:
            self.surrogate = self.surrogate or "clip"
            LOSS_SETTINGS["surrogate"].check("surrogate", self.surrogate)
            self.function = SURROGATES[self.surrogate]
        else:
            self.surrogate = "own"
        of_kl = [name for name in LOSS_SETTINGS if name.startswith("kl_") and getattr(self, name)]
        for name, setting in LOSS_SETTINGS.items():
            if getattr(self, name) is None:
                setattr(self, name, setting.default)
            elif name != "surrogate":
                setting.check(name, getattr(self, name))
        self.kl_aggregation = None if self.kl_aggregation == "inside" else self.kl_aggregation
        for one, other, reason in self._contradictions(of_kl):
            flags = " and ".join(f"--{flag} {getattr(self, flag)}" for flag in (one, other))
            raise ValueError(f"{flags} contradict each other: {reason}")
        self._check_options()
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        for name, default in self._read.items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are read, by the loss or for the reward."""
        return self.beta > 0

    def __call__(
        self,
        scores: PolicyScores,
        *,
        ref_log_probs: Tensor | None = None,
        weights: Tensor | None = None,
        token_count: Tensor | float | None = None,
        constant: float | None = None,
    ) -> Tensor:
        """The scalar to minimise.

        Args:
            scores: the scores of B responses.
            ref_log_probs: token log-probabilities under the reference, [B, T]; needed for a KL term in the loss.
                Default: those of the scores.
            weights: further factors of the surrogate, but not of the KL term, [B, T] or [B, 1]: importance weights
                for another sampler, or a mask of tokens.
            token_count: see `aggregate`; also used for a separate mean of the KL term.
            constant: the generation budget, for the aggregation `constant`.

        Raises:
            ValueError: reference log-probabilities or the constant are needed and missing.
        """
        padding = scores.mask == 0
        ref_log_probs = scores.ref_log_probs if ref_log_probs is None else ref_log_probs
        scores = replace(
            scores,
            log_probs=_blank(scores.log_probs, padding),
            old_log_probs=_blank(scores.old_log_probs, padding),
            sampler_log_probs=_blank(scores.sampler_log_probs, padding),
            ref_log_probs=_blank(ref_log_probs, padding),
            advantages=_blank(scores.advantages, padding),
            ratio=self.ratio,
        )
        losses = self._surrogate_losses(scores)
        if weights is not None:
            losses = losses * _blank(weights, padding)
        reduction = {"constant": self.loss_constant or constant, "token_count": token_count}
        if not self._adds_kl:
            return aggregate(losses, scores.mask, self.aggregation, **reduction)
        divergence = self.beta * self._divergence(scores, _blank(ref_log_probs, padding))
        if self.kl_aggregation is None:
            return aggregate(losses + divergence, scores.mask, self.aggregation, **reduction)
        surrogate = aggregate(losses, scores.mask, self.aggregation, **reduction)
        return surrogate + aggregate(divergence, scores.mask, self.kl_aggregation, **reduction)

    def clamped(self, scores: PolicyScores, ref_log_probs: Tensor | None = None) -> Tensor:
        """Tokens with a log-ratio clamped at 20, where a term of the loss has no gradient. Boolean, [B, T]."""
        has_divergence = self._adds_kl
        ref_log_probs = scores.ref_log_probs if ref_log_probs is None else ref_log_probs
        beyond = torch.zeros_like(scores.mask, dtype=torch.bool)
        # No gradient is lost if it flows through log_probs, as in CISPO.
        is_bounded = self._reads_ratio and "log_probs" not in self._inputs
        if is_bounded or (has_divergence and self.kl_ratio_correction):
            beyond = beyond | (scores.log_ratio > MAX_EXPONENT)
        if has_divergence and self.kl_estimator == "k3":
            beyond = beyond | (ref_log_probs - scores.log_probs > MAX_EXPONENT)
        return beyond & (scores.mask != 0)

    def reward_penalty(self, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
        """The KL penalty on each response's reward: beta times the sum of the estimates over its tokens. [B]."""
        divergence = kl_estimate(log_probs.detach(), ref_log_probs.detach(), self.kl_estimator)
        return self.beta * masked_sum(divergence, mask, dim=-1)

    # ---- The surrogate, by its signature ----

    @property
    def _inputs(self) -> list[str]:
        """Positional parameters: `scores` for your own function, its attributes for a built-in one."""
        return ["scores"] if self.surrogate == "own" else Entry("", self.function).inputs

    @property
    def _read(self) -> dict[str, Any]:
        """Settings that the surrogate reads, with its defaults; your own function has options instead."""
        return {} if self.surrogate == "own" else settings_of(self.function)

    @property
    def _reads_ratio(self) -> bool:
        return "log_ratio" in self._inputs

    @property
    def _takes_beta(self) -> bool:
        """Whether your own function itself compares with the reference."""
        return Entry("", self.function).takes_beta

    @property
    def _adds_kl(self) -> bool:
        return self.needs_reference and self.kl_in == "loss" and not self._takes_beta

    @property
    def _function_name(self) -> str:
        return self.function.__name__ if self.surrogate == "own" else self.surrogate

    def _surrogate_losses(self, scores: PolicyScores) -> Tensor:
        inputs = [getattr(scores, name, scores) for name in self._inputs]
        settings = {LOSS_SETTINGS[name].option: getattr(self, name) for name in self._read}
        if self._takes_beta:
            settings["beta"] = self.beta
        losses = self.function(*inputs, **settings, **self.options)
        return self._checked_shape(losses, scores) if self.surrogate == "own" else losses

    def _divergence(self, scores: PolicyScores, ref_log_probs: Tensor | None) -> Tensor:
        if ref_log_probs is None:
            raise ValueError(f"--beta {self.beta:g} needs the reference's log-probabilities, and there are none")
        divergence = kl_estimate(scores.log_probs, ref_log_probs, self.kl_estimator)
        return divergence * bounded_ratio(scores.log_ratio) if self.kl_ratio_correction else divergence

    # ---- Checks ----

    def _contradictions(self, of_kl: list[str]) -> Iterator[tuple[str, str, str]]:
        """Two settings that contradict each other, why, and what to use instead; `of_kl` names those of a KL term."""
        own, reads_ratio = self.surrogate == "own", self._reads_ratio
        for name, setting in LOSS_SETTINGS.items():
            if setting.option and getattr(self, name) is not None and name not in self._read:
                readers = [known for known, function in SURROGATES.items() if name in settings_of(function)]
                instead = "give your function an option for it" if own else f"use --surrogate {readers[0]}"
                yield name, "surrogate", f"this surrogate does not read {name}; leave it out, or {instead}"
        if self.loss_constant is not None and self.aggregation != "constant":
            reason = "only a constant aggregation divides by it; leave it out, or use --aggregation constant"
            yield "loss_constant", "aggregation", reason
        if self._takes_beta and (not self.beta or self.kl_in != "loss"):
            reason = "it compares with the reference itself, times a beta above 0; leave settings of a KL term out"
            yield "kl_in" if self.beta else "beta", "surrogate", reason
        if not own and not reads_ratio and self.ratio != "none":
            reason = "it has no importance ratio; use --ratio none, or --surrogate no_clip for a ratio without a clip"
            yield "surrogate", "ratio", reason
        if self.ratio == "none" and reads_ratio:
            reason = "this surrogate is of the importance ratio; use --ratio token, or --surrogate reinforce"
            yield "ratio", "surrogate", reason
        if self.surrogate == "gmpo" and self.ratio != "token":
            yield (
                "ratio",
                "surrogate",
                "this surrogate is of the token's ratio; use --ratio token, or --surrogate clip",
            )
        if self.ratio == "sequence" and self.aggregation == "token_mean":
            reason = "one ratio per response, counted once per token, would weight responses by their length; "
            yield "ratio", "aggregation", reason + "use --aggregation sequence_mean, or --ratio token"
        if not self.beta:
            for name in of_kl:
                reason = f"without a beta there is no KL term; use --beta above 0, or leave {name} out"
                yield name, "beta", reason
            return
        if self.kl_in == "reward" and self.kl_estimator != "k1":
            reason = f"a detached {self.kl_estimator} in the reward follows the gradient of no divergence; "
            yield "kl_in", "kl_estimator", reason + "use --kl_estimator k1, or --kl_in loss"
        for name in ("kl_ratio_correction", "kl_aggregation"):
            if self.kl_in == "reward" and getattr(self, name):
                yield "kl_in", name, "it concerns a KL term in the loss; leave it out, or use --kl_in loss"
        if self.kl_ratio_correction and self.ratio == "none":
            reason = "there is no ratio to correct with; use --ratio token, or leave the correction out"
            yield "kl_ratio_correction", "ratio", reason
        if self.kl_ratio_correction and self.kl_estimator == "k2":
            reason = "k2 has the reverse KL's gradient without it, and not with it; use --kl_estimator k3 or k1"
            yield "kl_ratio_correction", "kl_estimator", reason

    def _check_options(self) -> None:
        for name in self._read:
            option = LOSS_SETTINGS[name].option
            if option in self.options:
                raise ValueError(
                    f"the surrogate {self.surrogate!r} reads {option!r} from the setting {name}: give that"
                )
        Entry(self._function_name, self.function).check_options(self.options)

    # ---- Your own surrogate ----

    def _checked_shape(self, losses: Any, scores: PolicyScores) -> Tensor:
        rows, tokens = scores.log_probs.shape
        if not isinstance(losses, Tensor) or losses.shape not in ((rows, tokens), (rows, 1)):
            got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise ValueError(
                f"the policy algorithm {self._function_name!r} returned {got} for {rows} responses of {tokens} "
                f"tokens; it must return one loss per token, [{rows}, {tokens}], or per response, [{rows}, 1], "
                "without reducing them"
            )
        return losses


def _blank(values: Tensor | None, padding: Tensor) -> Tensor | None:
    """Zeros at padding, where an infinity or a NaN would reach the gradient even of a masked sum."""
    if values is None or values.shape != padding.shape:
        return values
    return values.masked_fill(padding, 0)
