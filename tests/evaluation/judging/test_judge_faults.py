"""Judging under faults: of the server, the network, the disk, other processes, and the machine that runs it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import time
import traceback
from contextlib import closing
from functools import partial

import pytest

from tests.support.loopback import Fault, LoopbackServer, expected_outcomes, judge_of, kept, pairs
from tests.support.refusals import assert_one_line, assert_refused
from trl_ext.evaluation import (
    CacheError,
    JudgeUnavailable,
    OpenAIJudge,
    TooManyErrors,
    VerdictCache,
    judge_pairs,
    win_rate,
)

KEY = "sk-proj-0123456789abcdef-secret"
# A fault, how often a question is sent with it before it counts as an error, the words of that error, and whether the
# SDK sends it again by itself (0), or the library asks again without (1) or with (2) a reply's usage.
FAULTS = [
    (Fault("status", status=500), 3, ["500 Internal Server Error"], 0),
    (Fault("status", status=429), 3, ["429 Too Many Requests"], 0),
    (Fault("reset"), 3, ["cannot be reached"], 0),
    (Fault("not_json"), 3, ["Chat Completions API", "3 attempts", "check the address"], 1),
    (Fault("not_the_api"), 3, ["Chat Completions API", "3 attempts", "check the address"], 1),
    (Fault("bad_schema"), 3, ["schema", "strength"], 2),
    (Fault("refusal"), 3, ["refused", "I cannot judge this."], 2),
    (Fault("empty"), 3, ["empty", "3 attempts"], 2),
    (Fault("cut"), 3, ["max_output_tokens", "raise it"], 2),
    (Fault("status", status=400), 1, ["400 Bad Request"], None),
    (Fault("stall"), 3, ["0.5 s"], None),
]


def name_of(value) -> str | None:
    return f"{value.kind}-{value.status}" if isinstance(value, Fault) else None


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No key, and the SDK waits a fiftieth as long before it sends a request again."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


class TestServer:
    @pytest.mark.parametrize("fault, kind", [(row[0], row[3]) for row in FAULTS if row[3] is not None], ids=name_of)
    def test_a_passing_fault_is_not_seen_in_the_verdicts(self, fault, kind):
        """Every question fails once: eight requests for four verdicts. Answers without a verdict count as calls."""
        with LoopbackServer(faults=lambda question, attempt: fault if attempt == 0 else None) as server:
            result = judge_pairs(judge_of(server), *pairs(2))
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(2)
        assert set(server.asked.values()) == {2}
        repeated = 4 if kind else 0
        assert (result.usage.calls, result.usage.retries, result.usage.errors) == (4 + repeated, repeated, 0)
        # They were paid for; those are in the total, except where there is no usage to read.
        assert result.usage.output_tokens == 80 * (8 if kind == 2 else 4)

    @pytest.mark.parametrize("fault, attempts, words", [row[:3] for row in FAULTS], ids=name_of)
    def test_a_lasting_fault_is_an_error_and_neither_win_nor_loss(self, fault, attempts, words, tmp_path):
        """One of ten rows cannot be judged. Of the other nine the candidate wins 0, 1, 3, 4, 6, 7: six of nine."""
        cache = tmp_path / "cache.sqlite"
        with LoopbackServer(faults=lambda question, _: fault if question[0].endswith(" 9") else None) as server:
            # A busy machine may take longer than half a second, which only a stall has to wait for.
            judge = judge_of(server, max_retries=2, timeout=0.5 if fault.kind == "stall" else 10.0)
            result = judge_pairs(judge, *pairs(10), cache=cache)
        assert_one_line(result.outcomes[9].error, words)
        summary = win_rate(result.outcomes)
        assert (summary.n_errors, summary.agreed.n, summary.half.n) == (1, 9, 9)
        assert summary.agreed.rate == summary.half.rate == pytest.approx(6 / 9)
        assert (result.usage.errors, len(server.calls)) == (2, 18 + 2 * attempts)
        assert kept(cache) == 18, "an error is not kept, and is asked again the next time"
        assert result.verdicts[9]["outcome"] is None and result.verdicts[9]["candidate_first"] is None

    @pytest.mark.parametrize(
        "fault, words",
        [
            (Fault("status", status=401), ["401 Unauthorized", "set OPENAI_API_KEY"]),
            (Fault("status", status=402), ["402 Payment Required", "no credit"]),
            (Fault("status", status=404), ["404 Not Found", "check the name of the model"]),
            (Fault("status", 429, code="insufficient_quota", retry_after="7200"), ["429", "no credit", "run again"]),
            (Fault("status", status=429, retry_after="7200"), ["4 failures in a row", "429 Too Many Req"]),
        ],
    )
    def test_what_every_request_would_meet_ends_the_run(self, fault, words, tmp_path):
        """After six answers. Those are kept, and a request for each thread at most is sent in vain."""
        cache, script = tmp_path / "cache.sqlite", [None] * 6 + [fault] * 1000
        with LoopbackServer(latency=0.02, faults=script) as server:
            run = partial(judge_pairs, judge_of(server), *pairs(30), cache=cache, max_concurrency=4)
            assert_refused(run, *words, error=JudgeUnavailable)
        assert kept(cache) == 6
        # Of the failures in a row, a late answer can interrupt three; a request for each thread is open at the end.
        assert len(server.calls) <= 6 + 3 + 3 + 4
        assert max(server.asked.values()) == 1, "nothing is asked again"

    def test_a_server_that_is_gone(self, tmp_path):
        """A server that has answered may come back, so the run stops after a few failures, and resumes from there."""
        cache = tmp_path / "cache.sqlite"
        with LoopbackServer() as server:
            judge = judge_of(server, max_retries=1)
            judge_pairs(judge, *pairs(3), cache=cache)
        stopped = partial(judge_pairs, judge, *pairs(30), cache=cache, max_concurrency=4)
        words = ["stopped after 4 failures in a row", f"{server.url} cannot be reached: ConnectError"]
        assert_refused(stopped, *words, error=JudgeUnavailable)
        assert_refused(partial(judge_pairs, judge_of(server), *pairs(30)), words[1], error=JudgeUnavailable)
        with LoopbackServer(port=server.port) as again:
            result = judge_pairs(judge, *pairs(30), cache=cache)
        assert (result.usage.cached, result.usage.calls, len(again.calls)) == (6, 54, 54)

    def test_failures_with_answers_between_them_are_of_the_rows(self):
        """Every second row fails, as many as may: two failures in a row, six times over, and the run ends as usual."""
        fault = Fault("status", status=500)
        with LoopbackServer(faults=lambda question, _: fault if int(question[0].split()[-1]) % 2 else None) as server:
            judge = judge_of(server, max_retries=0)
            result = judge_pairs(judge, *pairs(12), max_concurrency=1, max_error_fraction=0.5)
        assert (result.usage.calls, result.usage.errors) == (24, 12)
        assert [outcome.error is None for outcome in result.outcomes] == [True, False] * 6

    def test_too_many_errors_stop_the_run(self, tmp_path):
        """Rows 1 and 4 of ten are refused where one may be, the latter in one order: the run ends there.

        One question at a time: rows 0, 2 and 3 and the first order of row 4 are answered, 2 + 2 + 2 + 1 = 7 calls;
        row 1 takes 2 * 3 and the second order of row 4 takes 3. A cache keeps what was answered for the next run.
        """
        texts = ("cccc", "bb"), ("bb", "cccc"), ("bb", "cccc")
        refused = {(f"user: question {row}", *shown) for row, shown in zip((1, 1, 4), texts, strict=True)}
        cache = tmp_path / "cache.sqlite"
        words = ["2 of 10 rows", "max_error_fraction", "row_id r1", "I cannot judge this. (3 attempts)"]
        with LoopbackServer(faults=lambda question, _: Fault("refusal") if question in refused else None) as server:
            judge = partial(judge_pairs, judge_of(server), *pairs(10), cache=cache)
            assert_refused(lambda: judge(max_error_fraction=0.1, max_concurrency=1), *words, error=TooManyErrors)
            assert (len(server.calls), kept(cache)) == (7 + 9, 7)
            refused.clear()
            result = judge(max_error_fraction=0)
        assert (result.usage.cached, result.usage.calls) == (7, 13)
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(10)

    @pytest.mark.parametrize("open_at_once", [1, 8])
    def test_replies_that_are_all_unusable_end_the_run_at_once(self, open_at_once):
        """Of 610 rows, four questions in a row or as many as are open, with three requests for each."""
        questions = max(4, open_at_once)
        words = f"stopped after {questions} failures in a row", "not one of the Chat Completions API"
        with LoopbackServer(faults=lambda *_: Fault("not_the_api")) as server:
            judge = partial(judge_pairs, judge_of(server), max_concurrency=open_at_once)
            assert_refused(lambda: judge(*pairs(610)), *words, error=JudgeUnavailable)
        assert len(server.calls) <= 3 * (questions + open_at_once)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
    @pytest.mark.parametrize("answers", [0, 2])
    def test_an_error_of_the_judge_itself_ends_the_run_with_the_rest_saved(self, answers, error, tmp_path):
        """At its first question, and at its third of ten."""
        answered, cache = [], tmp_path / "c.sqlite"

        class Judge:
            identity, sequential = {"kind": "mine"}, True

            def judge(self, prompt, response_a, response_b):
                if len(answered) == answers:
                    raise error
                answered.append(prompt)
                return "A"

        with pytest.raises(error):
            judge_pairs(Judge(), *pairs(5), cache=cache)
        assert kept(cache) == answers


class TestKey:
    """The key is in no log, cache, error, traceback or repr, even where the server repeats it."""

    FAULTS = [Fault("status", status=status, echo_key=True) for status in (401, 400, 500, 429)]
    FAULTS += [Fault("refusal", echo_key=True), *map(Fault, ("reset", "stall", "not_json", "bad_schema"))]

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.status}")
    def test_in_process(self, fault, monkeypatch, tmp_path, caplog, capfd):
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_LOG", "debug")
        caplog.set_level(logging.DEBUG)
        cache, texts = tmp_path / "cache.sqlite", []
        with LoopbackServer(faults=[None, *[fault] * 50]) as server:
            judge = judge_of(server, max_retries=0, timeout=0.5)
            judge.judge("q", "a", "b")
            several = partial(judge_pairs, judge, *pairs(1), cache=cache, max_error_fraction=0)
            for call in (partial(judge.judge, "q", "aa", "b"), several):
                with pytest.raises(Exception) as caught:
                    call()
                error = caught.value
                while error is not None:
                    texts += [repr(error), str(error), repr(vars(error))]
                    texts += traceback.TracebackException.from_exception(error).format()
                    error = error.__cause__ or error.__context__
        assert all(call.authorization == f"Bearer {KEY}" for call in server.calls), "it is sent"
        texts += [repr(judge), str(judge), repr(vars(judge)), json.dumps(judge.identity), caplog.text]
        texts += [*capfd.readouterr(), cache.read_bytes().decode("latin-1")]
        assert len(caplog.records) > 5
        for text in texts:
            assert KEY not in text and "0123456789abcdef" not in text


class TestCache:
    def test_two_caches_on_one_file_see_each_others_verdicts(self, tmp_path):
        """The first verdict stays. SQLite promises that it is on the disk, by a journal with full synchronisation."""
        path, record = tmp_path / "folder" / "cache.sqlite", {"verdict": "A"}
        with VerdictCache(path) as cache, VerdictCache(path) as other:
            assert other.get("ab") is None
            cache.add("ab", record)
            cache.add("cd", {"verdict": "B"})
            assert other.get("ab") == record
            other.add("ab", {"verdict": "B"})
            assert cache.get("ab") == record
            settings = [
                cache._database.execute(f"PRAGMA {name}").fetchone() for name in ("journal_mode", "synchronous")
            ]
        assert settings == [("delete",), (3,)]
        assert kept(path) == 2 and list(path.parent.iterdir()) == [path]

    def test_what_cannot_be_a_cache_fails_when_it_is_opened(self, tmp_path):
        """Before any verdict is paid for: another file, which is left alone, and a folder."""
        path, other = tmp_path / "judge_cache.jsonl", tmp_path / "other"
        path.write_text('{"key": "ab", "verdict": "A"}\n')
        with closing(sqlite3.connect(other)) as database:
            database.execute("CREATE TABLE verdicts (rubric TEXT)")
        for bad, words in (
            (path, ["judge_cache.jsonl", "not a database", "name another cache"]),
            (other, ["other", "no such column: record", "name another cache"]),
            (tmp_path, [str(tmp_path), "unable to open", "check the disk"]),
        ):
            assert_refused(lambda bad=bad: VerdictCache(bad), *words, error=CacheError)
        assert path.read_text() == '{"key": "ab", "verdict": "A"}\n' and set(tmp_path.iterdir()) == {path, other}

    def test_a_full_disk(self, tmp_path, monkeypatch):
        """SQLite's own limit of a file's size stands for the disk. The run stops, and its cache can be used again."""
        cache, open_cache = tmp_path / "cache.sqlite", VerdictCache.__init__

        def open_small(self, path):
            open_cache(self, path)
            self._database.execute("PRAGMA max_page_count = 4")

        monkeypatch.setattr(VerdictCache, "__init__", open_small)
        with LoopbackServer(latency=0.01) as server:
            run = partial(judge_pairs, judge_of(server), *pairs(12), cache=cache, max_concurrency=4)
            assert_refused(run, f"{cache}: database or disk is full: check the disk", error=CacheError)
        monkeypatch.undo()
        assert 3 <= kept(cache) <= len(server.calls) < 24
        with LoopbackServer() as again:
            judge_pairs(judge_of(again), *pairs(12), cache=cache)
        assert kept(cache) == 24


def judge_in_process(url: str, cache: str, count: int, concurrency: int) -> None:
    """The whole of a judging run, for a process of its own."""
    judge = OpenAIJudge(base_url=url, instructions="Judge well.")
    judge_pairs(judge, *pairs(count), cache=cache, max_concurrency=concurrency)


@pytest.fixture(scope="module")
def processes():
    """Makes processes that have the SDK loaded, and share nothing else with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openai", __name__, "trl_ext.evaluation.judging.openai_judge"])
    return context


