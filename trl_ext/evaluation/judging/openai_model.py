"""A language model behind a server with OpenAI's Responses or Chat Completions API, asked for structured answers."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from trl_ext.evaluation.judging.protocol import JudgeError, JudgeUnavailable, Messages, Usage
from trl_ext.names import check_choice

KEY_VARIABLE = "OPENAI_API_KEY"
OPENAI_URL = "https://api.openai.com/v1"
MAX_OUTPUT_TOKENS = 2048
# Each attempt costs as much as a valid answer.
BAD_ANSWER_RETRIES = 2
# Seconds within which a server must accept the first connection. Later requests wait longer.
FIRST_CONNECTION = 5.0
# Error codes of a 429 for which waiting does not help.
_SPENT = {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"}
_ADVICE = {
    401: "the key is missing or refused: set OPENAI_API_KEY to a valid one for this server",
    402: "the account has no credit left: add some, and run again; what is judged already is not asked again",
    404: "check the name of the model and the address of the server",
}
_NO_STRUCTURE = (
    "if all answers do, the model cannot produce structured output, or its server does not enforce the schema: choose "
    "a model and a server that do"
)
_OTHER_API = {
    "responses": "a server that speaks only Chat Completions needs --api chat",
    "chat": "a server that speaks only the Responses API needs --api responses",
}


class Failure(NamedTuple):
    """Why a request produced no answer.

    Attributes:
        kind: "answer" for a reply without a valid answer; "server" for an error that may pass; "row" for a request
            that the server rejects; "all" for an error that affects every request.
        reason: a few words.
        advice: what the user can do if every request fails this way.
    """

    kind: Literal["answer", "server", "row", "all"]
    reason: str
    advice: str = ""


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
        _import_openai(type(self).__name__)
        check_choice("api", api, ("responses", "chat"))
        self.model, self.base_url, self.api = model, base_url, api
        self.timeout, self.max_retries, self.max_output_tokens = timeout, max_retries, max_output_tokens
        self.temperature, self.reasoning_effort = temperature, reasoning_effort
        self._lock = threading.Lock()

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that an answer depends on other than the instructions and the question.

        It includes whether the server was your own, so that answers of a stand-in are not mistaken for those of the
        model it imitates. It excludes the address, since addresses change. A non-default token limit is included,
        because it decides which answers are complete and therefore which questions have one.
        """
        settings: dict[str, Any] = {"temperature": self.temperature, "reasoning_effort": self.reasoning_effort}
        if self.max_output_tokens != MAX_OUTPUT_TOKENS:
            settings["max_output_tokens"] = self.max_output_tokens
        if self._server != OPENAI_URL:
            settings["server"] = "own"
        told = {name: value for name, value in settings.items() if value is not None}
        return {"kind": "openai", "model": self.model, **told}

    def complete(
        self, instructions: str, question: str, schema: Mapping[str, Any], read: Callable[[str], Any]
    ) -> tuple[Any, Usage]:
        """The answer to a question, and the usage.

        Args:
            instructions: the system message.
            question: the user's message.
            schema: JSON schema of the answer.
            read: turns the text of an answer into the value to return; raises ValueError if it is invalid.

        Raises:
            JudgeError: there is no answer to this question.
            JudgeUnavailable: every question would fail: the key is missing or rejected, the model is unknown, or the
                server cannot be reached.
        """
        usage = Usage()
        for attempt in range(1 + BAD_ANSWER_RETRIES):
            outcome, cost = self._send(instructions, question, schema, read)
            usage = replace(usage + cost, retries=attempt)
            if not isinstance(outcome, Failure):
                return outcome, usage
            if outcome.kind != "answer":
                break
        advice = f"; {outcome.advice}" if outcome.advice else ""
        if outcome.kind == "all":
            raise JudgeUnavailable(f"{self._server} gives no verdicts: {outcome.reason}{advice}")
        attempts = f" ({usage.calls} attempts)" if usage.calls > 1 else ""
        # Advice about an answer is for a model or server that always answers in this way.
        server_failed = outcome.kind == "server" or bool(outcome.kind == "answer" and advice)
        raise JudgeError(f"{outcome.reason}{attempts}{advice}", usage=usage, server_failed=server_failed)

    @property
    def _server(self) -> str:
        return self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL

    @cached_property
    def _client(self):
        """The SDK's client. Raises an error if the server does not accept a connection, since retries take long."""
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise JudgeUnavailable(f"{KEY_VARIABLE} holds characters that a key cannot have: set it again")
        if not key and self._server == OPENAI_URL:
            raise JudgeUnavailable(
                f"{KEY_VARIABLE} is not set: export the key, or give the base_url of your own server"
            )
        openai = _import_openai(type(self).__name__)
        client = openai.OpenAI(
            api_key=key or "none", base_url=self.base_url, timeout=self.timeout, max_retries=self.max_retries
        )
        problem = None
        try:
            client.with_options(max_retries=0, timeout=FIRST_CONNECTION).get("/", cast_to=str)
        except openai.APIConnectionError as error:
            problem = type(error.__cause__ or error).__name__
        except openai.APIError:
            pass  # any answer will do
        if problem in ("ConnectError", "ConnectTimeout"):
            raise JudgeUnavailable(
                f"{self._server} cannot be reached: {problem}: check the address, and that the server is up"
            )
        return client

    def _send(
        self, instructions: str, question: str, schema: Mapping[str, Any], read: Callable[[str], Any]
    ) -> tuple[Any, Usage]:
        """The answer to one request, or a `Failure`, and its usage.

        Errors of the SDK are caught here, since they carry the request and thus the key.
        """
        openai = _import_openai(type(self).__name__)
        with self._lock:
            client = self._client
        try:
            reply = self._request(
                client, instructions, question, {"name": "verdict", "strict": True, "schema": schema}
            )
        except openai.APIStatusError as error:
            return self._status_failure(error.status_code, error.body), Usage(calls=1)
        except openai.APITimeoutError:
            return Failure("server", f"no answer within {self.timeout:g} s"), Usage(calls=1)
        except openai.APIConnectionError as error:
            name = type(error.__cause__ or error).__name__
            return Failure("server", f"{self._server} cannot be reached: {name}"), Usage(calls=1)
        if isinstance(reply, str):
            advice = f"check the address, which ends in /v1 for most servers; {_OTHER_API[self.api]}"
            return Failure("answer", "the reply is not JSON", advice), Usage(calls=1)
        try:
            text, problem = _of_response(reply) if self.api == "responses" else _of_chat(reply)
        except (AttributeError, IndexError, TypeError):
            reason = f"the reply is not one of the {self.api} API"
            return Failure("answer", reason, _OTHER_API[self.api]), Usage(calls=1)
        cost = _usage(reply.usage)
        if problem is not None or not text.strip():
            return Failure("answer", self._without_key(problem or "the answer is empty")), cost
        try:
            return read(text), cost
        except ValueError as error:
            reason = self._without_key(f"the answer breaks the schema: {error}")
            return Failure("answer", reason, _NO_STRUCTURE), cost

    def _request(self, client, instructions: str, question: str, schema: dict[str, Any]) -> Any:
        settings: dict[str, Any] = {"model": self.model}
        if self.temperature is not None:
            settings["temperature"] = self.temperature
        if self.api == "responses":
            if self.reasoning_effort:
                settings["reasoning"] = {"effort": self.reasoning_effort}
            return client.responses.create(
                instructions=instructions,
                input=question,
                text={"format": {"type": "json_schema", **schema}},
                max_output_tokens=self.max_output_tokens,
                store=False,
                **settings,
            )
        if self.reasoning_effort:
            settings["reasoning_effort"] = self.reasoning_effort
        return client.chat.completions.create(
            messages=[{"role": "system", "content": instructions}, {"role": "user", "content": question}],
            response_format={"type": "json_schema", "json_schema": schema},
            max_completion_tokens=self.max_output_tokens,
            **settings,
        )

    def _status_failure(self, status: int, body: Any) -> Failure:
        """Interpret an error status; `body` is the error object in the response's JSON, or any other content."""
        body = body if isinstance(body, Mapping) else {}
        reason = self._without_key(f"{status} {body.get('message') or ''}".strip())
        if status == 429 and {body.get("code"), body.get("type")} & _SPENT:
            status = 402
        if status in _ADVICE:
            return Failure("all", reason, _ADVICE[status])
        return Failure("server" if status in (408, 409, 429) or status >= 500 else "row", reason)

    def _without_key(self, text: str) -> str:
        """A server's message in one short line, without the key, which some servers repeat when they reject it."""
        key = os.environ.get(KEY_VARIABLE, "")
        line = " ".join(text.split())
        # A placeholder such as "x" is not a secret, and occurs in many words.
        return (line.replace(key, "[key]") if len(key) >= 8 else line)[:300]


