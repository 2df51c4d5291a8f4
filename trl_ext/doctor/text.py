"""Checks of the rows: the tokens that the trainer sees, how rows compare, and their order."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
from scipy.stats import kruskal

from trl_ext.doctor.examine import Finding, check
from trl_ext.doctor.patient import Example, Patient, as_text, plain_text
from trl_ext.rollouts.generation import prompt_tokens, without_template

_LEARNS, _PAIRS = "sft preference", "preference reward"
_PADDING = "The trainers mask by position; code of your own must too, and generate() needs an attention mask."
_TEXTS = ("prompt", "completion", "chosen", "rejected", "messages", "text")


def in_rows(patient: Patient, found: list[Example], of: list, share: float, what: str, remedy="") -> Finding | None:
    """The finding that something holds for a share of the rows, with the tokens of the first; None if for fewer."""
    if not found or len(found) < share * len(of):
        return None
    return Finding(f"{what} in {len(found)} of {len(of)} sampled rows", remedy, tokens=patient.tokens(found[0]))


@check("template-missing", "error", "trainer")
def template_missing(patient: Patient) -> Finding | str | None:
    """Set tokenizer.chat_template (or chat_template_path in TRL's SFTConfig), or give the prompts as plain text."""
    first = patient.rows[0].get("prompt", patient.rows[0].get("messages"))
    writers = (patient.tokenizer, patient.trainer.processing_class)
    if isinstance(first, list) and not any(getattr(one, "chat_template", None) for one in writers):
        return "the rows hold messages, and the tokenizer has no chat template to write them with"
    prompts = [row["prompt"] for row in patient.rows if row.get("prompt")]
    if patient.kind in ("reward", "other") or not without_template(patient.tokenizer, prompts):
        return None
    what = f"the model's chat template is not applied to prompts of plain text, such as {prompts[0][:60]!r}"
    return Finding(what, "Rename the column to prompt_text, or give messages, unless this is intended.", "warning")


@check("prompt-tokens-differ", "warning", "trainer", _LEARNS)
def prompt_tokens_differ(patient: Patient) -> Finding | None:
    """End prompts without a space and begin responses with it; let a response begin as the generation prompt ends."""
    rows, found = [], []
    for one in patient.examples if not patient.is_packed else ():
        prompt, other = one.row.get("prompt"), one.row.get("tools") or one.row.get("chat_template_kwargs")
        is_asked = isinstance(prompt, str) or (prompt and prompt[-1].get("role") != "assistant")
        if prompt and is_asked and not one.truncated and not other:
            # Generation truncates prompts as training does.
            ids = prompt_tokens(patient.tokenizer, prompt, patient.setting("max_prompt_tokens"))
            rows.append(one)
            found += [one] if one.ids[: len(ids)] != ids else []
    what = "a prompt has other tokens together with its response than alone, from which responses are generated,"
    return in_rows(patient, found, rows, 0.1, what) if len(found) > 1 else None


@check("begin-token-doubled", "warning", "trainer")
def begin_token_doubled(patient: Patient) -> Finding | None:
    """Remove it from the text, or set tokenizer.add_bos_token to False; tokenize responses without special tokens."""
    begin, found = patient.tokenizer.bos_token_id, []
    for one in patient.examples if begin is not None else ():
        start = one.learned.index(True) if any(one.learned) else 0
        # One that is an end token may also end the prompt's last turn.
        places = {1, start} if begin in patient.stop_ids else {1, start - 1, start}
        again = any(0 < place < len(one.ids) and one.ids[place] == begin for place in places)
        found += [one] if one.ids[0] == begin and again else []
    what = f"{patient.tokenizer.bos_token!r} stands twice at the beginning, or before the response as well,"
    return in_rows(patient, found, patient.examples, 0, what)


@check("end-token", "error", "trainer", "sft preference policy")
def end_token(patient: Patient) -> Finding | None:
    """End each response with the tokenizer's end token, or use a chat template that does."""
    stops, missing, masked, other = patient.stop_ids, [], [], []
    rows = [one for one in patient.examples if not one.truncated and any(one.learned)]
    for one in rows:
        # The end token may be followed by a line break or another token of the template.
        tail = list(zip(one.ids[-4:], one.learned[-4:], strict=True))
        ids, learned = {token for token, _ in tail}, {token for token, on in tail if on}
        if stops & ids:
            masked += [] if stops & learned else [one]
        elif not patient.special_ids & ids:
            missing.append(one)
        elif patient.special_ids & learned:
            other.append(one)
    at, same = patient.tokenizer.decode(sorted(stops)), patient.tokenizer.pad_token_id in stops
    mask = "Give the tokenizer a padding token of its own." if same else "Let the mask include the end token."
    which = "Set the tokenizer's eos_token and model.generation_config.eos_token_id to the token that ends a response."
    return (
        in_rows(patient, missing, rows, 0.5, "no end token follows the response")
        or in_rows(patient, masked, rows, 0.5, "the loss is not taken on the end token", mask)
        or in_rows(patient, other, rows, 0.5, f"generation stops at {at}, and responses end otherwise", which)
        or (Finding("the padding token also ends a response", _PADDING, "info") if same else None)
    )


@check("nothing-learned-in-rows", "error", "trainer", _LEARNS)
def nothing_learned_in_rows(patient: Patient) -> Finding | None:
    """Raise the length limit if the response was truncated; otherwise correct the mask or the labels."""
    found = [one for one in patient.examples if not any(one.learned)]
    return in_rows(patient, found, patient.examples, 0.05, "the loss is taken on no token")


@check("truncated-rows", "warning", "trainer", _LEARNS)
def truncated_rows(patient: Patient) -> Finding | None:
    """Raise max_length or max_response_tokens, or drop the rows that exceed it."""
    found = [one for one in patient.examples if one.truncated]
    return in_rows(patient, found, patient.examples, 0.2, "the response is truncated")


@check("system-prompt-lost", "error", "trainer")
def system_prompt_lost(patient: Patient) -> Finding | None:
    """Put the text into the first user message, use a template that writes it, or raise the limit."""
    messages = [(one, message) for one in patient.examples for message in messages_of(one.row)]
    texts = [
        (one, message["content"].strip()[:40].strip()) for one, message in messages if message["role"] == "system"
    ]
    found = [one for one, text in texts if text not in patient.tokenizer.decode(one.ids)]
    return in_rows(patient, found, texts, 0.1, "the system message is not in the tokens")


def messages_of(row: dict) -> list[dict]:
    """The messages of a row that hold text."""
    messages = [one for name in _TEXTS if isinstance(row.get(name), list) for one in row[name]]
    return [one for one in messages if isinstance(one, dict) and isinstance(one.get("content"), str)]


def _size(value: Any) -> int:
    """The number of tokens of a list of them (an empty list is), or of characters of a text or of messages."""
    is_tokens = isinstance(value, list) and all(isinstance(one, int) for one in value[:1])
    return len(value if is_tokens else plain_text(value))


@check("length-predicts-label", "warning", "trainer", _PAIRS)
def length_predicts_label(patient: Patient) -> str | None:
    """Add pairs of similar length, or correct for length (a length-normalised loss, or a penalty in the reward)."""
    names = ("chosen_ids", "rejected_ids") if "chosen_ids" in patient.many_rows[0] else ("chosen", "rejected")
    lengths = [tuple(_size(row[name]) for name in names) for row in patient.many_rows if names[0] in row]
    longer, unequal = sum(a > b for a, b in lengths), sum(a != b for a, b in lengths)
    if unequal < 50 or unequal / 10 < longer < unequal * 0.9:
        return None
    which, count = ("longer", longer) if longer > unequal / 2 else ("shorter", unequal - longer)
    return f"the chosen response is the {which} one in {count} of {unequal} pairs of unequal length"


@check("duplicate-rows", "warning", "trainer", "sft preference reward")
def duplicate_rows(patient: Patient) -> str | None:
    """Drop the repeated rows: they are learned by heart, and an epoch shows less than it seems to."""
    names = [name for name in _TEXTS if name in patient.rows[0]]
    rows = [tuple(as_text(row[name]) for name in names) for row in patient.many_rows if names]
    repeated = len(rows) - len(set(rows))
    found = len(rows) >= 20 and repeated > len(rows) / 5
    return f"{repeated} of {len(rows)} training rows repeat another row" if found else None


@check("pairs-contradict", "warning", "trainer", _PAIRS)
def pairs_contradict(patient: Patient) -> str | None:
    """Drop equal responses, and keep one label for each pair; swapped files and ties often cause this."""
    names = ("prompt", "chosen", "rejected")
    pairs = [tuple(as_text(row.get(name, "")) for name in names) for row in patient.many_rows if "chosen" in row]
    known = set(pairs)
    against = sum((prompt, rejected, chosen) in known for prompt, chosen, rejected in pairs)
    what = f"{against} of {len(pairs)} pairs have equal responses, or occur with both labels"
    return what if against >= max(4, 0.02 * len(pairs)) else None


@check("labels-against-scores", "warning", "trainer", _PAIRS)
def labels_against_scores(patient: Patient) -> Finding | None:
    """Swap or drop these pairs; if lower scores are better, or other annotators gave them, all is well."""
    for name in (name for name in patient.many_rows[0] if re.search("chosen", name)):
        pairs = [(row[name], row.get(name.replace("chosen", "rejected"))) for row in patient.many_rows]
        scores = [pair for pair in pairs if all(isinstance(one, int | float) for one in pair)]
        against = sum(chosen < rejected for chosen, rejected in scores)
        if re.search("score|rating|reward", name) and against >= max(3, 0.03 * len(scores)):
            what = f"the chosen response has the lower score ({name}) in {against} of {len(scores)} pairs"
            return Finding(what, severity="error" if against > 0.4 * len(scores) else "")
    return None


@check("rows-in-order", "warning", "trainer")
def rows_in_order(patient: Patient) -> str | None:
    """Shuffle the rows, or the stream with a large buffer; a curriculum that is intended is no fault."""
    rows, grouped = patient.rows_as_read, patient.setting("train_sampling_strategy") == "group_by_length"
    for name, values in _signals(rows).items() if len(rows) >= 30 else ():
        # Kruskal and Wallis (1952), between up to ten consecutive parts of the epoch. A random order gives an alarm
        # with probability 1e-6 for each signal, so in fewer than one of 10,000 runs.
        test = kruskal(*np.array_split(values, min(10, len(values) // 6)))
        explained = test.statistic / (len(values) - 1)
        if test.pvalue < 1e-6 and explained > 0.1 and not (grouped and "length of" in name):
            what = f"explains {explained:.0%} of the variance of its ranks (p {test.pvalue:.0e}, {len(values)} rows)"
            return f"{name} depends on the position in the epoch, which {what}"
    return None


def _signals(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What might drift: lengths, numbers, whether a column has one of few values, and which response is longer."""
    found: dict[str, list] = {}
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        if name in _TEXTS or name.endswith("_ids"):
            found[f"the length of {name}"] = list(map(_size, values))
        elif all(isinstance(value, float) for value in values):
            found[name] = values
        elif len(kinds := {as_text(value) for value in values}) <= 20:
            found |= {f"{name} = {kind[:40]}": [as_text(value) == kind for value in values] for kind in sorted(kinds)}
    if "rejected" in rows[0]:
        longer = [_size(row["chosen"]) > _size(row["rejected"]) for row in rows]
        found |= {"whether the chosen response is longer": longer}
    # A few rows that differ from the others come together by chance more often than the test says.
    others = {name: len(rows) - Counter(values).most_common(1)[0][1] for name, values in found.items()}
    return {name: np.array(found[name], float) for name in found if others[name] >= max(10, len(rows) / 10)}
