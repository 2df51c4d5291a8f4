"""Checks of the tokens that the trainer sees."""

from __future__ import annotations

import re
from collections import Counter

from trl_ext.doctor.patient import Example, Patient
from trl_ext.doctor.report import Found
from trl_ext.doctor.table import check
from trl_ext.rollouts.generation import prompt_tokens, without_template

# What chat templates write around turns, and other texts rarely contain. Some models spell `<|user|>` with ordinary
# tokens.
_MARKER = re.compile(r"<\|(?!user\||assistant\||system\|)[a-zA-Z0-9_]{2,30}\|>|<start_of_turn>|<end_of_turn>")
# The end token may be followed by a line break or another token of the template.
_TAIL = 4
_LEARNS = "sft preference"


def _complete(patient: Patient) -> list[Example]:
    """Examples with their end, of which something is learned."""
    return [one for one in patient.examples if not one.cut and any(one.learned)]


def _share(some: list, of: list) -> str:
    return f"{len(some)} of {len(of)} sampled rows"


@check("template-missing", "error", "data")
def template_missing(patient: Patient) -> Found | None:
    first = patient.rows[0].get("prompt", patient.rows[0].get("messages")) if patient.rows else None
    writers = (patient.tokenizer, patient.trainer.processing_class)
    if not isinstance(first, list) or any(getattr(one, "chat_template", None) for one in writers):
        return None
    return Found(
        "the rows hold messages, and the tokenizer has no chat template to write them with",
        "set tokenizer.chat_template (or chat_template_path in TRL's SFTConfig), or give the prompts as plain text",
    )


@check("template-unused", "warning", "data", "sft preference policy")
def template_unused(patient: Patient) -> Found | None:
    prompts = [row["prompt"] for row in patient.rows if row.get("prompt")]
    line = without_template(patient.tokenizer, prompts)
    if line is None:
        return None
    evidence, remedy = line.split("; ")
    return Found(f"{evidence}, such as {prompts[0][:60]!r}", remedy)


@check("template-of-another-model", "error", "data")
def template_of_another_model(patient: Patient) -> Found | None:
    known = patient.tokenizer.get_vocab()
    rows = [(one, set(_MARKER.findall(patient.decode(one))) - known.keys()) for one in patient.examples]
    found = [(one, markers) for one, markers in rows if markers]
    # Single rows may be about such tokens.
    if len(found) < max(2, len(rows) / 2):
        return None
    counted = Counter(marker for _, markers in found for marker in markers)
    names = ", ".join(name for name, _ in counted.most_common(3))
    return Found(
        f"{names} in {_share(found, rows)} are not tokens of this model: they are spelled with ordinary tokens",
        "use the chat template of this model, or one whose special tokens it has",
        patient.tokens(found[0][0]),
    )


@check("special-token-in-text", "warning", "data")
def special_token_in_text(patient: Patient) -> Found | None:
    specials = set(patient.tokenizer.all_special_tokens)
    conversations = [one for one in patient.examples if _messages(one.row)]
    found = []
    for one in conversations:
        inside = {token for message in _messages(one.row) for token in specials if token in message["content"]}
        found += [(one, inside)] if inside else []
    if len(found) < max(2, len(conversations) / 20):
        return None
    return Found(
        f"messages of {_share(found, conversations)} contain special tokens such as {sorted(found[0][1])[0]!r}; the "
        "chat template adds its own around them",
        "remove the special tokens from the texts: messages hold plain text",
        patient.tokens(found[0][0]),
    )


def _messages(row: dict) -> list[dict]:
    """The messages of a row that hold text."""
    lists = [row.get(name) for name in ("prompt", "completion", "chosen", "rejected", "messages")]
    messages = [one for many in lists if isinstance(many, list) for one in many]
    return [one for one in messages if isinstance(one, dict) and isinstance(one.get("content"), str)]


@check("template-doubled", "error", "data")
def template_doubled(patient: Patient) -> Found | None:
    """Messages that begin with what the chat template itself writes before a user's message."""
    rows = [one for one in patient.examples if _messages(one.row)]
    if not rows or not patient.tokenizer.chat_template:
        return None
    before = patient.tokenizer.apply_chat_template([{"role": "user", "content": "qzx"}], tokenize=False)
    before = before.partition("qzx")[0].strip()
    marks = tuple(mark for mark in {before, before.rpartition("\n")[2]} if len(mark) > 2)
    found = [one for one in rows if any(m["content"].lstrip().startswith(marks) for m in _messages(one.row))]
    if not marks or len(found) < max(2, len(rows) / 2):
        return None
    return Found(
        f"messages of {_share(found, rows)} begin with {marks[-1][:40]!r}, which the chat template adds itself",
        "give messages without the template's text, or the finished prompts as plain text",
        patient.tokens(found[0]),
    )


