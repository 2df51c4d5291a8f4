"""A judge's server on this machine: speaks OpenAI's Responses and Chat Completions APIs, and fails as told.

It prefers the longer response, and the one shown first of two that are equally long. In a test, `with LoopbackServer()
as server:` runs it in a thread; `python -m tests.support.loopback --latency 0.05` runs it in a process of its own and
prints its address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

USAGE = {"input": 900, "cached": 400, "output": 80}


@dataclass(frozen=True)
class Fault:
    """What to do instead of answering, or to the answer.

    Attributes:
        kind: "status", "reset" (in the middle of the body), "stall", "not_json", "not_the_api", "bad_schema",
            "same_label", "refusal", "empty" or "cut".
        status: for "status", with `retry_after` as its header and `code` in its body.
        echo_key: repeat the client's key in the text of the error, or of the refusal.
        seconds: for "stall".
    """

    kind: str
    status: int = 500
    retry_after: str | None = None
    code: str | None = None
    echo_key: bool = False
    seconds: float = 60.0


@dataclass
class Call:
    """One request: when it came, what was asked, and whether its reply went out whole."""

    time: float
    question: tuple[str, str, str]
    body: dict[str, Any]
    authorization: str
    answered: bool = False


@dataclass
class LoopbackServer:
    """The server.

    Args:
        latency: seconds from a request to its reply.
        faults: `f(question, attempt) -> Fault | None`, or an iterable of faults for the first requests (None for an
            answer). `question` is the conversation and both responses as shown; `attempt` is how often it was asked
            before.

    Attributes:
        url: base URL of the API.
        calls: every request, in order of arrival.
        open, most_open: how many requests are open, and were at most.
    """

    latency: float = 0.0
    faults: Callable[[tuple[str, str, str], int], Fault | None] | Iterable[Fault | None] = ()
    port: int = 0
    calls: list[Call] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    def __post_init__(self):
        self._script = None if callable(self.faults) else iter(self.faults)
        self._ready = threading.Event()

    def __enter__(self) -> LoopbackServer:
        self._thread = threading.Thread(target=asyncio.run, args=(self.serve(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def answered(self) -> Counter:
        """How often each question's reply went out whole."""
        return Counter(call.question for call in self.calls if call.answered)

    @property
    def asked(self) -> Counter:
        """How often each question came in."""
        return Counter(call.question for call in self.calls)

    async def serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._converse, "127.0.0.1", self.port, backlog=512)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._end.wait()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                headers = dict(re.findall(r"(?m)^([^:\r\n]+): *([^\r\n]*)", head))
                headers = {name.lower(): value for name, value in headers.items()}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    await self._reply(head.split()[1], headers, body, reader, writer)
                finally:
                    self.open -= 1
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client is gone, or the server ends
        finally:
            writer.close()

    async def _reply(self, path: str, headers: dict, raw: bytes, reader: asyncio.StreamReader, writer: Any) -> None:
        if path not in ("/v1/responses", "/v1/chat/completions"):
            return _send(writer, 404, {"error": {"message": f"no {path} here", "code": None}})
        body = json.loads(raw)
        chat = path.endswith("completions")
        question = read_question(body["messages"][-1]["content"] if chat else body["input"])
        fault = self._fault(question)
        call = Call(time.monotonic(), question, body, headers.get("authorization", ""))
        self.calls.append(call)
        await asyncio.sleep(self.latency)
        key = call.authorization.removeprefix("Bearer ") if fault and fault.echo_key else ""
        if fault and fault.kind == "stall":
            await asyncio.sleep(fault.seconds)
        if fault and fault.kind == "status":
            extra = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
            error = {"message": f"{HTTPStatus(fault.status).phrase} {key}", "code": fault.code, "type": "error"}
            return _send(writer, fault.status, {"error": error}, extra)
        if fault and fault.kind == "not_json":
            return _send(writer, 200, "<html>busy</html>")
        if fault and fault.kind == "not_the_api":
            return _send(writer, 200, {"hello": "world"})
        reply = _reply_body(body, chat, question, fault, key)
        if fault and fault.kind == "reset":
            return _reset(writer, reply)
        call.answered = not reader.at_eof()  # else the client has hung up
        return _send(writer, 200, reply)

    def _fault(self, question: tuple[str, str, str]) -> Fault | None:
        if self._script is not None:
            return next(self._script, None)
        return self.faults(question, sum(call.question == question for call in self.calls))


def read_question(text: str) -> tuple[str, str, str]:
    """The conversation and both responses in the text that a judge is shown."""
    found = re.fullmatch(
        r"\[conversation (\w+)\]\n(.*)\n\[response A \1\]\n(.*)\n\[response B \1\]\n(.*)\n\[end \1\]", text, re.DOTALL
    )
    assert found, f"not a question: {text[:200]!r}"
    return found.groups()[1:]


def answer(question: tuple[str, str, str], **changes: Any) -> dict[str, Any]:
    """The fields of an answer: the longer response is the better one."""
    best, worst = "AB" if len(question[1]) >= len(question[2]) else "BA"
    fields = {"reason": "It is longer.", "best": best, "worst": worst, "confidence": 0.75, "strength": 3}
    return {**fields, "usable": True, "quality": 4, "exclusion_tags": [], **changes}


def _reply_body(body: dict, chat: bool, question: tuple[str, str, str], fault: Fault | None, key: str) -> dict:
    kind, cut = fault.kind if fault else "", fault is not None and fault.kind == "cut"
    changes = {"bad_schema": {"strength": 9}, "same_label": {"worst": answer(question)["best"]}}
    text = json.dumps(answer(question, **changes.get(kind, {})))
    text = {"empty": "", "cut": text[:40]}.get(kind, text)
    refusal = f"I cannot judge this. {key}" if kind == "refusal" else None
    if chat:
        message = {"role": "assistant", "content": None if refusal else text, "refusal": refusal}
        return {
            "id": "chatcmpl_1",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}],
            "usage": {
                "prompt_tokens": USAGE["input"],
                "prompt_tokens_details": {"cached_tokens": USAGE["cached"]},
                "completion_tokens": USAGE["output"],
            },
        }
    part = {"type": "output_text", "text": text, "annotations": []}
    part = {"type": "refusal", "refusal": refusal} if refusal else part
    message = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}
    return {
        "id": "resp_1",
        "object": "response",
        "model": body["model"],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [{"type": "reasoning", "id": "rs_1", "summary": []}, message],
        "usage": {
            "input_tokens": USAGE["input"],
            "input_tokens_details": {"cached_tokens": USAGE["cached"]},
            "output_tokens": USAGE["output"],
        },
    }


def _encode(status: int, content: Any, extra: dict[str, str] | None = None) -> bytes:
    payload = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(payload)), **(extra or {})}
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {headers[name]}" for name in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + payload


def _send(writer: asyncio.StreamWriter, status: int, content: Any, extra: dict[str, str] | None = None) -> None:
    writer.write(_encode(status, content, extra))


def _reset(writer: asyncio.StreamWriter, reply: dict[str, Any]) -> None:
    """Half of the reply, then a reset of the connection instead of its orderly end."""
    data = _encode(200, reply)
    writer.write(data[: len(data) - 200])
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds from a request to its reply")
    with LoopbackServer(latency=parser.parse_args().latency) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
