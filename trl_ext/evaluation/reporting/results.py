"""The model of results.json, which recipes write and the report, comparisons and model cards read, and of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from trl_ext.files import brief, write_json

RESULTS_NAME = "results.json"
MAX_SHOWN = 43


class Part(BaseModel):
    """Accepts finite numbers and text without conversion, and keeps unknown fields."""

    # Build models on first use, so that a report waits only for the four models that it reads.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, defer_build=True)


class Estimate(Part):
    """A mean, rate or accuracy, its 95% interval, and the number of rows that it covers; null if there are none."""

    value: float | None = Field(validation_alias=AliasChoices("mean", "rate", "accuracy"))
    low: float | None = None
    high: float | None = None
    n: int | None = None
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
    optimizer_steps: int | None = None
    seed: int | None = None
    processes: int | None = None
    training_seconds: float | None = None
    total_seconds: float | None = None
    sampling: dict[str, Any] | None = None


class WinRate(Part):
    """Ties count as half, or only rows on which both orders agree count."""

    half: Estimate
    agreed: Estimate
    n_errors: int = 0


class Gain(Part):
    """The gain in a mean score or reward on held-out prompts."""

    gain: Estimate | None = None


class Rankings(Part):
    n: int
    reference_corrected: Estimate | None = None


class Preferences(Part):
    after: Rankings | None = None


class Diagnostics(Part):
    """Diagnostics of responses; null if undefined."""

    mean_tokens: float | None = None


class Decoding(Part):
    accuracy: Estimate


class Reasoning(Part):
    """Verified problems: by decoding before and after training, or a single `accuracy` of an untrained model."""

    accuracy: Estimate | None = None
    before: dict[str, Decoding] = {}
    after: dict[str, Decoding] = {}


class Ranking(Estimate):
    """A reward model on held-out pairs, by their labels or by a known quality, with which the labels may agree."""

    nll: float | None = None
    brier: float | None = None
    ece: float | None = None
    label_agreement: float | None = None


class Results(Part):
    """The results of a run. Parts that the run does not have are null or missing."""

    run: RunInfo
    win_rate: WinRate | None = None
    score: Gain | None = None
    rewards: dict[str, Gain] | None = None
    preferences: Preferences | None = None
    kl: Estimate | None = None
    generations: dict[str, Diagnostics] | None = None
    reasoning: Reasoning | None = None
    pairs: Ranking | None = None
    true_order: Ranking | None = None
    # Metrics by task and name.
    tasks: dict[str, dict[str, Estimate]] = {}


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


def save_results(folder: Path, content: dict[str, Any]) -> None:
    """Check a run's figures against the model, and write them, as they are, into its results.json."""
    Results.model_validate(content)
    write_json(folder / RESULTS_NAME, content)


def read_results(path: str | Path) -> Results:
    """Read a results.json; ValueError names the file, the first bad field and its value."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        return Results.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """The first bad field, and its expected and actual values."""
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, fault["loc"])) + ": " if fault["loc"] else ""
    known = fault["type"] not in ("missing", "json_invalid")
    value = f", got {brief(json.dumps(fault['input'], ensure_ascii=False), MAX_SHOWN)}" if known else ""
    return f"{where}{fault['msg']}{value}"
