"""Making a submission: greedy responses of policies, scores of a reward model, and the archive to hand in."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.evaluation.submissions.assets import (
    MAX_PROMPT_TOKENS,
    TokenCounter,
    default_max_new_tokens,
    load_pairs,
    load_prompts,
    token_counter,
)
from trl_ext.evaluation.submissions.row_files import RowFile
from trl_ext.evaluation.submissions.rows import (
    RowProblem,
    read_pair_scores,
    read_responses,
    refuse_fatal,
    response_row,
)
from trl_ext.files import brief, replacing

REWARD_MODEL = "reward_model"
PART_TWO = ("offline_best", "online_best")
METHODS = ("dpo", "ipo", "aot", "grpo", "drgrpo", "gspo")


def submission_file(name: str) -> str:
    """Where a submission keeps the file of `reward_model`, `offline_best`, `online_best` or of a policy's method.

    Raises:
        ValueError: the name is empty or leads out of its folder.
    """
    if not name.strip(". ") or any(character in name for character in "/\\") or not name.isprintable():
        raise ValueError(
            f"{brief(name)!r} cannot be a policy's name, which is that of its file: give letters, digits and "
            f"underscores without a path, such as {METHODS[0]}"
        )
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
    overwrite: bool = False,
    progress: bool = False,
) -> RowFile:
    """Write a policy's greedy response to every prompt, a batch of similar length at a time.

    The file is written after each batch. Called again, it goes on from the rows that are there, if they are of the
    same model, prompts and settings; with all of them there, no model is loaded. Another batch size is only warned of:
    it changes the rounding, and so may change the text where two tokens are equally likely, above all in bfloat16.

    Args:
        model: `toy`, a folder of a full model or of an adapter, or a hub name.
        out: the file; beside it, a `.settings.json` says how its rows are made.
        prompts_jsonl: prompts; None for the embedded ones.
        max_prompt_tokens: longer prompts lose their beginning.
        max_new_tokens: longest response; None for 256, or 48 for the embedded prompts.
        batch_size: prompts per batch.
        dtype: of the weights.
        overwrite: replace a file of other settings.
        progress: whether to show a progress bar.

    Raises:
        FileNotFoundError: no such model or prompts.
        FileExistsError: `out` holds rows of another model or of other settings.
        ValueError: bad prompts, or an argument out of range.
    """
    from trl_ext.evaluation.submissions.policy_models import load_policy, model_sha256
    from trl_ext.models import resolve_model_path

    # What is wrong here shows before large libraries are imported.
    resolve_model_path(str(model))
    limit = default_max_new_tokens(prompts_jsonl) if max_new_tokens is None else max_new_tokens
    for name, value in (
        ("max_prompt_tokens", max_prompt_tokens),
        ("max_new_tokens", limit),
        ("batch_size", batch_size),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    prompts = load_prompts(prompts_jsonl)
    settings = {
        "rows": "greedy responses",
        "model": str(model),
        "model_sha256": model_sha256(model),
        "prompts_sha256": _sha256([row["row_id"], row["prompt"]] for row in prompts),
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": limit,
        "dtype": dtype,
        "batch_size": batch_size,
    }
    file = RowFile(out, settings, [row["row_id"] for row in prompts], overwrite=overwrite)
    batches = _batches(prompts, batch_size, set(file.missing))
    if batches:
        policy, tokenizer = load_policy(model, dtype=dtype)

        from tqdm.auto import tqdm

        from trl_ext.rollouts import generate_responses

        with tqdm(total=len(prompts), initial=len(file.rows), desc="responses", disable=not progress) as bar:
            for batch in batches:
                generations = generate_responses(
                    policy,
                    tokenizer,
                    [row["prompt"] for row in batch],
                    max_new_tokens=limit,
                    max_prompt_tokens=max_prompt_tokens,
                    batch_size=batch_size,
                )
                file.add(
                    response_row(row, generation.text, len(generation.response_ids))
                    for row, generation in zip(batch, generations, strict=True)
                )
                bar.update(len(batch))
    return file


def score_submission_file(
    reward_model: str | Path,
    out: str | Path,
    *,
    prefs_jsonl: str | Path | None = None,
    batch_size: int = 16,
    dtype: str = "float32",
    overwrite: bool = False,
    progress: bool = False,
) -> RowFile:
    """Write a reward model's scores of both responses of every pair; resumes as `generate_submission_file` does.

    Args:
        reward_model: a saved reward model, full or an adapter.
        out: the file; beside it, a `.settings.json` says how its rows are made.
        prefs_jsonl: pairs; None for the embedded ones.
        batch_size: responses per forward pass.
        dtype: of the weights.
        overwrite: replace a file of other settings.
        progress: whether to show a progress bar.

    Raises:
        FileNotFoundError: no such model or pairs.
        FileExistsError: `out` holds rows of another model or of other settings.
        ValueError: bad pairs, not a reward model, or an argument out of range.
    """
    from trl_ext.evaluation.submissions.policy_models import model_sha256
    from trl_ext.models import resolve_model_path

    # What is wrong here shows before large libraries are imported.
    resolve_model_path(str(reward_model))
    pairs = load_pairs(prefs_jsonl)

    from trl_ext.rewards import RewardModel

    model = RewardModel(reward_model, batch_size=batch_size, dtype=dtype)
    settings = {
        "rows": "scores of pairs",
        "model": str(reward_model),
        "model_sha256": model_sha256(model.folder),
        "pairs_sha256": _sha256([row["row_id"], row["prompt"], row["chosen"], row["rejected"]] for row in pairs),
        "dtype": dtype,
        "batch_size": batch_size,
    }
    file = RowFile(out, settings, [row["row_id"] for row in pairs], overwrite=overwrite)
    missing = set(file.missing)
    if missing:
        rows = [row for row in pairs if row["row_id"] in missing]
        chosen, rejected = (
            model.score(
                [row["prompt"] for row in rows],
                [row[side] for row in rows],
                progress=f"{side} responses" if progress else None,
            ).tolist()
            for side in ("chosen", "rejected")
        )
        file.add(
            {"row_id": row["row_id"], "chosen_score": c, "rejected_score": r}
            for row, c, r in zip(rows, chosen, rejected, strict=True)
        )
    return file


def build_submission(
    policies: Mapping[str, str | Path],
    out: str | Path,
    *,
    reward_model: str | Path | None = None,
    prompts_jsonl: str | Path | None = None,
    prefs_jsonl: str | Path | None = None,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    max_new_tokens: int | None = None,
    batch_size: int = 32,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: bool = False,
) -> list[Path]:
    """Write a submission's folder from models; resumes where it stopped.

    Args:
        policies: model by method, such as `{"aot": "runs/aot-toy"}`; `offline_best` and `online_best` are part two's.
        out: the folder.
        reward_model: a saved reward model; None for none.
        prompts_jsonl, max_prompt_tokens, max_new_tokens, batch_size, dtype: as in `generate_submission_file`.
        prefs_jsonl: as in `score_submission_file`.
        overwrite: replace files of other settings.
        progress: whether to show progress bars.

    Returns:
        The files.

    Raises:
        ValueError: a policy's name is no file's name.
        ValueError, FileNotFoundError, FileExistsError: as for the two functions named.
    """
    folder = Path(out)
    # All names before the first model is loaded.
    places = {name: folder / submission_file(name) for name in policies}
    files = [
        generate_submission_file(
            model,
            places[name],
            prompts_jsonl=prompts_jsonl,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            dtype=dtype,
            overwrite=overwrite,
            progress=progress,
        )
        for name, model in policies.items()
    ]
    if reward_model is not None:
        target = folder / submission_file(REWARD_MODEL)
        files.append(
            score_submission_file(
                reward_model, target, prefs_jsonl=prefs_jsonl, overwrite=overwrite, progress=progress
            )
        )
    return [file.path for file in files]


def submission_checks(
    methods: Iterable[str],
    *,
    prompts_jsonl: str | Path | None = None,
    prefs_jsonl: str | Path | None = None,
    max_new_tokens: int | None = None,
    count_tokens: TokenCounter | None = None,
) -> dict[str, Any]:
    """What the files of a submission are held against, the same when they are packed and when they are graded.

    Args:
        methods: whose files; pairs are read if the reward model is one of them.
        prompts_jsonl, prefs_jsonl: what the submission was made on; None for what is embedded.
        max_new_tokens: the most tokens of a response; None for 256, or 48 for the embedded prompts.
        count_tokens: counts the tokens of a text, to check what rows say of their length. None for the embedded
            tokenizer's count where the prompts are embedded, and for no check where they are not.

    Returns:
        The keywords of `check_submission_file`.

    Raises:
        FileNotFoundError: no such file of prompts or pairs.
        ValueError: those files have bad rows.
    """
    if count_tokens is None and prompts_jsonl is None:
        count_tokens = token_counter("toy")
    return {
        "prompts": load_prompts(prompts_jsonl),
        "pairs": load_pairs(prefs_jsonl) if REWARD_MODEL in methods else [],
        "max_new_tokens": default_max_new_tokens(prompts_jsonl) if max_new_tokens is None else max_new_tokens,
        "count_tokens": count_tokens,
    }


def check_submission_file(
    folder: str | Path,
    name: str,
    *,
    prompts: Sequence[Mapping[str, Any]],
    pairs: Sequence[Mapping[str, Any]],
    max_new_tokens: int,
    count_tokens: TokenCounter | None,
) -> tuple[Any, list[RowProblem]]:
    """What `read_responses` or `read_pair_scores` finds in a method's file, held against `submission_checks`."""
    path = Path(folder) / submission_file(name)
    if name == REWARD_MODEL:
        return read_pair_scores(path, [row["row_id"] for row in pairs])
    return read_responses(path, prompts, max_new_tokens=max_new_tokens, count_tokens=count_tokens)


