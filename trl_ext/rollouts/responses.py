"""Responses on disk: sampled in parts, scored, saved with their settings, and resumed after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.data.conversation import prompt_text
from trl_ext.files import brief, read_json, write_json, write_text
from trl_ext.processes import map_over_ranks
from trl_ext.rewards.verified import Grader, category_of
from trl_ext.rollouts.generation import Generation, SamplingSettings, TransformersEngine, VLLMEngine

if TYPE_CHECKING:
    from accelerate import Accelerator

Row = dict[str, Any]
Prompt = Sequence[Mapping[str, Any]] | str
Engine = Callable[..., list[Generation]]
# A row with `row_id`, its prompt, and the number of the response to it.
Item = tuple[Mapping[str, Any], Any, int]
SAVE_EVERY = 256
# Settings that are recorded and may change: a model is compared by the hash of its weights.
MAY_CHANGE = ("model", "batch_size", "use_vllm")


def sample_responses(
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    engine: Engine,
    score: Callable[[list, list[Generation]], Sequence[Mapping[str, Any]]] | None = None,
    *,
    samples: int = 1,
    progress: str | None = None,
    **options: Any,
) -> list[Row]:
    """Sample responses to prompts and score them.

    Args:
        rows: data with `row_id`, and perhaps `prompt_text`, one row for each prompt.
        prompts: the model's input for each row, messages or text.
        engine: `TransformersEngine`, `VLLMEngine`, or a function that is called like them.
        score: `f(rows, generations)`, which returns further columns for each response; None for none.
        samples: responses to each prompt.
        progress: label of the progress bar; None for no bar.
        options: `path`, `settings`, `seed`, `save_every` and `accelerator`, as for `save_rows`.

    Returns:
        JSON-ready rows, grouped by prompt in order: `row_id`, `sample` (from 0), `prompt_text`, `response_text`,
        `generated_num_tokens`, `finished`, and the columns of `score`.
    """
    if not rows or len(rows) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts for {len(rows)} rows; give one for each, and at least one")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    items = [(row, prompt, number) for row, prompt in zip(rows, prompts, strict=True) for number in range(samples)]

    def respond(part: list[Item], *, seed: int, done: int) -> list[Row]:
        label = None if progress is None else f"{progress}, {done} of {len(items)} done"
        generations = engine([prompt for _, prompt, _ in part], seed=seed, progress=label)
        columns = [{}] * len(part) if score is None else score([row for row, _, _ in part], generations)
        return [
            {
                "row_id": row["row_id"],
                "sample": number,
                "prompt_text": row.get("prompt_text") or prompt_text(prompt),
                "response_text": generation.text,
                "generated_num_tokens": len(generation.response_ids),
                "finished": generation.finished,
                **own,
            }
            for (row, prompt, number), generation, own in zip(part, generations, columns, strict=True)
        ]

    return save_rows(items, respond, **options)


def save_rows(
    items: Sequence[Item],
    compute: Callable[..., list[Row]],
    *,
    path: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    save_every: int = SAVE_EVERY,
    accelerator: Accelerator | None = None,
) -> list[Row]:
    """Compute a row for each item, in parts of `save_every` items that are appended to a file one after another.

    A call that finds rows in the file continues after the last complete part and returns the same rows as an
    uninterrupted call with the same `save_every`.

    Args:
        items: rows with their prompt and the number of the response.
        compute: `f(items, seed=, done=)`, which returns JSON-ready rows with `row_id` and perhaps `sample`; `done` is
            the number of items before these. Each part has a seed of its own.
        path: a JSON Lines file; None to keep the rows in memory alone.
        settings: how rows are made, JSON-ready, kept beside the file as `NAME.settings.json`; None if the caller makes
            sure that the file is its own. Those in `MAY_CHANGE` are not compared.
        accelerator: for several processes, which divide the work; each must call this function and gets all rows.

    Raises:
        ValueError: a line of the file is damaged, or its rows are not in this order.
        FileExistsError: the file was made with other settings.
    """
    is_main = accelerator is None or accelerator.is_main_process
    kept: list[Any] = [[]]
    # The first process reads the saved rows for all.
    if path is not None and is_main:
        try:
            if settings is not None:
                check_settings(path, settings)
            kept = [_kept(Path(path), items, save_every)]
        except (OSError, ValueError) as error:
            kept = [error]
    if accelerator is not None and accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(kept)
    rows = kept[0]
    if isinstance(rows, Exception):
        raise rows
    # Under FSDP all processes do the same work, and must sample alike.
    alike = accelerator is None or str(accelerator.distributed_type).endswith("FSDP")
    rank = 0 if alike else accelerator.process_index
    for start in range(len(rows), len(items), save_every):
        options = {"seed": seed + 1_000_003 * (start + rank), "done": start}
        part = items[start : start + save_every]
        found = map_over_ranks(lambda own, options=options: compute(own, **options), part, accelerator)
        if path is not None and is_main:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found).encode())
                file.flush()
                os.fsync(file.fileno())
        rows += found
    return rows


def settings_path(path: str | Path) -> Path:
    """The file beside a file of rows that holds their settings."""
    return Path(path).with_suffix(".settings.json")


def check_settings(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Record the settings of a new file; FileExistsError if it was made with others or with unknown ones."""
    place = settings_path(path)
    if not Path(path).exists():
        write_json(place, settings)
        return
    earlier = read_json(place) if place.exists() else {}
    # As JSON holds them, without tuples.
    for name, value in json.loads(json.dumps(settings)).items():
        if name not in MAY_CHANGE and earlier.get(name) != value:
            was, now = (brief(str(known.get(name)), 20) for known in (earlier, settings))
            raise FileExistsError(
                f"{path} holds rows made with {name} {was}, not {now}: choose another file or folder, or remove it"
            )


