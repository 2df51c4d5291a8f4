"""An LLM as a judge, behind any server that speaks OpenAI's Responses or Chat Completions API."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trl_ext.evaluation.judge import JudgeError, Judgement, JudgeUnavailable, Messages
from trl_ext.evaluation.judging.answer import answer_schema, read_answer
from trl_ext.evaluation.judging.back_off import wait_before_retry
from trl_ext.evaluation.judging.openai_replies import NO_STRUCTURE, Failure, read_reply, status_failure
from trl_ext.evaluation.judging.prices import Usage, find_price, load_prices

KEY_VARIABLE = "OPENAI_API_KEY"
# Each costs as much as an answer that can be read.
BAD_ANSWER_RETRIES = 2
MAX_OUTPUT_TOKENS = 2048
# Replies in a row, from the first, that are not of the API or the schema: as many as three questions get.
UNREADABLE_AT_FIRST = 3 * (1 + BAD_ANSWER_RETRIES)
# A server that asks for more has a limit per hour or per day.
LONGEST_RETRY_AFTER = 300.0
OPENAI_URL = "https://api.openai.com/v1"
# Seconds for a connection to be made, and for retries of the first: an address that never answered is likely wrong.
CONNECT_TIMEOUT = 5.0
FIRST_CONTACT = 2.0
_NOT_CONNECTED = ("ConnectError", "ConnectTimeout")


class Answer(NamedTuple):
    """A judgement, and what it cost with the attempts before it."""

    judgement: Judgement
    usage: Usage


class OpenAIJudge:
    """Asks a model behind an OpenAI-compatible API which response is better, and has it answer in a fixed schema.

    The key is read from the environment variable OPENAI_API_KEY and from nowhere else; a server at a `base_url` of
    your own is asked without one if it is not set. Rate limits (429), errors of the server (408, 409, 5xx), broken
    connections and timeouts are retried with exponential back-off, and `Retry-After` is honoured; a server that cannot
    be reached at all is given up after a few seconds, unless it has answered before. An answer that is no verdict (not
    JSON, outside the schema, empty, cut or a refusal) is asked for twice more. If not one of the first nine replies is
    of the API and the schema, no others are asked for. May be called from several threads.

    Args:
        model: as the server knows it.
        base_url: of the API, such as `http://localhost:8000/v1`; None for OpenAI's, or what OPENAI_BASE_URL says.
        api: "responses", or "chat" for servers with Chat Completions alone.
        instructions: the rubric, as a text or as the `Path` of a file; None for the one that comes with the package.
            It must ask for the fields of that one.
        timeout: seconds to wait for the next part of an answer; one that comes in pieces may take longer in all.
        max_retries: how often a request that failed is sent again.
        max_output_tokens: the longest answer, reasoning included. An answer that is cut there gives no verdict.
        temperature, reasoning_effort: None for the server's default; not every model takes them.
        prices: file or mapping of prices that add to the package's, as `load_prices` takes them.

    Raises:
        ImportError: the openai package is missing.
        ValueError: an argument is out of range.
        FileNotFoundError: no such file of instructions or prices.
    """

    def __init__(
        self,
        model: str = "gpt-5.4",
        *,
        base_url: str | None = None,
        api: Literal["responses", "chat"] = "responses",
        instructions: str | Path | None = None,
        timeout: float = 60.0,
        max_retries: int = 6,
        max_output_tokens: int = MAX_OUTPUT_TOKENS,
        temperature: float | None = None,
        reasoning_effort: str | None = None,
        prices: str | Path | Mapping[str, Any] | None = None,
    ):
        _import_openai()
        if api not in ("responses", "chat"):
            raise ValueError(f"api must be 'responses' or 'chat', got {api!r}")
        for name, value, least in (("max_retries", max_retries, 0), ("max_output_tokens", max_output_tokens, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
        self.model = model
        self.base_url = base_url
        self.api = api
        self.instructions = _read_instructions(instructions)
        self.timeout = timeout
        self.max_retries = max_retries
        self.max_output_tokens = max_output_tokens
        self.temperature = temperature
        self.reasoning_effort = reasoning_effort
        self.price = find_price(model, load_prices(prices))
        self._schema = answer_schema()
        self._lock = threading.Lock()
        self._has_answered = False
        # None once a reply could be read.
        self._unreadable: int | None = 0
        # What `ask` was called with, for the HTTP client to find.
        self._call = threading.local()

    def __repr__(self) -> str:
        return f"OpenAIJudge(model={self.model!r}, base_url={self.base_url!r}, api={self.api!r})"

    @property
    def identity(self) -> dict[str, Any]:
        """What a verdict depends on beside the question.

        Whether a server of one's own gave it, though not its address, which moves: a trial against a stand-in must not
        pass for the verdicts of the model that it names. A limit of tokens other than the default counts as well: it
        decides which answers are whole, and so which rows have a verdict.
        """
        settings: dict[str, Any] = {"temperature": self.temperature, "reasoning_effort": self.reasoning_effort}
        if self.max_output_tokens != MAX_OUTPUT_TOKENS:
            settings["max_output_tokens"] = self.max_output_tokens
        if self.base_url or os.environ.get("OPENAI_BASE_URL"):
            settings["server"] = "own"
        return {
            "kind": "openai",
            "model": self.model,
            "instructions": self.instructions,
            **{name: value for name, value in settings.items() if value is not None},
        }

    def judge(self, prompt: Messages | str, response_a: str, response_b: str) -> Judgement:
        """The judgement on one question.

        Raises:
            JudgeError: it could not be had.
            JudgeUnavailable: no question would be answered: the key is missing or refused, the model is unknown, the
                server cannot be reached, the first replies are all of another API or schema.
        """
        return self.ask(prompt, response_a, response_b).judgement

    def ask(
        self,
        prompt: Messages | str,
        response_a: str,
        response_b: str,
        *,
        stop: threading.Event | None = None,
        slots: threading.Semaphore | None = None,
    ) -> Answer:
        """As `judge`, with what it cost.

        Args:
            stop: once it is set nothing is sent any more, and waits before retries end, with a JudgeError.
            slots: held while a request is open, and not while it is made or its reply is read.
        """
        self._call.stop, self._call.slots = stop, slots
        request = self._request(question_text(prompt, response_a, response_b))
        usage, bad_answers, failures, start = Usage(), 0, 0, time.monotonic()
        while True:
            outcome, cost = self._send(request)
            usage += cost
            usage = replace(usage, retries=max(0, usage.calls - 1))
            self._watch_first_replies(outcome)
            if isinstance(outcome, Judgement):
                return Answer(outcome, usage)
            if outcome.kind == "fatal":
                raise JudgeUnavailable(f"{self._server} gives no verdicts: {outcome.reason}; {outcome.advice}")
            if outcome.kind == "stopped":
                raise JudgeError(outcome.reason, usage=usage)
            if outcome.kind == "answer":
                bad_answers += 1
            else:
                failures += 1
            spent = outcome.kind == "request" or bad_answers > BAD_ANSWER_RETRIES or failures > self.max_retries
            given_up = spent or time.monotonic() - start > FIRST_CONTACT
            if outcome.kind == "unreachable" and given_up and not self._has_answered:
                raise JudgeUnavailable(f"{outcome.reason}: check the address, and that the server is up")
            if spent:
                reason = f"{outcome.reason} ({bad_answers + failures} attempts)"
                # A refused request is about its row, and no sign that the server is down.
                server_failed = outcome.kind in ("transient", "unreachable")
                raise JudgeError(reason, usage=usage, server_failed=server_failed)
            if outcome.kind != "answer":
                self._wait(failures - 1, outcome, usage, stop)

    def _watch_first_replies(self, outcome: Judgement | Failure) -> None:
        """End the run if no reply from the first on could be read: each of them is paid for."""
        is_reply = isinstance(outcome, Judgement) or outcome.kind == "answer"
        if not is_reply or self._unreadable is None:
            return
        with self._lock:
            if isinstance(outcome, Judgement) or not outcome.advice:
                self._unreadable = None
            elif self._unreadable is not None:
                self._unreadable += 1
            count = self._unreadable
        if count is not None and count >= UNREADABLE_AT_FIRST:
            raise JudgeUnavailable(
                f"{self._server} gives no verdicts: stopped since the first {count} replies are all unusable, the "
                f"last: {outcome.reason}; {outcome.advice}"
            )

    def estimate_tokens(self, prompt: Messages | str, response_a: str, response_b: str, count) -> int:
        """Input tokens of a question, with `count` as the tokenizer: `f(text) -> int`."""
        # The schema is sent along and read by the model.
        sent = (self.instructions, question_text(prompt, response_a, response_b), str(self._schema))
        return sum(count(text) for text in sent)

    @property
    def _server(self) -> str:
        return self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL

    @cached_property
    def _create(self):
        """The SDK's method that sends a request; retries are not the SDK's, since they are counted here."""
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise JudgeUnavailable(f"{KEY_VARIABLE} holds characters that a key cannot have: set it again")
        own_server = self.base_url or os.environ.get("OPENAI_BASE_URL")
        if not key and not own_server:
            raise JudgeUnavailable(
                f"{KEY_VARIABLE} is not set: export the key, or give the base_url of your own server"
            )
        openai = _import_openai()
        client = openai.OpenAI(
            api_key=key or "none",
            base_url=self.base_url,
            timeout=openai.Timeout(self.timeout, connect=min(self.timeout, CONNECT_TIMEOUT)),
            max_retries=0,
            http_client=_limited_client(openai, self._call),
        )
        # A whole address, which the SDK need not put together for each request.
        address = f"{client.base_url}{'responses' if self.api == 'responses' else 'chat/completions'}"
        # Past the SDK's typed methods, whose checks of every field take as long as all the rest of a call.
        return partial(client.post, address, cast_to=str)

    def _request(self, question: str) -> dict[str, Any]:
        schema = {"name": "verdict", "strict": True, "schema": self._schema}
        if self.api == "responses":
            request = {
                "model": self.model,
                "instructions": self.instructions,
                "input": question,
                "text": {"format": {"type": "json_schema", **schema}},
                "max_output_tokens": self.max_output_tokens,
                "store": False,
            }
            effort = {"reasoning": {"effort": self.reasoning_effort}}
        else:
            request = {
                "model": self.model,
                "messages": [
                    {"role": "system", "content": self.instructions},
                    {"role": "user", "content": question},
                ],
                "response_format": {"type": "json_schema", "json_schema": schema},
                "max_completion_tokens": self.max_output_tokens,
            }
            effort = {"reasoning_effort": self.reasoning_effort}
        if self.temperature is not None:
            request["temperature"] = self.temperature
        return request if self.reasoning_effort is None else request | effort

    def _send(self, request: dict[str, Any]) -> tuple[Judgement | Failure, Usage]:
        """One request. Errors of the SDK end here: they carry the request, and the request carries the key."""
        openai = _import_openai()
        with self._lock:
            create = self._create
        cost = Usage(calls=1)
        try:
            body = create(body=request)
        except openai.APIStatusError as error:
            self._has_answered = True
            failure = status_failure(error.status_code, error.body, error.response.headers)
            return replace(failure, reason=self._without_key(failure.reason)), cost
        except (JudgeError, openai.OpenAIError) as error:
            failure = self._connection_failure(error)
            return failure, cost if failure.kind == "transient" else Usage()
        self._has_answered = True
        reply = read_reply(body, self.api)
        cost += self._cost(reply)
        if reply.problem is not None:
            return Failure("answer", self._without_key(reply.problem), advice=reply.advice), cost
        try:
            return read_answer(reply.text), cost
        except ValueError as error:
            reason = self._without_key(f"the answer breaks the schema: {error}")
            return Failure("answer", reason, advice=NO_STRUCTURE), cost

    def _connection_failure(self, error: Exception) -> Failure:
        """Why a request had no reply. The SDK's own text says only that there was an error, so the cause is named."""
        cause = error.__cause__ or error
        if isinstance(cause, JudgeError):
            return Failure("stopped", str(cause))
        name = type(cause).__name__
        if name in _NOT_CONNECTED:
            return Failure("unreachable", f"{self._server} cannot be reached: {name}")
        if isinstance(error, _import_openai().APITimeoutError):
            return Failure("transient", f"no answer within {self.timeout:g} s")
        return Failure("transient", f"{self._server} cannot be reached: {name}")

    def _cost(self, reply) -> Usage:
        tokens = {
            "input_tokens": reply.input_tokens,
            "cached_input_tokens": reply.cached_input_tokens,
            "output_tokens": reply.output_tokens,
        }
        return Usage(**tokens, dollars=None if self.price is None else self.price.dollars(**tokens))

    def _wait(self, attempt: int, failure: Failure, usage: Usage, stop: threading.Event | None) -> None:
        if failure.retry_after is not None and failure.retry_after > LONGEST_RETRY_AFTER:
            raise JudgeUnavailable(
                f"{self._server} asks to wait {failure.retry_after:.0f} s: {failure.reason}; run again then"
            )
        seconds = wait_before_retry(attempt, failure.retry_after)
        if (stop or threading.Event()).wait(seconds):
            raise JudgeError(f"stopped while waiting to retry: {failure.reason}", usage=usage)

    def _without_key(self, text: str) -> str:
        """A server's words in one short line; some servers repeat the key that they refuse."""
        key = os.environ.get(KEY_VARIABLE, "")
        line = " ".join(text.split())
        # A placeholder such as "x" is no secret, and part of many words.
        return (line.replace(key, "[key]") if len(key) >= 8 else line)[:300]


