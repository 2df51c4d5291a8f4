"""Evaluates a model on a task: samples responses, checks them, and summarizes with intervals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from trl_ext.data.benchmark import EMBEDDED, known_score
from trl_ext.data.formats import plain_prompt
from trl_ext.data.math import load_prompt_template, render
from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation.judging.protocol import last_user_text
from trl_ext.evaluation.reasoning import summarize_reasoning
from trl_ext.evaluation.reporting.results import save_results
from trl_ext.evaluation.statistics.intervals import mean_with_interval
from trl_ext.evaluation.tasks.task import Row, Task, read_rows, read_task
from trl_ext.files import existing_file, read_json
from trl_ext.models.loading import find_policy, model_sha256
from trl_ext.names import check_choice, load_function
from trl_ext.rewards.verified import KINDS, VerifiedGrader
from trl_ext.rollouts.generation import Generation, SamplingSettings
from trl_ext.rollouts.responses import Engine, graded, load_engine, sample_responses, settings_path

RESPONSES = "responses.jsonl"
# Metrics are saved in each row under this prefix, as rewards are, so that the report shows them beside the response.
PREFIX = "reward/"
CHECKS = (*KINDS, "exact", "contains", *EMBEDDED)


def evaluate(
    model: str,
    name: str,
    folder: Path,
    *,
    data: Path | None = None,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    dtype: str = "auto",
    use_vllm: bool = False,
    save_every: int = 512,
    compare: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a model on a task, and write the responses and `results.json` into a folder; a killed call resumes.

    Args:
        model, dtype, use_vllm: as for `load_engine`; the model may also be the folder of a run.
        name: a task of the library, or a YAML file.
        folder, compare: where results go, and the folder of an earlier call, for the differences on the same rows.
        data: the folder that holds the task's data.
        limit: the number of rows, from the first; None for all. A later call on the folder may raise it.
        max_new_tokens: the longest response; None for that of the task.
        batch_size, seed, save_every: of the sampling, as for `SamplingSettings` and `save_rows`.

    Raises:
        ValueError, FileNotFoundError: an argument, the task or its data is wrong; nothing was sampled.
        FileExistsError: the folder holds an evaluation of another model, task or data.
    """
    name, task, home = read_task(name)
    task = task.model_copy(update={"max_new_tokens": max_new_tokens or task.max_new_tokens})
    rows = read_rows(task, [home, *([data] if data else [])])
    check = make_check(task, rows)
    find_policy(model, dtype=dtype)
    # A model that is trained again into the same folder is another one, and so are data or your own check's file that
    # have changed.
    source = Path(task.check.rpartition(":")[0])
    own = source.read_bytes() if source.is_file() else b""
    settings = {
        **{"task": name, **task.model_dump(), "seed": seed, "dtype": dtype},
        "data_sha256": hashlib.sha256(json.dumps(rows).encode() + own).hexdigest(),
        "model_sha256": model_sha256(model),
        "batch_size": batch_size,
    }
    earlier = None if compare is None else _rows_of(compare / RESPONSES, settings)
    decoding = {"temperature": task.temperature, "top_p": task.top_p}
    limits = {"max_new_tokens": task.max_new_tokens, "batch_size": batch_size}
    sampling = SamplingSettings(**limits, **decoding, stop=tuple(task.stop))
    engine = _engine_of(task, cache(lambda: load_engine(model, sampling, dtype=dtype, use_vllm=use_vllm)))
    asked = [{**row, "prompt_text": _text(row["prompt"])} for row in rows[:limit]]
    prompts, options = [row["prompt"] for row in asked], {"samples": task.samples, "progress": name}
    options |= {"path": folder / RESPONSES, "settings": settings, "seed": seed, "save_every": save_every}
    done = sample_responses(asked, prompts, engine, check, **options)
    run = {"objective": f"evaluation ({name})", "model": model, "dataset": name, "sampling": decoding, "seed": seed}
    results: dict[str, Any] = {"run": run, "tasks": {name: summarize(_by_row(done).values())}}
    if task.check in KINDS:
        ks = [2**power for power in range(task.samples.bit_length())] if task.samples > 1 else []
        results["reasoning"] = found = summarize_reasoning(done, ks)
        of_k = {f"{kind}@{k}": one for kind in ("pass", "maj") for k, one in found[f"{kind}_at"].items()}
        results["tasks"][name] = {"accuracy": found["accuracy"], "format": found["format_rate"], **of_k}
        results["score"] = {"policy": found["accuracy"]["mean"]}
    tokens, finished = (fmean(row[key] for row in done) for key in ("generated_num_tokens", "finished"))
    results["generations"] = {"policy": {"mean_tokens": tokens, "truncated_fraction": 1 - finished}}
    if earlier is not None:
        results["compared_with"] = str(compare)
        results["difference"] = difference(earlier, done)
    save_results(folder, results)
    return results


