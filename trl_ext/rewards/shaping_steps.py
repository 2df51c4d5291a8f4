"""Steps of reward shaping: centring, whitening, squashing, clipping, penalties on length and repetition.

A step maps this process's rewards of one batch to rewards of the same shape. NaN marks a response without a reward;
it stays NaN and enters no statistic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

EPSILON = 1e-8
# Settings are checked when a step is created: bools and infinities are not accepted as numbers.
settings = dataclass(config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


class Moments(NamedTuple):
    """Statistics of a batch's rewards over all processes. Without rewards, lowest is inf and highest is -inf."""

    count: float
    total: float
    squares: float
    lowest: float
    highest: float


@dataclasses.dataclass
class Batch:
    """Information about a batch that a step may use.

    Attributes:
        of_all_ranks: gathers this process's list of numbers and those of the others, in rank order; all processes
            must call it equally often.
        completion_ids: the responses as token ids; None if the caller does not pass them.
        references: rewards of the rows' reference responses before any shaping, [N]; None if no step needs them.
        learns: whether running statistics include this batch.
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

    def lengths(self, step: str) -> Tensor:
        return torch.tensor([len(ids) for ids in self.tokens(step)], dtype=torch.float64)


class Step:
    """A shaping step; its fields are its settings.

    Attributes:
        kind: its name in settings and metrics.
        of_batch: whether a response's reward depends on other responses scored with it.
    """

    kind: ClassVar[str]
    of_batch: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def calibrate(self, references: Tensor) -> None:
        """Calibrate on rewards of reference responses, as the preceding steps return them."""

    def state(self) -> dict[str, float]:
        """The step's state, for `load_state`."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore a `state`."""


@settings
class Center(Step):
    """Subtracts the running mean, this batch included: of all rewards so far, or an exponential average of batches.

    Attributes:
        momentum: weight of the past in `momentum * mean + (1 - momentum) * batch mean`, which starts at the first
            batch's; None for the mean of everything.
    """

    kind = "center"
    of_batch = True
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    count: float = field(default=0.0, init=False)
    mean: float = field(default=0.0, init=False)

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


@settings
class CenterReference(Step):
    """Subtracts the reward of reference responses (Eisenstein et al. 2023, arXiv 2312.09244).

    Attributes:
        value: the value to subtract; None for the mean computed by `calibrate`.
        per_prompt: subtract the reward of each prompt's own reference, from the column `reference_response_text`.
    """

    kind = "center_reference"
    value: float | None = None
    per_prompt: bool = False
    calibrated: bool = field(default=False, init=False)

    def __post_init__(self):
        if self.value is not None and self.per_prompt:
            raise ValueError("give value or per_prompt, not both")

    @property
    def needs_calibration(self) -> bool:
        return self.value is None and not self.per_prompt

    def __call__(self, rewards, batch):
        if self.per_prompt:
            return rewards - batch.references
        if self.value is None:
            raise ValueError("center_reference has no value: give one, or calibrate it on reference responses")
        return rewards - self.value

    def calibrate(self, references):
        if self.needs_calibration:
            known = references[references.isfinite()].double()
            if not len(known):
                raise ValueError("center_reference: no reference response has a reward")
            self.value, self.calibrated = known.mean().item(), True

    def state(self):
        return {} if self.value is None else {"value": self.value}

    def load_state(self, state):
        saved = state.get("value")
        is_configured = self.per_prompt or (self.value is not None and not self.calibrated)
        if is_configured and saved != self.value:
            was, now = ("that of each prompt" if value is None else value for value in (saved, self.value))
            raise ValueError(
                f"center_reference: the saved value is {was}, and now it is {now}: go on with the run's own setting"
            )
        if not is_configured and saved is not None:
            self.value, self.calibrated = saved, True


