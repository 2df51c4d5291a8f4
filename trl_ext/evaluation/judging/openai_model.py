"""A language model behind a server with OpenAI's Responses or Chat Completions API, asked for structured answers."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from trl_ext.data.rows import first_error
from trl_ext.evaluation.judging.protocol import JudgeError, JudgeUnavailable, Messages, Usage
from trl_ext.names import check_choice

Answer = TypeVar("Answer", bound=BaseModel)
KEY_VARIABLE = "OPENAI_API_KEY"
OPENAI_URL = "https://api.openai.com/v1"
MAX_OUTPUT_TOKENS = 2048
# Each attempt costs as much as a valid answer.
BAD_ANSWER_RETRIES = 2
# Seconds within which a server must accept the first connection. Later requests wait longer.
FIRST_CONNECTION = 5.0
# Error codes of a 429 for which waiting does not help.
_SPENT = {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"}
# What to do about an error that every request meets.
_ADVICE = {
    401: "the key is missing or refused: set OPENAI_API_KEY to a valid one for this server",
    402: "the account has no credit left: add some, and run again; what is judged already is not asked again",
    404: "check the name of the model and the address of the server",
}
_NO_STRUCTURE = "if all answers do, choose a model and a server that produce structured output"
_OTHER_API = {
    "responses": "a server that speaks only Chat Completions needs --api chat",
    "chat": "a server that speaks only the Responses API needs --api responses",
}


class OpenAIModel:
    """Sends questions with a fixed schema for their answers, and retries.

    The key is read only from the environment variable OPENAI_API_KEY. If the variable is not set, a server at your own
    `base_url` is called without a key. The SDK retries a request after a rate limit (429), a server error (408, 409,
    5xx), a broken connection or a timeout. It waits longer each time, or as long as `Retry-After` requests. After an
    invalid answer (not JSON, outside the schema, empty, truncated or a refusal), the question is asked up to two more
    times. The model may be asked from several threads.

    Args:
        model: the model's name on the server.
        base_url: the API's address, such as `http://localhost:8000/v1`; None for OpenAI's, or the value of
            OPENAI_BASE_URL.
        api: "responses", or "chat" for servers that only have Chat Completions.
        timeout: seconds to wait for the next part of an answer; a streamed answer may take longer in total.
        max_retries: how often a failed request is sent again.
        max_output_tokens: maximum length of an answer, including reasoning. A truncated answer is invalid.
        temperature, reasoning_effort: None for the server's default; not every model accepts them.

    Raises:
        ImportError: the openai package is missing.
        ValueError: `api` is unknown.
    """

    def __init__(
        self,
        model: str = "gpt-5.4",
        *,
        base_url: str | None = None,
        api: Literal["responses", "chat"] = "responses",
        timeout: float = 60.0,
        max_retries: int = 6,
        max_output_tokens: int = MAX_OUTPUT_TOKENS,
        temperature: float | None = None,
        reasoning_effort: str | None = None,
    ):
        try:
            import openai  # noqa: F401
        except ImportError as error:
            message = f"{type(self).__name__} needs the package openai: pip install 'trl_ext[judge]'"
            raise ImportError(message) from error
        check_choice("api", api, tuple(_OTHER_API))
        self.model, self.base_url, self.api = model, base_url, api
        self.timeout, self.max_retries, self.max_output_tokens = timeout, max_retries, max_output_tokens
        self.temperature, self.reasoning_effort = temperature, reasoning_effort

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that an answer depends on other than the instructions and the question.

        It includes whether the server was your own, but not its address, since addresses change. A non-default token
        limit is included, because it decides which answers are complete.
        """
        settings: dict[str, Any] = {"temperature": self.temperature, "reasoning_effort": self.reasoning_effort}
        if self.max_output_tokens != MAX_OUTPUT_TOKENS:
            settings["max_output_tokens"] = self.max_output_tokens
        if self._server != OPENAI_URL:
            settings["server"] = "own"
        told = {name: value for name, value in settings.items() if value is not None}
        return {"kind": "openai", "model": self.model, **told}

    def complete(self, instructions: str, question: str, answer_type: type[Answer]) -> tuple[Answer, Usage]:
        """The answer to a question, and the usage.

        Args:
            instructions: the system message.
            question: the user's message.
            answer_type: the fields of the answer.

        Raises:
            JudgeError: there is no answer to this question.
            JudgeUnavailable: every question would fail: the key is missing or rejected, the model is unknown, or the
                server cannot be reached.
        """
        usage = Usage()
        for attempt in range(1 + BAD_ANSWER_RETRIES):
            reply, failure = self._send(instructions, question, answer_type)
            usage = replace(usage + _usage(reply), retries=attempt)
            if failure is not None:
                failure.usage = usage
                raise failure
            try:
                return answer_type.model_validate_json(_text(reply, self.api)), usage
            except ValidationError as error:
                reason, is_of_server = f"the answer breaks the schema: {first_error(error)}; {_NO_STRUCTURE}", True
            except ValueError as error:
                reason, is_of_server = str(error), False
            except (AttributeError, IndexError, TypeError):
                advice = f"check the address, which ends in /v1 for most servers; {_OTHER_API[self.api]}"
                reason, is_of_server = f"the reply is not one of the {self.api} API: {advice}", True
        reason = f"{self._without_key(reason)} ({usage.calls} attempts)"
        raise JudgeError(reason, usage=usage, server_failed=is_of_server)

    @property
    def _server(self) -> str:
        return self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL

    @cached_property
    def _client(self):
        """The SDK's client. Raises an error if the server does not accept a connection, since retries take long."""
        import openai

        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key and self._server == OPENAI_URL:
            raise JudgeUnavailable(f"{KEY_VARIABLE} is not set: export it, or give the base_url of your own server")
        client = openai.OpenAI(
            api_key=key or "none", base_url=self.base_url, timeout=self.timeout, max_retries=self.max_retries
        )
        try:
            client.with_options(max_retries=0, timeout=FIRST_CONNECTION).get("/", cast_to=str)
        except openai.APIConnectionError as error:
            reason = type(error.__cause__ or error).__name__
            if reason in ("ConnectError", "ConnectTimeout"):
                raise JudgeUnavailable(
                    f"{self._server} cannot be reached: {reason}: check the address, and that the server is up"
                ) from None
        except openai.APIError:
            pass  # any answer will do
        return client

    def _send(
        self, instructions: str, question: str, answer_type: type[BaseModel]
    ) -> tuple[Any, JudgeError | JudgeUnavailable | None]:
        """The reply to one request, or the failure, which is not raised where the SDK's error would carry the key."""
        import openai

        schema = {"name": "verdict", "strict": True, "schema": answer_type.model_json_schema()}
        settings: dict[str, Any] = {"model": self.model, "temperature": self.temperature}
        effort = self.reasoning_effort or None
        if self.api == "responses":
            create = self._client.responses.create
            settings |= {
                "instructions": instructions,
                "input": question,
                "text": {"format": {"type": "json_schema", **schema}},
                "max_output_tokens": self.max_output_tokens,
                "reasoning": effort and {"effort": effort},
                "store": False,
            }
        else:
            create = self._client.chat.completions.create
            settings |= {
                "messages": [{"role": "system", "content": instructions}, {"role": "user", "content": question}],
                "response_format": {"type": "json_schema", "json_schema": schema},
                "max_completion_tokens": self.max_output_tokens,
                "reasoning_effort": effort,
            }
        try:
            return create(**{name: value for name, value in settings.items() if value is not None}), None
        except openai.APIStatusError as error:
            return None, self._status_failure(error.status_code, error.body)
        except openai.APITimeoutError:
            reason = f"no answer within {self.timeout:g} s"
        except openai.APIConnectionError as error:
            reason = f"{self._server} cannot be reached: {type(error.__cause__ or error).__name__}"
        return None, JudgeError(reason, server_failed=True)

    def _status_failure(self, status: int, body: Any) -> JudgeError | JudgeUnavailable:
        """Interpret an error status; `body` is the error object in the response's JSON, or any other content."""
        body = body if isinstance(body, dict) else {}
        reason = self._without_key(f"{status} {body.get('message') or ''}")
        if status == 429 and {body.get("code"), body.get("type")} & _SPENT:
            status = 402
        if status in _ADVICE:
            return JudgeUnavailable(f"{self._server} gives no verdicts: {reason}; {_ADVICE[status]}")
        return JudgeError(reason, server_failed=status in (408, 409, 429) or status >= 500)

    def _without_key(self, text: str) -> str:
        """A server's message in one short line, without the key, which some servers repeat when they reject it."""
        key = os.environ.get(KEY_VARIABLE, "")
        line = " ".join(text.split())
        # A placeholder such as "x" is not a secret, and occurs in many words.
        return (line.replace(key, "[key]") if len(key) >= 8 else line)[:400]