def _engine_of(task: Task, load: Callable[[], tuple[Engine, Any]]) -> Engine:
    """The engine of a task, whose model is loaded with the first prompt: a finished evaluation needs none."""
    template = None if task.template is None else load_prompt_template(task.template)

    def respond(prompts: Sequence[Any], **options: Any) -> list[Generation]:
        engine, tokenizer = load()
        if template is not None:
            prompts = [render(template, _text(prompt)) for prompt in prompts]
        elif tokenizer.chat_template:
            prompts = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in prompts]
        else:
            prompts = [_text(prompt) for prompt in prompts]
        return engine(prompts, **options)

    return respond


def summarize(rows: Iterable[Mapping[str, float]], *, gains: bool = False) -> dict[str, dict[str, Any]]:
    """Each metric's `mean`, its interval `low` and `high` as `mean_with_interval` has it, and `n`; most rows first."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    found = sorted(columns.items(), key=lambda item: -len(item[1]))
    return {name: {**mean_with_interval(values, gains=gains), "n": len(values)} for name, values in found}


def difference(before: Sequence[Row], after: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Each metric of the saved rows after minus before, on those that both have, as `summarize` returns it."""
    earlier, gains = _by_row(before), []
    for row_id, new in _by_row(after).items():
        old = earlier.get(row_id, {})
        gains.append({name: new[name] - old[name] for name in new if name in old})
    return summarize(gains, gains=True)


def _by_row(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The metrics of each row of the data, each the mean over the row's responses that have it."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        own = values.setdefault(row["row_id"], {})
        for key, value in row.items():
            if key.startswith(PREFIX) and value is not None:
                own.setdefault(key.removeprefix(PREFIX), []).append(value)
    return {row_id: {name: fmean(found) for name, found in own.items()} for row_id, own in values.items()}


def _rows_of(path: Path, settings: Mapping[str, Any]) -> list[Row]:
    """The rows of an earlier evaluation of the task."""
    earlier = read_json(existing_file(settings_path(path)))
    for name, value in settings.items():
        if name not in ("model_sha256", "dtype", "batch_size") and earlier.get(name) != value:
            raise ValueError(f"--compare {path.parent}: its {name} is {earlier.get(name)!r}, not {value!r}")
    return [row for _, row in read_jsonl(path).rows]


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else plain_prompt(prompt)


def make_check(task: Task, rows: Sequence[Row]) -> Callable[[Sequence[Row], Sequence[Generation]], list[Row]]:
    """The function `f(rows, generations)` that checks responses of a task and returns columns of their rows.

    The columns are the metrics under `PREFIX` and, for verified answers, those of `graded`.

    Raises:
        ValueError, FileNotFoundError: an unknown check, or the rows or the task lack what it needs.
    """
    name = task.check
    if ":" not in name:
        check_choice("check", name, [*CHECKS, "your own file.py:function"])
    if name in (*KINDS, "exact", "contains") and task.answer is None:
        raise ValueError(f'the check {name} needs the key answer, such as answer: "{{answer}}"')
    if task.answer is not None and not all(isinstance(row["answer"], str) for row in rows):
        raise ValueError(f"answer: {task.answer} is a list in the data, and one text is needed")
    if name == "countdown" and not all("numbers" in row for row in rows):
        raise ValueError("the check countdown needs numbers in every row of the data")
    of_one = _check_of_one(name)
    return lambda rows, found: [of_one(row, one) for row, one in zip(rows, found, strict=True)]


def _check_of_one(name: str) -> Callable[[Row, Generation], Row]:
    if name in KINDS:
        grade = VerifiedGrader(name)

        def verified(row: Row, one: Generation) -> Row:
            found = graded(row, one, grade)
            return found | _columns({"accuracy": found["answer_reward"], "format": found["format_reward"]})

        return verified
    if name in ("exact", "contains"):
        same = str.__eq__ if name == "exact" else str.__contains__
        return lambda row, one: _columns({"accuracy": float(same(_plain(one.text), _plain(row["answer"])))})
    if name in EMBEDDED:
        score = known_score(name)
        return lambda row, one: _columns(
            {"score": score(last_user_text(row["prompt"]), one.text, finished=one.finished)}
        )
    own = load_function(name, "check")

    def check(row: Row, one: Generation) -> Row:
        found = own(one.text, row)
        return _columns(found if isinstance(found, Mapping) else {"accuracy": None if found is None else float(found)})

    return check


def _columns(metrics: Mapping[str, Any]) -> Row:
    return {PREFIX + name: value for name, value in metrics.items()}


def _plain(text: str) -> str:
    """A text without differences in case and spaces."""
    return " ".join(text.split()).casefold()