@settings
class Whiten(Step):
    """`(r - mean) / (std + 1e-8)` over the batch of all processes; 0 for a batch without spread.

    Attributes:
        ddof: 0 for the population's standard deviation, 1 for the sample's.
    """

    kind = "whiten"
    of_batch = True
    ddof: Literal[0, 1]

    def __call__(self, rewards, batch):
        found = batch.moments(rewards)
        if found.lowest == found.highest:
            # With rounding, the mean of equal rewards can differ from them.
            return rewards - rewards
        mean = found.total / found.count if found.count else 0.0
        # Square the deviations: for large rewards with small differences, sums of squares lose precision.
        squares = batch.moments(rewards - mean).squares
        if not found.count:
            return rewards - mean
        return (rewards - mean) / (math.sqrt(squares / (found.count - self.ddof)) + EPSILON)


@settings
class Sigmoid(Step):
    """`sigmoid(r - reference)`, in (0, 1) (Fu et al. 2025, arXiv 2502.18770)."""

    kind = "sigmoid"
    reference: float = 0.0

    def __call__(self, rewards, batch):
        return (rewards - self.reference).sigmoid()


@settings
class LogSigmoid(Step):
    """`log sigmoid(r - reference)`, below 0 (Wang et al. 2024, arXiv 2402.00742)."""

    kind = "log_sigmoid"
    reference: float = 0.0

    def __call__(self, rewards, batch):
        return logsigmoid(rewards - self.reference)


@settings
class Clip(Step):
    """Clips rewards to [-limit, limit] (Ziegler et al. 2019, arXiv 1909.08593)."""

    kind = "clip"
    limit: Annotated[float, Field(gt=0)]

    def __call__(self, rewards, batch):
        return rewards.clamp(-self.limit, self.limit)


@settings
class LengthPenalty(Step):
    """Subtracts `per_token` for each token beyond the first `free` ones.

    Attributes:
        per_token: penalty per token; a negative value rewards length.
        free: number of tokens without penalty.
    """

    kind = "length_penalty"
    per_token: float
    free: Annotated[int, Field(ge=0)] = 0

    def __call__(self, rewards, batch):
        return rewards - self.per_token * (batch.lengths(self.kind) - self.free).clamp(min=0)


@settings
class SoftOverlong(Step):
    """DAPO's soft punishment of long responses, `soft_overlong`, times `weight`.

    Attributes:
        max_tokens: the length from which the full punishment applies.
        buffer: number of tokens over which it grows.
        weight: factor of the punishment.
    """

    kind = "soft_overlong"
    max_tokens: int
    buffer: int
    weight: float = 1.0

    def __post_init__(self):
        if not 0 < self.buffer <= self.max_tokens:
            raise ValueError(f"buffer must lie between 1 and max_tokens {self.max_tokens}, got {self.buffer}")

    def __call__(self, rewards, batch):
        return rewards + self.weight * soft_overlong(batch.lengths(self.kind), self.max_tokens, self.buffer)


def soft_overlong(lengths: Tensor, max_tokens: float, buffer: float) -> Tensor:
    """0 up to `max_tokens - buffer` tokens, then `(max_tokens - buffer - tokens) / buffer`, at least -1.

    Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 13.
    """
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1, 0)


@settings
class RepetitionPenalty(Step):
    """Subtracts `weight` times the share of repeated n-grams of tokens: 1 - distinct / all, 0 for fewer than n tokens.

    The share is seq-rep-n of Welleck et al. 2020, arXiv 1908.04319.
    """

    kind = "repetition_penalty"
    weight: float
    ngram: Annotated[int, Field(ge=1)] = 4

    def __call__(self, rewards, batch):
        shares = [_repeated(ids, self.ngram) for ids in batch.tokens(self.kind)]
        return rewards - self.weight * torch.tensor(shares, dtype=rewards.dtype)


def _repeated(ids: Sequence[int], n: int) -> float:
    grams = [tuple(map(int, ids[start : start + n])) for start in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


STEPS: dict[str, type[Step]] = {step.kind: step for step in Step.__subclasses__()}


def settings_of(step: Step) -> dict[str, Any]:
    """A step's kind and settings, from which `build_step` can rebuild it."""
    return {"kind": step.kind, **{f.name: getattr(step, f.name) for f in dataclasses.fields(step) if f.init}}
