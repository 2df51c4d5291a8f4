"""Sample and grade responses to problems; an interrupted run can be continued."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.rewards.verified import Grader, category_of
from trl_ext.rollouts.generation import Generation
from trl_ext.rollouts.saved_rows import SAVE_EVERY, Engine, Prompt, sample_rows

if TYPE_CHECKING:
    from accelerate import Accelerator


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

    With a `path`, responses are appended to the file and synchronized to disk every `save_every` responses. A call
    that finds rows there continues after them and returns the same rows as an uninterrupted call. The file must come
    from the same call: only the problems are checked, so the caller must check everything else.

    Args:
        rows: problems with `row_id`, `prompt_text`, `answer` and the fields that the grader reads.
        prompts: the model's input for each problem, messages or text.
        engine: `f(prompts, seed=..., progress=...)`, which returns a `Generation` for each prompt:
            `TransformersEngine` or `VLLMEngine`.
        grade: `f(response, row)`, such as a function created by `grader`. If it has a method
            `parsed_answer(response)`, rows include the answer.
        samples: responses to each problem.
        seed: seed of the sampling.
        path: JSON lines file to append to; None keeps all rows in memory.
        save_every: responses between saves.
        entropies: computes the mean entropy of each response, for the field `entropy`; None to leave it out.
        accelerator: for a run with several processes, which divide the work. Each must call this function and gets
            all rows.
        progress: label of the progress bar; None for no bar.

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

    def graded(part: list, generations: list[Generation]) -> list[dict[str, Any]]:
        known = [None] * len(part) if entropies is None else entropies(generations)
        return [
            _graded(row, sample, generation, entropy, grade)
            for (row, _, sample), generation, entropy in zip(part, generations, known, strict=True)
        ]

    options = {"seed": seed, "path": path, "save_every": save_every, "accelerator": accelerator, "progress": progress}
    return sample_rows(items, engine, graded, **options)


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
