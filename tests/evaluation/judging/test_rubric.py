"""Rewards by a rubric: the formula, what is asked, what an unanswered question means, and what is paid for."""

from __future__ import annotations

import functools
import json
import sys

import pytest
import torch

from tests.support.refusals import assert_refused
from trl_ext import load_benchmark
from trl_ext.evaluation import JudgeUnavailable, OpenAIModel, RubricReward
from trl_ext.evaluation.judging.rubric import read_rubric
from trl_ext.trainers.policy.reward_functions import check_arguments

pytestmark = pytest.mark.usefixtures("no_key")

# The reference's example: essential, essential, important, optional, and a pitfall stated as what to avoid.
WEIGHTS = {"says why": 1.0, "names a source": 1.0, "is polite": 0.7, "is short": 0.3, "avoids a list": 0.9}
RUBRIC = [{"criterion": text, "weight": weight} for text, weight in WEIGHTS.items()]


class Server:
    """Answers in place of the SDK's client: a criterion is met if the response contains its last word."""

    def __init__(self, broken: tuple[str, ...] = (), rating: int = 7):
        self.broken, self.rating = broken, rating
        self.questions: list[str] = []

    def post(self, path: str, body: dict, cast_to: type) -> str:
        question = body["messages"][-1]["content"]
        self.questions.append(question)
        response, _, criterion = question.partition("[response ")[2].partition("\n[criteri")
        if body["response_format"]["json_schema"]["schema"]["title"] == "RatingAnswer":
            answer = {"reason": "r", "rating": self.rating}
        else:
            last = criterion.splitlines()[1].split()[-1]
            answer = {"reason": "r", "met": "yes" if last in self.broken else last in response}
        message = {"role": "assistant", "content": json.dumps(answer)}
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        return json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})


def reward_with(server: Server, form: str = "explicit", **arguments) -> RubricReward:
    model = OpenAIModel("judge", base_url="http://localhost:1/v1", api="chat")
    model.__dict__["_client"] = server
    return RubricReward(model, form, **arguments)


def test_the_share_of_weights_that_are_met():
    reward = reward_with(Server())
    responses = ["why polite short list", "why source polite short list", "nothing", " "]
    found = reward(["q"] * 4, responses, rubric=[RUBRIC] * 4)
    # 2.9 of 3.9 is the reference's 0.743590.
    assert found == pytest.approx([0.743590, 1.0, 0.0, 0.0], abs=1e-6)
    assert reward.usage.calls == 15 and reward.usage.input_tokens == 150


def test_one_rating_by_all_criteria():
    server = Server(rating=7)
    conversation = [[{"role": "user", "content": "q"}]]
    found = reward_with(server, "implicit")(conversation, [[{"role": "assistant", "content": "r"}]], rubric=[RUBRIC])
    assert found == pytest.approx([6 / 9])
    (question,) = server.questions
    assert "1: says why\n1: names a source\n0.7: is polite" in question and "user: q" in question


def test_a_question_without_an_answer_is_missing_and_not_a_zero(caplog):
    """`met` is no boolean for this criterion: three attempts, then the response has no reward."""
    server = Server(broken=("polite",))
    reward = reward_with(server)
    found = reward(["q", "q"], ["why", "source"], rubric=[["says why", "is polite"], ["names a source"]])
    assert found == [None, 1.0]
    assert reward.usage.errors == 1 and reward.usage.calls == 2 + 3
    assert "rubric_explicit: a question has no answer" in caplog.text


def test_answers_are_kept_and_equal_questions_are_asked_once(tmp_path):
    server, logged = Server(), {}
    arguments = (["q", "q", "p"], ["why", "why", "why"])
    rubric = [["says why"], ["says why"], ["says why"]]
    first = reward_with(server, cache=tmp_path / "rubric.sqlite")
    assert first(*arguments, rubric=rubric, log_metric=logged.__setitem__) == [1.0, 1.0, 1.0]
    assert len(server.questions) == 2
    assert logged == {"rubric_explicit/calls": 2.0, "rubric_explicit/cached": 0.0, "rubric_explicit/errors": 0.0}
    second = reward_with(server, cache=tmp_path / "rubric.sqlite")
    assert second(*arguments, rubric=rubric) == [1.0, 1.0, 1.0]
    assert len(server.questions) == 2 and second.usage.cached == 2


def test_a_file_of_prompts_keeps_its_rubrics(tmp_path):
    """The criteria of a file may be texts or records, and what is malformed is refused where it is read."""
    rubrics = [["says why"], [{"criterion": "is polite", "weight": 2}, "is short"], [{"criterion": 3, "weight": "x"}]]
    rows = [{"row_id": str(n), "prompt_text": f"q{n}", "rubric": rubric} for n, rubric in enumerate(rubrics)]
    (tmp_path / "train_gen.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    read = load_benchmark(tmp_path)["train_gen"]["rubric"]
    assert [read_rubric(one) for one in read[:2]] == [[("says why", 1.0)], [("is polite", 2.0), ("is short", 1.0)]]
    assert_refused(lambda: read_rubric(read[2]), "a criterion is a text")


def test_the_last_text_of_the_assistant_is_judged():
    """A response with tools may end in a call or in a tool's message."""
    said = {"role": "assistant", "content": "why"}
    completions = [[said, {"role": "tool", "content": "4"}], [{"role": "assistant", "tool_calls": []}]]
    assert reward_with(Server())(["q", "q"], completions, rubric=[["says why"]] * 2) == [1.0, 0.0]


def test_arguments_of_reward_functions_are_known_before_sampling():
    def lines(completions, steps):
        return [1.0] * len(completions)

    @functools.wraps(lines)
    def decorated(completions, **columns):
        return lines(completions, columns)

    check_arguments([decorated, max, functools.partial(lines, steps=[])], ["prompt"])
    check_arguments([reward_with(Server()), torch.nn.Linear(1, 1)], ["prompt", "rubric"])
    for function, columns, words in (
        (lines, ["prompt"], ["'lines' takes 'steps'", "no such column"]),
        (lambda completion: [1.0], ["prompt", "completion"], ["takes 'completion'", "did you mean 'completions'"]),
        (reward_with(Server()), ["prompt", "rubic"], ["'rubric_explicit' takes 'rubric'", "did you mean 'rubic'"]),
    ):
        assert_refused(lambda f=function, c=columns: check_arguments([f], c), *words)


def test_refusals(monkeypatch):
    for rubric, words in (
        (None, ["a rubric is a list of criteria", "None"]),
        ("be polite", ["a rubric is a list", "be polite"]),
        ([{"text": "x"}], ["a criterion is a text", "text"]),
        ([{"criterion": "x", "weight": -0.9}], ["must be positive", "-0.9", "pitfall"]),
    ):
        assert_refused(lambda rubric=rubric: read_rubric(rubric), *words)
    assert_refused(lambda: reward_with(Server(), "explicitt"), "explicit")
    asked = RubricReward(OpenAIModel("judge"))
    words = ["OPENAI_API_KEY is not set"]
    assert_refused(lambda: asked(["q"], ["r"], rubric=[["says why"]]), *words, error=JudgeUnavailable)
    monkeypatch.setitem(sys.modules, "openai", None)
    assert_refused(lambda: OpenAIModel("judge"), "openai package", "trl_ext[judge]", error=ImportError)
