"""Evaluation of reasoning: categories, pass@k and maj@k, intervals, and resuming."""

from __future__ import annotations

import itertools
import json
import math
from functools import partial

import pytest

from tests.support.refusals import assert_refused
from trl_ext.evaluation.reasoning import (
    accuracy_gain,
    majority_at_k,
    pass_at_k,
    summarize_reasoning,
    vote_of,
)
from trl_ext.rewards.verified import VerifiedGrader, category_of, count_categories
from trl_ext.rollouts import Generation, SamplingSettings, TransformersEngine
from trl_ext.rollouts.responses import evaluate_reasoning

# ---- Categories and samples ----


def test_the_three_categories():
    names = [category_of(*rewards) for rewards in ((1, 1), (1, 0), (0, 0))]
    assert names == ["correct", "wrong_answer", "wrong_format"]
    rows = [{"category": "correct"}, {"category": "correct"}, {"category": "wrong_format"}]
    assert count_categories(rows) == {"correct": 2, "wrong_answer": 0, "wrong_format": 1}


def test_graders():
    row = {"row_id": "a", "answer": "10", "numbers": [4, 6]}
    right = "x </think> <answer> 10 </answer>"
    for reward, response, found in (
        ("r1_zero", right, 1),
        ("question_only", "\\boxed{10}", 1),
        ("question_only", right, 0),
        ("gsm8k", "no tags, but 10", 1),
        ("countdown", "x </think> <answer> 4 + 6 </answer>", 1),
        ("countdown", right, 0),
    ):
        assert VerifiedGrader(reward)(response, row)["reward"] == found, (reward, response)
    assert_refused(lambda: VerifiedGrader("countdown")("x", {"row_id": "b", "answer": "10"}), "numbers None")
    assert_refused(lambda: VerifiedGrader("r1-zero"), "r1-zero", "did you mean")


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [place < correct for place in range(n)]
        subsets = list(itertools.combinations(samples, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-12)
    for counts in ((5, 2, 6), (5, 2, 0), (5, 6, 1)):
        assert_refused(lambda counts=counts: pass_at_k(*counts), "must lie between")


def test_who_votes():
    """Votes 7, 7, 8, of which 8 is correct. One votes: right in 1 of 3. All: 7 wins.

    Two: (7, 7) is wrong and either (7, 8) a draw, so (0 + 1/2 + 1/2) / 3.
    """
    votes, correct = ["7", "7", "8"], [False, False, True]
    assert [majority_at_k(votes, correct, k) for k in (1, 2, 3)] == pytest.approx([1 / 3, 1 / 3, 0])
    # Two ways to write the correct answer are one; without the form there is no vote, and without votes no answer.
    assert majority_at_k(["0.5", "1/2", "3", "3", "3"], [True, True, False, False, False], 5) == 0
    assert majority_at_k(["0.5", "1/2", "3"], [True, True, False], 3) == 1
    assert majority_at_k([None, None, "5"], [False, False, True], 3) == 1
    assert majority_at_k([None, None], [False, False], 2) == 0
    row = {"category": "wrong_answer", "response_text": "so", "parsed_answer": " 1,  B "}
    assert vote_of(row) == "1, b"
    assert vote_of({**row, "category": "wrong_format"}) is None
    assert [vote_of({**row, "parsed_answer": nothing}) for nothing in (None, "", " ")] == [None] * 3
    # A grader that says nothing of answers.
    assert vote_of({"category": "wrong_answer", "response_text": "So  1/2"}) == "so 1/2"


TAGS = "so </think> <answer> {} </answer>"


@pytest.mark.parametrize(
    ("reward", "truth", "responses", "majority", "parsed"),
    [
        ("gsm8k", "7", ["so 7", "it is 7", "10", "so 10", "$10"], 0.0, ["7", "7", "10", "10", "10"]),
        # In a box and without it, 4 is 4: two to one.
        ("r1_zero", "5", [TAGS.format(r"\boxed{4}"), TAGS.format("4"), TAGS.format("5")], 0.0, [r"4", " 4 ", " 5 "]),
        ("question_only", "5", [r"\boxed{4}", r"is \boxed{4}, not 5.", r"\boxed{5}"], 0.0, ["4", "4", "5"]),
        ("r1_zero", "5", [*map(TAGS.format, (r"\boxed{4", r"\boxed{5", "5"))], 1.0, [None, None, " 5 "]),
        ("countdown", "10", [*map(TAGS.format, ("4 + 7", "4+7", "4+6"))], 1 / 3, [" 4 + 7 ", " 4+7 ", " 4+6 "]),
    ],
)
def test_votes_are_of_what_the_reward_reads(reward, truth, responses, majority, parsed):
    """The sampled responses are given ones; all of them vote, and of three that differ each wins in a third."""

    def engine(prompts, **keywords):
        return [Generation([1], [2], text, True) for text in responses]

    problem = {"row_id": "a", "prompt_text": "?", "answer": truth, "numbers": [4, 6]}
    count = len(responses)
    rows = evaluate_reasoning([problem], ["?"], engine, VerifiedGrader(reward), samples=count)
    assert [row["parsed_answer"] for row in rows] == parsed
    assert summarize_reasoning(rows, (count,))["maj_at"][str(count)]["mean"] == pytest.approx(majority)


def test_many_subsets_are_sampled():
    """C(16, 8) = 12,870 subsets: 12 votes of 16 for the correct answer win nearly all of them (1 - 0.0035 exactly).

    A subset of 8 holds 4, 5 ... 8 of the 12. At 4 the vote is a draw, with C(12, 4) C(4, 4) = 495 subsets: 1/2 each.
    """
    votes, correct = ["a"] * 12 + ["b"] * 4, [True] * 12 + [False] * 4
    exact = 1 - 0.5 * math.comb(12, 4) * math.comb(4, 4) / math.comb(16, 8)
    # The majority of all 16 is 1, as is that of every subset without a draw.
    assert majority_at_k(votes, correct, 8) == pytest.approx(exact, abs=0.014)
    assert majority_at_k(votes, correct, 8) < 0.995
    assert majority_at_k(votes, correct, 8) == majority_at_k(votes, correct, 8), "seeded"


# ---- Summaries ----


def graded(row_id, category, tokens=10, sample=0, answer=1, **more):
    form, right = {"correct": (1.0, 1.0), "wrong_answer": (1.0, 0.0), "wrong_format": (0.0, 0.0)}[category]
    return {
        **{"row_id": row_id, "sample": sample, "response_text": f"</think> <answer> {answer} </answer>"},
        **{"generated_num_tokens": tokens, "finished": True, "category": category},
        **{"reward": right, "format_reward": form, "answer_reward": right, **more},
    }


def test_a_summary_by_hand():
    """Two of four correct. Wilson with z = 1.96: (0.5 + 0.4802) / 1.9604 = 0.5 for the centre, and for half the width
    1.96 sqrt(0.25 / 4 + 3.8416 / 64) / 1.9604 = 0.35.
    """
    rows = [
        graded("a", "correct", 10, entropy=0.2),
        graded("b", "correct", 20, entropy=0.4),
        graded("c", "wrong_answer", 30),
        graded("d", "wrong_format", 50, finished=False),
    ]
    summary = summarize_reasoning(rows)
    accuracy = summary["accuracy"]
    assert (accuracy["mean"], accuracy["n"]) == (0.5, 4)
    assert (accuracy["low"], accuracy["high"]) == pytest.approx((0.15, 0.85), abs=1e-3)
    assert summary["format_rate"]["mean"] == 0.75
    assert summary["categories"] == {"correct": 2, "wrong_answer": 1, "wrong_format": 1}
    lengths = ("mean_tokens", "mean_tokens_correct", "mean_tokens_incorrect", "truncated_fraction", "mean_entropy")
    assert [summary[name] for name in lengths] == pytest.approx([27.5, 15, 40, 0.25, 0.3])
    assert (summary["pass_at"], summary["maj_at"]) == ({}, {})
    assert summarize_reasoning(rows[2:])["mean_tokens_correct"] is None
    json.dumps(summary, allow_nan=False)


def test_samples_of_a_problem_go_together():
    """Problem a: 2 of 2 correct; b: 1 of 2; c: 0. Accuracy (1 + 1/2 + 0) / 3, pass@2 (1 + 1 + 0) / 3; maj@2 as
    accuracy, since b's two votes are a draw.

    The interval is of three problems whose means are 1, 1/2 and 0, worked by hand in the test of `rate_interval`. Six
    independent responses would have had 0.19 to 0.81.
    """
    categories = {"a": ("correct", "correct"), "b": ("correct", "wrong_answer"), "c": ("wrong_answer", "wrong_format")}
    rows = [
        graded(name, category, sample=sample, answer=sample)
        for name, own in categories.items()
        for sample, category in enumerate(own)
    ]
    summary = summarize_reasoning(rows, (1, 2))
    assert (summary["n_prompts"], summary["n_samples"], summary["accuracy"]["n"]) == (3, 2, 3)
    assert summary["accuracy"]["mean"] == summary["pass_at"]["1"]["mean"] == pytest.approx(0.5)
    assert (summary["accuracy"]["low"], summary["accuracy"]["high"]) == pytest.approx((0.036171, 0.963829), abs=1e-6)
    assert summary["pass_at"]["2"]["mean"] == pytest.approx(2 / 3)
    assert summary["maj_at"]["2"]["mean"] == pytest.approx(0.5)
    assert_refused(lambda: summarize_reasoning(rows[:-1]), "1 to 2 samples")
    assert_refused(lambda: summarize_reasoning([]), "no responses")


def test_the_gain_is_of_pairs():
    """Of 40 problems 10 turn from wrong to correct and none back: +0.25, and p = 2 / 2^10 by McNemar's exact test.

    With a gain and a loss more, 10/42 -+ 1.959964 sqrt((12/42 - (10/42)^2) / 42).
    """
    names = [str(n) for n in range(40)]
    before = [graded(name, "correct" if n < 20 else "wrong_answer") for n, name in enumerate(names)]
    after = [graded(name, "correct" if n < 30 else "wrong_format") for n, name in enumerate(names)]
    gain = accuracy_gain(before, after[::-1])
    assert gain["mean"] == pytest.approx(0.25) and gain["n"] == 40
    assert (gain["low"], gain["high"]) == pytest.approx((0.093363, 0.382827), abs=1e-6)
    assert gain["p_value"] == pytest.approx(2 / 2**10)
    assert_refused(lambda: accuracy_gain(before, after[1:]), "same rows")


# ---- Runs ----


class Interrupted(Exception):
    pass


def run(toy, additions, calls: int | None = None, **options):
    """An evaluation of 12 problems with 3 samples each, 36 responses, saved 7 at a time; interrupted before a call."""
    engine = TransformersEngine(*toy, SamplingSettings(max_new_tokens=40, batch_size=4))
    count = itertools.count()

    def counted(prompts, **keywords):
        if next(count) == calls:
            raise Interrupted
        return engine(prompts, **keywords)

    return evaluate_reasoning(*additions, counted, VerifiedGrader(), samples=3, seed=1, save_every=7, **options)


@pytest.fixture(scope="module")
def uninterrupted(toy, additions, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "rows.jsonl"
    return run(toy, additions, path=path), path.read_bytes()


def test_rows_of_a_run(uninterrupted, additions):
    rows, saved = uninterrupted
    places = [(row["row_id"], sample) for row in additions[0] for sample in range(3)]
    assert [(row["row_id"], row["sample"]) for row in rows] == places
    assert [json.loads(line) for line in saved.splitlines()] == rows
    for row in rows:
        assert row.items() >= VerifiedGrader()(row["response_text"], row).items()
        assert row["category"] == category_of(row["format_reward"], row["answer_reward"])
        assert not row["format_reward"] or (row["response_text"].endswith("</answer>") and row["finished"])
    assert len({row["response_text"] for row in rows[:3]}) > 1, "samples of a problem differ"


def test_interrupted_torn_finished_and_damaged_files(toy, additions, uninterrupted, tmp_path):
    """A line that was cut off while it was written, and what of its save is there, is made again."""
    rows, whole = uninterrupted
    path = tmp_path / "rows.jsonl"
    with pytest.raises(Interrupted):
        run(toy, additions, 3, path=path)
    assert len(path.read_bytes().splitlines()) == 7 * 3
    for content in (path.read_bytes(), whole[:-3000]):
        path.write_bytes(content)
        assert run(toy, additions, path=path) == rows
        assert path.read_bytes() == whole
    assert run(toy, additions, calls=0, path=path) == rows, "nothing is sampled"
    lines = whole.splitlines(keepends=True)
    for content, words in (
        (b"".join(lines[3:17]), ["line 1 is not row_id"]),
        (b"{\n" + b"".join(lines[1:7]), ["is damaged"]),
        (whole * 2, ["holds 72 rows, and this call has 36"]),
    ):
        path.write_bytes(content)
        assert_refused(lambda: run(toy, additions, path=path), "rows.jsonl", *words)


def test_what_cannot_be_graded_is_named(additions):
    def engine(prompts, **keywords):
        return [Generation([1], [2], "</think> <answer> 1 </answer>", True) for _ in prompts]

    rows = [{**additions[0][0], "answer": ""}]
    assert_refused(
        partial(evaluate_reasoning, rows, additions[1][:1], engine, VerifiedGrader()), f"row_id {rows[0]['row_id']}: "
    )
    assert_refused(partial(evaluate_reasoning, rows, [], engine, VerifiedGrader()), "0 prompts for 1 rows")
