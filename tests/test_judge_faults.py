"""Judging under faults: of the server, of the network, of the disk, and of the machine that runs it."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from tests.loopback import Fault, LoopbackServer
from trl_ext.evaluation import (
    CacheError,
    JudgeError,
    JudgeUnavailable,
    OpenAIJudge,
    TooManyErrors,
    Usage,
    judge_pairs,
    win_rate,
)
from trl_ext.evaluation.judging import back_off, openai_judge
from trl_ext.evaluation.judging import cache as judge_cache
from trl_ext.evaluation.judging.cache import VerdictCache
from trl_ext.evaluation.judging.pairs import make_questions
from trl_ext.evaluation.judging.run import JudgingRun

REPOSITORY = Path(__file__).resolve().parent.parent
KEY = "sk-proj-0123456789abcdef-secret"
INSTRUCTIONS = "Judge well."
# Each ends without a verdict; the second figure is how often it is asked for before it counts as an error.
BAD_ANSWERS = ["not_json", "not_the_api", "bad_schema", "refusal", "empty", "cut"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No key, and waits a fiftieth as long."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(back_off, "FIRST_WAIT", 0.01)


def pairs(count: int, offset: int = 0) -> tuple[list[dict], list[str], list[str]]:
    """Rows with the candidate's and the base's responses; the candidate's is longer, and wins, in two of three."""
    numbers = range(offset, offset + count)
    rows = [{"row_id": f"r{i}", "prompt": [{"role": "user", "content": f"question {i}"}]} for i in numbers]
    return rows, ["c" * (1 if i % 3 == 2 else 4) for i in numbers], ["bb"] * count


def expected_outcomes(count: int) -> list[str]:
    return ["base" if i % 3 == 2 else "candidate" for i in range(count)]


def judge_of(server: LoopbackServer, **arguments) -> OpenAIJudge:
    return OpenAIJudge(**{"base_url": server.url, "instructions": INSTRUCTIONS, "timeout": 10.0, **arguments})


def first_time(fault: Fault, every: int = 1):
    """The fault on the first attempt at a question, for one of `every` questions."""

    def faults(question, attempt):
        number = int(question[0].split()[-1])
        return fault if attempt == 0 and number % every == 0 else None

    return faults


