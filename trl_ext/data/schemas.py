"""Rows in TRL's columns, from the benchmark's field names or TRL's: pairs, labelled responses and prompts.

A pair holds `prompt`, `chosen` and `rejected`: lists of messages, or strings throughout when the source is TRL's plain
(non-chat) format. A labelled response, as used by KTO, holds `prompt`, `completion` and `label`. Other fields are
kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

Messages = list[dict[str, str]]

PROMPT_FIELDS = ("prompt_messages", "prompt", "prompt_text")
CHOSEN_FIELDS = ("chosen_text", "chosen")
REJECTED_FIELDS = ("rejected_text", "rejected")
# The columns of each kind of row.
COLUMNS = {
    "pair": ("row_id", "prompt", "chosen", "rejected"),
    "labelled": ("row_id", "prompt", "completion", "label"),
    "prompt": ("row_id", "prompt"),
}
# What chat templates render of a message besides its role and content.
NOT_PLAIN = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning", "thinking")


def kind_of(names: Iterable[str]) -> str:
    """The kind of a row with these fields: a field that denotes a response makes it a pair."""
    names = {*names}
    if names & {*CHOSEN_FIELDS, *REJECTED_FIELDS}:
        return "pair"
    return "labelled" if names >= {"completion", "label"} else "prompt"


def convert_row(kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """A row in the columns of its kind.

    The prompt is given as `prompt_messages`, TRL's `prompt` (messages, or a string that stays plain) or `prompt_text`
    (one user message); the first of these is used. Pairs whose `chosen` and `rejected` are conversations that share
    their first turns may leave it out. The responses of a pair are `chosen_text` and `rejected_text`, or TRL's
    `chosen` and `rejected` as strings or messages. The `completion` of a prompt without a label, as in TRL's format
    for fine-tuning, becomes its `reference_response_text`.

    Raises:
        ValueError: a field is missing or bad; the message begins with its name.
    """
    # JSON and the hub write a missing field as null.
    fields = {name: value for name, value in raw.items() if value is not None}
    columns = {"pair": _pair, "labelled": _labelled, "prompt": _prompt}[kind](fields)
    if not isinstance(fields.get("reference_response_text", ""), str):
        raise ValueError("reference_response_text: must be text")
    return {**columns, **fields}


# Each takes the fields that it converts out of `fields`.


def _prompt(fields: dict[str, Any]) -> dict[str, Any]:
    name, prompt = _take(fields, PROMPT_FIELDS)
    plain = name == "prompt" and isinstance(prompt, str)
    messages = _prompt_messages(name, prompt)
    columns = {"prompt": prompt if plain else messages}
    completion = fields.pop("completion", None)
    # A prompt is of use without it, such as one of several turns.
    with suppress(ValueError):
        columns["reference_response_text"] = _response_text("completion", _messages("completion", completion))
    return columns


def _labelled(fields: dict[str, Any]) -> dict[str, Any]:
    name, prompt = _take(fields, PROMPT_FIELDS)
    _, completion = _take(fields, ("completion",))
    _, label = _take(fields, ("label",))
    if not isinstance(label, bool):
        raise ValueError(f"label: must be true or false, got {label!r}")
    response = _messages("completion", completion)
    _response_text("completion", response)
    messages = _prompt_messages(name, prompt)
    plain = name == "prompt" and isinstance(prompt, str) and isinstance(completion, str)
    columns = (prompt, completion) if plain else (messages, response)
    return {"prompt": columns[0], "completion": columns[1], "label": label}


def _pair(fields: dict[str, Any]) -> dict[str, Any]:
    prompt_name, prompt = _take(fields, PROMPT_FIELDS, required=False)
    chosen_name, chosen = _take(fields, CHOSEN_FIELDS)
    rejected_name, rejected = _take(fields, REJECTED_FIELDS)
    names = (prompt_name, chosen_name, rejected_name)
    if names == ("prompt", "chosen", "rejected") and all(isinstance(v, str) for v in (prompt, chosen, rejected)):
        _not_empty(prompt_name, prompt)
        responses = _not_empty(chosen_name, chosen), _not_empty(rejected_name, rejected)
    else:
        chosen, rejected = _messages(chosen_name, chosen), _messages(rejected_name, rejected)
        # The turns that both conversations start with; the last turn is never shared.
        count = 0
        while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
            count += 1
        shared, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
        prompt = _merge_prompt(prompt_name, prompt, shared)
        responses = _response_text(chosen_name, chosen), _response_text(rejected_name, rejected)
    if responses[0] == responses[1]:
        raise ValueError(f"{chosen_name}: equal to {rejected_name}")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _take(fields: dict[str, Any], names: tuple[str, ...], *, required: bool = True) -> tuple[str | None, Any]:
    """Remove all fields in `names`; return the first one present, in that order, with its name."""
    found = [(name, fields.pop(name)) for name in names if name in fields]
    if not found and required:
        # Put TRL's name, the shortest, first.
        first, *others = sorted(names, key=len)
        raise ValueError(f"{first}: missing" + f" (or {' or '.join(others)})" * bool(others))
    return found[0] if found else (None, None)


def _messages(name: str, value: Any, role: str = "assistant") -> Messages:
    """The messages; those with a key of `NOT_PLAIN` are refused, and a text becomes one message with this role."""
    turns = [{"role": role, "content": value}] if isinstance(value, str) else value
    texts = isinstance(turns, list) and all(
        isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    )
    if not texts or not turns:
        raise ValueError(f"{name}: must be text or a non-empty list of messages with a role and a content")
    if carried := [key for turn in turns for key in NOT_PLAIN if turn.get(key)]:
        raise ValueError(f"{name}: a message has {carried[0]}, and only role and content are used")
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def _prompt_messages(name: str, value: Any) -> Messages:
    messages = _messages(name, value, role="user")
    _not_empty(name, messages[-1]["content"])
    if messages[-1]["role"] != "user":
        raise ValueError(f"{name}: last message is from {messages[-1]['role']!r}, must be from 'user'")
    return messages


def _merge_prompt(name: str | None, prompt: Any, shared: Messages) -> Messages:
    """The prompt field, the turns shared by the responses, or both if they are the same."""
    if name is None:
        name, prompt = ("chosen", shared) if shared else _take({}, PROMPT_FIELDS)
    messages = _prompt_messages(name, prompt)
    # Some public data sets repeat the last user turn as a string next to the whole conversation.
    if not shared or messages == shared or (isinstance(prompt, str) and prompt == shared[-1]["content"]):
        return _prompt_messages(name, shared or messages)
    raise ValueError(f"{name}: differs from the turns that chosen and rejected start with")


def _response_text(name: str, messages: Messages) -> str:
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise ValueError(f"{name}: must be one assistant message after the prompt's turns")
    return _not_empty(name, messages[0]["content"])


def _not_empty(name: str, text: str) -> str:
    if not text.strip():
        raise ValueError(f"{name}: empty")
    return text
