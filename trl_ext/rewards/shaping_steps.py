"""The steps that rewards are shaped by: centring, whitening, squashing, clipping, penalties on length and repetition.

A step takes the rewards of one batch of this process and what is known of its responses, and gives rewards of the same
shape. NaN stands for a response without a reward, stays NaN, and is in no statistic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

EPSILON = 1e-8


class Moments(NamedTuple):
    """Of the rewards of a batch over all processes; of none, the lowest is infinite and the highest minus that."""

    count: float
    total: float
    squares: float
    lowest: float
    highest: float


@dataclass
class Batch:
    """What a step may ask of a batch.

    Attributes:
        of_all_ranks: gives a list of numbers of this process and those of the others, in the order of their ranks;
            every process calls it as often as the others.
        completion_ids: the responses as token ids; None where the caller does not give them.
        references: rewards of the rows' reference responses before any shaping, [N]; None where nothing needs them.
        learns: whether running statistics take this batch in.
    """

    of_all_ranks: Callable[[list[float]], list[list[float]]]
    completion_ids: Sequence[Sequence[int]] | None = None
    references: Tensor | None = None
    learns: bool = True

    def moments(self, rewards: Tensor) -> Moments:
        known = rewards[rewards.isfinite()].double()
        own = [float(len(known)), known.sum().item(), known.square().sum().item()]
        own += [known.min().item(), known.max().item()] if len(known) else [math.inf, -math.inf]
        *sums, lowest, highest = zip(*self.of_all_ranks(own), strict=True)
        return Moments(*map(math.fsum, sums), min(lowest), max(highest))

    def tokens(self, step: str) -> Sequence[Sequence[int]]:
        if self.completion_ids is None:
            raise ValueError(f"reward shaping: {step} counts tokens, and the caller gives no completion_ids")
        return self.completion_ids


class Step:
    """One step; a dataclass whose fields are its settings.

    Attributes:
        kind: its name in settings and in the names of metrics.
        of_batch: whether a response's reward depends on which others are scored with it.
    """

    kind: ClassVar[str]
    of_batch: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def calibrate(self, references: Tensor) -> None:
        """Take in rewards of reference responses, as they are where this step stands."""

    def state(self) -> dict[str, float]:
        """What the step has learnt, for `load_state`."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on from a `state`."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass
class Center(Step):
    """Subtracts the running mean, this batch included: of all rewards so far, or an exponential average of batches.

    Attributes:
        momentum: weight of the past in `momentum * mean + (1 - momentum) * batch mean`, which starts at the first
            batch's; None for the mean of everything.
    """

    kind = "center"
    of_batch = True
    momentum: float | None = None
    count: float = field(default=0.0, init=False)
    mean: float = field(default=0.0, init=False)

    def __post_init__(self):
        _require(
            self.momentum is None or 0 <= self.momentum < 1,
            f"center: momentum must lie in [0, 1), got {self.momentum}",
        )

    def __call__(self, rewards, batch):
        found = batch.moments(rewards)
        if batch.learns and found.count:
            batch_mean = found.total / found.count
            if self.momentum is None:
                self.mean += (batch_mean - self.mean) * found.count / (self.count + found.count)
            else:
                past = self.momentum if self.count else 0.0
                self.mean = past * self.mean + (1 - past) * batch_mean
            self.count += found.count
        return rewards - self.mean

    def state(self):
        return {"count": self.count, "mean": self.mean}

    def load_state(self, state):
        self.count, self.mean = float(state["count"]), float(state["mean"])


@dataclass
class CenterReference(Step):
    """Subtracts the reward of reference responses (Eisenstein et al. 2023, arXiv 2312.09244).

    Attributes:
        value: what to subtract; None for the mean that `calibrate` finds.
        per_prompt: subtract each prompt's own, of its column `reference_response_text`.
    """

    kind = "center_reference"
    value: float | None = None
    per_prompt: bool = False
    calibrated: bool = field(default=False, init=False)

    def __post_init__(self):
        _require(self.value is None or math.isfinite(self.value), "center_reference: value must be a finite number")
        _require(self.value is None or not self.per_prompt, "center_reference: give value or per_prompt, not both")

    @property
    def needs_calibration(self) -> bool:
        return self.value is None and not self.per_prompt

    def __call__(self, rewards, batch):
        if self.per_prompt:
            _require(batch.references is not None, "center_reference: per_prompt needs reference_response_text")
            return rewards - batch.references
        _require(
            self.value is not None, "center_reference has no value: give one, or calibrate it on reference responses"
        )
        return rewards - self.value

    def calibrate(self, references):
        if self.needs_calibration:
            known = references[references.isfinite()].double()
            _require(len(known) > 0, "center_reference: no reference response has a reward")
            self.value, self.calibrated = known.mean().item(), True

    def state(self):
        return {} if self.value is None else {"value": self.value}

    def load_state(self, state):
        saved = float(state["value"]) if "value" in state else None
        is_configured = self.per_prompt or (self.value is not None and not self.calibrated)
        if is_configured and saved != self.value:
            was, now = ("that of each prompt" if value is None else value for value in (saved, self.value))
            raise ValueError(
                f"center_reference: the saved value is {was}, and now it is {now}: go on with the run's own setting"
            )
        if not is_configured and saved is not None:
            self.value, self.calibrated = saved, True


