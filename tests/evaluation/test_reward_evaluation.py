"""Evaluation of reward models against values worked by hand, and best-of-n against every subset."""

from __future__ import annotations

import itertools
import logging
import math
import random

import pytest
import torch

from tests.support.refusals import assert_refused
from trl_ext.evaluation import best_of_n, reward_metrics, reward_mistakes, true_order_metrics, wilson_interval

# P(the response with the higher score wins), and whether that is the chosen one.
CONFIDENCES = [(0.55, True), (0.62, False), (0.71, True), (0.78, True), (0.88, True), (0.93, True)]


def scores_of(confidences) -> tuple[list[float], list[float]]:
    """Scores with the given confidences: a margin of log(p / (1 - p)), negative where the wrong side is ahead."""
    margins = [math.log(p / (1 - p)) * (1 if correct else -1) for p, correct in confidences]
    return [5 + margin for margin in margins], [5.0] * len(margins)


def test_six_pairs_by_hand():
    """NLL: -(ln .55 + ln .38 + ln .71 + ln .78 + ln .88 + ln .93) / 6
        = (.597837 + .967584 + .342490 + .248461 + .127833 + .072571) / 6 = 2.356776 / 6.
    Brier: (.45^2 + .62^2 + .29^2 + .22^2 + .12^2 + .07^2) / 6
        = (.2025 + .3844 + .0841 + .0484 + .0144 + .0049) / 6 = .7387 / 6.
    ECE, bins of .1: |.55 - 1| + |.62 - 0| + |(.71 + .78) / 2 - 1| * 2 + |.88 - 1| + |.93 - 1|, over 6:
        (.45 + .62 + .51 + .12 + .07) / 6 = 1.77 / 6.
    """
    metrics = reward_metrics(*scores_of(CONFIDENCES), bins=5)
    assert metrics["n"] == 6
    assert metrics["accuracy"] == pytest.approx(5 / 6)
    assert (metrics["low"], metrics["high"]) == wilson_interval(5, 6)
    assert metrics["ties"] == 0
    assert metrics["nll"] == pytest.approx(0.392796, abs=1e-6)
    assert metrics["brier"] == pytest.approx(0.123117, abs=1e-6)
    assert metrics["ece"] == pytest.approx(0.295, abs=1e-6)
    assert [row["n"] for row in metrics["calibration"]] == [1, 1, 2, 1, 1]
    third = metrics["calibration"][2]
    assert (third["low"], third["high"]) == pytest.approx((0.7, 0.8))
    assert (third["confidence"], third["accuracy"]) == pytest.approx((0.745, 1.0))
    # Ten bins of .05, the default, have at most one pair each: the mean of |p - correct| is the same.
    metrics = reward_metrics(*scores_of([(p + 1e-9, correct) for p, correct in CONFIDENCES]))
    assert [row["n"] for row in metrics["calibration"]] == [0, 1, 1, 0, 1, 1, 0, 1, 1, 0]
    empty = metrics["calibration"][0]
    assert (empty["low"], empty["high"], empty["confidence"], empty["accuracy"]) == (0.5, 0.55, None, None)
    assert metrics["ece"] == pytest.approx(0.295, abs=1e-6)


def test_ties_count_as_wrong_and_certainty_is_finite():
    """Margins 0, 800 and -800: log 2, 0 and 800 nats; squares .25, 0 and 1."""
    metrics = reward_metrics(torch.tensor([1.0, 800.0, -400.0]), torch.tensor([1.0, 0.0, 400.0]), bins=10)
    assert (metrics["accuracy"], metrics["ties"]) == (pytest.approx(1 / 3), 1)
    assert metrics["margin"] == pytest.approx(0)
    assert metrics["nll"] == pytest.approx((math.log(2) + 800) / 3)
    assert metrics["brier"] == pytest.approx(1.25 / 3)
    # The tie is half certain and wrong; of the two certain ones half are right.
    assert metrics["ece"] == pytest.approx((0.5 + 2 * 0.5) / 3)


def test_refusals_and_a_warning(caplog):
    for call, words in (
        (lambda: reward_metrics([], []), ["no pairs"]),
        (lambda: reward_metrics([1.0], [1.0, 2.0]), ["1 scores of chosen", "2 of rejected"]),
        (lambda: reward_metrics([1.0, math.nan], [0.0, 0.0]), ["pair 1", "nan and 0.0"]),
        (lambda: reward_metrics([1.0], [0.0], bins=0), ["bins", "at least 1", "0"]),
        (lambda: true_order_metrics([1.0], [0.0], [0.5, 1], [0.5, 1]), ["1 pairs of scores for 2"]),
        (lambda: best_of_n([0.1, 0.2], [0.1, 0.2], 3), ["n must lie between 1", "2, got 3"]),
        (lambda: best_of_n([[0.1, 0.2]], [[0.1]], 1), ["same number of samples"]),
        (lambda: best_of_n([], [], 1), ["one or more prompts"]),
        (lambda: best_of_n([0.1, math.nan], [0.1, 0.2], 1), ["finite"]),
    ):
        assert_refused(call, *words)
    with caplog.at_level(logging.WARNING):
        reward_metrics([1.0, 2.0], [0.0, 3.0])
        assert not caplog.records, "exactly one half is chance"
        reward_metrics([1.0, 2.0, 3.0], [0.0, 3.0, 4.0])
    assert "accuracy 0.333 on 3 pairs is below one half, worse than chance" in caplog.text