@check("prompt-tokens-differ", "warning", "data", _LEARNS)
def prompt_tokens_differ(patient: Patient) -> Found | None:
    if patient.is_packed:
        raise ValueError("packed rows do not show what a prompt is")
    rows = [one for one in patient.examples if _is_generated_from(one)]
    found = []
    for one in rows:
        # Generation cuts prompts as training does.
        asked = prompt_tokens(patient.tokenizer, one.row["prompt"], patient.setting("max_prompt_tokens"))
        found += [one] if one.ids[: len(asked)] != asked else []
    if len(found) < max(2, len(rows) / 10):
        return None
    return Found(
        f"prompt and response together tokenize differently from the prompt alone in {_share(found, rows)}: "
        "generation begins with tokens that training does not show",
        "end prompts without a space and begin responses with it, and use a template whose generation prompt is how "
        "a response begins",
        patient.tokens(found[0]),
    )


def _is_generated_from(example: Example) -> bool:
    """Whether a row's prompt is one that a response is generated for, and is there as a whole."""
    prompt = example.row.get("prompt")
    if not prompt or example.cut or example.row.get("tools") or example.row.get("chat_template_kwargs"):
        return False
    return isinstance(prompt, str) or (isinstance(prompt[-1], dict) and prompt[-1].get("role") != "assistant")


@check("begin-token-doubled", "warning", "data")
def begin_token_doubled(patient: Patient) -> Found | None:
    begin = patient.tokenizer.bos_token_id
    found = [one for one in patient.examples if begin is not None and one.ids[:2] == [begin, begin]]
    before = [one for one in patient.examples if begin is not None and _begins_again(patient, one)]
    if not found and not before:
        return None
    name = repr(patient.tokenizer.bos_token)
    return Found(
        f"{_share(found, patient.examples)} begin with {name} twice"
        if found
        else f"{name} stands before the response as well as before the prompt in {_share(before, patient.examples)}",
        "the chat template and the tokenizer both add it: remove it from the text, or set tokenizer.add_bos_token "
        "to False; tokenize a response with add_special_tokens=False",
        patient.tokens((found or before)[0]),
    )


def _begins_again(patient: Patient, example: Example) -> bool:
    """Whether the response of a row that begins with the beginning token begins with it too."""
    begin, start = patient.tokenizer.bos_token_id, example.learned.index(True) if any(example.learned) else 0
    # One that is an end token may also end the prompt's last turn.
    places = {start} if begin in patient.stop_ids else {start - 1, start}
    return example.ids[:1] == [begin] and any(place > 0 and example.ids[place] == begin for place in places)


@check("end-token-missing", "error", "data", _LEARNS)
def end_token_missing(patient: Patient) -> Found | None:
    ends = patient.stop_ids | patient.special_ids
    rows = _complete(patient)
    found = [one for one in rows if not ends & set(one.ids[-_TAIL:])]
    if len(found) < max(1, len(rows) / 2):
        return None
    return Found(
        f"no end token follows the response in {_share(found, rows)}: the model does not learn to stop",
        "end each response with the tokenizer's end token, or use a chat template that does",
        patient.tokens(found[0]),
    )


@check("end-token-masked", "error", "data", _LEARNS)
def end_token_masked(patient: Patient) -> Found | None:
    rows = _complete(patient)
    found = [one for one in rows if patient.stop_ids & set(one.ids[-_TAIL:]) and not _learned_ends(patient, one)]
    if len(found) < max(1, len(rows) / 2):
        return None
    tokenizer = patient.tokenizer
    same = tokenizer.pad_token_id in patient.stop_ids
    why = f", which is the padding token {tokenizer.pad_token!r} as well" if same else ""
    return Found(
        f"the loss is not taken on the end token{why} in {_share(found, rows)}: the model does not learn to stop",
        "give the tokenizer a padding token of its own"
        if same
        else "let the mask of what is learned include the end token",
        patient.tokens(found[0]),
    )


def _learned_ends(patient: Patient, example: Example) -> bool:
    pairs = list(zip(example.ids, example.learned, strict=True))[-_TAIL:]
    return any(learned and token in patient.stop_ids for token, learned in pairs)


