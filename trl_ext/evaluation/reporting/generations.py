"""The browser's data: every prompt once, every response once, and which run gave which to what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.values import number, pick, text
from trl_ext.toy import kind_of

OUTCOMES = {"candidate": "win", "base": "loss", "tie": "tie"}


class _Numbering(dict):
    """Numbers what it is asked for in order, the same for the same."""

    def __missing__(self, key):
        self[key] = len(self)
        return self[key]


def generations(runs: Sequence[Run], *, max_prompts: int) -> dict[str, Any]:
    """What the browser shows.

    Texts, prompts and kinds are referred to by their place in `texts`, `prompts` and `kinds`, so that base responses
    and prompts that runs share are held once.

    Returns:
        `texts`; `kinds`; `prompts`, each as (row_id, text, kind or None); `rows`, by the run's label, each as (prompt,
        response, base response or None, figures) with the figures that are known: `outcome`, `score`, `base_score`,
        `tokens`, `base_tokens`, `cut`, `base_cut`, and `rewards` by name as (policy, base); and `left_out`, the number
        of prompts beyond the first `max_prompts`.
    """
    texts, kinds, prompts = _Numbering(), _Numbering(), _Numbering()
    kept: dict[int, list[Any]] = {}
    rows: dict[str, list[list[Any]]] = {}
    for run in runs:
        for row in run.generations:
            prompt = prompts[str(row.get("row_id")), row["prompt_text"]]
            if prompt >= max_prompts:
                continue
            if prompt not in kept:
                kind = _kind(run, row)
                kept[prompt] = [
                    str(row.get("row_id", "")),
                    texts[row["prompt_text"]],
                    None if kind is None else kinds[kind],
                ]
            base = pick(row, "base_response_text")
            entry = [prompt, texts[row["response_text"]], texts[base] if isinstance(base, str) else None]
            rows.setdefault(run.label, []).append([*entry, _figures(row)])
    return {
        "texts": list(texts),
        "kinds": list(kinds),
        "prompts": list(kept.values()),
        "rows": rows,
        "left_out": len(prompts) - len(kept),
    }


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {"outcome": OUTCOMES.get(text(row, "outcome"))}
    for name, key in (("tokens", "generated_num_tokens"), ("score", "score")):
        figures[name] = _short(number(row, key))
        figures[f"base_{name}"] = _short(number(row, f"base_{key}"))
    figures["cut"] = row.get("finished") is False or None
    figures["base_cut"] = row.get("base_finished") is False or None
    names = [key.removeprefix("reward/") for key in row if key.startswith("reward/")]
    rewards = {name: [_short(number(row, f"{of}reward/{name}")) for of in ("", "base_")] for name in names}
    figures["rewards"] = rewards or None
    return {name: value for name, value in figures.items() if value is not None}


def _short(value: float | None) -> float | None:
    """Four digits are shown; more would be half the file."""
    return None if value is None else float(f"{value:.4g}")


def _kind(run: Run, row: dict[str, Any]) -> str | None:
    """The kind that the row names, or that the embedded benchmark gives its prompts."""
    if isinstance(row.get("kind"), str):
        return row["kind"]
    if run.data == "toy":
        try:
            return kind_of(row["prompt_text"])
        except ValueError:
            return None
    return None
