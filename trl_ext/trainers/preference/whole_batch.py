"""The whole optimizer batch: scales a micro-batch's loss, and evaluates a batch-coupled loss on all micro-batches.

An optimizer step covers every micro-batch of an accumulation window on every rank. A loss that couples pairs, such as
AOT's sorting, must be evaluated on all of them, while activations are kept for one micro-batch at a time. Cached
gradients make this possible (Gao et al. 2021, arXiv 2101.06983). A pass without gradients collects the scores, a few
numbers per pair. The loss of the whole window is differentiated with respect to these numbers. Each micro-batch then
contributes its scores times those derivatives, a local term whose gradient is the exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from accelerate import Accelerator
from torch import Tensor

from trl_ext.losses import PreferenceScores


@dataclass
class CoupledShare:
    """A micro-batch's share of a batch-coupled loss.

    Attributes:
        loss: the loss of the whole optimizer batch, of which the trainer's mean over micro-batches is the loss itself.
        chosen_slope, rejected_slope: its derivatives by this micro-batch's scores, [n], times the number of
            micro-batches on all ranks, since the trainer averages over them.
    """

    loss: Tensor
    chosen_slope: Tensor
    rejected_slope: Tensor

    def part(self, own: slice) -> CoupledShare:
        """The share of some of the micro-batch's pairs."""
        slopes = self.chosen_slope[own], self.rejected_slope[own]
        return CoupledShare(self.loss * len(slopes[0]) / len(self.chosen_slope), *slopes)

    def of(self, scores: PreferenceScores) -> Tensor:
        """The loss, with the gradient that is the micro-batch's part of the whole gradient."""
        linear = (self.chosen_slope * scores.chosen + self.rejected_slope * scores.rejected).sum()
        return self.loss + linear - linear.detach()


@dataclass
class Window:
    """One rank's part of an optimizer batch; its micro-batches share this object.

    Attributes:
        scale: turns a micro-batch's summed loss into the one that the trainer expects: see `loss_scale`.
        mean_raw_weight: mean over the window of the weights to be normalised; None without such weights.
        pending: the micro-batches, until a batch-coupled loss has scored them ahead; then None.
        reference: reference log-probabilities from scoring ahead, `(chosen, rejected)` for each micro-batch.
        coupled: a batch-coupled loss, one share per micro-batch; None until known.
        micro_batches: over how many the trainer averages.
    """

    scale: float
    micro_batches: int | None = None
    mean_raw_weight: Tensor | None = None
    pending: list[dict] | None = None
    reference: list[Sequence[Tensor | None]] | None = None
    coupled: list[CoupledShare] | None = None

    def part(self, index: int, own: slice) -> Window:
        """The window of some pairs of a micro-batch, as its first micro-batch."""
        reference = self.reference and [[one if one is None else one[own] for one in self.reference[index]]]
        return replace(self, reference=reference, coupled=self.coupled and [self.coupled[index].part(own)])


def loss_scale(micro_batches: int, ranks: int, pairs: int) -> float:
    """The factor on a micro-batch's summed loss, which makes the gradient that of the mean over all pairs.

    The trainer divides each micro-batch's loss by the number of micro-batches of a rank and averages over ranks,
    however many pairs each of them has.
    """
    return micro_batches * ranks / pairs


def coupled_shares(
    loss: Callable[[PreferenceScores], Tensor],
    parts: list[PreferenceScores],
    accelerator: Accelerator,
    counted: Tensor | None = None,
    *,
    micro_batches: int | None = None,
) -> list[CoupledShare]:
    """Differentiate a batch-coupled loss over the whole optimizer batch. Every rank must call this.

    Args:
        loss: the mean loss of the batch's pairs, of which there is at least one.
        parts: this rank's scores, one entry per micro-batch; gradients are not needed and not used.
        accelerator: gathers tensors, of equal length on every rank, in the order of ranks.
        counted: 1 where a pair of this rank counts, in the order of `parts`; None if all do.
        micro_batches: over how many of them the trainer averages; None for as many as there are parts.

    Returns:
        One share per part, in order; all are 0 if no pair counts.
    """
    own = join_scores([map_scores(Tensor.detach, part) for part in parts])
    whole = map_scores(accelerator.gather, own)
    slopes, value = own.chosen.new_zeros(2, len(whole.chosen)), own.chosen.new_zeros(())
    # Found once, since every search waits for the device.
    places = None if counted is None else accelerator.gather(counted).nonzero()[:, 0]
    if places is not None:
        whole = map_scores(lambda values: values[places], whole)
    if len(whole.chosen):
        whole.chosen.requires_grad_()
        whole.rejected.requires_grad_()
        with torch.enable_grad():
            value = loss(whole)
        inputs = (whole.chosen, whole.rejected)
        gradients = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
        found = torch.stack(gradients).to(slopes.dtype)
        slopes = found if places is None else slopes.index_copy(1, places, found)
    own_slopes = slopes.chunk(accelerator.num_processes, dim=1)[accelerator.process_index]
    micro_batches = micro_batches or len(parts)
    own_slopes = own_slopes * micro_batches * accelerator.num_processes
    lengths, share = [part.chosen.numel() for part in parts], value.detach() * micro_batches / len(parts)
    return [CoupledShare(share, *slope) for slope in own_slopes.split(lengths, dim=1)]


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