def sections_text(prompt: Messages | str, *sections: tuple[str, str]) -> str:
    """The conversation and named texts, between markers that no text can guess."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    conversation = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    names, texts = zip(("conversation", conversation), *sections, strict=True)
    # Model output may contain unpaired surrogates, which cannot be sent.
    parts = [text.encode("utf-8", "replace").decode() for text in texts]
    code = hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:12]
    return "\n".join([*(f"[{name} {code}]\n{text}" for name, text in zip(names, parts, strict=True)), f"[end {code}]"])


# ---- Replies: their text, or the problem with them ----


def _of_response(reply) -> tuple[str, str | None]:
    parts = [part for item in reply.output if item.type == "message" for part in item.content]
    refusals = [part.refusal for part in parts if part.type == "refusal"]
    if refusals:
        return "", f"the judge refused: {refusals[0]}"
    if reply.status == "incomplete":
        return "", _incomplete(reply.incomplete_details and reply.incomplete_details.reason)
    if reply.status == "failed":
        return "", f"the server failed: {reply.error and reply.error.message}"
    return reply.output_text, None


def _of_chat(reply) -> tuple[str, str | None]:
    choice = reply.choices[0]
    if getattr(choice.message, "refusal", None):
        return "", f"the judge refused: {choice.message.refusal}"
    if choice.finish_reason in ("length", "content_filter"):
        return "", _incomplete(choice.finish_reason)
    return choice.message.content or "", None


def _incomplete(reason: str | None) -> str:
    if reason in ("length", "max_output_tokens"):
        return "the answer was cut at max_output_tokens: raise it"
    return f"the answer is incomplete: {reason}"


def _usage(usage) -> Usage:
    """What a request cost; servers leave out some of it."""

    def count(owner, *names: str) -> int:
        return next((found for name in names if (found := getattr(owner, name, None))), 0)

    details = getattr(usage, "input_tokens_details", None) or getattr(usage, "prompt_tokens_details", None)
    return Usage(
        calls=1,
        input_tokens=count(usage, "input_tokens", "prompt_tokens"),
        cached_input_tokens=count(details, "cached_tokens"),
        output_tokens=count(usage, "output_tokens", "completion_tokens"),
    )


def _import_openai(needed_by: str):
    try:
        import openai
    except ImportError as error:
        raise ImportError(f"{needed_by} needs the openai package: pip install 'trl_ext[judge]'") from error
    return openai
