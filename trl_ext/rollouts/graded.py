"""Sample responses in parts, which are saved, and grade them; an interrupted run can be continued."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.files import write_text
from trl_ext.processes import map_over_ranks
from trl_ext.rewards.verified import Grader, category_of
from trl_ext.rollouts.generation import Generation

if TYPE_CHECKING:
    from accelerate import Accelerator

Prompt = list[dict[str, Any]] | str
Engine = Callable[..., list[Generation]]
# A row with `row_id`, its prompt, and the number of the response to it.
Item = tuple[Mapping[str, Any], Prompt, int]
Row = dict[str, Any]
SAVE_EVERY = 256


def sample_rows(
    items: Sequence[Item],
    engine: Engine,
    finish: Callable[[list[Item], list[Generation]], list[Row]],
    *,
    seed: int = 0,
    path: str | Path | None = None,
    save_every: int = SAVE_EVERY,
    accelerator: Accelerator | None = None,
    progress: str | None = None,
) -> list[Row]:
    """Sample a response for each item, in parts of `save_every` responses.

    With a `path`, each part is appended to the file and synchronized to disk. A call that finds rows there continues
    after the last complete part and returns the same rows as an uninterrupted call. The file must come from the same
    call: only `row_id` and `sample` are checked, so the caller must check everything else.

    Args:
        items: rows with their prompt and the number of the response.
        engine: called with a list of prompts, `seed` and `progress`; returns one `Generation` for each.
        finish: turns items and their generations into JSON-ready rows with `row_id` and `sample`.
        seed: seed of the samples.
        path: a JSON Lines file; None to keep the rows in memory alone.
        save_every: responses of a part. A call that continues a file needs the same number.
        accelerator: for a run with several processes, which divide the work. Each must call this function and gets
            all rows.
        progress: label of the progress bar; None for no bar.

    Raises:
        ValueError: a line of the file is damaged, or its rows are not in this order.
    """
    is_main = accelerator is None or accelerator.is_main_process
    # The first process reads the saved rows for all.
    kept = [_kept(Path(path), items, save_every) if path is not None and is_main else []]
    if accelerator is not None and accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(kept)
    done = kept[0]
    # Under FSDP all processes do the same work, and must sample alike.
    alike = accelerator is None or str(accelerator.distributed_type).endswith("FSDP")
    rank = 0 if alike else accelerator.process_index
    for start in range(len(done), len(items), save_every):
        options = {"seed": seed + 1_000_003 * (start + rank)}
        options["progress"] = None if progress is None else f"{progress}, {start} of {len(items)} done"

        def sample_part(part: list[Item], options=options) -> list[Row]:
            return finish(part, engine([prompt for _, prompt, _ in part], **options))

        rows = map_over_ranks(sample_part, items[start : start + save_every], accelerator)
        if path is not None and is_main:
            _append(Path(path), rows)
        done += rows
    return done


def _append(path: Path, rows: Sequence[Row]) -> None:
    """Append the rows of a part and wait until they are on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())


def _kept(path: Path, items: Sequence[Item], save_every: int) -> list[Row]:
    """The saved rows up to the last complete part; what follows is cut off from the file."""
    if not path.is_file():
        return []
    # Text after the last newline is a line whose writing was interrupted.
    lines = path.read_bytes().split(b"\n")[:-1]
    whole = len(lines) if len(lines) == len(items) else len(lines) // save_every * save_every
    order = [(item["row_id"], sample) for item, _, sample in items]
    rows = []
    for number, line in enumerate(lines[:whole]):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}: line {number + 1} is damaged ({error}): remove the file to begin again"
            ) from error
        found = (row.get("row_id"), row.get("sample"))
        if order[number : number + 1] != [found]:
            raise ValueError(
                f"{path}: line {number + 1} is row_id {found[0]}, sample {found[1]}, and not what this evaluation has "
                "in its place: the file is of another one; remove it or choose another"
            )
        rows.append(row)
    write_text(path, "".join(line.decode() + "\n" for line in lines[:whole]))
    return rows


def evaluate_reasoning(
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    engine: Engine,
    grade: Grader,
    *,
    samples: int = 1,
    entropies: Callable[[list[Generation]], list[float | None]] | None = None,
    **options: Any,
) -> list[Row]:
    """Sample responses to problems and grade them.

    Args:
        rows: problems with `row_id`, `prompt_text`, `answer` and the fields that the grader reads.
        prompts: the model's input for each problem, messages or text.
        engine: `TransformersEngine`, `VLLMEngine`, or a function that is called like them.
        grade: `f(response, row)`, such as a function created by `grader`. If it has a method
            `parsed_answer(response)`, rows include the answer.
        samples: responses to each problem.
        entropies: computes the mean entropy of each response, for the field `entropy`; None to leave it out.
        options: `seed`, `path`, `save_every`, `accelerator` and `progress` of `sample_rows`.

    Returns:
        One row per response, grouped by problem in order: `row_id`, `sample`, `prompt_text`, `answer`,
        `response_text`, `generated_num_tokens`, `finished`, `category`, `reward`, `format_reward`, `answer_reward`,
        and, if available, `parsed_answer` (None for a response without one) and `entropy`.

    Raises:
        ValueError: there are no problems, `samples` is below 1, or the file holds rows of another evaluation.
    """
    if not rows or len(rows) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts for {len(rows)} problems; give one for each, and at least one")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    items = [(row, prompt, sample) for row, prompt in zip(rows, prompts, strict=True) for sample in range(samples)]

    def graded(part: list[Item], generations: list[Generation]) -> list[Row]:
        known = [None] * len(part) if entropies is None else entropies(generations)
        return [
            _graded(row, sample, generation, grade) | ({} if entropy is None else {"entropy": entropy})
            for (row, _, sample), generation, entropy in zip(part, generations, known, strict=True)
        ]

    return sample_rows(items, engine, graded, **options)


def _graded(row: Mapping[str, Any], sample: int, generation: Generation, grade: Grader) -> Row:
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
        **response_fields(generation),
        "category": category,
        **{name: rewards[name] for name in ("reward", "format_reward", "answer_reward")},
        **({"parsed_answer": grade.parsed_answer(generation.text)} if hasattr(grade, "parsed_answer") else {}),
    }


def response_fields(generation: Generation) -> Row:
    """What a saved row holds of a response."""
    return {
        "response_text": generation.text,
        "generated_num_tokens": len(generation.response_ids),
        "finished": generation.finished,
    }
