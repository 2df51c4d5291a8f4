"""Pairs to judge against the loopback server, and a judge that asks it."""

from __future__ import annotations

from pathlib import Path

from tests.support.loopback import LoopbackServer
from trl_ext.evaluation import OpenAIJudge, VerdictCache


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
    with VerdictCache(path) as cache:
        return len(cache)
