"""Preference losses: pure functions from sequence log-probabilities to one loss per pair.

Notation: `h_w` and `h_l` are the reference-corrected log-ratios of the chosen and the rejected response, `margin` is
`h_w - h_l`, and `l(u) = -log sigmoid(u)`. A loss returns one value per pair, [B]; its defaults are the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trl_ext.registry import preference_loss


@dataclass
class PreferenceScores:
    """The inputs of a preference loss for a batch of B pairs; every tensor has the shape [B].

    Attributes:
        chosen, rejected: sums of the policy's token log-probabilities over the response, in nats.
        ref_chosen, ref_rejected: the same under the frozen reference; None for a reference-free loss.
        chosen_length, rejected_length: response tokens, including the end-of-turn token if it is trained on.
        columns: dataset columns by name.
        chosen_policy_weight, rejected_policy_weight: WPO's length-normalised policy probability of each response,
            which is 1 for a typical sample; no gradient flows through it. None unless a weighting needs it.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None
    chosen_length: Tensor | None = None
    rejected_length: Tensor | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)
    chosen_policy_weight: Tensor | None = None
    rejected_policy_weight: Tensor | None = None

    @property
    def chosen_log_ratio(self) -> Tensor:
        """`h_w`: log of policy over reference probability of the chosen response."""
        return self.chosen - self._reference(self.ref_chosen)

    @property
    def rejected_log_ratio(self) -> Tensor:
        """`h_l`: log of policy over reference probability of the rejected response."""
        return self.rejected - self._reference(self.ref_rejected)

    @property
    def margin(self) -> Tensor:
        """Reference-corrected margin `h_w - h_l`."""
        return self.chosen_log_ratio - self.rejected_log_ratio

    @property
    def chosen_mean(self) -> Tensor:
        """Mean log-probability of a token of the chosen response."""
        return self.chosen / self._length(self.chosen_length)

    @property
    def rejected_mean(self) -> Tensor:
        """Mean log-probability of a token of the rejected response."""
        return self.rejected / self._length(self.rejected_length)

    @staticmethod
    def _reference(values: Tensor | None) -> Tensor:
        if values is None:
            raise ValueError(
                "this loss reads reference log-probabilities, and there are none: "
                "register it with needs_reference=True"
            )
        return values

    @staticmethod
    def _length(length: Tensor | None) -> Tensor:
        if length is None:
            raise ValueError("this loss averages over tokens and needs chosen_length and rejected_length")
        return length.clamp(min=1)


def _check_from_0(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} must be a number from 0 up, got {value}")


def _check_label_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must lie in [0, 0.5), got {label_smoothing}: it is the probability that a label is "
            "wrong, and from one half on the labels carry no or the opposite information"
        )


@preference_loss("dpo", paper="2305.18290")
def dpo(scores: PreferenceScores, *, beta: float = 0.1) -> Tensor:
    """DPO: `l(beta margin)`. Rafailov et al. 2023, arXiv 2305.18290, equation 7."""
    return -logsigmoid(beta * scores.margin)


