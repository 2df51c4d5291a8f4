"""Row schemas: preference pairs, labelled responses and prompts, in the benchmark's field names or in TRL's.

They normalise a row to TRL's columns. `PreferenceRow` holds `prompt`, `chosen` and `rejected`: lists of messages, or
strings throughout when the source is TRL's plain (non-chat) format. `UnpairedRow` holds `prompt`, `completion` and
`label`, and `PromptRow` holds `prompt`. Extra fields are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from typing_extensions import TypedDict

PROMPT_FIELDS = ("prompt_messages", "prompt", "prompt_text")
CHOSEN_FIELDS = ("chosen_text", "chosen")
REJECTED_FIELDS = ("rejected_text", "rejected")
LABEL_FIELDS = ("completion", "label")
# What chat templates render of a message besides its role and content.
NOT_PLAIN = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning", "thinking")


class Message(TypedDict):
    """One turn of a conversation. Those of `NOT_PLAIN` are refused, and other keys are dropped."""

    role: str
    content: str


MESSAGES = TypeAdapter(Annotated[list[Message], Field(min_length=1)])


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    row_id: Annotated[str, Field(coerce_numbers_to_str=True, min_length=1)] | None = None
    prompt: list[Message] | str
    reference_response_text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _to_columns_of_trl(cls, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        # JSON and the hub write a missing field as null.
        fields = {name: value for name, value in row.items() if value is not None}
        return {**cls._columns(fields), **fields}

    @classmethod
    def _columns(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The columns of TRL, whose fields are taken out of `fields`."""
        raise NotImplementedError


class PromptRow(_Row):
    """A prompt to generate from.

    The prompt is given as `prompt_messages`, TRL's `prompt` (messages, or a string that stays plain) or
    `prompt_text` (one user message); the first of these in the row is used.
    """

    @classmethod
    def _columns(cls, fields: dict[str, Any]) -> dict[str, Any]:
        name, prompt = _take(fields, PROMPT_FIELDS)
        plain = name == "prompt" and isinstance(prompt, str)
        return {"prompt": _not_empty(name, prompt) if plain else _prompt_messages(name, prompt)}


class PreferenceRow(_Row):
    """A prompt with a preferred and a dispreferred response.

    The prompt is given as in `PromptRow`, or left out if `chosen` and `rejected` are conversations that share their
    first turns. The responses are `chosen_text` and `rejected_text`, or TRL's `chosen` and `rejected` as strings
    or messages. `prompt`, `chosen` and `rejected` that are all strings stay strings.
    """

    chosen: list[Message] | str
    rejected: list[Message] | str
    avg_confidence: float | None = Field(default=None, ge=0.0, le=1.0)
    avg_preference_strength: float | None = None
    avg_training_quality: float | None = None

    @classmethod
    def _columns(cls, fields: dict[str, Any]) -> dict[str, Any]:
        prompt_name, prompt = _take(fields, PROMPT_FIELDS, required=False)
        chosen_name, chosen = _take(fields, CHOSEN_FIELDS)
        rejected_name, rejected = _take(fields, REJECTED_FIELDS)
        names = (prompt_name, chosen_name, rejected_name)
        if names == ("prompt", "chosen", "rejected") and all(isinstance(v, str) for v in (prompt, chosen, rejected)):
            _not_empty(prompt_name, prompt)
            responses = _not_empty(chosen_name, chosen), _not_empty(rejected_name, rejected)
        else:
            chosen, rejected = _messages(chosen_name, chosen), _messages(rejected_name, rejected)
            shared, chosen, rejected = _split_shared_turns(chosen, rejected)
            prompt = _merge_prompt(prompt_name, prompt, shared)
            responses = _response_text(chosen_name, chosen), _response_text(rejected_name, rejected)
        if responses[0] == responses[1]:
            raise ValueError(f"{chosen_name}: equal to {rejected_name}")
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


class UnpairedRow(_Row):
    """A prompt with one response and a label that says whether it is desirable, as used by KTO.

    The prompt is given as in `PromptRow`, the response as `completion`, a string or one assistant message. `prompt`
    and `completion` that are both strings stay strings.
    """

    completion: list[Message] | str
    label: Annotated[bool, Field(strict=True)]

    @classmethod
    def _columns(cls, fields: dict[str, Any]) -> dict[str, Any]:
        name, prompt = _take(fields, PROMPT_FIELDS)
        _, completion = _take(fields, ("completion",))
        if name == "prompt" and isinstance(prompt, str) and isinstance(completion, str):
            return {"prompt": _not_empty(name, prompt), "completion": _not_empty("completion", completion)}
        prompt, completion = _prompt_messages(name, prompt), _messages("completion", completion)
        _response_text("completion", completion)
        return {"prompt": prompt, "completion": completion}


def row_type(names: Iterable[str]) -> type[_Row]:
    """The schema of a row with these fields: a field that denotes a response makes it a pair."""
    names = {*names}
    if names & {*CHOSEN_FIELDS, *REJECTED_FIELDS}:
        return PreferenceRow
    return UnpairedRow if names >= {*LABEL_FIELDS} else PromptRow


def _take(fields: dict[str, Any], names: tuple[str, ...], *, required: bool = True) -> tuple[str | None, Any]:
    """Remove all fields in `names`; return the first one present, in that order, with its name."""
    found = [(name, fields.pop(name)) for name in names if name in fields]
    if not found and required:
        # Put TRL's name, the shortest, first.
        first, *others = sorted(names, key=len)
        raise ValueError(f"{first}: missing" + f" (or {' or '.join(others)})" * bool(others))
    return found[0] if found else (None, None)


def _messages(name: str, value: Any, role: str = "assistant") -> list[Message]:
    """The messages; a text becomes one message with this role."""
    try:
        messages = MESSAGES.validate_python([{"role": role, "content": value}] if isinstance(value, str) else value)
    except ValidationError:
        raise ValueError(f"{name}: must be text or a non-empty list of messages with a role and a content") from None
    if isinstance(value, list) and (carried := [key for one in value for key in NOT_PLAIN if one.get(key)]):
        raise ValueError(f"{name}: a message has {carried[0]}, and only role and content are used")
    return messages


def _prompt_messages(name: str, value: Any) -> list[Message]:
    messages = _messages(name, value, role="user")
    _not_empty(name, messages[-1]["content"])
    if messages[-1]["role"] != "user":
        raise ValueError(f"{name}: last message is from {messages[-1]['role']!r}, must be from 'user'")
    return messages


def _split_shared_turns(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """The turns that both conversations start with, and the rest of each; the last turn is never shared."""
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    return chosen[:count], chosen[count:], rejected[count:]


def _merge_prompt(name: str | None, prompt: Any, shared: list[Message]) -> list[Message]:
    """The prompt field, the turns shared by the responses, or both if they are the same."""
    if name is None:
        if not shared:
            _take({}, PROMPT_FIELDS)
        return _prompt_messages("chosen", shared)
    messages = _prompt_messages(name, prompt)
    # Some public data sets repeat the last user turn as a string next to the whole conversation.
    if not shared or messages == shared or (isinstance(prompt, str) and prompt == shared[-1]["content"]):
        return _prompt_messages(name, shared or messages)
    raise ValueError(f"{name}: differs from the turns that chosen and rejected start with")


def _response_text(name: str, messages: list[Message]) -> str:
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise ValueError(f"{name}: must be one assistant message after the prompt's turns")
    return _not_empty(name, messages[0]["content"])


def _not_empty(name: str, text: str) -> str:
    if not text.strip():
        raise ValueError(f"{name}: empty")
    return text
