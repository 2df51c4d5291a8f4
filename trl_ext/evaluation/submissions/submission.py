"""Creating a submission: greedy responses of policies, scores of a reward model, and the archive to submit."""

from __future__ import annotations

import hashlib
import json
import zipfile
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from trl_ext.evaluation.submissions.assets import (
    MAX_PROMPT_TOKENS,
    FileRows,
    default_max_new_tokens,
    load_pairs,
    load_prompts,
    read_pair_scores,
    read_responses,
)
from trl_ext.files import replacing, write_json_lines

REWARD_MODEL = "reward_model"
PART_TWO = ("offline_best", "online_best")
# Responses between saves.
SAVE_EVERY = 128


def submission_file(name: str) -> str:
    """The path within a submission for `reward_model`, `offline_best`, `online_best` or a policy's method."""
    if name == REWARD_MODEL:
        return "reward_model/public_test_pref_scores.jsonl"
    return f"part2/{name}.jsonl" if name in PART_TWO else f"policy_generations/{name}.jsonl"


def generate_submission_file(
    model: str | Path,
    out: str | Path,
    *,
    prompts_jsonl: str | Path | None = None,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    max_new_tokens: int | None = None,
    batch_size: int = 32,
    dtype: str = "auto",
) -> list[dict[str, Any]]:
    """Write a policy's greedy response to every prompt, and return the rows.

    A later call resumes from the existing rows; if all are there, no model is loaded.

    Args:
        model: `toy`, a folder of a full model or of an adapter, or a hub name.
        out: the output file; `.settings.json` next to it records how the rows are made.
        prompts_jsonl: prompts; None for the embedded ones.
        max_prompt_tokens: longer prompts lose their beginning.
        max_new_tokens: maximum length of a response; None for 256, or 48 for the embedded prompts.
        batch_size, dtype: prompts per batch, whose number may change the rounding, and the type of the weights.

    Raises:
        FileNotFoundError: the model or the file of prompts does not exist.
        FileExistsError: `out` contains rows of another model, of other prompts or with other settings.
        ValueError: prompts or existing rows are malformed.
    """
    from trl_ext.models.loading import model_sha256
    from trl_ext.processes import warn_once_per_run
    from trl_ext.rollouts.generation import SamplingSettings, without_template
    from trl_ext.rollouts.responses import load_engine, save_rows

    prompts = load_prompts(prompts_jsonl)
    asked = [[row["row_id"], row["prompt"]] for row in prompts]
    limits = {
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens or default_max_new_tokens(prompts_jsonl),
        "batch_size": batch_size,
    }
    settings = {
        "rows": "greedy responses",
        "model": str(model),
        "model_sha256": model_sha256(model),
        "prompts_sha256": hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest(),
        "dtype": dtype,
        **limits,
    }

    @cache
    def load() -> Any:
        engine, tokenizer = load_engine(str(model), SamplingSettings(temperature=0.0, stop=(), **limits), dtype=dtype)
        if line := without_template(tokenizer, [row["prompt"] for row in prompts]):
            warn_once_per_run(line)
        return engine

    def respond(part: list, *, done: int, **_: Any) -> list[dict[str, Any]]:
        label = f"responses, {done} of {len(prompts)} done"
        generations = load()([prompt for _, prompt, _ in part], progress=label)
        return [
            {
                "row_id": row["row_id"],
                "prompt_text": row["prompt_text"],
                "response_text": one.text,
                "generated_num_tokens": len(one.response_ids),
            }
            for (row, _, _), one in zip(part, generations, strict=True)
        ]

    items = [(row, row["prompt"], 0) for row in prompts]
    return save_rows(items, respond, path=out, settings=settings, save_every=SAVE_EVERY)


