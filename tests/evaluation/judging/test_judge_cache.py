"""The cache of verdicts: on a full disk, among processes, and when a run is killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import time

import pytest

from tests.support.judging import INSTRUCTIONS, expected_outcomes, judge_of, kept, pairs
from tests.support.loopback import LoopbackServer
from tests.support.refusals import assert_refused
from trl_ext.evaluation import CacheError, OpenAIJudge, VerdictCache, judge_pairs
from trl_ext.evaluation.judging.pairs import make_questions

pytestmark = pytest.mark.usefixtures("no_key")


class TestCache:
    RECORD = {"key": "ab", "verdict": "A"}

    def test_two_caches_on_one_file_see_each_others_verdicts(self, tmp_path):
        path = tmp_path / "folder" / "cache.sqlite"
        with VerdictCache(path) as cache, VerdictCache(path) as other:
            assert other.get("ab") is None
            cache.add([self.RECORD, {"key": "cd", "verdict": "B"}])
            assert other.get("ab") == self.RECORD
            other.add([{**self.RECORD, "verdict": "B"}])
            assert cache.get("ab") == self.RECORD, "the first verdict stays"
        assert kept(path) == 2 and list(path.parent.iterdir()) == [path]

    def test_a_verdict_is_on_the_disk_when_add_returns(self, tmp_path):
        """SQLite promises so of a rollback journal with its highest synchronisation."""
        with VerdictCache(tmp_path / "cache.sqlite") as cache:
            assert cache._database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
            assert cache._database.execute("PRAGMA synchronous").fetchone() == (3,)

    def test_what_cannot_be_a_cache_fails_when_it_is_opened(self, tmp_path, monkeypatch):
        """Before any verdict is paid for: another file, which is left alone, a folder, and a file that is read-only.

        The last as for a user who may not write, for whom SQLite opens the file to read alone.
        """
        path, other, connect = tmp_path / "judge_cache.jsonl", tmp_path / "other", sqlite3.connect
        path.write_text('{"key": "ab", "verdict": "A"}\n')
        with connect(other) as database:
            database.execute("CREATE TABLE verdicts (rubric TEXT)")
        for bad, words in (
            (path, ["judge_cache.jsonl", "not a database", "name another cache"]),
            (other, ["other", "no such column: record", "name another cache"]),
            (tmp_path, [str(tmp_path), "unable to open", "check the disk"]),
        ):
            assert_refused(lambda bad=bad: VerdictCache(bad), *words, error=CacheError)
        assert path.read_text() == '{"key": "ab", "verdict": "A"}\n' and set(tmp_path.iterdir()) == {path, other}
        path = tmp_path / "cache.sqlite"
        VerdictCache(path).close()
        monkeypatch.setattr(sqlite3, "connect", lambda path, **_: connect(f"file:{path}?mode=ro", uri=True))
        words = ("cache.sqlite", "attempt to write a readonly database", "check the disk")
        assert_refused(lambda: VerdictCache(path), *words, error=CacheError)

    @pytest.mark.parametrize("room_is_made", [False, True])
    def test_a_full_disk(self, room_is_made, tmp_path, monkeypatch):
        """SQLite's own limit of a file's size stands for the disk. The run stops, and its cache can be used again.

        Where there is room again by the end, nothing of what was answered is lost.
        """
        cache, open_cache, add = tmp_path / "cache.sqlite", VerdictCache.__init__, VerdictCache.add

        def open_small(self, path):
            open_cache(self, path)
            self._database.execute("PRAGMA max_page_count = 4")

        def add_and_make_room(self, records):
            try:
                add(self, records)
            except CacheError:
                if room_is_made:
                    self._database.execute("PRAGMA max_page_count = 100")
                raise

        monkeypatch.setattr(VerdictCache, "__init__", open_small)
        monkeypatch.setattr(VerdictCache, "add", add_and_make_room)
        with (
            LoopbackServer(latency=0.01) as server,
            pytest.raises(CacheError, match=f"{cache}: database or disk is full: check the disk") as caught,
        ):
            judge_pairs(judge_of(server), *pairs(12), cache=cache, max_concurrency=4)
        assert "\n" not in str(caught.value)
        monkeypatch.undo()
        assert 3 <= kept(cache) <= len(server.calls) < 24
        assert not room_is_made or kept(cache) == len(server.calls)
        with LoopbackServer() as again:
            result = judge_pairs(judge_of(again), *pairs(12), cache=cache)
        assert result.usage.cached + len(again.calls) == 24
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(12)


def judge_in_process(url: str, cache: str, count: int, concurrency: int) -> None:
    """The whole of a judging run, for a process of its own."""
    judge = OpenAIJudge(base_url=url, instructions=INSTRUCTIONS)
    judge_pairs(judge, *pairs(count), cache=cache, max_concurrency=concurrency)


@pytest.fixture(scope="module")
def processes():
    """Makes processes that have the SDK loaded, and share nothing else with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openai", __name__, "trl_ext.evaluation.judging.openai_judge"])
    return context


