"""Tournaments: ratings against closed forms and values worked by hand, and matches counted by hand."""

import math
from functools import partial

import numpy
import pytest

from tests.support.public_evaluation import plan, response_rows, write_assets
from tests.support.refusals import assert_refused
from trl_ext.evaluation import JudgeError
from trl_ext.evaluation.methods.tournament import run_tournament
from trl_ext.evaluation.statistics.ratings import bradley_terry, expected_score, ratings_with_intervals
from trl_ext.evaluation.submissions.assets import load_base, load_prompts
from trl_ext.evaluation.submissions.candidates import known_score_judge
from trl_ext.evaluation.submissions.rows import Response

# ---- Ratings ----


@pytest.mark.parametrize(
    ("wins", "anchor", "expected", "virtual"),
    [
        # 7 to 3: 400 log10(7 / 3) points apart; 2 wins, a loss and 3 ties as halves: 3.5 to 2.5.
        ([[0, 7], [3, 0]], 1, [1000 + 400 * math.log10(7 / 3), 1000], False),
        ([[0, 3.5], [2.5, 0]], 1, [1000 + 400 * math.log10(3.5 / 2.5), 1000], False),
        ([[0, 7], [3, 0]], None, [1000 + 200 * math.log10(7 / 3), 1000 - 200 * math.log10(7 / 3)], False),
        ([[0, 7, 8], [3, 0, 6], [2, 4, 0]], None, [1128.650175, 974.098285, 897.251540], False),
        ([[0, 7, 8], [3, 0, 6], [2, 4, 0]], 2, [1231.398634, 1076.846745, 1000.0], False),
        # 10 to 0 becomes 10.5 to 0.5.
        ([[0, 10], [0, 0]], 1, [1000 + 400 * math.log10(21), 1000], True),
        # A cycle: each wins all against one, and yet the ratings are finite and equal.
        ([[0, 5, 0], [0, 0, 5], [5, 0, 0]], None, [1000] * 3, False),
    ],
)
def test_ratings_by_hand(wins, anchor, expected, virtual):
    ratings, had_virtual = bradley_terry(wins, anchor=anchor)
    assert ratings == pytest.approx(expected, abs=1e-5) and had_virtual == virtual
    if len(wins) == 2 and not virtual:
        share = wins[0][1] / (wins[0][1] + wins[1][0])
        assert expected_score(ratings[0] - ratings[1]) == pytest.approx(share)


def test_expected_wins_are_the_observed_ones():
    """What maximal likelihood means here, on many problems at once: sum_j n_ij P(i beats j) = wins of i."""
    generator = numpy.random.default_rng(0)
    wins = generator.integers(1, 30, size=(5, 4, 4)).astype(float) + 0.5
    for table, ratings in zip(wins, bradley_terry(wins)[0], strict=True):
        for i in range(4):
            others = [j for j in range(4) if j != i]
            expected = sum((table[i, j] + table[j, i]) * expected_score(ratings[i] - ratings[j]) for j in others)
            assert expected == pytest.approx(sum(table[i, j] for j in others), abs=1e-6)


def test_groups_that_win_all_need_virtual_draws_and_groups_that_never_met_are_refused():
    """A and B beat C whenever they meet, though both lose too: C cannot reach them."""
    assert bradley_terry([[0, 3, 4], [2, 0, 4], [0, 0, 0]])[1]
    assert_refused(lambda: bradley_terry([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]), "never met")
    assert_refused(lambda: bradley_terry([[0, 1, 2], [1, 0, 2]]), "square table")


def test_intervals_of_two_systems():
    """70 of 100: each resampled count k of wins gives 400 log10(k / (100 - k)), so the interval is that of a
    bootstrap of the win rate, carried over. Rows without judgement are no matches."""
    credits = [1.0] * 70 + [0.0] * 30
    result = ratings_with_intervals([credits], [(0, 1)], 2, anchor=1)
    counts = numpy.random.default_rng(0).multinomial(100, [0.01] * 100, size=2000)
    rates = counts @ numpy.array(credits) / 100
    points = [1000 + 400 * math.log10(rate / (1 - rate)) for rate in numpy.percentile(rates, [2.5, 97.5])]
    assert (result.low[0], result.high[0]) == pytest.approx(tuple(points), abs=1e-6)
    assert result.ratings[0] == pytest.approx(1000 + 400 * math.log10(7 / 3))
    assert (result.low[1], result.high[1]) == (1000.0, 1000.0)
    result = ratings_with_intervals([[1.0, None, 0.0, 1.0, 1.0, None]], [(0, 1)], 2, anchor=1)
    assert result.ratings[0] - 1000 == pytest.approx(400 * math.log10(3))


@pytest.mark.parametrize(
    "credit, n, rate, low, high",
    [
        # Ten wins and the virtual draw are 10.5 of 11: odds of 21.
        (1.0, 10, 10.5 / 11, 0.678552, 0.995236),
        (0.0, 10, 0.5 / 11, 0.004764, 0.321448),
        (1.0, 1, 1.5 / 2, 0.197867, 0.973323),
        # Ties are even without one; the interval is that of 5.5 of 11.
        (0.5, 10, 0.5, 0.245622, 0.754378),
    ],
)
def test_comparisons_that_all_have_one_outcome(credit, n, rate, low, high):
    """Wilson's bounds, in points: the interval of ten wins out of ten has a width.

    Of 10.5 in 11: centre (0.954545 + 0.174612) / 1.349224 = 0.836894 and half-width 1.959964
    sqrt(0.954545 x 0.045455 / 11 + 3.841459 / 484) / 1.349224 = 0.158342.
    """
    result = ratings_with_intervals([[credit] * n], [(0, 1)], 2, anchor=1)
    expected = [1000 + 400 * math.log10(share / (1 - share)) for share in (rate, low, high)]
    assert result.ratings[0] == pytest.approx(expected[0], abs=1e-6)
    # The middle 95% of 2000 draws ends within a point or two of them.
    assert (result.low[0], result.high[0]) == pytest.approx(expected[1:], abs=1.5)


