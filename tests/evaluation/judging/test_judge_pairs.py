"""Judging in both orders: what is asked, how often, what is kept under which settings, and what it would cost."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.support.judging import kept, prompt_rows
from tests.support.loopback import LoopbackServer
from tests.support.refusals import assert_refused
from trl_ext.evaluation import (
    GroundTruthJudge,
    JudgeError,
    Judgement,
    OpenAIJudge,
    estimate,
    judge_pairs,
    win_rate,
)
from trl_ext.evaluation.judging.openai_format import SCHEMA, question_text

pytestmark = pytest.mark.usefixtures("no_key")


class CountingJudge:
    """Prefers the longer response, and remembers what it was asked."""

    def __init__(self, **attributes):
        self.asked = []
        self.__dict__.update(attributes)

    def judge(self, prompt, response_a, response_b):
        self.asked.append((prompt[-1]["content"], response_a, response_b))
        if "fail" in prompt[-1]["content"]:
            raise JudgeError("cannot say")
        return "tie" if len(response_a) == len(response_b) else "A" if len(response_a) > len(response_b) else "B"


class TestJudgePairs:
    def test_the_course_example(self):
        """Two agreed wins, an agreed loss, a disagreement, a win unusable in one pass, an error: 2 of 3; 3.5 of 5."""
        answers = {
            "question 0": "AB", "question 1": "AB", "question 2": "BA", "question 3": "AA", "question 4": "AB",
        }  # fmt: skip

        def judge(prompt, response_a, response_b):
            text = prompt[-1]["content"]
            if text == "question 5":
                raise JudgeError("timeout")
            order = 0 if response_a == "c" else 1
            return Judgement(answers[text][order], text != "question 4" or order == 0, confidence=0.5)

        found = judge_pairs(judge, prompt_rows(6), ["c"] * 6, ["b"] * 6, max_error_fraction=0.2)
        result = win_rate(found.outcomes)
        assert result.agreed.rate == pytest.approx(2 / 3) and result.n_counted == 3
        assert result.half.rate == pytest.approx(3.5 / 5)
        assert (result.n_errors, found.usage.calls, found.usage.errors) == (1, 12, 2)
        rows = json.loads(json.dumps(found.verdicts))
        columns = ("row_id", "outcome", "usable", "error", "empty")
        assert [rows[3][name] for name in columns] == ["r3", "disagree", True, None, False]
        assert rows[3]["candidate_first"]["verdict"] == rows[3]["base_first"]["verdict"] == "A"
        assert rows[3]["candidate_first"]["confidence"] == 0.5

    def test_an_empty_candidate_is_not_asked_about(self):
        judge = CountingJudge()
        result = judge_pairs(judge, prompt_rows(3), ["cc", " \n", ""], ["b", "b", ""])
        assert len(judge.asked) == 2
        summary = win_rate(result.outcomes)
        assert (summary.half.rate, summary.half.n) == (pytest.approx(1 / 3), 3)
        assert (summary.agreed.rate, summary.agreed.n, summary.position_bias) == (1.0, 1, 0.0)
        assert [row["empty"] for row in result.verdicts] == [False, True, True]

    def test_the_same_question_is_asked_once(self):
        """Two rows of the same prompt and responses make two questions, and so does a third with the roles swapped."""
        judge = CountingJudge()
        rows = [*prompt_rows(1), *({**prompt_rows(1)[0], "row_id": name} for name in ("again", "swapped"))]
        result = judge_pairs(judge, rows, ["cc", "cc", "b"], ["b", "b", "cc"])
        assert len(judge.asked) == 2
        assert [(o.first, o.second) for o in result.outcomes] == [("candidate", "candidate")] * 2 + [("base", "base")]

    def test_identical_responses_are_not_paid_for(self, tmp_path):
        rows, cache = prompt_rows(3), tmp_path / "cache.sqlite"
        responses = (["same", "cc", ""], ["same", "b", ""])
        with LoopbackServer() as server:
            judge = OpenAIJudge(base_url=server.url)
            assert estimate(judge, rows, *responses).calls == 2
            result = judge_pairs(judge, rows, *responses, cache=cache)
        assert [call.question[0] for call in server.calls] == ["user: question 1"] * 2
        assert (result.usage.calls, kept(cache)) == (2, 2)
        assert [row["outcome"] for row in result.verdicts] == ["tie", "candidate", "base"]
        assert [row["reason"] for row in result.verdicts] == ["identical responses", None, "empty response"]
        assert [row["usable"] for row in result.verdicts] == [False, True, True]
        assert result.verdicts[0]["candidate_first"] is result.verdicts[0]["base_first"] is None
        summary = win_rate(result.outcomes)
        # Half a win, a win and the empty response's loss; of these `agreed` has the win alone.
        assert (summary.half.rate, summary.half.n) == (0.5, 3)
        assert (summary.agreed.rate, summary.agreed.n) == (1.0, 1)

    def test_a_cut_response_is_not_identical_to_a_whole_one(self):
        """To a judge that is told so; another sees the same texts."""
        rows, flags = prompt_rows(1), {"candidate_finished": [False]}
        told = GroundTruthJudge(lambda _, text, finished=True: 1.0 if finished else 0.0)
        assert judge_pairs(told, rows, ["same"], ["same"], **flags).outcomes[0].first == "base"
        judge = CountingJudge()
        assert judge_pairs(judge, rows, ["same"], ["same"], **flags).outcomes[0].first == "tie"
        assert judge.asked == []

    @pytest.mark.parametrize("bound", [1, 3, 8])
    def test_concurrency_is_bounded_and_used(self, bound):
        # The more may be open, the longer each is, so that a busy machine can open as many.
        with LoopbackServer(latency=0.02 * bound) as server:
            judge_pairs(
                OpenAIJudge(base_url=server.url), prompt_rows(20), ["cc"] * 20, ["b"] * 20, max_concurrency=bound
            )
        assert server.most_open == bound

    def test_a_sequential_judge_is_called_from_one_thread(self):
        threads = set()

        class Judge:
            sequential = True

            def judge(self, prompt, response_a, response_b):
                threads.add(threading.get_ident())
                time.sleep(0.001)
                return "A"

        judge_pairs(Judge(), prompt_rows(10), ["c"] * 10, ["b"] * 10)
        assert len(threads) == 1

    @pytest.mark.parametrize(
        ("judge", "base", "options", "words"),
        [
            (CountingJudge(), ["b"], {}, ["base", "1 entries for 2 rows"]),
            (CountingJudge(), ["b", "b"], {"base_finished": []}, ["base_finished", "0 entries for 2 rows"]),
            (CountingJudge(), ["b", "b"], {"max_error_fraction": 10}, ["max_error_fraction", "between 0 and 1", "10"]),
            (CountingJudge(), ["b", "b"], {"cache": "x.sqlite"}, ["needs a judge with an attribute `identity`"]),
            (lambda *_: "first", ["b", "b"], {}, ["row_id r", "'A', 'B' or 'tie'", "'first'"]),
        ],
    )
    def test_refusals(self, judge, base, options, words):
        assert_refused(lambda: judge_pairs(judge, prompt_rows(2), ["c", "c"], base, **options), *words)


class TestCacheIdentity:
    def judge(self, server, **changes):
        return OpenAIJudge(**{"base_url": server.url, "instructions": "Judge well.", **changes})

    def test_what_is_asked_anew(self, tmp_path):
        """A verdict holds for a model, its settings, the instructions and the question, wherever the server is."""
        cache, rows = tmp_path / "cache.sqlite", prompt_rows(1)
        with LoopbackServer() as server:

            def calls(candidate="cc", base="b", **changes):
                result = judge_pairs(self.judge(server, **changes), rows, [candidate], [base], cache=cache)
                return result.usage.calls, result.usage.cached

            assert calls() == (2, 0)
            assert calls() == (0, 2)
            # The base against the candidate are the same two questions.
            assert calls(candidate="b", base="cc") == (0, 2)
            assert calls(timeout=5, max_retries=1, api="chat") == (0, 2)
            assert calls(base_url=server.url.replace("127.0.0.1", "localhost")) == (0, 2)
            assert calls(model="gpt-5.4-mini") == (2, 0)
            assert calls(instructions="Judge better.") == (2, 0)
            assert calls(temperature=0.0) == (2, 0)
            assert calls(reasoning_effort="high") == (2, 0)
            assert calls(max_output_tokens=220) == (2, 0)
            assert calls(max_output_tokens=2048) == (0, 2)
            assert calls(candidate="cc ") == (2, 0)
            rows[0]["prompt"] = [{"role": "system", "content": "s"}, *rows[0]["prompt"]]
            assert calls() == (2, 0)
            assert calls() == (0, 2)

    def test_cached_verdicts_give_the_same_result(self, tmp_path):
        cache, rows = tmp_path / "folder" / "cache.sqlite", prompt_rows(5)
        candidate, base = ["c", "cc", "ccc", "c", ""], ["bb"] * 5
        with LoopbackServer() as server:
            first = judge_pairs(self.judge(server), rows, candidate, base, cache=cache)
        # The server is gone: everything comes from the file.
        second = judge_pairs(self.judge(server), rows, candidate, base, cache=cache)
        assert second.outcomes == first.outcomes and second.verdicts == first.verdicts
        assert (first.usage.calls, first.usage.input_tokens, first.usage.output_tokens) == (8, 8 * 900, 8 * 80)
        assert (second.usage.cached, second.usage.calls, second.usage.input_tokens) == (8, 0, 0)

    def test_own_judges(self, tmp_path):
        """One that says what its verdicts depend on has a cache, and a free one needs none."""
        rows, cache = prompt_rows(1), tmp_path / "cache.sqlite"
        judge = CountingJudge(identity={"kind": "mine", "version": 1})
        for version, asked in ((1, 2), (1, 2), (2, 4)):
            judge.identity = {"kind": "mine", "version": version}
            judge_pairs(judge, rows, ["cc"], ["b"], cache=cache)
            assert len(judge.asked) == asked
        other = tmp_path / "other.sqlite"
        judge_pairs(GroundTruthJudge(lambda _, text: len(text)), rows, ["cc"], ["b"], cache=other)
        assert not other.exists()


class TestEstimate:
    def test_by_hand(self, tmp_path):
        """A text is a quarter of its bytes, and one: see `tokens`. Each of two questions has the instructions, its
        text and the schema, and 150 tokens of output; 2.5 and 15 dollars per million.
        """

        def tokens(text):
            return len(text.encode()) // 4 + 1

        rows, cache = prompt_rows(1), tmp_path / "cache.sqlite"
        with LoopbackServer() as server:
            judge = OpenAIJudge(base_url=server.url, instructions="Judge well.")
            result = estimate(judge, rows, ["Größe"], ["b"], cache=cache, price_in=2.5, price_out=15)
        shown = question_text(rows[0]["prompt"], "Größe", "b")
        expected = 2 * (tokens("Judge well.") + tokens(shown) + tokens(str(SCHEMA)))
        assert (result.calls, result.cached, result.input_tokens, result.output_tokens) == (2, 0, expected, 300)
        assert result.dollars == pytest.approx((expected * 2.5 + 300 * 15) / 1e6)
        assert "a quarter of the UTF-8 bytes" in result.notes[0]
        assert server.calls == [] and not cache.exists(), "nothing is sent, and nothing written"
        json.dumps(result.to_dict())

    def test_what_is_cached_costs_nothing_and_tells_the_length_of_answers(self, tmp_path):
        rows, cache = prompt_rows(4), tmp_path / "cache.sqlite"
        with LoopbackServer() as server:
            judge = OpenAIJudge(base_url=server.url)
            judge_pairs(judge, rows[:3], ["cc"] * 3, ["b"] * 3, cache=cache)
        # Of the four rows one is new; the verdicts that are there had 80 tokens each.
        result = estimate(judge, rows, ["cc"] * 4, ["b"] * 4, cache=cache)
        assert (result.calls, result.cached, result.output_tokens) == (2, 6, 160)
        assert estimate(judge, rows[:3], ["cc"] * 3, ["b"] * 3, cache=cache, price_in=1, price_out=1).dollars == 0.0

    def test_without_prices(self):
        """No answer is longer than the limit. A free judge costs 0, and one that does not say, None."""
        rows = prompt_rows(2)
        result = estimate(OpenAIJudge(max_output_tokens=20), rows[:1], ["cc"], ["b"], price_in=1)
        assert result.dollars is None and result.input_tokens > 0 and result.output_tokens == 2 * 20
        assert "no dollars without --price_in and --price_out" in result.notes
        free = estimate(GroundTruthJudge(), rows, ["cc", ""], ["b", "b"])
        assert (free.calls, free.dollars, free.notes) == (2, 0.0, ())
        assert estimate(CountingJudge(), rows, ["c", "c"], ["b", "b"]).dollars is None