def test_true_order():
    """True margins +, +, -, 0: the labels are right on 2 of 3; the scores on pairs 0 and 2, so also on 2 of 3."""
    metrics = true_order_metrics([2, 1, 1, 5], [1, 2, 3, 0], [0.9, 0.8, 0.2, 0.5], [0.1, 0.3, 0.6, 0.5])
    assert metrics == {
        "n": 3,
        "ties": 1,
        "accuracy": pytest.approx(2 / 3),
        "low": wilson_interval(2, 3)[0],
        "high": wilson_interval(2, 3)[1],
        "label_agreement": pytest.approx(2 / 3),
    }
    # A tie in the scores is wrong, too; and where the truth has only ties there is no rate.
    assert true_order_metrics([1.0], [1.0], [0.9], [0.1])["accuracy"] == 0
    assert true_order_metrics([1.0], [0.0], [0.5], [0.5])["accuracy"] is None


def test_best_of_n_by_hand():
    """Sorted by proxy, gold is .2, .8, .6, .3. Weights of 1/6, 2/6, 3/6 on ranks 2 to 4: (.8 + 1.2 + .9) / 6."""
    figures = best_of_n([0.1, 0.9, 0.4, 0.7], [0.2, 0.3, 0.8, 0.6], 2)
    expected = {"gold": 0.483333, "proxy": 0.75, "oracle": 0.65, "regret": 0.166667}
    assert figures == {name: pytest.approx(value, abs=1e-6) for name, value in expected.items()}


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_best_of_n_is_the_mean_over_all_subsets(n):
    """Also with equal proxy scores, of which one is picked at random; and several prompts are averaged."""
    generator = random.Random(n)
    proxy = [[generator.choice([0.0, 0.5, 1.0]) for _ in range(5)] for _ in range(3)]
    gold = [[generator.random() for _ in range(5)] for _ in range(3)]
    picks = []
    for own_proxy, own_gold in zip(proxy, gold, strict=True):
        for subset in itertools.combinations(range(5), n):
            best = max(own_proxy[i] for i in subset)
            tied = [own_gold[i] for i in subset if own_proxy[i] == best]
            picks.append(sum(tied) / len(tied))
    assert best_of_n(proxy, gold, n)["gold"] == pytest.approx(sum(picks) / len(picks))
    assert best_of_n(torch.tensor(proxy), torch.tensor(gold), n)["gold"] == pytest.approx(sum(picks) / len(picks))


@pytest.mark.parametrize(("count", "n"), [(1040, 520), (2048, 1024)])
def test_best_of_n_of_more_subsets_than_a_double_holds(count, n):
    """Gold 0 and 1 in equal parts, the ones on top by proxy: all but the C(N / 2, n) subsets of zeros pick a one.

    Of ranks 1 to N without ties, the best of n is (N + 1) n / (n + 1) on average.
    """
    half = count // 2
    zeros = math.comb(half, n) / math.comb(count, n)
    figures = best_of_n([0.0] * half + [1.0] * half, [0.0] * half + [1.0] * half, n)
    assert figures["gold"] == pytest.approx(1 - zeros, abs=1e-12)
    ranks = list(range(1, count + 1))
    assert best_of_n(ranks, ranks, n)["gold"] == pytest.approx((count + 1) * n / (n + 1), rel=1e-12)


def test_mistakes_come_worst_first():
    rows = [
        {"row_id": name, "prompt": [{"role": "user", "content": f"ask {name}"}], "chosen": f"good {name}"}
        | {"rejected": [{"role": "assistant", "content": f"bad {name}"}]}
        for name in "abcd"
    ]
    chosen, rejected = torch.tensor([1.0, 0.0, 2.0, -1.0]), torch.tensor([0.0, 0.5, 2.0, 1.0])
    mistakes = reward_mistakes(rows, chosen, rejected)
    assert [(row["row_id"], row["margin"]) for row in mistakes] == [("d", -2.0), ("b", -0.5), ("c", 0.0)]
    texts = {"row_id": "d", "prompt_text": "ask d", "chosen_text": "good d", "rejected_text": "bad d"}
    assert mistakes[0] == {**texts, "chosen_score": -1.0, "rejected_score": 1.0, "margin": -2.0}
    assert [row["row_id"] for row in reward_mistakes(rows, chosen, rejected, 1)] == ["d"]
    assert_refused(lambda: reward_mistakes(rows[:3], chosen, rejected), "3 rows for the scores of 4 pairs")