def test_a_base_that_loses_everything_makes_all_ratings_uncertain():
    """The two that beat it 10 to 0 are 7 to 3 against one another.

    What is uncertain is the base, which is fixed at 1000. One match of 10 to 0 leaves 797 points open; each of the
    two hangs on two such, its own and through the other, which halve the variance: 797 / sqrt(2) = 564. The mixed
    match alone would leave less than 340.
    """
    mixed = [1.0] * 7 + [0.0] * 3
    result = ratings_with_intervals([[0.0] * 10, [0.0] * 10, mixed], [(0, 1), (0, 2), (1, 2)], 3, anchor=0)
    for system in (1, 2):
        assert result.high[system] - result.low[system] > 564
        assert result.low[system] < result.ratings[system] < result.high[system]


# ---- Matches ----


@pytest.fixture
def systems(tmp_path):
    """Prompts, and the base with three policies: 8 wins and 2 ties, 5 wins and 5 losses, and 10 losses against it."""
    assets = write_assets(tmp_path)
    prompts = load_prompts(assets["prompts_jsonl"])

    def responses(kinds):
        return [
            Response(row["row_id"], row["response_text"], row["generated_num_tokens"], 256)
            for row in response_rows(kinds)
        ]

    return prompts, {
        "base": load_base(prompts, assets["base_jsonl"]),
        "good": responses(plan(win=8, tie=2)),
        "even": responses(plan(win=5, loss=5)),
        "bad": responses(plan(loss=10)),
    }


def test_matches_by_hand(systems):
    """Good against even: even wins nothing that good has not won too: on 5 rows both are right, on 3 only good is,
    on the last 2 good has the base's answer and even a wrong one: (5 x 1/2 + 5) / 10 = 0.75.
    Even against bad: 5 wins, 5 ties between wrong answers: 0.75."""
    prompts, responses = systems
    result = run_tournament(known_score_judge(prompts), prompts, responses)
    rates = {(match["first"], match["second"]): match["rate"] for match in result.matches}
    assert rates == {
        ("base", "good"): pytest.approx(1 - (8 + 1) / 10),
        ("base", "even"): pytest.approx(0.5),
        ("base", "bad"): 1.0,
        ("good", "even"): pytest.approx(0.75),
        ("good", "bad"): 1.0,
        ("even", "bad"): pytest.approx(0.75),
    }
    assert all(match["n"] == 10 and match["errors"] == 0 for match in result.matches)
    # In a round robin ratings rank by points: 0.9 + 0.75 + 1, 0.1 + 0.5 + 1, 0.5 + 0.25 + 0.75, and 0.25.
    assert [row["name"] for row in result.table()] == ["good", "base", "even", "bad"]
    base = result.names.index("base")
    assert (result.ratings.ratings[base], result.ratings.low[base], result.ratings.high[base]) == (1000,) * 3
    assert not result.ratings.virtual_draws, "bad draws with even, so it can be reached"


def test_one_policy_in_closed_form(systems):
    """Good wins 9 of 10 with ties as halves: 400 log10(9) = 381.697 above the base, which expects 0.1."""
    prompts, responses = systems
    judge, two = known_score_judge(prompts), {name: responses[name] for name in ("base", "good")}
    result = run_tournament(judge, prompts, two)
    row = result.table()[0]
    assert row["rating"] == pytest.approx(1000 + 400 * math.log10(9), abs=1e-6)
    assert row["expected_against_base"] == pytest.approx(0.9)
    assert row["low"] < row["rating"] < row["high"]
    # The base is fixed, so the expected score's interval is the rating's, through 1 / (1 + 10^(-points / 400)).
    for end in ("low", "high"):
        odds = 10 ** ((row[end] - 1000) / 400)
        assert row[f"expected_{end}"] == pytest.approx(odds / (1 + odds))
    assert row["expected_low"] < 0.9 < row["expected_high"]
    base = result.table()[1]
    assert base["expected_against_base"] is base["expected_low"] is base["expected_high"] is None
    # Bad loses all 10; with a draw half each way 10.5 to 0.5.
    result = run_tournament(judge, prompts, {name: responses[name] for name in ("base", "bad")})
    assert result.ratings.virtual_draws
    assert result.table()[1]["rating"] == pytest.approx(1000 - 400 * math.log10(21), abs=1e-6)
    asked = partial(run_tournament, judge, prompts, {"good": responses["good"]})
    assert_refused(asked, "needs the system 'base'", "got good")


def test_unjudged_rows_are_counted(systems):

    prompts, responses = systems
    known = known_score_judge(prompts)

    def fails_on_axes(prompt, a, b):
        if "axe" in prompt[0]["content"]:
            raise JudgeError("no answer")
        return known.judge(prompt, a, b)

    two = {name: responses[name] for name in ("base", "good")}
    (match,) = run_tournament(fails_on_axes, prompts, two, max_error_fraction=0.1).matches
    # Without the row of the axe, seven wins are left beside the two ties.
    assert (match["n"], match["errors"], match["rate"]) == (9, 1, pytest.approx(1 / 9))