def question_keys(count: int) -> dict[str, tuple[str, str, str]]:
    """The cache's key of every question, and the question as the server sees it."""
    judge = OpenAIJudge(base_url="http://localhost/v1", instructions=INSTRUCTIONS)
    both = [question for pair in make_questions(judge, *pairs(count)) for question in pair]
    return {q.key: (f"user: {q.prompt[-1]['content']}", q.response_a, q.response_b) for q in both}


def open_and_write(path: str, name: str, start) -> None:
    start.wait()
    for _ in range(2):
        with VerdictCache(path) as cache:
            cache.add([{"key": key, "verdict": name} for key in (name, "shared")])
            assert cache.get(name)["verdict"] == name


class TestProcesses:
    def test_several_that_create_one_cache_at_the_same_moment(self, tmp_path):
        context = multiprocessing.get_context("fork")
        for trial in range(30):
            path, count = tmp_path / f"folder-{trial}" / "cache.sqlite", 2 + trial % 3
            start = context.Barrier(count)
            running = [context.Process(target=open_and_write, args=(path, f"{k}", start)) for k in range(count)]
            for process in running:
                process.start()
            for process in running:
                process.join(60)
            assert [process.exitcode for process in running] == [0] * count
            assert kept(path) == count + 1

    def test_two_on_one_cache(self, processes, tmp_path):
        """Both judge the same 60 pairs at the same time, and share the work.

        Only what both have open at one moment is paid for twice. They ask in different orders, so that this is rare
        until few questions are left: about 4 / n of the questions with n left, and most of the last eight.
        """
        cache, count = tmp_path / "cache.sqlite", 60
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
        print(f"{len(server.calls) - 2 * count} of {2 * count} questions were paid for twice")
        assert 2 * count <= len(server.calls) <= 2 * count + 40
        assert (result.usage.cached, result.usage.calls) == (120, 0)
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(count)

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

        What is in the cache at a kill is never asked again, and at the end every verdict is there once. Requests that
        were open at a kill are sent again, and so are those whose answers were not written yet. Answers are written
        before anything else is asked, so both together are at most as many as may be open. How many of them had been
        answered depends on the machine's speed.
        """
        cache, count, kills, concurrency = tmp_path / "cache.sqlite", 60, 20, 4
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
            assert all(store.get(key) is not None for key in keys) and len(store) == len(keys)
        assert [row["outcome"] for row in result.verdicts] == expected_outcomes(count)
        repeated = len(server.calls) - 2 * count
        answered_twice = sum(times - 1 for times in server.answered.values())
        print(
            f"{kills} kills: {len(asked_when_cached)} of {2 * count} verdicts cached before the last run; {repeated} "
            f"requests repeated, of which {answered_twice} had been answered to a process killed before it could write"
        )
        assert repeated <= kills * concurrency


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