@dataclass
class Whiten(Step):
    """`(r - mean) / (std + 1e-8)` over the batch of all processes; 0 for a batch without spread.

    Attributes:
        ddof: 0 for the population's standard deviation, 1 for the sample's.
    """

    kind = "whiten"
    of_batch = True
    ddof: int

    def __post_init__(self):
        _require(self.ddof in (0, 1), f"whiten: ddof must be 0 (population) or 1 (sample), got {self.ddof}")

    def __call__(self, rewards, batch):
        found = batch.moments(rewards)
        if found.lowest == found.highest:
            # Rounding can leave equal rewards off their mean.
            return rewards - rewards
        mean = found.total / found.count if found.count else 0.0
        # Squares of what is left: of large rewards that differ by little, sums of squares lose the difference.
        squares = batch.moments(rewards - mean).squares
        if not found.count:
            return rewards - mean
        return (rewards - mean) / (math.sqrt(squares / (found.count - self.ddof)) + EPSILON)


@dataclass
class Sigmoid(Step):
    """`sigmoid(r - reference)`, in (0, 1) (Fu et al. 2025, arXiv 2502.18770)."""

    kind = "sigmoid"
    reference: float = 0.0

    def __call__(self, rewards, batch):
        return (rewards - self.reference).sigmoid()


@dataclass
class LogSigmoid(Step):
    """`log sigmoid(r - reference)`, below 0 (Wang et al. 2024, arXiv 2402.00742)."""

    kind = "log_sigmoid"
    reference: float = 0.0

    def __call__(self, rewards, batch):
        return logsigmoid(rewards - self.reference)


@dataclass
class Clip(Step):
    """Holds rewards within [-limit, limit] (Ziegler et al. 2019, arXiv 1909.08593)."""

    kind = "clip"
    limit: float

    def __post_init__(self):
        _require(self.limit > 0, f"clip: limit must be above 0, got {self.limit}")

    def __call__(self, rewards, batch):
        return rewards.clamp(-self.limit, self.limit)


@dataclass
class LengthPenalty(Step):
    """Subtracts `per_token` for each token beyond the first `free` ones.

    Attributes:
        per_token: reward that a token costs; below 0 it earns.
        free: tokens that cost nothing.
    """

    kind = "length_penalty"
    per_token: float
    free: int = 0

    def __post_init__(self):
        _require(self.free >= 0, f"length_penalty: free must be at least 0, got {self.free}")

    def __call__(self, rewards, batch):
        lengths = torch.tensor([len(ids) for ids in batch.tokens(self.kind)], dtype=rewards.dtype)
        return rewards - self.per_token * (lengths - self.free).clamp(min=0)


@dataclass
class SoftOverlong(Step):
    """DAPO's soft punishment of long responses, times `weight` (Yu et al. 2025, arXiv 2503.14476, equation 13).

    Added is 0 up to `max_tokens - buffer` tokens, then `(max_tokens - buffer - tokens) / buffer`, and -1 beyond
    `max_tokens`.

    Attributes:
        max_tokens: the longest response without the whole punishment.
        buffer: tokens over which it grows.
        weight: of the punishment.
    """

    kind = "soft_overlong"
    max_tokens: int
    buffer: int
    weight: float = 1.0

    def __post_init__(self):
        _require(
            0 < self.buffer <= self.max_tokens,
            f"soft_overlong: buffer must lie between 1 and max_tokens {self.max_tokens}, got {self.buffer}",
        )

    def __call__(self, rewards, batch):
        lengths = torch.tensor([len(ids) for ids in batch.tokens(self.kind)], dtype=rewards.dtype)
        return rewards + self.weight * ((self.max_tokens - self.buffer - lengths) / self.buffer).clamp(-1, 0)


@dataclass
class RepetitionPenalty(Step):
    """Subtracts `weight` times the share of repeated n-grams of tokens: 1 - distinct / all, 0 for fewer than n tokens.

    The share is seq-rep-n of Welleck et al. 2020, arXiv 1908.04319.
    """

    kind = "repetition_penalty"
    weight: float
    ngram: int = 4

    def __post_init__(self):
        _require(self.ngram >= 1, f"repetition_penalty: ngram must be at least 1, got {self.ngram}")

    def __call__(self, rewards, batch):
        shares = [_repeated(ids, self.ngram) for ids in batch.tokens(self.kind)]
        return rewards - self.weight * torch.tensor(shares, dtype=rewards.dtype)


def _repeated(ids: Sequence[int], n: int) -> float:
    grams = [tuple(map(int, ids[start : start + n])) for start in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


STEPS: dict[str, type[Step]] = {
    step.kind: step
    for step in (
        Center,
        CenterReference,
        Whiten,
        Sigmoid,
        LogSigmoid,
        Clip,
        LengthPenalty,
        SoftOverlong,
        RepetitionPenalty,
    )
}


def settings_of(step: Step) -> dict[str, Any]:
    """A step's kind and settings, from which it can be built again."""
    return {"kind": step.kind, **{f.name: getattr(step, f.name) for f in dataclasses.fields(step) if f.init}}