def for_row(number: int, fault: Fault):
    """The fault on every attempt at one row's questions."""
    return lambda question, attempt: fault if question[0] == f"user: question {number}" else None


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestServer:
    @pytest.mark.parametrize("api", ["responses", "chat"])
    @pytest.mark.parametrize(
        "fault",
        [
            Fault("status", status=429),
            Fault("status", status=500),
            Fault("status", status=503, retry_after="0.05"),
            Fault("status", status=408),
            Fault("reset"),
            *(Fault(kind) for kind in BAD_ANSWERS),
        ],
        ids=lambda fault: f"{fault.kind}-{fault.status}" if fault.kind == "status" else fault.kind,
    )
    def test_a_passing_fault_is_not_seen_in_the_verdicts(self, fault, api):
        """Every question fails once: eight requests for four verdicts."""
        with LoopbackServer(faults=first_time(fault)) as server:
            result = judge_pairs(judge_of(server, api=api), *pairs(2))
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(2)
        assert (result.usage.calls, result.usage.retries, result.usage.errors) == (8, 4, 0)
        assert set(server.asked.values()) == {2}
        # Answers that are no verdict were paid for; those are in the total, except where there is no usage to read.
        billed = 8 if fault.kind in ("bad_schema", "refusal", "empty", "cut") else 4
        assert result.usage.output_tokens == 80 * billed

    @pytest.mark.parametrize(
        "fault, attempts, reason",
        [
            (Fault("status", status=500), 3, "500 Internal Server Error (3 attempts)"),
            (Fault("status", status=429), 3, "429 Too Many Requests (3 attempts)"),
            (Fault("status", status=400), 1, "400 Bad Request (1 attempts)"),
            (Fault("reset"), 3, "cannot be reached"),
            (Fault("not_json"), 3, "the reply is not JSON (3 attempts)"),
            (Fault("not_the_api"), 3, "the reply is not one of the responses API"),
            (Fault("bad_schema"), 3, "the answer breaks the schema: strength: "),
            (Fault("refusal"), 3, "the judge refused: I cannot judge this."),
            (Fault("empty"), 3, "the answer is empty (3 attempts)"),
            (Fault("cut"), 3, "the answer was cut at max_output_tokens: raise it"),
        ],
        ids=lambda value: f"{value.kind}-{value.status}" if isinstance(value, Fault) else None,
    )
    def test_a_lasting_fault_is_an_error_and_neither_win_nor_loss(self, fault, attempts, reason, tmp_path):
        """One of ten rows cannot be judged. Of the other nine the candidate wins 0, 1, 3, 4, 6, 7: six of nine."""
        cache = tmp_path / "cache.jsonl"
        with LoopbackServer(faults=for_row(9, fault)) as server:
            result = judge_pairs(judge_of(server, max_retries=2), *pairs(10), cache=cache)
        assert reason in result.outcomes[9].error
        summary = win_rate(result.outcomes)
        assert (summary.n_errors, summary.agreed.n, summary.half.n) == (1, 9, 9)
        assert summary.agreed.rate == summary.half.rate == pytest.approx(6 / 9)
        assert (result.usage.errors, result.usage.calls) == (2, 18 + 2 * attempts)
        assert len(lines(cache)) == 18, "an error is not kept, and is asked again the next time"
        assert result.verdicts[9]["outcome"] is None and result.verdicts[9]["candidate_first"] is None

    def test_one_label_for_best_and_worst_is_a_verdict_that_does_not_count(self):
        """It keeps its label, and is unusable: not in `agreed`, whose nine other rows the candidate wins six of."""
        with LoopbackServer(faults=for_row(9, Fault("same_label"))) as server:
            result = judge_pairs(judge_of(server), *pairs(10))
        assert (result.usage.calls, result.usage.errors) == (20, 0)
        row = result.verdicts[9]
        assert (row["outcome"], row["usable"]) == ("candidate", False)
        assert row["candidate_first"]["exclusion_tags"] == ["all_weak"] and row["candidate_first"]["quality"] == 1
        summary = win_rate(result.outcomes)
        assert (summary.agreed.n, summary.half.n) == (9, 10)
        assert summary.agreed.rate == pytest.approx(6 / 9) and summary.half.rate == pytest.approx(7 / 10)

    def test_a_stalled_answer_is_given_up_and_asked_for_again(self):
        with LoopbackServer(faults=first_time(Fault("stall"), every=3)) as server:
            start = time.monotonic()
            result = judge_pairs(judge_of(server, timeout=0.5), *pairs(6))
            took = time.monotonic() - start
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(6)
        assert result.usage.retries == 4 and took < 10

    def test_a_row_that_always_stalls(self):
        with LoopbackServer(faults=for_row(0, Fault("stall"))) as server:
            result = judge_pairs(judge_of(server, timeout=0.3, max_retries=1), *pairs(10))
        assert result.outcomes[0].error == "no answer within 0.3 s (2 attempts)"

    def test_a_storm_of_429_with_retry_after(self):
        """The first forty requests are turned away for 0.3 s. No question comes back sooner, and none is lost."""
        storm = [Fault("status", status=429, retry_after="0.3")] * 40
        with LoopbackServer(latency=0.01, faults=storm) as server:
            result = judge_pairs(judge_of(server), *pairs(20))
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(20)
        assert (result.usage.calls, result.usage.retries, result.usage.errors) == (80, 40, 0)
        last: dict = {}
        for number, call in enumerate(server.calls):
            if call.question in last and last[call.question][0] < 40:
                assert call.time - last[call.question][1] >= 0.3
            last[call.question] = (number, call.time)

    def test_retry_after_as_a_date(self):
        """Dates have whole seconds: two seconds from now is one to two seconds away."""
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        with LoopbackServer(faults=[Fault("status", status=503, retry_after=date)]) as server:
            judge_of(server).judge("q", "a", "b")
        first, second = server.calls
        assert 0.8 <= second.time - first.time <= 4

    @pytest.mark.parametrize(
        "fault, reason",
        [
            (Fault("status", status=401), "gives no verdicts: 401 Unauthorized; the key is .* set OPENAI_API_KEY to"),
            (Fault("status", status=402), "gives no verdicts: 402 Payment Required; the account has no credit left"),
            (Fault("status", status=404), "gives no verdicts: 404 Not Found; check the name of the model and the"),
            (
                Fault("status", status=429, code="insufficient_quota", retry_after="0.01"),
                "gives no verdicts: 429 Too Many Requests; the account has no credit left: add some, and run again",
            ),
            (Fault("status", status=429, retry_after="7200"), "asks to wait 7200 s"),
        ],
    )
    def test_what_every_request_would_meet_ends_the_run(self, fault, reason, tmp_path):
        """After six answers; those are kept, and a request for each thread at most is sent in vain."""
        cache, script = tmp_path / "cache.jsonl", [None] * 6 + [fault] * 1000
        with (
            LoopbackServer(latency=0.02, faults=script) as server,
            pytest.raises(JudgeUnavailable, match=reason) as caught,
        ):
            judge_pairs(judge_of(server), *pairs(30), cache=cache, max_concurrency=4)
        assert "\n" not in str(caught.value)
        assert len(lines(cache)) == sum(server.answered.values()) == 6
        assert len(server.calls) <= 6 + 6
        assert max(server.asked.values()) == 1, "nothing is asked again"

    def test_a_server_that_is_gone(self, tmp_path):
        """Not a row's fault: the run stops after as many failures in a row as may be open, and goes on from there."""
        cache = tmp_path / "cache.jsonl"
        with LoopbackServer() as server:
            judge = judge_of(server, max_retries=1)
            judge_pairs(judge, *pairs(3), cache=cache)
        with pytest.raises(
            JudgeUnavailable, match="stopped after 4 failures in a row.*cannot be reached: ConnectError"
        ):
            judge_pairs(judge, *pairs(30), cache=cache, max_concurrency=4)
        with LoopbackServer(port=server.port) as again:
            result = judge_pairs(judge, *pairs(30), cache=cache)
        assert (result.usage.cached, result.usage.calls, len(again.calls)) == (6, 54, 54)

    @pytest.mark.parametrize("max_retries", [0, 6])
    def test_a_server_that_never_answered_is_given_up_soon(self, max_retries, monkeypatch):
        """Waits as long as they are: by 0.5, 1 and 2 s at most, of which the third begins within the first two."""
        monkeypatch.setattr(back_off, "FIRST_WAIT", 0.5)
        judge = OpenAIJudge(base_url="http://127.0.0.1:9/v1", max_retries=max_retries)
        start = time.monotonic()
        with pytest.raises(JudgeUnavailable) as caught:
            judge_pairs(judge, *pairs(20))
        assert time.monotonic() - start < 5
        assert str(caught.value) == (
            "http://127.0.0.1:9/v1 cannot be reached: ConnectError: check the address, and that the server is up"
        )

    def test_a_server_that_has_answered_is_waited_for(self, monkeypatch):
        """It is gone for three times as long as one that never answered is waited for, and comes back."""
        monkeypatch.setattr(openai_judge, "FIRST_CONTACT", 0.2)
        with LoopbackServer() as server:
            judge, answers = judge_of(server, max_retries=10), []
            judge.judge("q", "a", "b")
        thread = threading.Thread(target=lambda: answers.append(judge.ask("q", "aa", "b")))
        thread.start()
        time.sleep(0.6)
        with LoopbackServer(port=server.port) as again:
            thread.join(30)
        assert answers[0].judgement.verdict == "A"
        assert answers[0].usage.calls == len(again.calls) == 1, "what was not sent is not counted"
        assert answers[0].usage.retries == 0

    def test_a_request_that_is_not_sent_is_no_call(self):
        """The run ends between a bad answer and its retry, and before the first request of another question."""
        stop = threading.Event()

        class Slots(threading.Semaphore):
            def __exit__(self, *_):
                stop.set()
                super().__exit__(*_)

        with LoopbackServer(faults=[Fault("bad_schema")]) as server:
            judge = judge_of(server)
            with pytest.raises(JudgeError, match="stopped before the request was sent") as sent_once:
                judge.ask("q", "a", "b", stop=stop, slots=Slots())
            with pytest.raises(JudgeError, match="stopped before the request was sent") as not_sent:
                judge.ask("q", "aa", "b", stop=stop)
        assert len(server.calls) == 1
        assert (sent_once.value.usage.calls, sent_once.value.usage.output_tokens) == (1, 80)
        assert not_sent.value.usage == Usage()

    def test_refused_requests_are_of_their_rows(self, tmp_path):
        """Six rows of 60 are refused, always: the second run asks for these alone, and ends as the first did."""

        def faults(question, attempt):
            return Fault("status", status=400) if int(question[0].split()[-1]) % 10 == 0 else None

        cache = tmp_path / "cache.jsonl"
        with LoopbackServer(faults=faults) as server:
            runs = [judge_pairs(judge_of(server), *pairs(60), cache=cache, max_error_fraction=0.1) for _ in range(2)]
        assert [sum(outcome.error is not None for outcome in run.outcomes) for run in runs] == [6, 6]
        assert (runs[1].usage.cached, runs[1].usage.errors) == (108, 12)

    def test_failures_with_answers_between_them_are_of_the_rows(self):
        """Every second row fails: two failures in a row, six times over, and the run goes on to its end."""

        def faults(question, attempt):
            return Fault("status", status=500) if int(question[0].split()[-1]) % 2 else None

        with LoopbackServer(faults=faults) as server:
            judge = judge_of(server, max_retries=0)
            result = judge_pairs(judge, *pairs(12), max_concurrency=1, max_error_fraction=0.5)
        assert (result.usage.calls, result.usage.errors) == (24, 12)
        assert [outcome.error is None for outcome in result.outcomes] == [True, False] * 6

    def test_too_many_errors_stop_the_run_with_the_rest_saved(self, tmp_path):
        """Rows 1 and 4 of ten are refused where one may be, the latter in one order: the run ends there.

        One question at a time: rows 0, 2 and 3 and the second order of row 4 are answered, 2 + 2 + 2 + 1 = 7 calls;
        row 1 takes 2 * 3 and the first order of row 4 takes 3. The next runs ask for what is missing.
        """
        cache = tmp_path / "cache.jsonl"
        refused = {("user: question 1", "cccc", "bb"), ("user: question 1", "bb", "cccc")}
        refused |= {("user: question 4", "bb", "cccc")}

        def faults(question, attempt):
            return Fault("refusal") if question in refused else None

        with LoopbackServer(faults=faults) as server:
            with pytest.raises(TooManyErrors) as caught:
                judge_pairs(judge_of(server), *pairs(10), cache=cache, max_error_fraction=0.1, max_concurrency=1)
            assert str(caught.value) == (
                "2 of 10 rows could not be judged, more than the share of 0.1 that max_error_fraction allows, so that "
                f"the run stopped; 7 verdicts are kept in {cache}, and the next run goes on from there; the first: "
                "row_id r1: the judge refused: I cannot judge this. (3 attempts)"
            )
            result = caught.value.result
            errors = [outcome.error for outcome in result.outcomes]
            assert [error is None for error in errors] == [True, False, True, True, False] + [False] * 5
            assert errors[5:] == ["not asked: too many rows before it could not be judged"] * 5
            assert (len(server.calls), result.usage.calls, result.usage.errors) == (7 + 9, 7 + 9, 3)
            assert len(lines(cache)) == 7
            allowed = judge_pairs(judge_of(server), *pairs(10), cache=cache, max_error_fraction=0.2)
            assert (allowed.usage.cached, allowed.usage.calls) == (7, 10 + 3 * 3)
            refused.clear()
            result = judge_pairs(judge_of(server), *pairs(10), cache=cache, max_error_fraction=0)
        assert (result.usage.cached, result.usage.calls) == (17, 3)
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(10)

    def test_as_many_errors_as_are_allowed_do_not_stop_the_run(self):
        """The last row that may fail is the tenth of a hundred; 90 rows take 180 calls, and ten take 10 * 2 * 3."""

        def faults(question, attempt):
            return Fault("refusal") if int(question[0].split()[-1]) < 10 else None

        with LoopbackServer(faults=faults) as server:
            result = judge_pairs(judge_of(server), *pairs(100), max_error_fraction=0.1)
        assert (result.usage.calls, sum(outcome.error is not None for outcome in result.outcomes)) == (240, 10)

    @pytest.mark.parametrize(
        "api, fault, reason",
        [
            (
                "responses",
                Fault("not_the_api"),
                "not one of the responses API; a server that speaks only Chat Completions needs --api chat",
            ),
            (
                "chat",
                Fault("not_the_api"),
                "not one of the chat API; a server that speaks only the Responses API needs --api responses",
            ),
            ("responses", Fault("not_json"), "the reply is not JSON; check the address, which ends in /v1 for most"),
            ("chat", Fault("bad_schema"), "the model cannot produce structured output"),
        ],
        ids=["other API", "the other way round", "not JSON", "schema"],
    )
    @pytest.mark.parametrize("max_concurrency", [1, 8])
    def test_replies_that_are_all_unusable_end_the_run_at_once(self, api, fault, reason, max_concurrency, tmp_path):
        """Of 610 rows: nine replies, and those that are open by then."""
        cache = tmp_path / "cache.jsonl"
        with (
            LoopbackServer(faults=lambda question, attempt: fault) as server,
            pytest.raises(
                JudgeUnavailable, match="stopped since the first 9 replies are all unusable, the last: "
            ) as end,
        ):
            judge_pairs(judge_of(server, api=api), *pairs(610), cache=cache, max_concurrency=max_concurrency)
        assert reason in str(end.value) and server.url in str(end.value)
        assert 9 <= len(server.calls) <= 9 + 2 * (max_concurrency - 1)
        assert cache.read_text() == ""

    def test_unusable_replies_after_one_that_was_read_count_as_errors(self):
        """One row of four is judged, two may fail: the third that fails ends the run, not the ninth bad reply."""

        def faults(question, attempt):
            return Fault("bad_schema") if question[0] != "user: question 0" else None

        with LoopbackServer(faults=faults) as server, pytest.raises(TooManyErrors, match="3 of 4 rows"):
            judge_pairs(judge_of(server), *pairs(4), max_error_fraction=0.5, max_concurrency=1)
        assert len(server.calls) == 2 + 2 * 3 + 2 * 3 + 3

    def test_an_interrupt_says_how_many_verdicts_are_kept(self, tmp_path):
        """The third question is interrupted: two of ten verdicts are there; before the first, none."""

        class Judge:
            identity, sequential = {"kind": "mine"}, True

            def judge(self, prompt, response_a, response_b):
                if prompt[-1]["content"] == self.interrupted:
                    raise KeyboardInterrupt
                return "A"

        judge, cache = Judge(), tmp_path / "c.jsonl"
        for judge.interrupted, kept in (("question 0", 0), ("question 1", 2)):
            with pytest.raises(KeyboardInterrupt) as caught:
                judge_pairs(judge, *pairs(5), cache=cache)
            assert str(caught.value) == (
                f"{kept} of 10 verdicts are kept in {cache}, and the same command goes on from there"
            )

    def test_an_error_in_the_users_judge_ends_the_run_with_the_rest_saved(self, tmp_path):
        answered = []

        class Judge:
            identity = {"kind": "mine"}

            def judge(self, prompt, response_a, response_b):
                if prompt[-1]["content"] == "question 5":
                    raise ZeroDivisionError("mine")
                answered.append(prompt)
                return "A"

        with pytest.raises(ZeroDivisionError, match="mine"):
            judge_pairs(Judge(), *pairs(6), cache=tmp_path / "c.jsonl", max_concurrency=2)
        assert len(lines(tmp_path / "c.jsonl")) == len(answered) > 6