@check("end-token-not-stopped-at", "error", "data", _LEARNS)
def end_token_not_stopped_at(patient: Patient) -> Found | None:
    specials = patient.special_ids
    rows = _complete(patient)
    found = []
    for one in rows:
        tail = [t for t, learned in zip(one.ids[-_TAIL:], one.learned[-_TAIL:], strict=True) if learned]
        if specials & set(tail) and not patient.stop_ids & set(one.ids[-_TAIL:]):
            found.append(one)
    if len(found) < max(1, len(rows) / 2):
        return None
    learned = next(token for token in reversed(found[0].ids) if token in specials)
    stops = ", ".join(repr(patient.tokenizer.decode([token])) for token in sorted(patient.stop_ids))
    return Found(
        f"responses end with {patient.tokenizer.decode([learned])!r} in {_share(found, rows)}, and generation stops "
        f"at {stops or 'nothing'}",
        "set the tokenizer's eos_token and model.generation_config.eos_token_id to the token that ends a response",
        patient.tokens(found[0]),
    )


@check("nothing-learned-in-rows", "error", "data", _LEARNS)
def nothing_learned_in_rows(patient: Patient) -> Found | None:
    found = [one for one in patient.examples if not any(one.learned)]
    if len(found) < max(1, len(patient.examples) / 20):
        return None
    return Found(
        f"the loss is taken on no token in {_share(found, patient.examples)}",
        "raise the length limit if the response was cut off; otherwise correct the mask or the labels",
        patient.tokens(found[0]),
    )


@check("loss-on-prompt", "warning", "data", _LEARNS)
def loss_on_prompt(patient: Patient) -> Found | None:
    if patient.is_packed:
        raise ValueError("packed rows do not show what a prompt is")
    rows = [one for one in patient.examples if one.row.get("prompt") and len(one.ids) > 1]
    # The labels of a first token may be kept or not; it is never predicted.
    found = [one for one in rows if one.learned[0] and all(one.learned)]
    if not rows or len(found) < len(rows) / 2:
        return None
    return Found(
        f"the loss is taken on the prompt in {_share(found, rows)}",
        "leave completion_only_loss at its default, and let a collator of your own mask the prompt",
        patient.tokens(found[0]),
    )


@check("truncated-rows", "warning", "data", _LEARNS)
def truncated_rows(patient: Patient) -> Found | None:
    found = [one for one in patient.examples if one.cut]
    if len(found) < max(1, len(patient.examples) / 5):
        return None
    limits = ("max_length", "max_prompt_tokens", "max_response_tokens")
    given = ", ".join(f"{name} {patient.setting(name)}" for name in limits if patient.setting(name))
    return Found(
        f"{_share(found, patient.examples)} are cut ({given}), and responses lose their end",
        "raise the limit, or drop the rows that exceed it",
        patient.tokens(found[0]),
    )


@check("system-prompt-lost", "error", "data")
def system_prompt_lost(patient: Patient) -> Found | None:
    rows, found = [], []
    for one in patient.examples:
        texts = [message["content"].strip() for message in _messages(one.row) if message.get("role") == "system"]
        if texts and texts[0]:
            rows.append(one)
            found += [one] if texts[0][:40].strip() not in patient.decode(one) else []
    if len(found) < max(1, len(rows) / 10):
        return None
    return Found(
        f"the system message is not in the tokens of {_share(found, rows)} that have one",
        "the chat template ignores it, or the prompt is cut: use another template, raise the limit, or put the text "
        "into the first user message",
        patient.tokens(found[0]),
    )


@check("unknown-tokens", "warning", "data")
def unknown_tokens(patient: Patient) -> Found | None:
    unknown = patient.tokenizer.unk_token_id
    # GPT-2's unknown token is its end token.
    if unknown is None or unknown in {*patient.stop_ids, patient.tokenizer.pad_token_id}:
        return None
    total = sum(len(one.ids) for one in patient.examples)
    count = sum(one.ids.count(unknown) for one in patient.examples)
    if count <= total / 100:
        return None
    worst = max(patient.examples, key=lambda one: one.ids.count(unknown))
    return Found(
        f"{count} of {total} tokens are {patient.tokenizer.unk_token!r}: the tokenizer has no token for the text",
        "use the tokenizer of this model, and one that covers the language of the data",
        patient.tokens(worst),
    )
