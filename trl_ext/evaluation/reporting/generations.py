"""The browser's data: every prompt and response once, and which run gave which response to which prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trl_ext.evaluation.reporting.results import Response
from trl_ext.evaluation.reporting.runs import Run

OUTCOMES = {"candidate": "win", "base": "loss", "tie": "tie"}


class _Numbering(dict):
    """Assigns consecutive numbers to keys; equal keys get the same number."""

    def __missing__(self, key):
        self[key] = len(self)
        return self[key]


def generations(runs: Sequence[Run], *, max_prompts: int) -> dict[str, Any]:
    """The data that the browser shows.

    Texts, kinds and prompts are referenced by their index in a list, so that base responses and prompts that runs
    share are stored once. A response consists of its text, tokens, score, 1 if it was truncated, and rewards by name;
    unknown values are None.

    Returns:
        `texts`; `kinds`; `prompts`, each as (row_id, text, kind or None); `bases`, the responses of base models;
        `rows`, by the run's label, each as (prompt, outcome, base or None, response); and `left_out`, the number of
        prompts beyond the first `max_prompts`.
    """
    texts, kinds, prompts, bases = _Numbering(), _Numbering(), _Numbering(), _Numbering()
    kept: dict[int, list[Any]] = {}
    rows: dict[str, list[list[Any]]] = {}
    for run in runs:
        for row in run.generations:
            prompt = prompts[row.row_id, row.prompt_text]
            if prompt >= max_prompts:
                continue
            if prompt not in kept:
                kind = None if row.kind is None else kinds[row.kind]
                kept[prompt] = [row.row_id or "", texts[row.prompt_text], kind]
            base = None if row.base_response_text is None else bases[_response(row, "base_", texts)]
            outcome = row.outcome and OUTCOMES[row.outcome]
            rows.setdefault(run.label, []).append([prompt, outcome, base, _response(row, "", texts)])
    return {
        "texts": list(texts),
        "kinds": list(kinds),
        "prompts": list(kept.values()),
        "bases": list(bases),
        "rows": rows,
        "left_out": len(prompts) - len(kept),
    }


def _response(row: Response, of: str, texts: _Numbering) -> tuple[Any, ...]:
    """The policy's response, or with `of` = "base_" the base's."""
    names = ("response_text", "generated_num_tokens", "score", "finished")
    text, tokens, score, finished = (getattr(row, of + name) for name in names)
    start = f"{of}reward/"
    rewards = ((name, _short(value)) for name, value in row.model_extra.items() if name.startswith(start))
    known = tuple((name.removeprefix(start), value) for name, value in rewards if value is not None)
    return texts[text], tokens, _short(score), 1 if finished is False else None, known


def _short(value: Any) -> float | None:
    """Round to the four digits that are shown; more would double the file's size."""
    return float(f"{value:.4g}") if isinstance(value, (int, float)) and math.isfinite(value) else None
