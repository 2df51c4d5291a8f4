"""Row schemas: preference pairs, labelled responses and prompts, in the benchmark's field names or in TRL's.

They normalise a row to TRL's columns. `PreferenceRow` holds `prompt`, `chosen` and `rejected`: lists of messages, or
strings throughout when the source is TRL's plain (non-chat) format. `UnpairedRow` holds `prompt`, `completion` and
`label`, and `PromptRow` holds `prompt`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

PROMPT_FIELDS = ("prompt_messages", "prompt", "prompt_text")
CHOSEN_FIELDS = ("chosen_text", "chosen")
REJECTED_FIELDS = ("rejected_text", "rejected")
LABEL_FIELDS = ("completion", "label")


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    row_id: Annotated[str, Field(coerce_numbers_to_str=True, min_length=1)] | None = None
    prompt: list[Message] | str
    reference_response_text: str | None = None

    @model_validator(mode="after")
    def _check_extra_fields(self):
        for name, value in (self.model_extra or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise _problem("number not finite", name, f"is {value}, not a finite number")
            if isinstance(value, str):
                _check_encodable(name, value)
        return self

    @property
    def conversational(self) -> bool:
        """True if the row holds messages, False if it holds plain strings."""
        return isinstance(self.prompt, list)

    @property
    def prompt_messages(self) -> list[Message]:
        """The prompt as messages; a plain prompt becomes one user message."""
        return self.prompt if self.conversational else [_message("user", self.prompt)]

    @property
    def prompt_text(self) -> str:
        """The text of the last prompt message."""
        return self.prompt_messages[-1]["content"]


class PromptRow(_Row):
    """A prompt to generate from.

    The prompt is given as `prompt_messages`, TRL's `prompt` (messages, or a string that stays plain) or
    `prompt_text` (one user message); the first of these that is there counts. Extra fields are kept.
    """

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        fields = _present_fields(row)
        name, prompt = _take(fields, PROMPT_FIELDS)
        if name is None:
            raise _missing(PROMPT_FIELDS)
        if isinstance(prompt, str) and name == "prompt":
            _check_text("empty prompt", name, prompt)
            return {"prompt": prompt, **fields}
        return {"prompt": _prompt_messages(name, prompt), **fields}


class PreferenceRow(_Row):
    """A prompt with a preferred and a dispreferred response.

    The prompt is given as in `PromptRow`, or left out where `chosen` and `rejected` are conversations that share their
    first turns. The responses are `chosen_text` and `rejected_text`, or TRL's `chosen` and `rejected` as strings
    or messages. `prompt`, `chosen` and `rejected` that are all strings stay strings. Extra fields are kept.
    """

    chosen: list[Message] | str
    rejected: list[Message] | str
    avg_confidence: float | None = Field(default=None, ge=0.0, le=1.0)
    avg_preference_strength: float | None = None
    avg_training_quality: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        fields = _present_fields(row)
        prompt_name, prompt = _take(fields, PROMPT_FIELDS)
        chosen_name, chosen = _take(fields, CHOSEN_FIELDS)
        rejected_name, rejected = _take(fields, REJECTED_FIELDS)
        if chosen_name is None or rejected_name is None:
            raise _missing(CHOSEN_FIELDS if chosen_name is None else REJECTED_FIELDS)
        names = (prompt_name, chosen_name, rejected_name)
        if names == ("prompt", "chosen", "rejected") and all(isinstance(v, str) for v in (prompt, chosen, rejected)):
            _check_text("empty prompt", prompt_name, prompt)
            responses = chosen, rejected
        else:
            chosen = _response_messages(chosen_name, chosen)
            rejected = _response_messages(rejected_name, rejected)
            shared, chosen, rejected = _split_shared_turns(chosen, rejected)
            prompt = _merge_prompt(prompt_name, prompt, shared)
            responses = _response_text(chosen_name, chosen), _response_text(rejected_name, rejected)
        _check_text("empty response", chosen_name, responses[0])
        _check_text("empty response", rejected_name, responses[1])
        if responses[0] == responses[1]:
            raise _problem("chosen equal to rejected", chosen_name, f"equal to {rejected_name}")
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **fields}

    @property
    def chosen_text(self) -> str:
        """The preferred response."""
        return self.chosen[-1]["content"] if self.conversational else self.chosen

    @property
    def rejected_text(self) -> str:
        """The dispreferred response."""
        return self.rejected[-1]["content"] if self.conversational else self.rejected


class UnpairedRow(_Row):
    """A prompt with one response, and whether it is desirable: what KTO trains on.

    The prompt is given as in `PromptRow`, the response as `completion`, a string or one assistant message. `prompt`
    and `completion` that are both strings stay strings. Extra fields are kept.
    """

    completion: list[Message] | str
    label: bool

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        fields = _present_fields(row)
        name, prompt = _take(fields, PROMPT_FIELDS)
        if name is None:
            raise _missing(PROMPT_FIELDS)
        for field in LABEL_FIELDS:
            if field not in fields:
                raise _missing((field,))
        completion = fields["completion"]
        if name == "prompt" and isinstance(prompt, str) and isinstance(completion, str):
            _check_text("empty prompt", name, prompt)
            text = completion
        else:
            prompt, completion = _prompt_messages(name, prompt), _response_messages("completion", completion)
            text = _response_text("completion", completion)
        _check_text("empty response", "completion", text)
        if not isinstance(fields["label"], bool):
            raise _problem("invalid label", "label", f"must be true or false, is {fields['label']!r}")
        return {**fields, "prompt": prompt, "completion": completion}


def has_label_fields(names: Iterable[str]) -> bool:
    """True if the field names are those of a labelled response, and of no pair."""
    return {*LABEL_FIELDS} <= {*names} and not has_response_field(names)


def has_response_field(names: Iterable[str]) -> bool:
    """True if one of the field names is a response's, which makes the row a pair rather than a prompt."""
    return not {*CHOSEN_FIELDS, *REJECTED_FIELDS}.isdisjoint(names)