class TestKey:
    """The key is in no log, cache, error, traceback or repr, even where the server repeats it."""

    FAULTS = [
        Fault("status", status=401, echo_key=True),
        Fault("status", status=400, echo_key=True),
        Fault("status", status=500, echo_key=True),
        Fault("status", status=429, echo_key=True),
        Fault("refusal", echo_key=True),
        Fault("reset"),
        Fault("stall"),
        Fault("not_json"),
        Fault("bad_schema"),
    ]

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.status}")
    def test_in_process(self, fault, monkeypatch, tmp_path, caplog, capfd):
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_LOG", "debug")
        caplog.set_level(logging.DEBUG)
        cache, texts = tmp_path / "cache.jsonl", []
        with LoopbackServer(faults=[None, *[fault] * 50]) as server:
            judge = judge_of(server, max_retries=0, timeout=0.5)
            judge.judge("q", "a", "b")
            for call in (
                lambda: judge.judge("q", "aa", "b"),
                lambda: judge_pairs(judge, *pairs(1), cache=cache, max_error_fraction=0),
            ):
                with pytest.raises(Exception) as caught:
                    call()
                error = caught.value
                while error is not None:
                    texts += [repr(error), str(error), repr(vars(error))]
                    texts += traceback.TracebackException.from_exception(error).format()
                    error = error.__cause__ or error.__context__
        assert all(call.authorization == f"Bearer {KEY}" for call in server.calls), "it is sent"
        texts += [repr(judge), str(judge), repr(vars(judge)), json.dumps(judge.identity), caplog.text]
        texts += [*capfd.readouterr(), cache.read_text()]
        assert len(caplog.records) > 5
        for text in texts:
            assert KEY not in text and "0123456789abcdef" not in text

    @pytest.mark.parametrize("traceback_wanted", [None, "1"])
    def test_of_a_program(self, traceback_wanted, tmp_path):
        """Its output, with the SDK's own debug log, with and without tracebacks; and all files that it leaves."""
        program = (
            "import sys; from pathlib import Path\n"
            "from tests.test_judge_faults import judge_of, pairs\n"
            "from trl_ext.evaluation import OpenAIJudge, judge_pairs\n"
            "judge = OpenAIJudge(base_url=sys.argv[1], max_retries=0)\n"
            "judge_pairs(judge, *pairs(4), cache=sys.argv[2], max_error_fraction=0)\n"
        )
        environment = {**os.environ, "OPENAI_API_KEY": KEY, "OPENAI_LOG": "debug"}
        if traceback_wanted:
            environment["TRL_EXT_TRACEBACK"] = traceback_wanted
        faults = [None, None, *[Fault("status", status=401, echo_key=True)] * 9]
        with LoopbackServer(faults=faults) as server:
            run = subprocess.run(
                [sys.executable, "-c", program, server.url, str(tmp_path / "cache.jsonl")],
                env=environment, cwd=REPOSITORY, capture_output=True, text=True,
            )  # fmt: skip
        assert run.returncode == 1 and "JudgeUnavailable" in run.stderr and "[key]" in run.stderr
        assert len(lines(tmp_path / "cache.jsonl")) == 2
        for text in (run.stdout, run.stderr, (tmp_path / "cache.jsonl").read_text()):
            assert KEY not in text


