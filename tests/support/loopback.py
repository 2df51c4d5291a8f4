"""A judge's server on this machine, which fails as told, and pairs to judge against it.

It speaks OpenAI's Chat Completions API. It prefers the longer response, and the one shown first of two
that are equally long. In a test, `with LoopbackServer() as server:` runs it in threads.
"""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trl_ext.evaluation import OpenAIJudge

Question = tuple[str, str, str]


@dataclass(frozen=True)
class Fault:
    """What to do instead of answering, or to the answer.

    Attributes:
        kind: "status", "reset" (in the middle of the body), "stall", "not_json", "not_the_api", "bad_schema",
            "refusal", "empty" or "cut".
        status: for "status", with `retry_after` as its header and `code` in its body.
        echo_key: repeat the client's key in the text of the error, or of the refusal.
    """

    kind: str
    status: int = 500
    retry_after: str | None = None
    code: str | None = None
    echo_key: bool = False


@dataclass
class Call:
    """One request."""

    question: Question
    body: dict[str, Any]
    authorization: str


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
    faults: Callable[[Question, int], Fault | None] | Iterable[Fault | None] = ()
    port: int = 0
    calls: list[Call] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    def __enter__(self) -> LoopbackServer:
        script = None if callable(self.faults) else iter(self.faults)
        self.next_fault = self.faults if script is None else lambda *_: next(script, None)
        self.lock, self.connections = threading.Lock(), []
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.owner, self.port = self, self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def asked(self) -> Counter:
        """How often each question came in."""
        return Counter(call.question for call in self.calls)


class _Server(ThreadingHTTPServer):
    request_queue_size = 512

    def handle_error(self, request, client_address):
        pass  # the client is gone


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def setup(self):
        super().setup()
        self.server.owner.connections.append(self.connection)

    def log_message(self, *_):
        pass

    def do_POST(self):
        owner, body = self.server.owner, json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = read_question(body["messages"][-1]["content"])
        with owner.lock:
            fault = owner.next_fault(question, owner.asked[question])
            call = Call(question, body, self.headers.get("authorization", ""))
            owner.calls.append(call)
            owner.open += 1
            owner.most_open = max(owner.most_open, owner.open)
        try:
            self._reply(call, fault)
        finally:
            with owner.lock:
                owner.open -= 1

    def _reply(self, call: Call, fault: Fault | None) -> None:
        kind = fault.kind if fault else ""
        key = call.authorization.removeprefix("Bearer ") if fault and fault.echo_key else ""
        time.sleep(60 if kind == "stall" else self.server.owner.latency)
        if kind == "status":
            extra = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
            error = {"message": f"{HTTPStatus(fault.status).phrase} {key}", "code": fault.code, "type": "error"}
            return self._send(fault.status, {"error": error}, extra)
        if kind in ("not_json", "not_the_api"):
            return self._send(200, "<html>busy</html>" if kind == "not_json" else {"hello": "world"})
        reply = _reply_body(call, kind, key)
        if kind == "reset":
            # Half of the reply, then a reset of the connection instead of its orderly end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self._send(200, reply, share=0.5)
        return self._send(200, reply)

    def _send(self, status: int, content: Any, extra: dict[str, str] | None = None, share: float = 1.0) -> None:
        payload = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **(extra or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload[: round(share * len(payload))])
        self.wfile.flush()


def read_question(text: str) -> Question:
    """The conversation and both responses in the text that a judge is shown."""
    found = re.fullmatch(
        r"\[conversation (\w+)\]\n(.*)\n\[response A \1\]\n(.*)\n\[response B \1\]\n(.*)\n\[end \1\]", text, re.DOTALL
    )
    assert found, f"not a question: {text[:200]!r}"
    return found.groups()[1:]


def answer(question: Question, **changes: Any) -> dict[str, Any]:
    """The fields of an answer: the longer response is the better one."""
    best, worst = "AB" if len(question[1]) >= len(question[2]) else "BA"
    fields = {"reason": "It is longer.", "best": best, "worst": worst, "confidence": 0.75, "strength": 3}
    return {**fields, "usable": True, "quality": 4, "exclusion_tags": [], **changes}


def _reply_body(call: Call, kind: str, key: str) -> dict:
    text = json.dumps(answer(call.question, **({"strength": 9} if kind == "bad_schema" else {})))
    text = {"empty": "", "cut": text[:40]}.get(kind, text)
    refusal = f"I cannot judge this. {key}" if kind == "refusal" else None
    message = {"role": "assistant", "content": None if refusal else text, "refusal": refusal}
    usage = {"prompt_tokens": 900, "completion_tokens": 80}
    choice = {"index": 0, "message": message, "finish_reason": "length" if kind == "cut" else "stop"}
    return {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


def prompt_rows(count: int) -> list[dict]:
    return [{"row_id": f"r{i}", "prompt": [{"role": "user", "content": f"question {i}"}]} for i in range(count)]


def pairs(count: int) -> tuple[list[dict], list[str], list[str]]:
    """Rows with the candidate's and the base's responses; the candidate's is longer, and wins, in two of three."""
    return prompt_rows(count), ["c" * (1 if i % 3 == 2 else 4) for i in range(count)], ["bb"] * count


def expected_outcomes(count: int) -> list[str]:
    return ["base" if i % 3 == 2 else "candidate" for i in range(count)]


def judge_of(server: LoopbackServer, **arguments) -> OpenAIJudge:
    return OpenAIJudge(**{"base_url": server.url, "instructions": "Judge well.", "timeout": 10.0, **arguments})


def kept(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT COUNT(*) FROM verdicts").fetchone()[0]
