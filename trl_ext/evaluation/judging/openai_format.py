"""The format of questions to an LLM judge, of its answers, and of the replies of the two APIs."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from trl_ext.evaluation.judging.protocol import Judgement, Messages

Rating = Annotated[int, Field(ge=1, le=5)]
# If a judge names the same response as best and worst, it considers neither good.
ALL_WEAK = "all_weak"
# Strings that models write for an empty list of tags.
_NO_TAG = ("", "none", "n/a", "null")


class JudgeAnswer(BaseModel, extra="forbid", strict=True):
    """A judge's answer; the reason comes before the verdict."""

    reason: str
    best: Literal["A", "B"]
    worst: Literal["A", "B"]
    confidence: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    strength: Rating
    usable: bool
    quality: Rating
    exclusion_tags: list[str]


SCHEMA = JudgeAnswer.model_json_schema()


def question_text(prompt: Messages | str, response_a: str, response_b: str) -> str:
    """A pairwise judge's input: the conversation and both responses."""
    return sections_text(prompt, ("response A", response_a), ("response B", response_b))


def sections_text(prompt: Messages | str, *sections: tuple[str, str]) -> str:
    """The conversation and named texts, between markers that no text can guess."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    conversation = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    names, texts = zip(("conversation", conversation), *sections, strict=True)
    # Model output may contain unpaired surrogates, which cannot be sent.
    parts = [text.encode("utf-8", "replace").decode() for text in texts]
    code = hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:12]
    return "\n".join([*(f"[{name} {code}]\n{text}" for name, text in zip(names, parts, strict=True)), f"[end {code}]"])


def read_answer(text: str) -> Judgement:
    """Parse an answer into a judgement, with `usable` and `quality` made consistent with its tags and labels.

    Any exclusion tag makes it unusable and limits its quality to 2. If best and worst have the same label, it is
    unusable, its quality is at most 1, and the tag `all_weak` is added; the verdict is still the best label.

    Raises:
        ValueError: the answer is not JSON, or violates the schema.
    """
    try:
        answer = JudgeAnswer.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    tags = [tag.strip() for tag in answer.exclusion_tags if tag.strip().lower() not in _NO_TAG]
    best_quality = 2 if tags else 5
    if answer.worst == answer.best:
        best_quality = 1
        tags += [] if ALL_WEAK in tags else [ALL_WEAK]
    return Judgement(
        verdict=answer.best,
        usable=answer.usable and not tags,
        worst=answer.worst,
        confidence=answer.confidence,
        strength=answer.strength,
        quality=min(answer.quality, best_quality),
        exclusion_tags=tuple(tags),
        reason=answer.reason.strip(),
    )


class Reply(NamedTuple):
    """The text of a reply or the `problem` with it, and its token counts, named as in `Usage`."""

    text: str
    problem: str | None
    tokens: dict[str, int]


def read_reply(reply: Any, api: Literal["responses", "chat"]) -> Reply:
    """Read the JSON of a response with status 200.

    Raises:
        KeyError, IndexError, TypeError, AttributeError: the JSON is not a reply of this API.
    """
    text, problem = _read_responses(reply) if api == "responses" else _read_chat(reply)
    if problem is None and not text.strip():
        problem = "the answer is empty"
    usage = reply.get("usage") or {}
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    tokens = {
        "input_tokens": usage.get("input_tokens") or usage.get("prompt_tokens") or 0,
        "cached_input_tokens": details.get("cached_tokens") or 0,
        "output_tokens": usage.get("output_tokens") or usage.get("completion_tokens") or 0,
    }
    return Reply(text, problem, tokens)


def _read_responses(reply: Any) -> tuple[str, str | None]:
    parts = [part for item in reply["output"] if item["type"] == "message" for part in item["content"]]
    refusals = [part["refusal"] for part in parts if part["type"] == "refusal"]
    if refusals:
        return "", f"the judge refused: {refusals[0]}"
    if reply.get("status") == "incomplete":
        return "", _incomplete((reply.get("incomplete_details") or {}).get("reason"))
    if reply.get("status") == "failed":
        return "", f"the server failed: {(reply.get('error') or {}).get('message')}"
    return "".join(part["text"] for part in parts if part["type"] == "output_text"), None


def _read_chat(reply: Any) -> tuple[str, str | None]:
    choice = reply["choices"][0]
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