def pack_submission(
    folder: str | Path,
    out: str | Path,
    methods: Iterable[str] = (REWARD_MODEL, *METHODS, *PART_TWO),
    *,
    prompts_jsonl: str | Path | None = None,
    prefs_jsonl: str | Path | None = None,
    max_new_tokens: int | None = None,
    count_tokens: TokenCounter | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Check a submission's files and put them into an archive; the same files give the same archive, byte for byte.

    Args:
        folder: with the files of `submission_file`; some may be missing, and no others are taken.
        out: the archive.
        methods: those that a submission may have.
        prompts_jsonl, prefs_jsonl, max_new_tokens, count_tokens: as in `submission_checks`.
        overwrite: replace an archive that is there.

    Returns:
        `files` with their sizes in bytes, `missing` files, `warnings`, and the archive's `bytes` and `sha256`.

    Raises:
        FileNotFoundError: no such folder, or none of the files in it.
        FileExistsError: the archive exists.
        ValueError: rows that would not be graded; the message names the first five.
    """
    folder, out = Path(folder), Path(out)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists: choose another --out, or replace it with --overwrite")
    names = list(methods)
    there = [name for name in names if (folder / submission_file(name)).is_file()]
    if not there:
        raise FileNotFoundError(f"{folder} holds no file of a submission, such as {submission_file(names[0])}")
    checks = submission_checks(
        there,
        prompts_jsonl=prompts_jsonl,
        prefs_jsonl=prefs_jsonl,
        max_new_tokens=max_new_tokens,
        count_tokens=count_tokens,
    )
    problems = [problem for name in there for problem in check_submission_file(folder, name, **checks)[1]]
    refuse_fatal(problems)
    with replacing(out) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(map(submission_file, there)):
            # A fixed time, so that the archive tells nothing but its content.
            entry = zipfile.ZipInfo(file, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, (folder / file).read_bytes())
    return {
        "files": {submission_file(name): (folder / submission_file(name)).stat().st_size for name in there},
        "missing": [submission_file(name) for name in names if name not in there],
        "warnings": [str(problem) for problem in problems],
        "bytes": out.stat().st_size,
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
    }


def _batches(prompts: list[dict[str, Any]], batch_size: int, missing: set[str]) -> list[list[dict[str, Any]]]:
    """Prompts in batches of similar length, the longest first: should memory not suffice, it shows at once.

    Batches are those of the whole file, without the rows that are there: padding alone can tip a close choice between
    two tokens, and an interrupted run should give what an uninterrupted one gives.
    """
    order = sorted(prompts, key=lambda row: -len(json.dumps(row["prompt"])))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    remaining = [[row for row in batch if row["row_id"] in missing] for batch in batches]
    return [batch for batch in remaining if batch]


def _sha256(values: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values), sort_keys=True).encode()).hexdigest()