def _problem(reason: str, field: str, message: str) -> PydanticCustomError:
    """An error whose type is a countable reason and whose message names the source's field."""
    return PydanticCustomError(reason, "{field}: {message}", {"field": field, "message": message})


def _missing(names: tuple[str, ...]) -> PydanticCustomError:
    # TRL's name, which is the shortest, comes first.
    first, *others = sorted(names, key=len)
    return _problem("missing field", first, f"missing (or {' or '.join(others)})" if others else "missing")


def _present_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without nulls: a null is how JSON and the hub write a field that a row does not have."""
    return {name: value for name, value in row.items() if value is not None}


def _take(fields: dict[str, Any], names: tuple[str, ...]) -> tuple[str | None, Any]:
    """Remove every field called one of `names`; return the first in that order, with its name."""
    found = [(name, fields.pop(name)) for name in names if name in fields]
    return found[0] if found else (None, None)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(name: str, value: Any) -> list[Message]:
    """Messages with only their role and content: other keys of a turn mean nothing to a chat template."""
    if not isinstance(value, list) or not value:
        raise _problem("malformed messages", name, "must be text or a non-empty list of messages")
    for position, turn in enumerate(value):
        well_formed = isinstance(turn, Mapping) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
        if not well_formed:
            message = f"message {position + 1} must have a role and a content that are strings"
            raise _problem("malformed messages", name, message)
    return [_message(turn["role"], turn["content"]) for turn in value]


def _prompt_messages(name: str, value: Any) -> list[Message]:
    messages = [_message("user", value)] if isinstance(value, str) else _messages(name, value)
    _check_text("empty prompt", name, messages[-1]["content"])
    if messages[-1]["role"] != "user":
        role = messages[-1]["role"]
        raise _problem("prompt not from the user", name, f"last message is from {role!r}, must be from 'user'")
    return messages


def _response_messages(name: str, value: Any) -> list[Message]:
    return [_message("assistant", value)] if isinstance(value, str) else _messages(name, value)


def _split_shared_turns(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """The turns that both conversations start with, and the rest of each; the last turn is never shared."""
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    return chosen[:count], chosen[count:], rejected[count:]


def _merge_prompt(name: str | None, prompt: Any, shared: list[Message]) -> list[Message]:
    """The prompt field, the turns shared by the responses, or both where they say the same."""
    if name is None:
        if not shared:
            raise _missing(PROMPT_FIELDS)
        return _prompt_messages("chosen", shared)
    messages = _prompt_messages(name, prompt)
    if not shared:
        return messages
    # Some public data sets give the last user turn as a string beside the whole conversation.
    if messages == shared or (isinstance(prompt, str) and prompt == shared[-1]["content"]):
        return _prompt_messages(name, shared)
    raise _problem("prompt mismatch", name, "differs from the turns that chosen and rejected start with")


def _response_text(name: str, messages: list[Message]) -> str:
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise _problem("malformed response", name, "must be one assistant message after the prompt's turns")
    return messages[0]["content"]


def _check_text(reason: str, name: str, value: str) -> None:
    if not value.strip():
        raise _problem(reason, name, "empty")
    _check_encodable(name, value)


def _check_encodable(name: str, value: str) -> None:
    """Half of a surrogate pair, which JSON can write as an escape, cannot be stored or tokenised."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _problem("invalid Unicode", name, "holds an unpaired surrogate") from None