def sections_text(prompt: Messages | str, *sections: tuple[str, str]) -> str:
    """The conversation and named texts, between markers that no text can guess."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    conversation = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    names, texts = zip(("conversation", conversation), *sections, strict=True)
    # Model output may contain unpaired surrogates, which cannot be sent.
    parts = [text.encode("utf-8", "replace").decode() for text in texts]
    code = hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:12]
    return "\n".join([*(f"[{name} {code}]\n{text}" for name, text in zip(names, parts, strict=True)), f"[end {code}]"])


def _text(reply: Any, api: str) -> str:
    """The text of a reply.

    Raises:
        ValueError: the judge refused, or its answer is truncated or empty.
        AttributeError, IndexError, TypeError: the reply is not one of this API.
    """
    if api == "responses":
        parts = [part for item in reply.output if item.type == "message" for part in item.content]
        refusal = next((part.refusal for part in parts if part.type == "refusal"), None)
        end = (reply.incomplete_details and reply.incomplete_details.reason) or reply.status
        text = reply.output_text
    else:
        choice = reply.choices[0]
        refusal, end, text = getattr(choice.message, "refusal", None), choice.finish_reason, choice.message.content
    if refusal:
        raise ValueError(f"the judge refused: {refusal}")
    if end in ("length", "max_output_tokens"):
        raise ValueError("the answer was truncated at max_output_tokens: raise it")
    if end in ("content_filter", "incomplete", "failed"):
        raise ValueError(f"the answer is incomplete: {end}")
    if not (text or "").strip():
        raise ValueError("the answer is empty")
    return text


def _usage(reply: Any) -> Usage:
    """What a request cost; servers leave out some of it."""

    def count(owner: Any, *names: str) -> int:
        return next((found for name in names if (found := getattr(owner, name, None))), 0)

    usage = getattr(reply, "usage", None)
    details = getattr(usage, "input_tokens_details", None) or getattr(usage, "prompt_tokens_details", None)
    return Usage(
        calls=1,
        input_tokens=count(usage, "input_tokens", "prompt_tokens"),
        cached_input_tokens=count(details, "cached_tokens"),
        output_tokens=count(usage, "output_tokens", "completion_tokens"),
    )
