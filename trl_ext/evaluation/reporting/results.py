"""The model of results.json, which recipes write and the report reads, and of the rows in related files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

RESULTS_NAME = "results.json"
MAX_SHOWN = 40


class Part(BaseModel):
    """Accepts finite numbers and text without conversion, and keeps unknown fields."""

    # Build models on first use, so that a report waits only for the four models that it reads.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, defer_build=True)


class Interval(Part):
    """A figure's 95% interval, and the number of rows that it covers."""

    low: float | None = None
    high: float | None = None
    n: int | None = None

    def figure(self) -> dict[str, float | None] | None:
        """The figure as `value`, with `low`, `high` and `n`; None if it covers no rows."""
        value = next(getattr(self, name) for name in ("mean", "rate", "accuracy") if hasattr(self, name))
        return (
            None if value is None or self.n == 0 else {"value": value, "low": self.low, "high": self.high, "n": self.n}
        )


class Mean(Interval):
    mean: float


class Rate(Interval):
    rate: float


class Accuracy(Interval):
    """A share of pairs; null if there are none."""

    accuracy: float | None
    ties: int | None = None
    margin: float | None = None


class RunInfo(Part):
    """Settings and duration of a run."""

    objective: str | None = None
    model: str | None = None
    dataset: str | None = None
    weights: str | None = None
    device: str | None = None
    settings_digest: str | None = None
    recipe: str | None = None
    optimizer_steps: int | None = None
    seed: int | None = None
    processes: int | None = None
    training_seconds: float | None = None
    total_seconds: float | None = None
    train_pairs: int | None = None
    train_prompts: int | None = None
    train_responses: int | None = None
    train_problems: int | None = None
    sampled_responses: int | None = None
    reward_models: list[str] | None = None
    sampling: dict[str, Any] | None = None
    versions: dict[str, str] | None = None


class WinRate(Part):
    """Ties count as half, or only rows on which both orders agree count."""

    half: Rate
    agreed: Rate
    n_errors: int = 0


class Scores(Part):
    policy: float | None = None
    base: float | None = None


class Score(Scores):
    """Mean scores on held-out prompts, by a known measure."""

    gain: Mean | None = None
    by_kind: dict[str, Scores] = {}


class Reward(Scores):
    """Mean rewards on held-out prompts."""

    gain: Mean | None = None
    gain_over_reference: Mean | None = None


class Rankings(Part):
    n: int
    reference_corrected: Accuracy | None = None


class Preferences(Part):
    before: Rankings | None = None
    after: Rankings | None = None


class Diagnostics(Part):
    """Diagnostics of responses; null if undefined, such as the repetition of responses that are all empty."""

    mean_tokens: float | None = None
    distinct_1: float | None = None
    distinct_2: float | None = None
    unique_token_ratio: float | None = None
    dominant_token_fraction: float | None = None
    repetition: float | None = None
    compression_ratio: float | None = None
    empty_fraction: float | None = None
    truncated_fraction: float | None = None
    collapsed: bool = False


class Decoding(Part):
    accuracy: Mean


class Reasoning(Part):
    """Verified problems: by decoding before and after training, or a single `accuracy` of an untrained model."""

    accuracy: Mean | None = None
    before: dict[str, Decoding] = {}
    after: dict[str, Decoding] = {}


class Bin(Part):
    """A bin of a calibration; values are null if it contains no pairs."""

    low: float
    high: float
    n: int
    confidence: float | None
    accuracy: float | None


class Pairs(Accuracy):
    """A reward model on held-out pairs."""

    nll: float | None = None
    brier: float | None = None
    ece: float | None = None
    calibration: list[Bin] = []


class TrueOrder(Accuracy):
    """A reward model's ranking of held-out pairs, compared with a known quality."""

    label_agreement: float | None = None


class Results(Part):
    """The results of a run. Parts that the run does not have are null or missing.

    `Results(**results).model_dump(exclude_unset=True)` returns the original content.
    """

    run: RunInfo
    win_rate: WinRate | None = None
    score: Score | None = None
    rewards: dict[str, Reward] | None = None
    preferences: Preferences | None = None
    kl: Mean | None = None
    generations: dict[str, Diagnostics] | None = None
    reasoning: Reasoning | None = None
    pairs: Pairs | None = None
    true_order: TrueOrder | None = None

    @property
    def is_of_reward_model(self) -> bool:
        """Whether the run is a reward model's: these have `pairs`, which is null without held-out pairs."""
        return "pairs" in self.model_fields_set


class Logged(Part):
    """A row of metrics.jsonl: metrics by name; NaN is stored as null."""

    step: int


class Response(Part):
    """A row of generations.jsonl. Rewards are stored under `reward/NAME` and `base_reward/NAME`."""

    prompt_text: str
    response_text: str
    base_response_text: str | None = None
    row_id: str | None = None
    kind: str | None = None
    outcome: Literal["candidate", "base", "tie"] | None = None
    score: float | None = None
    base_score: float | None = None
    generated_num_tokens: int | None = None
    base_generated_num_tokens: int | None = None
    finished: bool | None = None
    base_finished: bool | None = None


class Mistake(Part):
    """A row of reward_mistakes.jsonl."""

    prompt_text: str
    chosen_text: str
    rejected_text: str
    margin: float
    chosen_score: float
    rejected_score: float


def read_results(path: str | Path) -> Results:
    """Read a results.json.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged; the message names the file, the first bad field and its value.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        return Results.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """The first bad field, its expected and actual values, and the number of other faults."""
    fault, *others = error.errors(include_url=False, include_context=False)
    where = ".".join(map(str, fault["loc"])) + ": " if fault["loc"] else ""
    value = "" if fault["type"] in ("missing", "json_invalid") else f", got {_shown(fault['input'])}"
    return f"{where}{fault['msg']}{value}" + (f" (and {len(others)} more)" if others else "")


def _shown(value: Any) -> str:
    """A value as JSON, truncated if long."""
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
