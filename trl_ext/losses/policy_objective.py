"""A policy loss with its settings: a surrogate, a KL term, and the reduction of both to the scalar to minimise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trl_ext.losses.kl import KL_ESTIMATORS, MAX_EXPONENT, kl_estimate
from trl_ext.losses.masking import masked_sum
from trl_ext.losses.policy import (
    AGGREGATIONS,
    PolicyScores,
    aggregate,
    bounded_ratio,
    cispo,
    clipped_surrogate,
    quadratic_ratio,
    reinforce,
    unclipped_surrogate,
)
from trl_ext.registry import Entry, nearest

# Settings that a surrogate reads, beside the ratio.
KNOBS = {
    "clip": ("epsilon", "epsilon_high", "dual_clip"),
    "no_clip": (),
    "cispo": ("ratio_cap",),
    "reinforce": (),
    "quadratic_ratio": (),
    "own": (),
}
SURROGATES = tuple(name for name in KNOBS if name != "own")
CHOICES = {
    "surrogate": SURROGATES,
    "ratio": ("token", "sequence", "none"),
    "aggregation": AGGREGATIONS,
    "kl_estimator": KL_ESTIMATORS,
    "kl_in": ("loss", "reward"),
    "kl_aggregation": ("inside", "token_mean"),
}
_RANGES = {
    "epsilon": (lambda value: value >= 0, "a number from 0 up"),
    "epsilon_high": (lambda value: value >= 0, "a number from 0 up"),
    "dual_clip": (lambda value: value > 1, "above 1, where it would cut off the unclipped loss"),
    "ratio_cap": (lambda value: value >= 1, "at least 1: it is the cap itself and not its distance from 1"),
    "loss_constant": (lambda value: value > 0, "positive"),
    "beta": (lambda value: value >= 0, "a number from 0 up"),
    "std_ddof": (lambda value: value in (0, 1), "0 (population) or 1 (sample)"),
    "advantage_eps": (lambda value: value >= 0, "a number from 0 up"),
    "advantage_clip": (lambda value: value > 0, "positive"),
}


def check_choice(flag: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of the choices, with the nearest and the list."""
    if value not in choices:
        raise ValueError(f"unknown --{flag} {value!r}{nearest(str(value), list(choices))} Known: {', '.join(choices)}")


def check_number(flag: str, value: Any) -> None:
    """Refuse a setting that is not a finite number or out of its range."""
    permitted, description = _RANGES[flag]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not permitted(value):
        raise ValueError(f"--{flag} must be {description}, got {value!r}")


