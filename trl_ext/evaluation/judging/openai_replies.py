"""Replies of OpenAI-compatible servers: the text in them, the tokens that they cost, and why a request failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trl_ext.evaluation.judging.back_off import read_retry_after

# Codes of a 429 that waiting does not mend.
_SPENT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
_ADVICE = {
    401: "the key is missing or refused: set OPENAI_API_KEY to a valid one for this server",
    402: "the account has no credit left: add some, and run again; what is judged already is not asked again",
    404: "check the name of the model and the address of the server",
}
# What helps where every reply is of another shape than was asked for.
NO_STRUCTURE = (
    "the model cannot produce structured output, or its server does not enforce the schema: choose a model and a "
    "server that do"
)
_OTHER_API = {
    "responses": "a server that speaks only Chat Completions needs --api chat",
    "chat": "a server that speaks only the Responses API needs --api responses",
}


@dataclass(frozen=True)
class Failure:
    """Why a request brought no verdict.

    Attributes:
        kind: "answer" for a reply that is no verdict; "transient" for what may pass; "unreachable" for a connection
            that was not made; "request" for a request that the server refuses; "fatal" for what every request would
            meet; "stopped" for one that was not sent since the run ends.
        reason: in a few words.
        retry_after: seconds that the server asks to wait.
        advice: what the user can do about a fatal one, or about an answer of another API or schema, should all be so.
    """

    kind: Literal["answer", "transient", "unreachable", "request", "fatal", "stopped"]
    reason: str
    retry_after: float | None = None
    advice: str = ""


@dataclass(frozen=True)
class Reply:
    """The text of a reply, or why there is none and what helps if all are so, and the tokens that it cost."""

    text: str | None
    problem: str | None = None
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    advice: str = ""


def read_reply(body: bytes, api: Literal["responses", "chat"]) -> Reply:
    """The reply in the body of a response with status 200, whatever it holds."""
    try:
        data = json.loads(body)
    except ValueError:
        advice = f"check the address, which ends in /v1 for most servers; {_OTHER_API[api]}"
        return Reply(None, "the reply is not JSON", advice=advice)
    advice = ""
    try:
        text, problem = _read_responses(data) if api == "responses" else _read_chat(data)
    except (KeyError, IndexError, TypeError, AttributeError):
        text, problem, advice = None, f"the reply is not one of the {api} API", _OTHER_API[api]
    if problem is None and not text.strip():
        problem = "the answer is empty"
    return Reply(text, problem, advice=advice, **_read_tokens(data))


def _read_responses(data: Any) -> tuple[str, str | None]:
    parts = [part for item in data["output"] if item["type"] == "message" for part in item["content"]]
    refusals = [part["refusal"] for part in parts if part["type"] == "refusal"]
    if refusals:
        return "", f"the judge refused: {refusals[0]}"
    if data.get("status") == "incomplete":
        return "", _incomplete((data.get("incomplete_details") or {}).get("reason"))
    if data.get("status") == "failed":
        return "", f"the server failed: {(data.get('error') or {}).get('message')}"
    return "".join(part["text"] for part in parts if part["type"] == "output_text"), None


def _read_chat(data: Any) -> tuple[str, str | None]:
    choice = data["choices"][0]
    message = choice["message"]
    if message.get("refusal"):
        return "", f"the judge refused: {message['refusal']}"
    if choice.get("finish_reason") in ("length", "content_filter"):
        return "", _incomplete(choice["finish_reason"])
    return message["content"] or "", None


def _incomplete(reason: str | None) -> str:
    if reason in ("length", "max_output_tokens"):
        return "the answer was cut at max_output_tokens: raise it"
    return f"the answer is incomplete: {reason}"


def _read_tokens(data: Any) -> dict[str, int]:
    usage = data.get("usage") if isinstance(data, Mapping) else None
    usage = usage if isinstance(usage, Mapping) else {}

    def count(*names: str) -> int:
        return next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)

    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return {
        "input_tokens": count("input_tokens", "prompt_tokens"),
        "cached_input_tokens": cached if isinstance(cached, int) else 0,
        "output_tokens": count("output_tokens", "completion_tokens"),
    }


def status_failure(status: int, body: Any, headers: Mapping[str, str]) -> Failure:
    """What a response with an error status means.

    Args:
        status: of the response.
        body: the error object of the response's JSON, or whatever there is.
        headers: with keys in lower case, or of a type that ignores case.
    """
    body = body if isinstance(body, Mapping) else {}
    reason = f"{status} {body.get('message') or ''}".strip()
    if status == 429 and not {body.get("code"), body.get("type")}.isdisjoint(_SPENT):
        return Failure("fatal", reason, advice=_ADVICE[402])
    if status in _ADVICE:
        return Failure("fatal", reason, advice=_ADVICE[status])
    if status in (408, 409, 429) or status >= 500:
        return Failure("transient", reason, read_retry_after(headers))
    return Failure("request", reason)