def score_submission_file(
    reward_model: str | Path,
    out: str | Path,
    *,
    prefs_jsonl: str | Path | None = None,
    batch_size: int = 16,
    dtype: str = "float32",
) -> list[dict[str, Any]]:
    """Write a reward model's scores of both responses of every pair, and return the rows.

    Args:
        reward_model: a saved reward model, full or an adapter.
        out: the output file; an earlier one is replaced.
        prefs_jsonl: pairs; None for the embedded ones.
        batch_size, dtype: responses per forward pass, and the type of the weights.

    Raises:
        FileNotFoundError: the model or the file of pairs does not exist.
        ValueError: pairs are malformed, or the model is not a reward model.
    """
    from trl_ext.rewards import RewardModel

    pairs = load_pairs(prefs_jsonl)
    model = RewardModel(reward_model, batch_size=batch_size, dtype=dtype)
    scores = {}
    for side in ("chosen", "rejected"):
        prompts, responses = zip(*((row["prompt"], row[side]) for row in pairs), strict=True)
        scores[side] = model.score(prompts, responses, progress=f"{side} responses").tolist()
    rows = [
        {"row_id": row["row_id"], "chosen_score": chosen, "rejected_score": rejected}
        for row, chosen, rejected in zip(pairs, scores["chosen"], scores["rejected"], strict=True)
    ]
    write_json_lines(out, rows)
    return rows


def read_submission(
    folder: str | Path,
    methods: Iterable[str],
    *,
    prompts_jsonl: str | Path | None = None,
    prefs_jsonl: str | Path | None = None,
    max_new_tokens: int | None = None,
) -> dict[str, FileRows]:
    """The files that are there, by method, as `read_responses` and `read_pair_scores` return them.

    Args:
        folder, methods: the submission, and the methods whose files are read.
        prompts_jsonl, prefs_jsonl: data that the submission was made on; None for the embedded prompts and pairs.
        max_new_tokens: maximum number of tokens in a response; None for 256, or 48 for the embedded prompts.
    """
    prompts, limit = load_prompts(prompts_jsonl), max_new_tokens or default_max_new_tokens(prompts_jsonl)
    found = {}
    for name in methods:
        path = Path(folder) / submission_file(name)
        if not path.is_file():
            continue
        if name == REWARD_MODEL:
            found[name] = read_pair_scores(path, [row["row_id"] for row in load_pairs(prefs_jsonl)])
        else:
            found[name] = read_responses(path, prompts, max_new_tokens=limit)
        if path.read_bytes().startswith(BOM_UTF8):
            mark = "begins with a UTF-8 byte order mark, on which the course's grader stops; pack leaves it out"
            found[name].warnings.append(mark)
    return found


def pack_submission(folder: str | Path, out: str | Path, methods: Collection[str], **data: Any) -> dict[str, Any]:
    """Check a submission's files and pack them into an archive; the same files give an identical archive.

    Args:
        folder: folder with the files of `submission_file`; some may be missing, and others are ignored.
        out: the archive; an earlier one is replaced.
        methods, data: as in `read_submission`.

    Returns:
        `files` with their sizes in bytes, `missing` files, `warnings`, and the archive's `bytes` and `sha256`.

    Raises:
        FileNotFoundError: the folder contains none of the files.
        ValueError: some rows of a file would not be graded; the message names the first five.
    """
    folder, out = Path(folder), Path(out)
    there = {submission_file(name): found for name, found in read_submission(folder, methods, **data).items()}
    wanted = [submission_file(name) for name in methods]
    if not there:
        raise FileNotFoundError(f"{folder} holds no file of a submission, such as {wanted[0]}")
    warnings = []
    for file, found in there.items():
        found.of(folder / file)
        warnings += [f"{folder / file}: {warning}" for warning in found.warnings]
    with replacing(out) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(there):
            # Use a fixed time, so that the archive depends only on its content.
            entry = zipfile.ZipInfo(file, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, (folder / file).read_bytes().removeprefix(BOM_UTF8))
    return {
        "files": {file: (folder / file).stat().st_size for file in there},
        "missing": [file for file in wanted if file not in there],
        "warnings": warnings,
        "bytes": out.stat().st_size,
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
    }
