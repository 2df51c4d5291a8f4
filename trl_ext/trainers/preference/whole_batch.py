"""The whole optimizer batch: scales a micro-batch's loss, and evaluates a batch-coupled loss on all micro-batches.

An optimizer step covers every micro-batch of an accumulation window on every rank. A loss that couples pairs, such as
AOT's sorting, must be evaluated on all of them, while activations are kept for one micro-batch at a time. Cached
gradients make this possible (Gao et al. 2021, arXiv 2101.06983). A pass without gradients collects the scores, a few
numbers per pair. The loss of the whole window is differentiated with respect to these numbers. Each micro-batch then
contributes its scores times those derivatives, a local term whose gradient is the exact one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trl_ext.losses import PreferenceScores


@dataclass
class CoupledShare:
    """A micro-batch's share of a batch-coupled loss: the window's loss, and its derivatives by this part's scores."""

    loss: Tensor
    chosen_slope: Tensor
    rejected_slope: Tensor


@dataclass
class Window:
    """One rank's part of an optimizer batch; its micro-batches share this object.

    Attributes:
        size: number of micro-batches on this rank.
        pairs: number of pairs over all micro-batches and ranks.
        ranks: number of processes.
        rank: this process's index.
        mean_raw_weight: mean over the window of the weights to be normalised; None without such weights.
        pending: the micro-batches, until a batch-coupled loss has scored them ahead; then None.
        reference: reference log-probabilities from scoring ahead, `(chosen, rejected)` for each micro-batch.
        coupled: cached value and derivatives of a batch-coupled loss, one entry per micro-batch; None until known.
    """

    size: int
    pairs: int
    ranks: int
    rank: int
    mean_raw_weight: Tensor | None = None
    pending: list[dict] | None = None
    reference: list[tuple[Tensor, Tensor]] | None = None
    coupled: list[CoupledShare] | None = None

    @property
    def scale(self) -> float:
        """The factor that turns a micro-batch's summed loss into the loss that the trainer expects.

        The trainer divides each micro-batch's loss by their number and averages over ranks. The gradient should be
        that of the mean over all pairs, however the last window is divided.
        """
        return self.size * self.ranks / self.pairs

    def share(self, index: int, scores: PreferenceScores) -> Tensor:
        """The loss of micro-batch `index`, whose gradient is its part of the batch-coupled loss's gradient."""
        share = self.coupled[index]
        linear = (share.chosen_slope * scores.chosen + share.rejected_slope * scores.rejected).sum()
        linear = linear * self.size * self.ranks
        return share.loss + linear - linear.detach()


def coupled_shares(
    loss: Callable[[PreferenceScores], Tensor],
    parts: list[PreferenceScores],
    rank: int,
    gather: Callable[[Tensor], Tensor],
    counted: Tensor | None = None,
) -> list[CoupledShare]:
    """Differentiate a batch-coupled loss over the whole window.

    Args:
        loss: the mean loss of the window's pairs, of which there is at least one.
        parts: this rank's scores, one entry per micro-batch; gradients are not needed and not used.
        rank: this process's index.
        gather: concatenates a tensor of equal length from every rank, in the order of ranks.
        counted: 1 where a pair of this rank counts, in the order of `parts`; None if all do.

    Returns:
        One share per part, in order; all are 0 if no pair counts.
    """
    own = join_scores([map_scores(Tensor.detach, part) for part in parts])
    size = own.chosen.numel()
    keep = gather(torch.ones_like(own.chosen) if counted is None else counted).bool()
    window = map_scores(lambda values: gather(values)[keep], own)
    slopes = own.chosen.new_zeros(2, len(keep))
    value = own.chosen.new_zeros(())
    if len(window.chosen):
        window.chosen.requires_grad_()
        window.rejected.requires_grad_()
        with torch.enable_grad():
            value = loss(window)
        inputs = (window.chosen, window.rejected)
        gradients = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
        slopes[:, keep] = torch.stack(gradients).to(slopes.dtype)
    lengths = [part.chosen.numel() for part in parts]
    own_slopes = slopes[:, rank * size : (rank + 1) * size].split(lengths, dim=1)
    return [CoupledShare(value.detach(), *slope) for slope in own_slopes]


def map_scores(function: Callable[[Tensor], Tensor], scores: PreferenceScores) -> PreferenceScores:
    """Apply `function` to every tensor of `scores`."""
    return _combine(lambda values: function(*values), [scores])


def join_scores(parts: list[PreferenceScores]) -> PreferenceScores:
    """Concatenate scores of several micro-batches into those of one."""
    return _combine(torch.cat, parts)


def _combine(function: Callable[[list[Tensor]], Tensor], parts: list[PreferenceScores]) -> PreferenceScores:
    """Apply `function` to the tensors of the same name; the order of names is the same on every rank."""
    first = parts[0]
    names = [f.name for f in fields(first) if f.name != "columns" and getattr(first, f.name) is not None]
    scores = {name: function([getattr(part, name) for part in parts]) for name in names}
    columns = {name: function([part.columns[name] for part in parts]) for name in sorted(first.columns)}
    return PreferenceScores(**scores, columns=columns)
