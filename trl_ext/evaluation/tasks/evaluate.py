"""Evaluates a model on a task: samples greedily or scores pairs, checks, and summarizes with intervals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trl_ext.data.conversation import encode_turn
from trl_ext.data.formats import plain_prompt
from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation.statistics.intervals import mean_with_interval
from trl_ext.evaluation.tasks.checks import PAIRS, make_check
from trl_ext.evaluation.tasks.task import Row, read_rows, read_task
from trl_ext.files import existing_file, read_json, write_json
from trl_ext.models.loading import find_policy, load_policy, model_sha256
from trl_ext.models.scoring import score_responses
from trl_ext.rollouts.generation import Generation, generate_responses
from trl_ext.rollouts.graded import sample_rows

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = "settings.json"
# Metrics are kept in each row under this prefix, as rewards are, so that the report shows them beside the response.
PREFIX = "reward/"


def evaluate(
    model: str,
    name: str,
    folder: Path,
    *,
    data: Path | None = None,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 16,
    compare: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a model on a task, and write the responses and `results.json` into a folder; a killed call goes on.

    Args:
        model: a folder of a model, an adapter or a run, a hub model, toy or smollm2.
        name: a task of the library, or a YAML file.
        folder: where results go.
        data: the folder that holds the task's data.
        limit: the number of rows, from the first; None for all. A later call on the folder may raise it.
        max_new_tokens: the longest response; None for that of the task.
        batch_size: rows at once.
        compare: the folder of an earlier call on the task, for the differences on the same rows.

    Raises:
        ValueError, FileNotFoundError: an argument, the task or its data is wrong; nothing was sampled.
    """
    name, task, home = read_task(name)
    task = task.model_copy(update={"max_new_tokens": max_new_tokens or task.max_new_tokens})
    rows = read_rows(task, [home, *([data] if data else [])])
    check, of_pairs = make_check(task, rows), task.check == PAIRS
    saved = "scores.jsonl" if of_pairs else "generations.jsonl"
    find_policy(model)
    # A model that is trained again into the same folder is another one, and so are data or your own check's file that
    # have changed.
    source = Path(task.check.rpartition(":")[0])
    own = source.read_bytes() if source.is_file() else b""
    digest = hashlib.sha256(json.dumps(rows).encode() + own).hexdigest()
    settings = {"task": name, **task.model_dump(), "data_sha256": digest, "model_sha256": model_sha256(model)}
    earlier = None if compare is None else _rows_of(compare, saved, settings)
    if (folder / SETTINGS).is_file() and read_json(folder / SETTINGS) != settings:
        raise ValueError(f"{folder} holds an evaluation of another model, task or data: give another --output_dir")
    kept = (folder / saved).read_bytes().count(b"\n") if (folder / saved).is_file() else 0
    if kept > len(rows[:limit]):
        raise ValueError(
            f"{folder} holds {kept} rows, more than --limit {limit}: raise it, or give another --output_dir"
        )
    write_json(folder / SETTINGS, settings)
    # A finished evaluation needs no model.
    load = cache(lambda: load_policy(model))

    def respond(part: list[Row], **options: Any) -> list[Generation]:
        policy, tokenizer = load()
        prompts = [_model_input(tokenizer, row["prompt"]) for row in part]
        limits = {"max_new_tokens": task.max_new_tokens, "batch_size": batch_size}
        return generate_responses(policy, tokenizer, prompts, **limits, **options)

    def score(part: list[Row], *, progress: str | None, **_: Any) -> list[tuple[Tensor, Tensor]]:
        policy, tokenizer = load()
        turns = [
            encode_turn(tokenizer, _model_input(tokenizer, row["prompt"]), row[side])
            for row in part
            for side in ("chosen", "rejected")
        ]
        options = {"pad_token_id": tokenizer.pad_token_id, "batch_size": batch_size, "progress": progress}
        scores = score_responses(policy, *zip(*turns, strict=True), **options)
        return list(zip(scores[::2], scores[1::2], strict=True))

    def finish(part: list, found: list) -> list[Row]:
        asked = [row for row, _, _ in part]
        return [_saved_row(*each) for each in zip(asked, found, check(asked, found), strict=True)]

    items = [(row, row, 0) for row in rows[:limit]]
    options = {"path": folder / saved, "save_every": batch_size, "accelerator": None}
    done = sample_rows(items, score if of_pairs else respond, finish, seed=0, progress=name, **options)
    run = {"objective": f"evaluation ({name})", "model": model, "dataset": name, "sampling": {"temperature": 0.0}}
    results: dict[str, Any] = {"run": run, "tasks": {name: summarize(map(_metrics, done))}}
    if not of_pairs:
        tokens, finished = (fmean(row[key] for row in done) for key in ("generated_num_tokens", "finished"))
        results["generations"] = {"policy": {"mean_tokens": tokens, "truncated_fraction": 1 - finished}}
    if earlier is not None:
        results["compared_with"] = str(compare)
        results["difference"] = difference(earlier, done)
    write_json(folder / "results.json", results)
    return results


def summarize(rows: Iterable[Mapping[str, float]], *, gains: bool = False) -> dict[str, dict[str, Any]]:
    """Each metric's `mean`, its interval `low` and `high`, and `n`, the number of rows that have it.

    The metrics with the most values come first. With `gains`, the values are paired differences; see
    `mean_with_interval`.
    """
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    found = sorted(columns.items(), key=lambda item: -len(item[1]))
    return {name: {**mean_with_interval(values, gains=gains), "n": len(values)} for name, values in found}


def difference(before: Sequence[Row], after: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Each metric of the saved rows after minus before, on those that both have, as `summarize` returns it."""
    earlier, gains = {row["row_id"]: _metrics(row) for row in before}, []
    for row in after:
        old, new = earlier.get(row["row_id"], {}), _metrics(row)
        gains.append({name: new[name] - old[name] for name in new if name in old})
    return summarize(gains, gains=True)


def _metrics(row: Row) -> dict[str, float]:
    """The metrics that a saved row has."""
    found = {key.removeprefix(PREFIX): value for key, value in row.items() if key.startswith(PREFIX)}
    return {key: value for key, value in found.items() if value is not None}


def _rows_of(folder: Path, saved: str, settings: Mapping[str, Any]) -> list[Row]:
    """The rows of an earlier evaluation of the task."""
    earlier = read_json(existing_file(folder / SETTINGS))
    for name, value in settings.items():
        if name != "model_sha256" and earlier.get(name) != value:
            raise ValueError(f"--compare {folder}: its {name} is {earlier.get(name)!r}, not {value!r}")
    return [row for _, row in read_jsonl(folder / saved).rows]


def _model_input(tokenizer, prompt: Any) -> Any:
    """Messages for a model with a chat template, else text."""
    if tokenizer.chat_template:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return prompt if isinstance(prompt, str) else plain_prompt(prompt)


def _saved_row(row: Row, one: Any, metrics: Mapping[str, Any]) -> Row:
    """What is saved of a response, in the form of a run's generations, or of the scores of a pair."""
    if isinstance(one, Generation):
        found = {
            "prompt_text": row["prompt"] if isinstance(row["prompt"], str) else plain_prompt(row["prompt"]),
            "response_text": one.text,
            "generated_num_tokens": len(one.response_ids),
            "finished": one.finished,
        }
    else:
        chosen, rejected = one
        found = {"margin": float(chosen.sum() - rejected.sum())}
    return {"row_id": row["row_id"], "sample": 0, **found, **{PREFIX + key: value for key, value in metrics.items()}}