def question_text(prompt: Messages | str, response_a: str, response_b: str) -> str:
    """What the judge is shown: the conversation and both responses, between markers that a response cannot guess."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    conversation = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    # Text of models may hold halves of surrogate pairs, which cannot be sent.
    parts = [text.encode("utf-8", "replace").decode() for text in (conversation, response_a, response_b)]
    code = hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:12]
    sections = zip(("conversation", "response A", "response B"), parts, strict=True)
    return "\n".join([*(f"[{name} {code}]\n{text}" for name, text in sections), f"[end {code}]"])


def _read_instructions(instructions: str | Path | None) -> str:
    if instructions is None:
        return (files("trl_ext.evaluation") / "judging" / "instructions.md").read_text(encoding="utf-8")
    if isinstance(instructions, Path):
        if not instructions.is_file():
            raise FileNotFoundError(f"no file of instructions {str(instructions)!r}")
        instructions = instructions.read_text(encoding="utf-8")
    if len(instructions.split()) < 2:
        raise ValueError(f"instructions must be a text, or the Path of a file that holds one, got {instructions!r}")
    return instructions


def _limited_client(openai, call: threading.local):
    """An HTTP client that sends a request when there is a free slot.

    The slot is taken here, and not around the SDK's call, since most of the work of a call is before and after.
    """

    class LimitedClient(openai.DefaultHttpxClient):
        def send(self, *args: Any, **kwargs: Any):
            with getattr(call, "slots", None) or nullcontext():
                stop = getattr(call, "stop", None)
                if stop is not None and stop.is_set():
                    raise JudgeError("stopped before the request was sent")
                return super().send(*args, **kwargs)

    return LimitedClient()


def _import_openai():
    try:
        import openai
    except ImportError as error:
        raise ImportError("OpenAIJudge needs the openai package: pip install 'trl_ext[judge]'") from error
    return openai
