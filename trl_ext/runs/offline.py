"""Held-out pairs of the preference recipes, and the demonstrations of `recipes/sft.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from trl_ext.files import write_json_lines
from trl_ext.held_out.generations import pair_metrics, score_pairs
from trl_ext.processes import warn_once_per_run


def evaluate_pairs(trainer, held_out, folder: Path) -> dict[str, Any] | None:
    """Preference metrics of the held-out pairs before and after training; None without pairs.

    Writes `scores.jsonl`: the log-probability of each response, in nats, under the policy and under its base.
    """
    if held_out is None:
        return None
    batch_size = trainer.args.per_device_eval_batch_size
    scores = score_pairs(trainer, trainer.eval_dataset, batch_size=batch_size)
    if trainer.accelerator.is_main_process:
        columns = {
            "row_id": held_out["row_id"],
            "chosen_log_prob": scores.chosen.tolist(),
            "rejected_log_prob": scores.rejected.tolist(),
            "base_chosen_log_prob": scores.ref_chosen.tolist(),
            "base_rejected_log_prob": scores.ref_rejected.tolist(),
        }
        rows = zip(*columns.values(), strict=True)
        write_json_lines(folder / "scores.jsonl", [dict(zip(columns, row, strict=True)) for row in rows])
    return pair_metrics(scores)


# ---- Demonstrations ----


def demonstrations(rows, split: str, count: int | None = None) -> Dataset:
    """The first `count` rows (None for all) with `row_id`, `prompt` and `completion`."""
    name = next((name for name in ("chosen", "reference_response_text") if name in rows.column_names), None)
    if name is None:
        raise ValueError(
            f"the split {split!r} holds no demonstrations: it needs chosen responses, or prompts with "
            "reference_response_text"
        )
    if count is not None and count > len(rows):
        raise ValueError(f"num_examples {count}: {split!r} has {len(rows)} rows")
    rows = rows.select(range(len(rows) if count is None else count))
    completions = [
        [{"role": "assistant", "content": response}]
        if isinstance(response, str) and isinstance(prompt, list)
        else response
        for prompt, response in zip(rows["prompt"], rows[name], strict=True)
    ]
    return Dataset.from_dict({"row_id": rows["row_id"], "prompt": rows["prompt"], "completion": completions})


def tell_shared_prompts(train: Dataset, prompts: Dataset, split: str) -> None:
    """Warn if held-out prompts are trained on."""
    trained = {json.dumps(prompt) for prompt in train["prompt"]}
    if shared := sum(json.dumps(prompt) in trained for prompt in prompts["prompt"]):
        warn_once_per_run(f"{shared} of the {len(prompts)} prompts of {split} are trained on, too")