@dataclass(kw_only=True)
class PolicyLoss:
    """From `PolicyScores` to the scalar to minimise. Attributes are those of `trl_ext.registry.Algorithm`, and

    Attributes:
        loss_constant: what the aggregation `constant` divides by; None for what the caller gives.
        options: keyword options of a surrogate of one's own, or `strength` of `quadratic_ratio`.
        function: the surrogate of one's own.

    Raises:
        ValueError: an unknown name, a value out of range, settings that contradict each other or that nothing would
            read; the message names the flags.
    """

    surrogate: str = "clip"
    ratio: str = "token"
    aggregation: str = "sequence_mean"
    epsilon: float | None = None
    epsilon_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float | None = None
    loss_constant: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    kl_ratio_correction: bool = False
    kl_aggregation: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    function: Callable | None = None

    def __post_init__(self):
        for flag, choices in CHOICES.items():
            own = self.function is not None and flag == "surrogate"
            if not own and getattr(self, flag) is not None:
                check_choice(flag, getattr(self, flag), choices)
        self.kl_aggregation = None if self.kl_aggregation == "inside" else self.kl_aggregation
        for flag in (*KNOBS["clip"], "ratio_cap", "loss_constant", "beta"):
            if getattr(self, flag) is not None:
                check_number(flag, getattr(self, flag))
        self._check_knobs()
        self._check_ratio()
        if self.needs_reference:
            self._check_kl()
        self._check_options()
        self._fill_knobs()
        if self.function is not None:
            self._dry_run()

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
            scores: what is known of B responses.
            ref_log_probs: token log-probabilities under the reference, [B, T]; needed for a KL term in the loss.
            weights: further factors of the surrogate, though not of the KL term, [B, T] or [B, 1]: importance weights
                for another sampler, or a mask of tokens.
            token_count: see `aggregate`; used for the KL term's own mean as well.
            constant: the generation budget, for the aggregation `constant`.

        Raises:
            ValueError: no reference log-probabilities or no constant where they are needed.
        """
        padding = scores.mask == 0
        scores = replace(
            scores,
            log_probs=_blank(scores.log_probs, padding),
            old_log_probs=_blank(scores.old_log_probs, padding),
            advantages=_blank(scores.advantages, padding),
            ratio=self.ratio,
        )
        losses = self._surrogate_losses(scores)
        if weights is not None:
            losses = losses * _blank(weights, padding)
        reduction = {"constant": self.loss_constant or constant, "token_count": token_count}
        if not self.needs_reference or self.kl_in != "loss":
            return aggregate(losses, scores.mask, self.aggregation, **reduction)
        divergence = self.beta * self._divergence(scores, _blank(ref_log_probs, padding))
        if self.kl_aggregation is None:
            return aggregate(losses + divergence, scores.mask, self.aggregation, **reduction)
        surrogate = aggregate(losses, scores.mask, self.aggregation, **reduction)
        return surrogate + aggregate(divergence, scores.mask, self.kl_aggregation, **reduction)

    def clamped(self, scores: PolicyScores, ref_log_probs: Tensor | None = None) -> Tensor:
        """Tokens with a log-ratio clamped at 20, where a term of the loss has no gradient. Boolean, [B, T].

        Args:
            scores, ref_log_probs: as for the loss.
        """
        has_divergence = self.needs_reference and self.kl_in == "loss"
        beyond = torch.zeros_like(scores.mask, dtype=torch.bool)
        # CISPO caps its ratio far below, and lets no gradient through it.
        is_bounded = self.function is None and self.surrogate in ("clip", "no_clip", "quadratic_ratio")
        if is_bounded or (has_divergence and self.kl_ratio_correction):
            beyond = beyond | (scores.log_ratio > MAX_EXPONENT)
        if has_divergence and self.kl_estimator == "k3":
            beyond = beyond | (ref_log_probs - scores.log_probs > MAX_EXPONENT)
        return beyond & (scores.mask != 0)

    def reward_penalty(self, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
        """What the KL divergence takes off each response's reward: beta times its sum over the tokens. [B].

        Args:
            log_probs: log-probabilities of the sampled tokens under the policy that sampled them, [B, T].
            ref_log_probs: the same under the reference.
            mask: 1 where a token counts, [B, T].
        """
        divergence = kl_estimate(log_probs.detach(), ref_log_probs.detach(), self.kl_estimator)
        return self.beta * masked_sum(divergence, mask, dim=-1)

    def _surrogate_losses(self, scores: PolicyScores) -> Tensor:
        if self.function is not None:
            losses = self.function(scores, **self.options)
            return self._checked_shape(losses, scores)
        if self.surrogate == "reinforce":
            return reinforce(scores.log_probs, scores.advantages)
        if self.surrogate == "cispo":
            return cispo(scores.log_ratio, scores.log_probs, scores.advantages, ratio_cap=self.ratio_cap)
        if self.surrogate == "no_clip":
            return unclipped_surrogate(scores.log_ratio, scores.advantages)
        if self.surrogate == "quadratic_ratio":
            return quadratic_ratio(scores.log_ratio, scores.advantages, **self.options)
        return clipped_surrogate(
            scores.log_ratio,
            scores.advantages,
            clip_low=self.epsilon,
            clip_high=self.epsilon_high,
            dual_clip=self.dual_clip,
        )

    def _divergence(self, scores: PolicyScores, ref_log_probs: Tensor | None) -> Tensor:
        if ref_log_probs is None:
            raise ValueError(f"--beta {self.beta:g} needs the reference's log-probabilities, and there are none")
        divergence = kl_estimate(scores.log_probs, ref_log_probs, self.kl_estimator)
        return divergence * bounded_ratio(scores.log_ratio) if self.kl_ratio_correction else divergence

    # ---- Checks ----

    def _refuse(self, one: str, other: str, reason: str) -> None:
        flags = " and ".join(f"--{flag} {getattr(self, flag)}" for flag in (one, other))
        raise ValueError(f"{flags} contradict each other: {reason}")

    def _check_knobs(self) -> None:
        for owner, knobs in KNOBS.items():
            for knob in knobs:
                if getattr(self, knob) is None or knob in KNOBS[self.surrogate]:
                    continue
                instead = f"use --surrogate {owner}"
                if self.function is not None:
                    instead = "give your function an option for it"
                self._refuse(knob, "surrogate", f"this surrogate does not read {knob}; leave it out, or {instead}")
        if self.loss_constant is not None and self.aggregation != "constant":
            reason = "only a constant aggregation divides by it; leave it out, or use --aggregation constant"
            self._refuse("loss_constant", "aggregation", reason)

    def _check_ratio(self) -> None:
        if self.surrogate == "reinforce" and self.ratio != "none":
            reason = "it has no importance ratio; use --ratio none, or --surrogate no_clip for a ratio without a clip"
            self._refuse("surrogate", "ratio", reason)
        if self.ratio == "none" and self.surrogate not in ("reinforce", "own"):
            reason = "this surrogate is of the importance ratio; use --ratio token, or --surrogate reinforce"
            self._refuse("ratio", "surrogate", reason)
        if self.ratio == "sequence" and self.aggregation == "token_mean":
            reason = (
                "one ratio per response, counted once per token, would weight responses by their length; "
                "use --aggregation sequence_mean, or --ratio token"
            )
            self._refuse("ratio", "aggregation", reason)

    def _check_kl(self) -> None:
        if self.kl_in == "reward":
            if self.kl_estimator != "k1":
                reason = (
                    f"a detached {self.kl_estimator} in the reward follows the gradient of no divergence; "
                    "use --kl_estimator k1, or --kl_in loss"
                )
                self._refuse("kl_in", "kl_estimator", reason)
            for flag in ("kl_ratio_correction", "kl_aggregation"):
                if getattr(self, flag):
                    self._refuse("kl_in", flag, "it concerns a KL term in the loss; leave it out, or use --kl_in loss")
        if not self.kl_ratio_correction:
            return
        if self.ratio == "none":
            reason = "there is no ratio to correct with; use --ratio token, or leave the correction out"
            self._refuse("kl_ratio_correction", "ratio", reason)
        if self.kl_estimator == "k2":
            reason = "k2 has the reverse KL's gradient without it, and not with it; use --kl_estimator k3 or k1"
            self._refuse("kl_ratio_correction", "kl_estimator", reason)

    def _check_options(self) -> None:
        if self.function is not None:
            Entry(self._function_name, self.function).check_options(self.options)
        elif self.surrogate == "quadratic_ratio":
            Entry("quadratic_ratio", quadratic_ratio).check_options(self.options)
        elif self.options:
            raise ValueError(
                f"the surrogate {self.surrogate!r} takes no options, and {', '.join(self.options)} would not be read: "
                "leave them out"
            )

    def _fill_knobs(self) -> None:
        if self.surrogate == "clip":
            self.epsilon = 0.2 if self.epsilon is None else self.epsilon
            self.epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.surrogate == "cispo" and self.ratio_cap is None:
            self.ratio_cap = 5.0

    # ---- A surrogate of one's own ----

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

    @property
    def _function_name(self) -> str:
        return getattr(self.function, "__name__", "own")

    def _dry_run(self) -> None:
        """Evaluate the function once on made-up scores, so that a wrong shape or option shows before training."""
        old = torch.linspace(-2.5, -0.2, 12).reshape(3, 4)
        log_probs = (old + torch.linspace(-0.3, 0.3, 12).flip(0).reshape(3, 4)).requires_grad_()
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
        advantages = torch.tensor([[1.0], [-0.5], [0.25]])
        scores = PolicyScores(log_probs, None if self.ratio == "none" else old, mask, advantages, self.ratio)
        name = self._function_name
        try:
            with torch.enable_grad():
                losses = self._surrogate_losses(scores)
        except ValueError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"the policy algorithm {name!r} fails on made-up responses: {problem}") from error
        if not losses.requires_grad:
            raise ValueError(
                f"the policy algorithm {name!r} has no gradient: it must be computed from scores.log_probs or "
                "scores.log_ratio with torch operations"
            )
        total = aggregate(losses, mask, "sum")
        (gradient,) = torch.autograd.grad(total, log_probs, allow_unused=True)
        if gradient is None or not bool(total.isfinite()) or not bool(gradient.isfinite().all()):
            raise ValueError(
                f"the policy algorithm {name!r} returns losses {losses.tolist()} for made-up responses: they and "
                "their gradient must be finite"
            )


def _blank(values: Tensor | None, padding: Tensor) -> Tensor | None:
    """Zeros at padding, where an infinity or a NaN would reach the gradient even of a masked sum."""
    if values is None or values.shape != padding.shape:
        return values
    return values.masked_fill(padding, 0)
