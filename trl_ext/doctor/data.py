"""Checks of the dataset's rows, compared with each other."""

from __future__ import annotations

import json
from typing import Any

from trl_ext.doctor.patient import Patient
from trl_ext.doctor.report import Found
from trl_ext.doctor.table import check

_PAIRS = "preference reward"


def _sides(row: dict[str, Any]) -> tuple[Any, Any] | None:
    for chosen, rejected in (("chosen_ids", "rejected_ids"), ("chosen", "rejected")):
        if chosen in row and rejected in row:
            return row[chosen], row[rejected]
    return None


def _as_text(value: Any) -> str:
    """Keys that `datasets` adds to messages with None, and their order, do not matter."""
    if isinstance(value, list):
        plain = [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in value]
        return json.dumps(plain, sort_keys=True, default=str)
    return str(value)


@check("chosen-equals-rejected", "error", "data", _PAIRS)
def chosen_equals_rejected(patient: Patient) -> Found | None:
    pairs = [sides for row in patient.many_rows if (sides := _sides(row)) is not None]
    same = sum(chosen == rejected for chosen, rejected in pairs)
    if same <= len(pairs) / 50:
        return None
    return Found(
        f"chosen and rejected are equal in {same} of {len(pairs)} pairs",
        "drop these pairs; if they differ in the data, raise the length limit",
    )


@check("length-predicts-label", "warning", "data", _PAIRS)
def length_predicts_label(patient: Patient) -> Found | None:
    pairs = [sides for row in patient.many_rows if (sides := _sides(row)) is not None]
    longer = sum(len(chosen) > len(rejected) for chosen, rejected in pairs)
    shorter = sum(len(chosen) < len(rejected) for chosen, rejected in pairs)
    if longer + shorter < 50 or max(longer, shorter) < 0.9 * (longer + shorter):
        return None
    which = "longer" if longer > shorter else "shorter"
    return Found(
        f"the chosen response is the {which} one in {max(longer, shorter)} of {longer + shorter} pairs of unequal "
        "length: length alone tells them apart",
        "add pairs of similar length, or correct for length (a length-normalised loss, or a penalty in the reward)",
    )


@check("leaking-prompts", "warning", "data")
def leaking_prompts(patient: Patient) -> Found | None:
    trained = {_as_text(row["prompt"]) for row in patient.many_rows if "prompt" in row}
    held_out = [_as_text(row["prompt"]) for row in patient.held_out_rows if "prompt" in row]
    leaked = [prompt for prompt in held_out if prompt in trained]
    if len(leaked) <= len(held_out) / 10:
        return None
    return Found(
        f"{len(leaked)} of {len(held_out)} held-out prompts are training prompts, such as {leaked[0][:80]!r}",
        "split the data by prompt, and not by row: held-out figures are too good otherwise",
    )


@check("duplicate-rows", "warning", "data", "sft preference reward")
def duplicate_rows(patient: Patient) -> Found | None:
    names = [
        n for n in ("prompt", "completion", "chosen", "rejected", "messages", "text") if n in (patient.rows or [{}])[0]
    ]
    rows = [tuple(_as_text(row[name]) for name in names) for row in patient.many_rows]
    repeated = len(rows) - len(set(rows))
    if not names or len(rows) < 20 or repeated <= len(rows) / 5:
        return None
    return Found(
        f"{repeated} of {len(rows)} training rows repeat another row",
        "drop the repeated rows: they are learned by heart, and an epoch shows less than it seems to",
    )
