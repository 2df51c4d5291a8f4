"""Methods compared over prompts and seeds, and tournaments: closed forms, tables, brute force, simulated studies."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy
import pytest
from scipy.stats import t

from tests.support.files import write_rows
from tests.support.public_evaluation import plan, response_rows, write_assets
from tests.support.refusals import assert_refused
from trl_ext.evaluation import JudgeError
from trl_ext.evaluation.comparing.runs import compare_runs, read_method_run
from trl_ext.evaluation.comparing.tournament import run_tournament
from trl_ext.evaluation.statistics.crossed import (
    compare_with_baseline,
    crossed_mean,
    error_of_mean,
    holm,
    mean_squares,
    mixed_critical_value,
    verdict,
)
from trl_ext.evaluation.statistics.ratings import bradley_terry, expected_score, ratings_with_intervals
from trl_ext.evaluation.submissions.assets import Response, load_base, load_prompts
from trl_ext.evaluation.submissions.candidates import known_score_judge
from trl_ext.files import write_json


class Variances(NamedTuple):
    """Variance components of a value: between prompts, between seeds, and the rest."""

    prompt: float
    seed: float
    rest: float


def studies(variances: Variances, prompts: int, seeds: int, count: int, effect: float = 0.0) -> numpy.ndarray:
    """Simulated differences with normal effects, [count, P, S]."""
    rng = numpy.random.default_rng(prompts + seeds)
    return (
        effect
        + math.sqrt(variances.prompt) * rng.standard_normal((count, prompts, 1))
        + math.sqrt(variances.seed) * rng.standard_normal((count, 1, seeds))
        + math.sqrt(variances.rest) * rng.standard_normal((count, prompts, seeds))
    )


def rejects(values: numpy.ndarray, alpha: float = 0.05) -> numpy.ndarray:
    """In which of the studies [count, P, S] the test of a mean of 0 rejects, [count]."""
    sizes = values.shape[-2:]
    error, share = error_of_mean(*mean_squares(values), *sizes)
    return abs(values.mean((-2, -1))) > mixed_critical_value(share, *sizes, alpha) * error


def rejected(values: numpy.ndarray) -> float:
    """In which share of them."""
    return float(rejects(values).mean())


# ---- Means ----


def test_a_mean_worked_by_hand():
    """Values 1, 3 / 2, 8: mean 3.5; rows 2 and 5, columns 1.5 and 5.5; what is left is 1, -1 / -1, 1.

    Mean squares: prompts 2 (1.5^2 + 1.5^2) / 1 = 9, seeds 2 (2^2 + 2^2) / 1 = 16, rest 4 / 1 = 4. The variance of the
    mean is (9 + 16 - 4) / 4 = 5.25, and the seeds' share 16 / 25; both t have one degree of freedom, of 12.7062.
    """
    found = crossed_mean([[1, 3], [2, 8]])
    assert [float(square) for square in mean_squares(numpy.array([[1.0, 3], [2, 8]]))] == [9, 16, 4]
    assert (found.mean, found.prompts, found.seeds) == (3.5, 2, 2)
    assert found.standard_error == pytest.approx(math.sqrt(5.25))
    assert found.seed_share == pytest.approx(0.64)
    margin = 12.7062 * math.sqrt(5.25)
    assert (found.low, found.high) == pytest.approx((3.5 - margin, 3.5 + margin), rel=1e-5)


def test_an_interval_of_two_degrees_worked_by_hand():
    """Values 0, 2, 4 / 2, 0, 4 / 1, 4, 7 / 1, 2, 1: rows 2, 2, 4, 4/3, columns 1, 2, 4, mean 7/3.

    Mean squares: prompts 3 (1/9 + 1/9 + 25/9 + 1) / 3 = 4, seeds 4 (16/9 + 1/9 + 25/9) / 2 = 28/3. The squares add up
    to 112 - 12 x 49/9 = 140/3, of which prompts take 12 and seeds 56/3, so that the rest has 16 / 6 = 8/3. The
    variance is (4 + 28/3 - 8/3) / 12 = 8/9; the seeds' share is (28/3) / (40/3) = 0.7 of t with 2 degrees, 4.302653,
    and 0.3 of t with 3, 3.182446: 3.966591.
    """
    values = [[0, 2, 4], [2, 0, 4], [1, 4, 7], [1, 2, 1]]
    found = crossed_mean(values)
    assert (found.standard_error**2, found.seed_share) == pytest.approx((8 / 9, 0.7))
    margin = 3.966591 * math.sqrt(8 / 9)
    assert (found.low, found.high) == pytest.approx((7 / 3 - margin, 7 / 3 + margin), abs=1e-5)
    # Moved so that its interval ends at 0, the mean has the p-value of that interval.
    compared = compare_with_baseline({"m": (values, numpy.full((4, 3), found.low))})["m"]
    assert compared.p_value == pytest.approx(0.05, abs=1e-6)


def test_means_that_are_all_alike_leave_the_error_of_the_rest():
    """Values 0.1, 0.2, 0.3 in a Latin square: prompts and seeds have the mean 0.2 each, and what is left has a mean
    square of 6 x 0.1^2 / 4 = 0.015. The standard error is sqrt(0.015 / 9), so that t is 0.2 / 0.0408 = sqrt(24); for
    the 2 degrees of either sample P(|T| > sqrt(24)) = 1 - sqrt(24 / 26). It had been 0 but for rounding, and p too."""
    found = crossed_mean([[0.1, 0.2, 0.3], [0.2, 0.3, 0.1], [0.3, 0.1, 0.2]])
    assert found.standard_error == pytest.approx(math.sqrt(0.015 / 9))
    compared = compare_with_baseline({"m": ([[0.1, 0.2, 0.3], [0.2, 0.3, 0.1], [0.3, 0.1, 0.2]], numpy.zeros((3, 3)))})
    assert compared["m"].p_value == pytest.approx(1 - math.sqrt(24 / 26), abs=1e-4)


@pytest.mark.parametrize("values", [[[1.0], [2.0], [5.0]], [[1.0, 2.0, 3.0]], [[0.25] * 2] * 2])
def test_what_has_no_interval(values):
    """One seed, one prompt, or values without spread; one seed cannot tell."""
    found = crossed_mean(values)
    assert found.mean == pytest.approx(numpy.mean(values))
    assert (found.low, found.high, found.standard_error, found.seed_share) == (None, None, None, None)
    compared = compare_with_baseline({"m": (values, numpy.zeros_like(values))})["m"]
    assert compared.verdict == "indistinguishable"


@pytest.mark.parametrize(
    ("seeds", "variances"),
    [
        *itertools.product(
            (3, 5),
            (
                Variances(0, 0, 1),
                Variances(1, 0, 1),
                Variances(0.1, 0.01, 1),
                Variances(0.1, 0.1, 1),
                Variances(1, 0.1, 1),
                Variances(0, 0.1, 1),
                Variances(1, 0.3, 0.1),
            ),
        ),
        *((2, variances) for variances in (Variances(1, 0, 1), Variances(0, 0.1, 1), Variances(1, 0.3, 0.1))),
    ],
)
def test_intervals_cover_the_truth(variances, seeds):
    """4,000 studies: 94 to 99.4% with 3 seeds and 94.5 to 99% with 5, +- 3 standard errors; 2 seeds cover nearly all
    without an effect of seeds, and about 95% with one."""
    covered = 1 - rejected(studies(variances, 50 if seeds == 2 else 40, seeds, 4000))
    low, high = {2: (0.93, 0.995), 3: (0.94 - 0.011, 0.994 + 0.006), 5: (0.945 - 0.011, 0.99 + 0.006)}[seeds]
    assert low < covered < high, covered


# ---- Many comparisons ----


def test_holm_worked_by_hand():
    """0.01 x 3 = 0.03; 0.03 x 2 = 0.06; 0.04 x 1 = 0.04, which may not be under 0.06."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_is_the_closed_test_of_bonferroni():
    """Independently: an adjusted p is the largest, over all sets that the test is in, of size x least p of the set."""
    rng = numpy.random.default_rng(0)
    for _ in range(50):
        p = (rng.uniform(size=4) ** 3).tolist()
        sets = [s for size in range(1, 5) for s in itertools.combinations(range(4), size)]
        brute = [max(min(1, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(4)]
        assert holm(p) == pytest.approx(brute)


@pytest.mark.parametrize(("seeds", "most"), [(2, 0.09), (3, 0.065), (5, 0.05)])
def test_how_often_one_of_eleven_methods_is_called_where_all_are_alike(seeds, most):
    """1,500 studies at Holm's first step, 0.05 / 11, where seeds bring ten times the variance that 100 prompts bring:
    about what docs/comparing.md says, + three standard errors; Satterthwaite's degrees of freedom fail this."""
    variances = Variances(0.5, 10 * 0.5 / 100 * seeds, 0.5)
    rng = numpy.random.default_rng(seeds)

    def values():
        parts = zip(
            (variances.prompt, variances.seed, variances.rest), ((100, 1), (1, seeds), (100, seeds)), strict=True
        )
        return sum(math.sqrt(variance) * rng.standard_normal((1500, *shape)) for variance, shape in parts)

    baseline, called = values(), numpy.zeros(1500, dtype=bool)
    for _ in range(11):
        called |= rejects(values() - baseline, 0.05 / 11)
    assert called.mean() < most + 3 * math.sqrt(most * (1 - most) / 1500), called.mean()


def test_the_verdict():
    assert [verdict(0.1, 0.05), verdict(-0.1, 0.01), verdict(0.1, 0.051)] == ["higher", "lower", "indistinguishable"]
    assert verdict(0.0, 0.0) == "indistinguishable"


def test_methods_against_a_baseline():
    """Prompts and seeds move all methods by the same large amounts: only the paired differences show who is better.

    The baseline's own interval is about 40 times as wide as the difference from `same` is certain.
    """
    rng = numpy.random.default_rng(3)
    base = rng.normal(size=(200, 1)) + 0.2 * rng.normal(size=(1, 5)) + 0.02 * rng.normal(size=(200, 5))
    noise = [0.02 * rng.normal(size=(200, 5)) for _ in range(3)]
    methods = {"up": (base + 0.05 + noise[0], base), "down": (base - 0.05 + noise[1], base)}
    methods |= {"same": (base + noise[2], base), "itself": (base, base)}
    found = compare_with_baseline(methods)
    assert {name: one.verdict for name, one in found.items()} == {
        "up": "higher",
        "down": "lower",
        "same": "indistinguishable",
        "itself": "indistinguishable",
    }
    own = crossed_mean(base)
    assert own.high - own.low > 40 * (found["same"].difference.high - found["same"].difference.low)
    up = found["up"]
    assert up.difference.low < 0.05 < up.difference.high
    distance = up.difference.mean / up.difference.standard_error
    assert 2 * t.sf(distance, 199) < up.p_value < 2 * t.sf(distance, 4)
    assert mixed_critical_value(up.difference.seed_share, 200, 5, up.p_value) == pytest.approx(distance, rel=1e-5)
    assert up.adjusted_p_value == pytest.approx(holm([one.p_value for one in found.values()])[0])
    assert found["itself"].p_value == 1.0


def test_a_prompt_without_a_value_in_one_run_is_left_out_for_all(tmp_path):
    """A method that fails on hard prompts does not win by it. Values that are not finite are none: two prompts remain,
    with the means (0.9 + 0.7) / 2 and (0.8 + 0.6) / 2. A prompt's place in the file does not matter."""
    runs = []
    for name, scores in (("dpo", (0.1, 0.9, 0.5, 0.7)), ("kto", (None, 0.8, math.nan, 0.6))):
        about = {"objective": name, "model": "toy", "dataset": "toy", "seed": 0}
        write_json(tmp_path / name / "results.json", {"run": about})
        rows = [{"row_id": f"p{place}", "score": score} for place, score in enumerate(scores)]
        write_rows(tmp_path / name / "generations.jsonl", rows if name == "dpo" else rows[::-1])
        runs.append(read_method_run(tmp_path / name, name, 0))
    found = compare_runs(runs, "dpo")
    assert found["prompts"] == 2 and found["notes"][-1].startswith("2 prompts lack a value")
    assert [one["mean"] for one in found["methods"]] == pytest.approx([0.8, 0.7])
    assert found["comparisons"][0]["difference"]["mean"] == pytest.approx(-0.1)


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
            Response(row["row_id"], row["response_text"], row["generated_num_tokens"], True)
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
    rates = {(match["first"], match["second"]): match["rate"] for match in result["matches"]}
    assert rates == {
        ("base", "good"): pytest.approx(1 - (8 + 1) / 10),
        ("base", "even"): pytest.approx(0.5),
        ("base", "bad"): 1.0,
        ("good", "even"): pytest.approx(0.75),
        ("good", "bad"): 1.0,
        ("even", "bad"): pytest.approx(0.75),
    }
    assert all(match["n"] == 10 and match["errors"] == 0 for match in result["matches"])
    # In a round robin ratings rank by points: 0.9 + 0.75 + 1, 0.1 + 0.5 + 1, 0.5 + 0.25 + 0.75, and 0.25.
    assert [row["name"] for row in result["ratings"]] == ["good", "base", "even", "bad"]
    assert [result["ratings"][1][name] for name in ("rating", "low", "high")] == [1000] * 3
    assert not result["virtual_draws"], "bad draws with even, so it can be reached"


def test_one_policy_in_closed_form(systems):
    """Good wins 9 of 10 with ties as halves: 400 log10(9) = 381.697 above the base, which expects 0.1."""
    prompts, responses = systems
    judge, two = known_score_judge(prompts), {name: responses[name] for name in ("base", "good")}
    result = run_tournament(judge, prompts, two)
    row, base = result["ratings"]
    assert row["rating"] == pytest.approx(1000 + 400 * math.log10(9), abs=1e-6)
    assert row["expected_against_base"] == pytest.approx(0.9)
    assert row["low"] < row["rating"] < row["high"]
    # The base is fixed, so the expected score's interval is the rating's, through 1 / (1 + 10^(-points / 400)).
    for end in ("low", "high"):
        odds = 10 ** ((row[end] - 1000) / 400)
        assert row[f"expected_{end}"] == pytest.approx(odds / (1 + odds))
    assert row["expected_low"] < 0.9 < row["expected_high"]
    assert base["expected_against_base"] is base["expected_low"] is base["expected_high"] is None
    # Bad loses all 10; with a draw half each way 10.5 to 0.5.
    result = run_tournament(judge, prompts, {name: responses[name] for name in ("base", "bad")})
    assert result["virtual_draws"]
    assert result["ratings"][1]["rating"] == pytest.approx(1000 - 400 * math.log10(21), abs=1e-6)


def test_unjudged_rows_are_counted(systems):
    prompts, responses = systems
    known = known_score_judge(prompts)

    def fails_on_axes(prompt, a, b):
        if "axe" in prompt[0]["content"]:
            raise JudgeError("no answer")
        return known.judge(prompt, a, b)

    two = {name: responses[name] for name in ("base", "good")}
    (match,) = run_tournament(fails_on_axes, prompts, two, max_error_fraction=0.1)["matches"]
    # Without the row of the axe, seven wins are left beside the two ties.
    assert (match["n"], match["errors"], match["rate"]) == (9, 1, pytest.approx(1 / 9))
