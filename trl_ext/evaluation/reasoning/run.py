"""Sampling and grading of responses to problems, which goes on where it was interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.evaluation.reasoning.categories import category_of
from trl_ext.evaluation.reasoning.grading import Grader
from trl_ext.files import write_text
from trl_ext.rollouts import Generation, map_over_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

Prompt = list[dict[str, Any]] | str
Engine = Callable[..., list[Generation]]
SAVE_EVERY = 256


def evaluate_reasoning(
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    engine: Engine,
    grade: Grader,
    *,
    samples: int = 1,
    seed: int = 0,
    path: str | Path | None = None,
    save_every: int = SAVE_EVERY,
    entropies: Callable[[list[Generation]], list[float | None]] | None = None,
    accelerator: Accelerator | None = None,
    progress: str | None = None,
) -> list[dict[str, Any]]:
    """Sample responses to problems and grade them.

    With a `path` every `save_every` responses are appended to it and synchronized to the disk, and a call that finds
    rows there goes on behind them: one that was interrupted and called again gives what an uninterrupted one gives.
    The file must be of the same call; what it was made with beside the problems is for the caller to check.

    Args:
        rows: problems with `row_id`, `prompt_text`, `answer` and what the grader reads.
        prompts: what the model is given for each, messages or text.
        engine: `f(prompts, seed=..., progress=...)`, one `Generation` for each: `TransformersEngine` or `VLLMEngine`.
        grade: `f(response, row)`, as `grader` makes it; where it has a method `parsed_answer(response)`, rows have it.
        samples: responses to each problem.
        seed: of the sampling.
        path: JSON lines to append to; None keeps all in memory.
        save_every: responses between saves.
        entropies: mean entropy of each response, for the field `entropy`; None for none.
        accelerator: of a run with several processes, which divide the work; each must call this and gets all rows.
        progress: what a progress bar calls the work; None for no bar.

    Returns:
        One row per response, problems in order and the samples of one together: `row_id`, `sample`, `prompt_text`,
        `answer`, `response_text`, `generated_num_tokens`, `finished`, `category`, `reward`, `format_reward`,
        `answer_reward`, and where they are known `parsed_answer` (None for a response without one) and `entropy`.

    Raises:
        ValueError: no problems, fewer than one sample, or a file that holds rows of another evaluation.
    """
    if not rows or len(rows) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts for {len(rows)} problems; give one for each, and at least one")
    if samples < 1 or save_every < 1:
        raise ValueError(f"samples and save_every must be at least 1, got {samples} and {save_every}")
    work = [(row, prompt, sample) for row, prompt in zip(rows, prompts, strict=True) for sample in range(samples)]
    done = [] if path is None else _kept(Path(path), work, save_every, accelerator)
    for start in range(len(done), len(work), save_every):
        label = None if progress is None else f"{progress}, {start} of {len(work)} done"

        def sample_and_grade(items: list, start=start, label=label) -> list[dict[str, Any]]:
            generations = engine(
                [prompt for _, prompt, _ in items], seed=_seed(seed, start, accelerator), progress=label
            )
            known = [None] * len(items) if entropies is None else entropies(generations)
            return [
                _graded(row, sample, generation, entropy, grade)
                for (row, _, sample), generation, entropy in zip(items, generations, known, strict=True)
            ]

        graded = map_over_ranks(sample_and_grade, work[start : start + save_every], accelerator)
        if path is not None and (accelerator is None or accelerator.is_main_process):
            _append(Path(path), graded)
        done += graded
    return done


def _graded(
    row: Mapping[str, Any], sample: int, generation: Generation, entropy: float | None, grade: Grader
) -> dict[str, Any]:
    try:
        rewards = grade(generation.text, row)
        category = category_of(rewards["format_reward"], rewards["answer_reward"])
    except ValueError as error:
        raise ValueError(f"row_id {row['row_id']}: {error}") from error
    return {
        "row_id": row["row_id"],
        "sample": sample,
        "prompt_text": row["prompt_text"],
        "answer": row["answer"],
        "response_text": generation.text,
        "generated_num_tokens": len(generation.response_ids),
        "finished": generation.finished,
        "category": category,
        **{name: rewards[name] for name in ("reward", "format_reward", "answer_reward")},
        **({"parsed_answer": grade.parsed_answer(generation.text)} if hasattr(grade, "parsed_answer") else {}),
        **({} if entropy is None else {"entropy": entropy}),
    }


def _seed(seed: int, start: int, accelerator: Accelerator | None) -> int:
    """Of one part of the work and one process; under FSDP all do the same work and must draw alike."""
    alone = accelerator is None or str(accelerator.distributed_type).endswith("FSDP")
    return seed + 1_000_003 * (start + (0 if alone else accelerator.process_index))


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())


def _kept(path: Path, work: Sequence[tuple], save_every: int, accelerator: Accelerator | None) -> list[dict[str, Any]]:
    """The rows of earlier calls, up to the last save that is whole; every process gets the first one's."""
    kept = [_read_kept(path, work, save_every) if accelerator is None or accelerator.is_main_process else None]
    if accelerator is not None and accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(kept)
    return kept[0]


def _read_kept(path: Path, work: Sequence[tuple], save_every: int) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    # What stands behind the last newline was cut off while it was written.
    lines = path.read_bytes().split(b"\n")[:-1]
    whole = len(lines) if len(lines) == len(work) else len(lines) // save_every * save_every
    rows = [_parsed(path, number, line) for number, line in enumerate(lines[:whole], start=1)]
    for number, found in enumerate(rows):
        wanted = (work[number][0]["row_id"], work[number][2]) if number < len(work) else None
        if (found.get("row_id"), found.get("sample")) != wanted:
            raise ValueError(
                f"{path}: line {number + 1} is row_id {found.get('row_id')}, sample {found.get('sample')}, and not "
                "what this evaluation has in its place: the file is of another one; remove it or choose another"
            )
    write_text(path, "".join(line.decode() + "\n" for line in lines[:whole]))
    return rows


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number} is damaged ({error}): remove the file to begin again") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}: line {number} holds no row: remove the file to begin again")
    return row