def _kept(path: Path, items: Sequence[Item], save_every: int) -> list[Row]:
    """The saved rows up to the last complete part; what follows is removed from the file."""
    if not path.is_file():
        return []
    # Text after the last newline is a line whose writing was interrupted.
    lines = path.read_bytes().split(b"\n")[:-1]
    if len(lines) > len(items):
        raise ValueError(f"{path} holds {len(lines)} rows, and this call has {len(items)}: choose another file")
    whole = len(lines) if len(lines) == len(items) else len(lines) // save_every * save_every
    try:
        rows = [json.loads(line) for line in lines[:whole]]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to begin again") from error
    for line, (row, (item, _, sample)) in enumerate(zip(rows, items[:whole], strict=True), start=1):
        if (row.get("row_id"), row.get("sample", 0)) != (item["row_id"], sample):
            raise ValueError(
                f"{path}: line {line} is not row_id {item['row_id']}, sample {sample}: choose another file"
            )
    write_text(path, "".join(line.decode() + "\n" for line in lines[:whole]))
    return rows


# ---- Engines by the name of a model ----


def load_engine(
    model: str, settings: SamplingSettings, *, dtype: str = "auto", use_vllm: bool = False, device: str | None = None
) -> tuple[Engine, Any]:
    """The engine that samples from a model, and the model's tokenizer.

    `model`, `dtype` and `device` are those of `load_policy`; `use_vllm` samples with vLLM instead of transformers.
    """
    from trl_ext.models.loading import find_policy, load_policy

    if not use_vllm:
        policy, tokenizer = load_policy(model, dtype=dtype, device=device)
        return TransformersEngine(policy, tokenizer, settings), tokenizer
    from transformers import AutoTokenizer

    path, _, is_adapter = find_policy(model, dtype=dtype)
    if is_adapter:
        raise ValueError(f"vLLM loads no adapter by its folder: merge {path} into its base, or sample without vLLM")
    tokenizer = AutoTokenizer.from_pretrained(path)
    return VLLMEngine(path, tokenizer, settings, dtype=dtype), tokenizer


# ---- Problems with known answers ----


def evaluate_reasoning(
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    engine: Engine,
    grade: Grader,
    *,
    entropies: Callable[[list[Generation]], list[float | None]] | None = None,
    **options: Any,
) -> list[Row]:
    """Sample responses to problems and grade them.

    Args:
        rows: problems with `row_id`, `prompt_text`, `answer` and the fields that the grader reads.
        prompts, engine, options: as for `sample_responses`, whose rows get the columns of `graded`.
        grade: `f(response, row)`, such as a `VerifiedGrader`.
        entropies: computes the mean entropy of each response, for the column `entropy`; None to leave it out.
    """

    def score(part: list, generations: list[Generation]) -> list[Row]:
        known = [None] * len(part) if entropies is None else entropies(generations)
        return [
            graded(row, generation, grade) | ({} if entropy is None else {"entropy": entropy})
            for row, generation, entropy in zip(part, generations, known, strict=True)
        ]

    return sample_responses(rows, prompts, engine, score, **options)


def graded(row: Mapping[str, Any], generation: Generation, grade: Grader) -> Row:
    """The columns of a graded response; `parsed_answer` is None for a response without one."""
    try:
        rewards = grade(generation.text, row)
    except ValueError as error:
        raise ValueError(f"row_id {row['row_id']}: {error}") from error
    return {
        "answer": row["answer"],
        "category": category_of(rewards["format_reward"], rewards["answer_reward"]),
        **{name: rewards[name] for name in ("reward", "format_reward", "answer_reward")},
        **({"parsed_answer": grade.parsed_answer(generation.text)} if hasattr(grade, "parsed_answer") else {}),
    }
