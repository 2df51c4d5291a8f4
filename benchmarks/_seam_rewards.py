"""Rewards and data of `benchmarks.seams`, and the stand-in for a judge that answers by the embedded checkers."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from trl_ext.evaluation import OpenAIModel, RubricReward
from trl_ext.evaluation.judging.openai_format import sections_text
from trl_ext.files import write_json_lines
from trl_ext.rewards.verified import completion_text
from trl_ext.toy import DATA_DIR
from trl_ext.toy.prompts import parse
from trl_ext.toy.scoring import score, score_parts

# Where the stand-in listens: the runs are processes of their own and read it from the environment.
JUDGE_VARIABLE = "TRL_EXT_SEAMS_JUDGE"

# ---- Rubrics over the parts of the embedded score ----

_ITEMS, _REPEATED = {"items": 0.6, "separator": 0.2, "ending": 0.2}, {"repetition": 0.1, "length": 0.1}
# The largest credit of each part, which is the criterion's weight, or for a penalty the weight of avoiding it.
CRITERIA: dict[str, dict[str, float]] = {
    "list": {**_ITEMS, "wrong": 0.2},
    "starts": {**_ITEMS, "wrong": 0.2},
    "say": {"items": 0.8, "ending": 0.2, "wrong": 0.2},
    "sort": {"present": 0.3, "order": 0.6, "ending": 0.1, "wrong": 0.1},
    "sentence": {
        **{"topic": 0.2, "adjective": 0.2, "place": 0.2, "fluency": 0.25, "capital": 0.05, "ending": 0.1},
        **_REPEATED,
    },
    "ask": {
        **{"name": 0.15, "object": 0.25, "request": 0.1, "please": 0.15, "greeting": 0.1, "thanks": 0.15},
        **{"ending": 0.1, **_REPEATED},
    },
    "describe": {
        **{"subject": 0.2, "adjective": 0.2, "fluency": 0.2, "count": 0.25, "capital": 0.05, "ending": 0.1},
        **_REPEATED,
    },
}


def rubric_of(prompt: str) -> list[dict[str, Any]]:
    """The criteria of a prompt with their weights."""
    return [
        {"criterion": f"full marks for: {part}", "weight": weight}
        for part, weight in CRITERIA[parse(prompt).kind].items()
    ]


def write_rubrics(folder: Path) -> Path:
    """The embedded prompts with their rubrics; returns the folder."""
    for split in ("train_gen", "test_gen"):
        rows = [json.loads(line) for line in (DATA_DIR / f"{split}.jsonl").open()]
        kept = [{name: row[name] for name in ("row_id", "prompt_text")} for row in rows]
        write_json_lines(folder / f"{split}.jsonl", [{**row, "rubric": rubric_of(row["prompt_text"])} for row in kept])
    return folder


def is_met(prompt: str, response: str, part: str) -> bool:
    """Whether the embedded checker gives a response full credit for a part, or no penalty."""
    parts, most = score_parts(prompt, response), CRITERIA[parse(prompt).kind][part]
    penalty = part in ("wrong", "repetition", "length")
    return "empty" not in parts and parts[part] >= (0 if penalty else most) - 1e-9


def verdict(question: str, noise: float) -> bool:
    """The stand-in's answer to a question: the checker's, and with probability `noise` the opposite, always alike."""
    found = re.match(
        r"\[conversation \w+\]\n(?:user: )?(.*)\n\[response \w+\]\n(.*)\n\[criterion \w+\]\n(.*)\n", question, re.S
    )
    prompt, response, criterion = found.groups()
    draw = int(hashlib.sha256(question.encode()).hexdigest()[:13], 16) / 16**13
    return is_met(prompt, response, criterion.removeprefix("full marks for: ")) != (draw < noise)


def rubric_share(prompt: str, response: str, noise: float) -> float:
    """The reward of a response by the stand-in's answers, without a server."""
    rubric = rubric_of(prompt) if response.strip() else []
    weights = [one["weight"] for one in rubric]
    questions = [sections_text(prompt, ("response", response), ("criterion", one["criterion"])) for one in rubric]
    return sum(w * verdict(q, noise) for w, q in zip(weights, questions, strict=True)) / (sum(weights) or 1.0)


class _Judge(BaseHTTPRequestHandler):
    """Chat Completions, for a model that is named `checker-NOISE`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        met = verdict(body["messages"][-1]["content"], float(body["model"].removeprefix("checker-")))
        message = {"role": "assistant", "content": json.dumps({"reason": "checked", "met": met})}
        self._send(
            {
                "id": "1",
                "object": "chat.completion",
                "model": body["model"],
                "created": 0,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
        )

    def do_GET(self) -> None:
        self._send({})

    def _send(self, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def judge() -> Iterator[str]:
    """The stand-in's address within the block, also for the processes that are started in it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    os.environ[JUDGE_VARIABLE] = url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield url
    finally:
        server.shutdown()


def truth(prompts, completions, finished, **_) -> list[float]:
    """The embedded score itself."""
    rows = zip(prompts, completions, finished, strict=True)
    return [score(prompt[-1]["content"], completion_text(own), finished=ended) for prompt, own, ended in rows]


def _rubric(noise: float) -> RubricReward:
    # An address for the check of flags, where nothing is asked.
    url = os.environ.get(JUDGE_VARIABLE, "http://127.0.0.1:1/v1")
    return RubricReward(OpenAIModel(f"checker-{noise}", base_url=url, api="chat"))


rubric_0, rubric_10, rubric_30 = _rubric(0.0), _rubric(0.1), _rubric(0.3)