class TestProcesses:
    def test_an_interrupt_waits_for_what_is_open(self, processes, tmp_path):
        """Ctrl-C: nothing more is asked, and the answers on their way are written down."""
        cache = tmp_path / "cache.sqlite"
        with LoopbackServer(latency=0.4) as server:
            process = processes.Process(target=judge_in_process, args=(server.url, str(cache), 30, 4))
            process.start()
            wait_for(lambda: len(server.calls) == 4)
            os.kill(process.pid, signal.SIGINT)
            process.join(20)
        assert process.exitcode == 1
        assert kept(cache) == len(server.calls) == 4

    @pytest.mark.slow
    def test_twenty_kills(self, processes, tmp_path):
        """60 pairs in both orders, killed at twenty random moments of judging and started again each time.

        At the end every verdict is in the cache once. Requests that were open at a kill are sent again, and so are
        those whose answers were not written yet. Answers are written before anything else is asked, so both together
        are at most as many as may be open, at each kill: what is in the cache is never asked again.
        """
        cache, count, kills, concurrency = tmp_path / "cache.sqlite", 60, 20, 4
        generator = random.Random(time.time_ns())
        with LoopbackServer(latency=0.05) as server:
            for _ in range(kills):
                before = len(server.calls)
                process = processes.Process(target=judge_in_process, args=(server.url, str(cache), count, concurrency))
                process.start()
                wait_for(lambda before=before: len(server.calls) > before)
                time.sleep(generator.uniform(0, 0.13))
                process.kill()
                process.join()
                assert process.exitcode == -signal.SIGKILL, "it was over before it could be killed"
            wait_for(lambda: server.open == 0)
            cached = kept(cache)
            result = judge_pairs(judge_of(server), *pairs(count), cache=cache, max_concurrency=concurrency)
        assert (result.usage.cached, kept(cache)) == (cached, 2 * count)
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(count)
        assert len(server.calls) - 2 * count <= kills * concurrency


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
