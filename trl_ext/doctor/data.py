"""Checks of the dataset's rows, compared with each other."""

from __future__ import annotations

from typing import Any

from trl_ext.doctor.patient import Patient
from trl_ext.doctor.report import Found
from trl_ext.doctor.rows import as_text, is_tokens, plain_text
from trl_ext.doctor.table import check

_PAIRS = "preference reward"


def sides_of(row: dict[str, Any]) -> tuple[Any, Any] | None:
    """The chosen and the rejected response of a row, as tokens if it has them."""
    for chosen, rejected in (("chosen_ids", "rejected_ids"), ("chosen", "rejected")):
        if chosen in row and rejected in row:
            return row[chosen], row[rejected]
    return None


@check("chosen-equals-rejected", "error", "data", _PAIRS)
def chosen_equals_rejected(patient: Patient) -> Found | None:
    pairs = [sides for row in patient.many_rows if (sides := sides_of(row)) is not None]
    same = sum(chosen == rejected for chosen, rejected in pairs)
    if same <= len(pairs) / 50:
        # The collator may cut the part in which they differ.
        sides = [[one.ids for one in patient.examples if one.side == side] for side in ("chosen", "rejected")]
        pairs = list(zip(*sides, strict=True))
        same = sum(chosen == rejected for chosen, rejected in pairs)
    if same <= len(pairs) / 50:
        return None
    return Found(
        f"chosen and rejected are equal in {same} of {len(pairs)} pairs",
        "drop these pairs; if they differ in the data, raise the length limit",
    )


@check("length-predicts-label", "warning", "data", _PAIRS)
def length_predicts_label(patient: Patient) -> Found | None:
    pairs = [sides for row in patient.many_rows if (sides := sides_of(row)) is not None]
    lengths = [[len(side if is_tokens(side) else plain_text(side)) for side in pair] for pair in pairs]
    longer = sum(chosen > rejected for chosen, rejected in lengths)
    shorter = sum(chosen < rejected for chosen, rejected in lengths)
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
    trained = {as_text(row["prompt"]) for row in patient.many_rows if "prompt" in row}
    held_out = [as_text(row["prompt"]) for row in patient.held_out_rows if "prompt" in row]
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
    rows = [tuple(as_text(row[name]) for name in names) for row in patient.many_rows]
    repeated = len(rows) - len(set(rows))
    if not names or len(rows) < 20 or repeated <= len(rows) / 5:
        return None
    return Found(
        f"{repeated} of {len(rows)} training rows repeat another row",
        "drop the repeated rows: they are learned by heart, and an epoch shows less than it seems to",
    )


@check("held-out-rows-differ", "warning", "data")
def held_out_rows_differ(patient: Patient) -> Found | None:
    held_out = patient.held_out_rows[:48]
    if len(held_out) < 5 or len(patient.rows) < 5:
        return None
    for what, of in _FORMS.items():
        # Rows without such a column have no form.
        trained, evaluated = ([of(row) for row in rows if of(row) is not None] for rows in (patient.rows, held_out))
        usual = max(set(trained), key=trained.count, default=None)
        same = evaluated.count(usual)
        if not evaluated or trained.count(usual) < 0.9 * len(trained) or same > 0.1 * len(evaluated):
            continue
        return Found(
            f"{what} differs between training and held-out rows: {usual!r} in {trained.count(usual)} of "
            f"{len(trained)} training rows, and in {same} of {len(evaluated)} held-out rows",
            "write both with the same template and system prompt: held-out figures say little otherwise",
        )
    return None


def _prompt(row: dict[str, Any]) -> Any:
    return next((row[name] for name in ("prompt", "messages", "chosen", "text") if row.get(name)), None)


_FORMS = {
    "whether prompts are messages": lambda row: None if _prompt(row) is None else isinstance(_prompt(row), list),
    "whether there is a system message": lambda row: (
        any(one.get("role") == "system" for one in _prompt(row) if isinstance(one, dict))
        if isinstance(_prompt(row), list)
        else None
    ),
    "the first token": lambda row: next(
        (row[name][0] for name in ("prompt_ids", "input_ids", "chosen_ids") if row.get(name)), None
    ),
}
