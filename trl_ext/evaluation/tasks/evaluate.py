"""Evaluates a model on a task: samples greedily or scores pairs, checks, and summarizes with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trl_ext.data.formats import plain_prompt
from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation.statistics.intervals import mean_with_interval
from trl_ext.evaluation.tasks.checks import PAIRS, make_check
from trl_ext.evaluation.tasks.task import Row, read_rows, read_task
from trl_ext.files import existing_file, read_json, write_json
from trl_ext.models.loading import find_policy, load_policy, model_sha256
from trl_ext.rollouts.generation import generate_responses
from trl_ext.rollouts.saved_rows import sample_rows

ROWS, PAIR_ROWS, SETTINGS = "generations.jsonl", "scores.jsonl", "settings.json"
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
        limit: the number of rows, from the first; None for all.
        max_new_tokens: the longest response; None for that of the task.
        batch_size: prompts at once.
        compare: the folder of an earlier call on the task, for the differences on the same rows.

    Raises:
        ValueError, FileNotFoundError: an argument, the row or the data is wrong; nothing was sampled.
    """
    name, task, home = read_task(name)
    task = task.model_copy(update={"max_new_tokens": max_new_tokens or task.max_new_tokens})
    rows = read_rows(task, [home, *([data] if data else [])], limit)
    check = None if task.check == PAIRS else make_check(task, rows)
    find_policy(model)
    # A model that is trained again into the same folder is another one.
    settings = {"task": name, **task.model_dump(), "model_sha256": model_sha256(model)}
    earlier = None if compare is None else _rows_of(compare, settings)
    if (folder / SETTINGS).is_file() and read_json(folder / SETTINGS) != settings:
        raise ValueError(f"{folder} holds an evaluation of another model or task: give another --output_dir")
    write_json(folder / SETTINGS, settings)
    # A finished evaluation needs no model.
    load = cache(lambda: load_policy(model))

    def respond(prompts: list, **options: Any) -> list:
        policy, tokenizer = load()
        prompts = [_as_input(tokenizer, prompt) for prompt in prompts]
        limits = {"max_new_tokens": task.max_new_tokens, "batch_size": batch_size}
        return generate_responses(policy, tokenizer, prompts, **limits, **options)

    def finish(part: list, found: list) -> list[Row]:
        asked, texts = [row for row, _, _ in part], [one.text for one in found]
        checked = check(asked, texts, [one.finished for one in found])
        return [
            {
                "row_id": row["row_id"],
                "sample": 0,
                "prompt_text": row["prompt"] if isinstance(row["prompt"], str) else plain_prompt(row["prompt"]),
                "response_text": one.text,
                "generated_num_tokens": len(one.response_ids),
                "finished": one.finished,
                **{f"{PREFIX}{key}": value for key, value in metrics.items()},
            }
            for row, one, metrics in zip(asked, found, checked, strict=True)
        ]

    engine, end = (_pair_scorer(load, batch_size), _finish_pairs) if task.check == PAIRS else (respond, finish)
    items = [(row, row["prompt"] if check else row, 0) for row in rows]
    kept = {"path": folder / (ROWS if check else PAIR_ROWS), "save_every": batch_size, "accelerator": None}
    done = sample_rows(items, engine, end, seed=0, progress=name, **kept)
    results: dict[str, Any] = {
        "run": {
            "objective": f"evaluation ({name})",
            "model": model,
            "dataset": name,
            "sampling": {"temperature": 0.0},
        },
        "tasks": {name: summarize(done)},
    }
    if check:
        tokens = [row["generated_num_tokens"] for row in done]
        cut = sum(not row["finished"] for row in done)
        results["generations"] = {
            "policy": {"mean_tokens": sum(tokens) / len(done), "truncated_fraction": cut / len(done)}
        }
    if earlier is not None:
        results["compared_with"] = str(compare)
        results["difference"] = difference(earlier, done)
    write_json(folder / "results.json", results)
    return results


def summarize(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Each metric's `mean`, its interval `low` and `high`, and `n`, the number of values."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, values in _metrics(row).items():
            columns.setdefault(name, []).extend(values)
    return {name: {**mean_with_interval(values), "n": len(values)} for name, values in columns.items() if values}


def difference(before: Sequence[Row], after: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Each metric after minus before on the rows that both have, as `summarize` returns it.

    Raises:
        ValueError: they share no row.
    """
    earlier = {row["row_id"]: _metrics(row) for row in before}
    gains: dict[str, list[float]] = {}
    for row in after:
        for name, values in _metrics(row).items():
            others = earlier.get(row["row_id"], {}).get(name, [])
            if len(others) == len(values):
                gains.setdefault(name, []).extend(a - b for a, b in zip(values, others, strict=True))
    if not any(gains.values()):
        raise ValueError("the evaluation to compare with has none of these rows")
    return {
        name: {**mean_with_interval(values, gains=True), "n": len(values)} for name, values in gains.items() if values
    }


def _metrics(row: Row) -> dict[str, list[float]]:
    """A row's metrics, each as the list of its values."""
    found = {key.removeprefix(PREFIX): value for key, value in row.items() if key.startswith(PREFIX)}
    return {
        key: value if isinstance(value, list) else [] if value is None else [value] for key, value in found.items()
    }


def _rows_of(folder: Path, settings: Mapping[str, Any]) -> list[Row]:
    """The rows of an earlier evaluation of the task."""
    earlier = read_json(existing_file(folder / SETTINGS))
    for name, value in settings.items():
        if name != "model_sha256" and earlier.get(name) != value:
            raise ValueError(f"--compare {folder}: its {name} is {earlier.get(name)!r}, not {value!r}")
    return [row for _, row in read_jsonl(folder / (PAIR_ROWS if settings["check"] == PAIRS else ROWS)).rows]


def _as_input(tokenizer, prompt: Any) -> Any:
    """Messages for a model with a chat template, else text."""
    if tokenizer.chat_template:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return prompt if isinstance(prompt, str) else plain_prompt(prompt)


def _pair_scorer(load, batch_size: int):
    """An engine that returns each pair's log-probabilities: tensors of the chosen and of the rejected tokens."""

    def score(pairs: list[Row], *, seed: int, progress: str | None) -> list:
        from trl_ext.data.conversation import encode_turn
        from trl_ext.models import score_responses

        policy, tokenizer = load()

        def encoded(row: Row, side: str) -> tuple[list[int], list[int]]:
            text = row[side] if isinstance(row[side], str) else row[side][-1]["content"]
            return encode_turn(tokenizer, _as_input(tokenizer, row["prompt"]), text)

        turns = [encoded(row, side) for row in pairs for side in ("chosen", "rejected")]
        pad = {"pad_token_id": tokenizer.pad_token_id, "batch_size": batch_size, "progress": progress}
        found = score_responses(policy, *map(list, zip(*turns, strict=True)), **pad)
        return list(zip(found[::2], found[1::2], strict=True))

    return score


def _finish_pairs(part: list, found: list) -> list[Row]:
    """The pairs' margins, and whether the chosen response is likelier, in sum and per token; ties are half."""
    rows = []
    for (row, _, _), (chosen, rejected) in zip(part, found, strict=True):
        margins = {"summed": chosen.sum() - rejected.sum(), "per token": chosen.mean() - rejected.mean()}
        right = {f"{PREFIX}{name}": 0.5 if value == 0 else float(value > 0) for name, value in margins.items()}
        rows.append({"row_id": row["row_id"], "sample": 0, "margin": float(margins["summed"]), **right})
    return rows