class TestCacheFile:
    RECORD = {"key": "ab" * 32, "verdict": "A"}

    def test_a_line_that_was_cut_short_is_healed(self, tmp_path):
        path, whole = tmp_path / "cache.jsonl", json.dumps(self.RECORD)
        for cut in (1, 9, 30, len(whole) - 1):
            path.write_text(f"{whole}\n{whole[:cut]}")
            with VerdictCache(path) as cache:
                assert len(cache) == 1
                cache.append({"key": "cd" * 32, "verdict": "B"})
            assert path.read_text().startswith(f"{whole}\n{whole[:cut]}\n"), "nothing is rewritten"
            with VerdictCache(path) as cache:
                assert len(cache) == 2 and cache.get("cd" * 32)["verdict"] == "B"

    def test_a_whole_line_without_its_end_is_not_lost(self, tmp_path):
        path = tmp_path / "cache.jsonl"
        path.write_text(json.dumps(self.RECORD))
        with VerdictCache(path) as cache:
            cache.append({"key": "cd" * 32, "verdict": "B"})
            cache.refresh()
            assert len(cache) == 2

    def test_a_line_that_another_process_is_writing_is_read_when_it_is_whole(self, tmp_path):
        path, line = tmp_path / "cache.jsonl", json.dumps(self.RECORD) + "\n"
        with VerdictCache(path) as cache, path.open("a") as other:
            for part in (line[:20], line[20:]):
                assert len(cache) == 0
                other.write(part)
                other.flush()
                cache.refresh()
            assert len(cache) == 1

    def test_a_line_of_any_length_is_read(self, tmp_path):
        """Three MiB between two short lines, and then three more that are not whole yet."""
        path, long = tmp_path / "cache.jsonl", "x" * (3 << 20)
        with VerdictCache(path) as cache:
            cache.append(self.RECORD)
            cache.append({"key": "cd" * 32, "verdict": "B", "reason": long})
            cache.append({"key": "ef" * 32, "verdict": "A"})
        with path.open("a") as other:
            other.write(json.dumps({"key": "01" * 32, "verdict": "A", "reason": long}))
        with VerdictCache(path) as cache:
            assert len(cache) == 3 and cache.get("cd" * 32)["reason"] == long
            assert cache.get("ef" * 32)["verdict"] == "A"
            with path.open("a") as other:
                other.write("\n")
            cache.refresh()
            assert len(cache) == 4

    def test_zeros_after_a_power_failure(self, tmp_path):
        path = tmp_path / "cache.jsonl"
        path.write_bytes(json.dumps(self.RECORD).encode() + b"\n" + b"\0" * 700)
        with VerdictCache(path) as cache:
            cache.append({"key": "cd" * 32, "verdict": "B"})
        with VerdictCache(path) as cache:
            assert len(cache) == 2

    @pytest.mark.parametrize("content", ['{"row_id": "r0"}\n', "text\n", "\x89PNG"])
    def test_another_file_is_left_alone(self, content, tmp_path):
        path = tmp_path / "candidate.jsonl"
        path.write_text(content)
        with pytest.raises(
            ValueError, match="candidate.jsonl is no cache of verdicts: name another file, or a new one"
        ):
            VerdictCache(path)
        assert path.read_text() == content

    def test_a_record_without_a_verdict_is_asked_again(self, tmp_path):
        path = tmp_path / "cache.jsonl"
        path.write_text('{"key": "x", "verdict": "C"}\n{"key": "y"}\n{"key": 3, "verdict": "A"}\n')
        with VerdictCache(path) as cache:
            assert len(cache) == 0

    def test_the_first_of_two_verdicts_stays(self, tmp_path):
        path = tmp_path / "cache.jsonl"
        with VerdictCache(path) as cache:
            cache.append({"key": "x", "verdict": "A"})
            cache.append({"key": "x", "verdict": "B"})
            assert cache.get("x")["verdict"] == "A"
        with VerdictCache(path) as cache:
            assert cache.get("x")["verdict"] == "A"

    def test_each_line_is_one_append(self, tmp_path, monkeypatch):
        writes, write = [], os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: writes.append(data) or write(descriptor, data))
        with VerdictCache(tmp_path / "cache.jsonl") as cache:
            flags = __import__("fcntl").fcntl(cache._descriptor, __import__("fcntl").F_GETFL)
            for number in range(5):
                cache.append({"key": str(number), "verdict": "A"})
        assert flags & os.O_APPEND
        assert len(writes) == 5 and all(data.endswith(b"\n") and data.count(b"\n") == 1 for data in writes)

    def test_everything_reaches_the_disk_before_the_end(self, tmp_path, monkeypatch):
        """A flush begins after the last append, also when another one is under way, and `close` waits for its end."""
        events, write, fsync = [], os.write, os.fsync

        def slow_fsync(descriptor):
            events.append("flush")
            time.sleep(0.05)
            fsync(descriptor)
            events.append("flushed")

        monkeypatch.setattr(os, "write", lambda *a: events.append("write") or write(*a))
        monkeypatch.setattr(os, "fsync", slow_fsync)
        with VerdictCache(tmp_path / "cache.jsonl") as cache:
            cache.append({"key": "first", "verdict": "A"})
            while "flush" not in events:
                time.sleep(0.001)
            for number in range(20):
                cache.append({"key": str(number), "verdict": "A"})
        assert events.count("write") == 21
        last = len(events) - 1 - events[::-1].index("write")
        assert events[last + 1 :].count("flush") >= 1 and events[-1] == "flushed"

    def test_no_locks_on_the_file_system(self, tmp_path, monkeypatch):
        def no_locks(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        for name in ("fcntl", "lockf"):
            monkeypatch.setattr(judge_cache.fcntl, name, no_locks)
        with LoopbackServer() as server, pytest.warns(UserWarning, match="the file system has no locks"):
            result = judge_pairs(judge_of(server), *pairs(4), cache=tmp_path / "cache.jsonl")
        assert result.usage.calls == 8 and len(lines(tmp_path / "cache.jsonl")) == 8


# In a process of its own: which of the keys can be claimed.
CLAIM = """
import sys
from trl_ext.evaluation.judging.cache import VerdictCache
with VerdictCache(sys.argv[1]) as cache:
    print(*(key for key in sys.argv[2:] if cache.claim(key)))
"""


class TestClaims:
    KEYS = ("ab" * 32, "cd" * 32)

    def claimed_elsewhere(self, path: Path) -> list[str]:
        return subprocess.check_output([sys.executable, "-c", CLAIM, str(path), *self.KEYS], text=True).split()

    @pytest.mark.parametrize("system", ["own", "without locks of open files", "not Linux"])
    def test_of_two_processes(self, system, tmp_path, monkeypatch):
        path = tmp_path / "cache.jsonl"
        if system == "not Linux":
            monkeypatch.setattr(judge_cache.sys, "platform", "darwin")
        if system == "without locks of open files":

            def invalid(*_):
                raise OSError(errno.EINVAL, "Invalid argument")

            monkeypatch.setattr(judge_cache.fcntl, "fcntl", invalid)
        with VerdictCache(path) as cache:
            assert cache.claim(self.KEYS[0]) and not cache.claim(self.KEYS[0])
            assert self.claimed_elsewhere(path) == [self.KEYS[1]]
            cache.release(self.KEYS[0])
            assert self.claimed_elsewhere(path) == list(self.KEYS)

    def test_of_two_caches_in_one_process(self, tmp_path):
        path = tmp_path / "cache.jsonl"
        with VerdictCache(path) as first, VerdictCache(path) as second:
            assert first.claim(self.KEYS[0])
            assert not second.claim(self.KEYS[0]) and second.claim(self.KEYS[1])
            first.release(self.KEYS[0])
            assert second.claim(self.KEYS[0])

    def test_reading_the_file_drops_no_claim(self, tmp_path):
        path = tmp_path / "cache.jsonl"
        with VerdictCache(path) as cache:
            assert cache.claim(self.KEYS[0])
            path.read_text()
            with VerdictCache(path) as other:
                other.append({"key": self.KEYS[1], "verdict": "A"})
            assert self.claimed_elsewhere(path) == [self.KEYS[1]]

    def test_two_runs_in_threads_of_one_process_pay_once(self, tmp_path):
        cache, count, results = tmp_path / "cache.jsonl", 30, []
        with LoopbackServer(latency=0.05) as server:

            def run():
                results.append(judge_pairs(judge_of(server), *pairs(count), cache=cache, max_concurrency=4))

            threads = [threading.Thread(target=run) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert server.most_open > 4, "both were at work"
        assert server.asked == Counter(question_keys(count).values())
        assert Counter(record["key"] for record in lines(cache)) == Counter(list(question_keys(count)))
        for result in results:
            assert [row["outcome"] for row in result.verdicts] == expected_outcomes(count)
            assert result.usage.calls + result.usage.cached == 60
        assert sum(result.usage.calls for result in results) == 60


class TestFullDisk:
    def run_until_full(self, path: Path, rows: int = 12) -> tuple[CacheError, LoopbackServer]:
        with LoopbackServer(latency=0.01) as server, pytest.raises(CacheError) as caught:
            judge_pairs(judge_of(server), *pairs(rows), cache=path, max_concurrency=4)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        return caught.value, server

    @pytest.mark.parametrize("partial, flushes", [(0, True), (57, True), (0, False)])
    def test_what_is_paid_for_is_kept_elsewhere(self, partial, flushes, tmp_path, monkeypatch):
        """The disk takes five lines and perhaps a part of the sixth. The rest of what was answered is in a file.

        So it is where the file with the rest cannot be brought to its disk at once.
        """
        path, write, fsync, count = tmp_path / "cache.jsonl", os.write, os.fsync, 0

        def flush(descriptor):
            if not flushes and os.readlink(f"/proc/self/fd/{descriptor}") != str(path):
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", flush)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

        def full(descriptor, data):
            nonlocal count
            if os.readlink(f"/proc/self/fd/{descriptor}") != str(path):
                return write(descriptor, data)
            count += 1
            if count <= 5:
                return write(descriptor, data)
            if count == 6 and partial:
                return write(descriptor, data[:partial])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        error, server = self.run_until_full(path)
        monkeypatch.setattr(os, "write", write)
        assert "No space left on device" in str(error) and "append them to it" in str(error)
        [rescued] = tmp_path.glob("verdicts-*.jsonl")
        assert str(rescued) in str(error)
        assert 5 + len(lines(rescued)) == len(server.calls) < 24, "the run stopped, and nothing was lost"
        with path.open("a") as file:
            file.write(("\n" if partial else "") + rescued.read_text())
        with LoopbackServer() as again:
            result = judge_pairs(judge_of(again), *pairs(12), cache=path)
        assert len(again.calls) == 24 - len(server.calls)
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(12)

    def test_room_is_made_meanwhile(self, tmp_path, monkeypatch):
        """A single write fails: the run stops, and what it had in hand is written then."""
        path, write, failed = tmp_path / "cache.jsonl", os.write, []

        def once(descriptor, data):
            if not failed:
                failed.append(data)
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", once)
        error, server = self.run_until_full(path)
        assert "all verdicts are saved now" in str(error)
        assert len(lines(path)) == len(server.calls) < 24

    @pytest.mark.parametrize("when", ["at once", "at the end"])
    def test_a_flush_that_fails(self, when, tmp_path, monkeypatch):
        """Some file systems say only then that the disk is full. What was answered is in the file, and only there."""
        path, ended = tmp_path / "cache.jsonl", threading.Event()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        ask_all = JudgingRun.ask_all

        def ask_all_and_end(self, questions):
            ask_all(self, questions)
            ended.set()

        def fsync(descriptor):
            if when == "at once" or ended.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(JudgingRun, "ask_all", ask_all_and_end)
        monkeypatch.setattr(os, "fsync", fsync)
        error, server = self.run_until_full(path)
        assert len(lines(path)) == len(server.calls) == sum(server.answered.values())
        assert len(server.calls) == 24 if when == "at the end" else len(server.calls) < 24
        assert list(tmp_path.iterdir()) == [path]
        assert "the disk does not take what was written (No space left on device)" in str(error)
        assert re.search(r"its \d+ verdicts are in the file, .*: make room and run again", str(error))
        monkeypatch.undo()
        with LoopbackServer() as again:
            result = judge_pairs(judge_of(again), *pairs(12), cache=path)
        assert (result.usage.cached, len(again.calls)) == (len(server.calls), 24 - len(server.calls))
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(12)

    def test_a_limit_of_the_system(self, tmp_path):
        """A process that may not write files beyond 3000 bytes leaves a cache whose last line is cut, at worst."""
        path = tmp_path / "cache.jsonl"
        program = (
            "import resource, sys\n"
            "from tests.test_judge_faults import judge_of, pairs\n"
            "from trl_ext.evaluation import OpenAIJudge, judge_pairs\n"
            "judge = OpenAIJudge(base_url=sys.argv[1], instructions='Judge well.')\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
            "judge_pairs(judge, *pairs(12), cache=sys.argv[2])\n"
        )
        with LoopbackServer(latency=0.01) as server:
            run = subprocess.run(
                [sys.executable, "-c", program, server.url, str(path)], cwd=REPOSITORY, capture_output=True, text=True
            )
            assert run.returncode == 1
            assert run.stderr.splitlines()[-1].startswith("trl_ext.evaluation.judging.cache.CacheError: ")
            assert path.stat().st_size <= 3000
            asked = len(server.calls)
            result = judge_pairs(judge_of(server), *pairs(12), cache=path)
        assert asked < 24 and result.usage.cached >= 5
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(12)


def judge_in_process(url: str, cache: str, count: int, concurrency: int) -> None:
    """The whole of a judging run, for a process of its own."""
    judge = OpenAIJudge(base_url=url, instructions=INSTRUCTIONS)
    judge_pairs(judge, *pairs(count), cache=cache, max_concurrency=concurrency)


@pytest.fixture(scope="module")
def processes():
    """Makes processes that have the SDK loaded, and share nothing else with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openai", "tests.test_judge_faults", "trl_ext.evaluation.judging.openai_judge"])
    return context


def question_keys(count: int) -> dict[str, tuple[str, str, str]]:
    """The cache's key of every question, and the question as the server sees it."""
    judge = OpenAIJudge(base_url="http://localhost/v1", instructions=INSTRUCTIONS)
    both = [question for pair in make_questions(judge, *pairs(count)) for question in pair]
    return {q.key: (f"user: {q.prompt[-1]['content']}", q.response_a, q.response_b) for q in both}


class TestProcesses:
    def test_two_on_one_cache_pay_once(self, processes, tmp_path):
        """Both judge the same 30 pairs at the same time, and every question is asked once."""
        cache, count = tmp_path / "cache.jsonl", 30
        with LoopbackServer(latency=0.05) as server:
            arguments = (server.url, str(cache), count, 4)
            running = [processes.Process(target=judge_in_process, args=arguments) for _ in range(2)]
            for process in running:
                process.start()
            for process in running:
                process.join(60)
                assert process.exitcode == 0
            assert server.most_open > 4, "both were at work"
            result = judge_pairs(judge_of(server), *pairs(count), cache=cache)
        assert server.asked == Counter(question_keys(count).values())
        assert Counter(record["key"] for record in lines(cache)) == Counter(list(question_keys(count)))
        assert (result.usage.cached, result.usage.calls) == (60, 0)
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(count)

    def test_the_questions_of_a_killed_process_are_taken_over(self, processes, tmp_path):
        """One waits for the answers that the other has asked for; when that is killed, it asks itself."""
        cache = tmp_path / "cache.jsonl"
        first = []

        def faults(question, attempt):
            first.append(question)
            return Fault("stall") if attempt == 0 and len(first) <= 4 else None

        with LoopbackServer(faults=faults) as server:
            process = processes.Process(target=judge_in_process, args=(server.url, str(cache), 2, 4))
            process.start()
            wait_for(lambda: len(server.calls) == 4)
            results = []
            thread = threading.Thread(
                target=lambda: results.append(judge_pairs(judge_of(server), *pairs(2), cache=cache))
            )
            thread.start()
            time.sleep(0.5)
            assert len(server.calls) == 4, "what another process asks is not asked again"
            process.kill()
            process.join()
            thread.join(30)
        assert len(server.calls) == 8
        assert [row["outcome"] for row in results[0].verdicts] == expected_outcomes(2)

    def test_an_interrupt_waits_for_what_is_open(self, processes, tmp_path):
        """Ctrl-C: nothing more is sent, and the answers on their way are written down."""
        cache = tmp_path / "cache.jsonl"
        with LoopbackServer(latency=0.4) as server:
            process = processes.Process(target=judge_in_process, args=(server.url, str(cache), 30, 4))
            process.start()
            wait_for(lambda: len(server.calls) == 4)
            os.kill(process.pid, signal.SIGINT)
            process.join(20)
        assert process.exitcode == 1
        assert len(lines(cache)) == len(server.calls) == 4

    @pytest.mark.slow
    def test_twenty_kills(self, processes, tmp_path):
        """60 pairs in both orders, killed at twenty random moments of judging and started again each time.

        What is in the cache at a kill is never asked again, and at the end every verdict is there once. Requests that
        were open at a kill are sent again; a few of them had been answered in the milliseconds before it, and were not
        written yet. There are no more of both than threads, of which there are six.
        """
        cache, count, kills, concurrency = tmp_path / "cache.jsonl", 60, 20, 4
        keys, generator = question_keys(count), random.Random(time.time_ns())
        asked_when_cached: dict[str, int] = {}
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
                asked = server.asked
                with VerdictCache(cache) as store:
                    for key in keys:
                        if store.get(key) is not None:
                            asked_when_cached.setdefault(key, asked[keys[key]])
            wait_for(lambda: server.open == 0)
            result = judge_pairs(judge_of(server), *pairs(count), cache=cache, max_concurrency=concurrency)
        for key, times in asked_when_cached.items():
            assert server.asked[keys[key]] == times, "a verdict in the cache was asked for again"
        with VerdictCache(cache) as store:
            assert all(store.get(key) is not None for key in keys)
        whole = [line for line in cache.read_bytes().splitlines() if line.endswith(b"}")]
        assert sorted(json.loads(line)["key"] for line in whole) == sorted(keys), "none twice"
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(count)
        repeated = len(server.calls) - 2 * count
        answered_twice = sum(times - 1 for times in server.answered.values())
        print(
            f"{kills} kills: {len(asked_when_cached)} of {2 * count} verdicts cached before the last run; {repeated} "
            f"requests repeated, of which {answered_twice} had been answered to a process killed before it could write"
        )
        assert repeated <= kills * 6
        assert answered_twice <= kills * 2


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