@preference_loss("cdpo")
def cdpo(scores: PreferenceScores, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """Conservative DPO: `(1-e) l(beta margin) + e l(-beta margin)`, minimal at `margin = logit(1-e) / beta`.

    Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO". TRL ignores `label_smoothing` for
    its sigmoid loss.
    """
    _check_label_smoothing(label_smoothing)
    logits = beta * scores.margin
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


@preference_loss("robust_dpo", paper="2403.00409")
def robust_dpo(scores: PreferenceScores, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """Robust DPO: an unbiased estimate of the DPO loss under labels flipped with probability e.

    `((1-e) l(beta margin) - e l(-beta margin)) / (1-2e)`. It is unbounded below: stop early.
    Chowdhury et al. 2024, arXiv 2403.00409, equation 12.
    """
    _check_label_smoothing(label_smoothing)
    logits = beta * scores.margin
    kept, flipped = -logsigmoid(logits), -logsigmoid(-logits)
    return ((1 - label_smoothing) * kept - label_smoothing * flipped) / (1 - 2 * label_smoothing)


@preference_loss("ipo", paper="2310.12036")
def ipo(scores: PreferenceScores, *, beta: float = 0.1, length_normalized: bool = False) -> Tensor:
    """IPO: squared distance of the margin from `1 / (2 beta)`. Azar et al. 2023, arXiv 2310.12036, equation 17.

    The margin uses summed log-probabilities, as in the paper. `length_normalized` first averages each log-ratio over
    its tokens, as TRL does. The target is then per token, so the two forms need different values of beta.
    """
    if length_normalized:
        chosen = scores.chosen_log_ratio / scores._length(scores.chosen_length)
        rejected = scores.rejected_log_ratio / scores._length(scores.rejected_length)
        return (chosen - rejected - 1 / (2 * beta)).square()
    return (scores.margin - 1 / (2 * beta)).square()


@preference_loss("hinge", paper="2309.06657")
def hinge(scores: PreferenceScores, *, beta: float = 0.05) -> Tensor:
    """Hinge on the margin: `max(0, 1 - beta margin)`. Liu et al. 2023 (RSO), arXiv 2309.06657."""
    return torch.relu(1 - beta * scores.margin)


@preference_loss("dpop", paper="2402.13228")
def dpop(scores: PreferenceScores, *, beta: float = 0.3, penalty: float = 50.0) -> Tensor:
    """DPO-Positive: DPO whose margin loses `penalty * max(0, -h_w)`, which keeps chosen responses likely.

    Pal et al. 2024 (Smaug), arXiv 2402.13228. The penalty is inside the sigmoid.
    """
    _check_from_0("penalty", penalty)
    return -logsigmoid(beta * (scores.margin - penalty * torch.relu(-scores.chosen_log_ratio)))


@preference_loss("apo_zero", paper="2408.06266")
def apo_zero(scores: PreferenceScores, *, beta: float = 0.1) -> Tensor:
    """APO-zero: `1 - sigmoid(beta h_w) + sigmoid(beta h_l)`; for chosen responses better than the model's own.

    D'Oosterlinck et al. 2024, arXiv 2408.06266, equation 7.
    """
    return 1 - torch.sigmoid(beta * scores.chosen_log_ratio) + torch.sigmoid(beta * scores.rejected_log_ratio)


@preference_loss("apo_down", paper="2408.06266")
def apo_down(scores: PreferenceScores, *, beta: float = 0.1) -> Tensor:
    """APO-down: `sigmoid(beta h_w) + 1 - sigmoid(beta margin)`; for chosen responses worse than the model's own.

    D'Oosterlinck et al. 2024, arXiv 2408.06266, equation 8.
    """
    return torch.sigmoid(beta * scores.chosen_log_ratio) + 1 - torch.sigmoid(beta * scores.margin)


@preference_loss("nca", paper="2402.05369")
def nca(scores: PreferenceScores, *, beta: float = 0.01) -> Tensor:
    """NCA for pairs: `l(beta h_w) + l(-beta h_w)/2 + l(-beta h_l)/2`, which bounds `h_w` at `log 2 / beta`.

    Chen et al. 2024, arXiv 2402.05369.
    """
    chosen, rejected = beta * scores.chosen_log_ratio, beta * scores.rejected_log_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


@preference_loss("sppo", paper="2405.00675")
def sppo(
    scores: PreferenceScores,
    *,
    beta: float = 1e-3,
    chosen_win_probability: float | str = 1.0,
    rejected_win_probability: float | str = 0.0,
) -> Tensor:
    """SPPO: regress each log-ratio to its win probability, `((h - (P - 1/2) / beta)^2)` summed over the pair, halved.

    Wu et al. 2024, arXiv 2405.00675, equation 4.7; beta is the paper's `1 / eta`. The defaults are hard labels; a
    string names the dataset column with a pair's probability. TRL's `sppo_hard` lacks the factor one half.
    """

    def target(probability: float | str) -> float | Tensor:
        if isinstance(probability, (int, float)) and not 0 <= probability <= 1:
            raise ValueError(f"a win probability must lie in [0, 1], got {probability}")
        return ((scores.columns[probability] if isinstance(probability, str) else probability) - 0.5) / beta

    chosen = scores.chosen_log_ratio - target(chosen_win_probability)
    rejected = scores.rejected_log_ratio - target(rejected_win_probability)
    return 0.5 * (chosen.square() + rejected.square())


@preference_loss("aot", batch_coupled=True, paper="2406.05882")
def aot(scores: PreferenceScores, *, beta: float = 0.01) -> Tensor:
    """AOT: the chosen log-ratios should dominate the rejected ones as distributions, quantile by quantile.

    Chosen and rejected log-ratios are sorted over the batch and matched by rank. The loss is `l(beta d)` of the
    difference d between a chosen log-ratio and the rejected one of equal rank; entry i is the loss of chosen response
    i. Which prompt a rejected response belongs to does not matter. Melnyk et al. 2024, arXiv 2406.05882, the unpaired
    form (TRL's `aot_unpaired`); the Berkeley course uses beta 0.2.
    """
    chosen, rejected = scores.chosen_log_ratio, scores.rejected_log_ratio
    return -logsigmoid(beta * (chosen - _of_equal_rank(chosen, rejected)))


@preference_loss("aot_paired", batch_coupled=True, paper="2406.05882")
def aot_paired(scores: PreferenceScores, *, beta: float = 0.01) -> Tensor:
    """AOT on paired data: the policy's margins should dominate the reference's, quantile by quantile.

    The margins `chosen - rejected` of policy and reference are sorted over the batch, and the loss is `l(beta d)` of
    their difference d rank by rank; entry i is the loss of pair i. Melnyk et al. 2024, arXiv 2406.05882, the paired
    form (TRL's `aot`).
    """
    margin = scores.chosen - scores.rejected
    reference_margin = scores._reference(scores.ref_chosen) - scores._reference(scores.ref_rejected)
    return -logsigmoid(beta * (margin - _of_equal_rank(margin, reference_margin)))


def _of_equal_rank(values: Tensor, others: Tensor) -> Tensor:
    """For each of `values`, the element of `others` with the same rank; gradients flow to both. The sort is stable."""
    rank = values.detach().argsort(stable=True).argsort()
    return others.sort(stable=True).values[rank]


@preference_loss("simpo", needs_reference=False, paper="2405.14734")
def simpo(
    scores: PreferenceScores, *, beta: float = 2.0, gamma_beta_ratio: float | None = None, gamma: float | None = None
) -> Tensor:
    """SimPO: `l(beta (mean chosen - mean rejected) - gamma)`, reference-free. Meng et al. 2024, arXiv 2405.14734.

    The paper tabulates `gamma / beta` (the default, 0.5, is for Llama-3 Base); give that or `gamma` itself, not both.
    """
    if gamma is not None and gamma_beta_ratio is not None:
        raise ValueError("give gamma or gamma_beta_ratio, not both: gamma = gamma_beta_ratio * beta")
    if gamma is None:
        gamma = beta * (0.5 if gamma_beta_ratio is None else gamma_beta_ratio)
    return -logsigmoid(beta * (scores.chosen_mean - scores.rejected_mean) - gamma)


@preference_loss("repo", needs_reference=False, paper="2503.07426")
def repo(scores: PreferenceScores, *, gamma: float = 0.6, beta: float = 1.0) -> Tensor:
    """ReLU-based preference optimisation: `max(0, gamma - (mean chosen - mean rejected))`.

    SimPO's limit of large beta; `beta` does not affect the loss and only scales the logged rewards.
    Wu et al. 2025, arXiv 2503.07426 (gamma 0.6 for Llama-3, 0.4 for Mistral and Gemma).
    """
    return torch.relu(gamma - (scores.chosen_mean - scores.rejected_mean))


@preference_loss("cpo", needs_reference=False, paper="2401.08417")
def cpo(scores: PreferenceScores, *, beta: float = 0.1, nll_weight: float = 1.0) -> Tensor:
    """CPO: `l(beta (chosen - rejected))` plus `nll_weight` times the chosen response's mean token loss.

    Xu et al. 2024, arXiv 2401.08417: DPO under a uniform reference, and behaviour cloning of the chosen response.
    """
    _check_from_0("nll_weight", nll_weight)
    return -logsigmoid(beta * (scores.chosen - scores.rejected)) - nll_weight * scores.chosen_mean


@preference_loss("orpo", needs_reference=False, paper="2403.07691")
def orpo(scores: PreferenceScores, *, beta: float = 0.1) -> Tensor:
    """ORPO: the chosen response's mean token loss plus `beta` (the paper's lambda) times a log-odds-ratio loss.

    `log odds = p - log(1 - exp(p))` of the mean token log-probability p. Hong et al. 2024, arXiv 2403.07691.
    """
    log_odds_ratio = _log_odds(scores.chosen_mean) - _log_odds(scores.rejected_mean)
    return -scores.chosen_mean - beta * logsigmoid(log_odds_ratio)


def _log_odds(log_probability: Tensor) -> Tensor:
    """`p - log(1 - exp(p))` for p < 0, accurate near 0; at p = 0, where it is infinite, its largest finite value."""
    log_probability = log_probability.clamp(max=-torch.finfo(log_probability.dtype).tiny)
    return log_probability - torch.log(-torch.expm1(log_probability))
