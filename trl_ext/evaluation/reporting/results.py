"""The model of results.json, which recipes write and the report, comparisons and model cards read, and of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from trl_ext.evaluation.statistics.intervals import NORMAL_95
from trl_ext.files import brief, read_json, write_json

RESULTS_NAME = "results.json"
HARNESS_NAMES = "results_*.json"
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


class Scores(Part):
    policy: float | None = None
    base: float | None = None


class Score(Scores):
    """Mean scores on held-out prompts, by a known measure."""

    gain: Estimate | None = None
    by_kind: dict[str, Scores] = {}


class Reward(Part):
    """The gain in mean reward on held-out prompts."""

    gain: Estimate | None = None


class Rankings(Part):
    n: int
    reference_corrected: Estimate | None = None


class Preferences(Part):
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
    accuracy: Estimate


class Reasoning(Part):
    """Verified problems: by decoding before and after training, or a single `accuracy` of an untrained model."""

    accuracy: Estimate | None = None
    before: dict[str, Decoding] = {}
    after: dict[str, Decoding] = {}


class Pairs(Estimate):
    """A reward model on held-out pairs."""

    nll: float | None = None
    brier: float | None = None
    ece: float | None = None


class TrueOrder(Estimate):
    """A reward model's ranking of held-out pairs, compared with a known quality."""

    label_agreement: float | None = None


class Results(Part):
    """The results of a run. Parts that the run does not have are null or missing."""

    run: RunInfo
    win_rate: WinRate | None = None
    score: Score | None = None
    rewards: dict[str, Reward] | None = None
    preferences: Preferences | None = None
    kl: Estimate | None = None
    generations: dict[str, Diagnostics] | None = None
    reasoning: Reasoning | None = None
    pairs: Pairs | None = None
    true_order: TrueOrder | None = None
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


class Mistake(Part):
    """A row of reward_mistakes.jsonl."""

    prompt_text: str
    chosen_text: str
    rejected_text: str
    margin: float
    chosen_score: float
    rejected_score: float


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


def read_harness(path: Path) -> Results:
    """The results file of lm-evaluation-harness, whose intervals are its standard errors times 1.96."""
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        found = read_json(path)
        for task, metrics in found["results"].items():
            samples = found.get("n-samples", {}).get(task, {}).get("effective")
            for key, value in metrics.items():
                name, _, how = key.partition(",")
                if not isinstance(value, (int, float)) or name.endswith("_stderr"):
                    continue
                error = metrics.get(f"{name}_stderr,{how}")
                margin = NORMAL_95 * error if isinstance(error, (int, float)) else None
                bounds = {} if margin is None else {"low": value - margin, "high": value + margin}
                title = name if how in ("", "none") else f"{name} ({how})"
                tasks.setdefault(task, {})[title] = {"mean": float(value), **bounds, "n": samples}
        run = {"objective": "lm-evaluation-harness", "model": found.get("model_name"), "dataset": ", ".join(tasks)}
        return Results.model_validate({"run": run, "tasks": tasks})
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: these are no results of lm-evaluation-harness ({error!r})") from None
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """The first bad field, and its expected and actual values."""
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, fault["loc"])) + ": " if fault["loc"] else ""
    known = fault["type"] not in ("missing", "json_invalid")
    value = f", got {brief(json.dumps(fault['input'], ensure_ascii=False), MAX_SHOWN)}" if known else ""
    return f"{where}{fault['msg']}{value}"
