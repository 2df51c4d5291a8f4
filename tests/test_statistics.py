"""Paired comparisons, chances at a threshold, length control and ratings, against values worked by hand."""

import math
import random

import numpy
import pytest

from trl_ext.evaluation import PairOutcome, wilson_interval, win_rate
from trl_ext.evaluation.bootstrap import (
    bootstrap_interval,
    chance_below,
    chance_mean_below,
    mcnemar,
    paired_bootstrap,
    resample_counts,
    row_credits,
)
from trl_ext.evaluation.length_control import (
    fit_logistic,
    length_controlled_win_rate,
    length_term,
    predicted_rates,
)
from trl_ext.evaluation.ratings import bradley_terry, expected_score, ratings_with_intervals

C, B, T = "candidate", "base", "tie"


def outcomes_of(*verdicts):
    return [PairOutcome(str(number), *verdict) for number, verdict in enumerate(verdicts)]


def settled(*wins):
    """Outcomes on which both orders agree: 1 for a win, 0 for a loss."""
    return outcomes_of(*((C, C) if win else (B, B) for win in wins))


class TestRowCredits:
    def test_each_kind_of_row(self):
        rows = [
            *outcomes_of((C, C), (B, B), (C, B), (T, T)),
            PairOutcome("4", C, C, usable=False),
            PairOutcome("5", None, None, error="timeout"),
            PairOutcome("6", C, C, empty=True),
        ]
        assert row_credits(rows, "agreed") == [1.0, 0.0, None, None, None, None, None]
        assert row_credits(rows, "half") == [1.0, 0.0, 0.5, 0.5, 1.0, None, 0.0]

    def test_unknown_rule(self):
        with pytest.raises(ValueError, match="rule must be one of agreed, half, got 'third'"):
            row_credits([], "third")


class TestBootstrap:
    def test_counts_are_samples_of_n(self):
        counts = resample_counts(7, 1000, seed=3)
        assert counts.shape == (1000, 7)
        assert (counts.sum(axis=1) == 7).all()
        # Each prompt is in a sample once on average, with variance 1 - 1/7: the mean of 1000 is within 4 errors.
        assert numpy.abs(counts.mean(axis=0) - 1).max() < 4 * math.sqrt((1 - 1 / 7) / 1000)

    @pytest.mark.parametrize("rule", ["agreed", "half"])
    def test_agrees_with_win_rate_of_the_repeated_rows(self, rule):
        """Every sample written out as a list of outcomes and given to `win_rate`, denominators and all."""
        generator = random.Random(1)
        rows = outcomes_of(*(tuple(generator.choices((C, B, T), (5, 3, 2), k=2)) for _ in range(20)))
        rows[3] = PairOutcome("3", None, None, error="timeout")
        rates = []
        for counts in resample_counts(20, 1000, seed=0):
            sample = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
            rates.append(getattr(win_rate(sample), rule).rate)
        expected = numpy.percentile(rates, [2.5, 97.5])
        assert bootstrap_interval(rows, rule, draws=1000) == pytest.approx(tuple(expected), abs=1e-12)

    @pytest.mark.parametrize("wins, n", [(60, 80), (87, 128), (200, 400)])
    def test_near_wilson_on_independent_rows(self, wins, n):
        low, high = bootstrap_interval(settled(*([1] * wins + [0] * (n - wins))), draws=4000)
        assert (low, high) == pytest.approx(wilson_interval(wins, n), abs=0.02)

    def test_a_fixed_seed(self):
        rows = settled(1, 0, 1, 1, 0)
        assert bootstrap_interval(rows) == bootstrap_interval(rows)

    def test_too_few_draws(self):
        with pytest.raises(ValueError, match="draws must be at least 1000"):
            bootstrap_interval(settled(1, 0), draws=999)

    def test_no_prompts(self):
        with pytest.raises(ValueError, match="no prompts"):
            bootstrap_interval([])


class TestPairedBootstrap:
    def test_the_same_candidate_twice(self):
        rows = settled(1, 0, 1, 1, 0, 1)
        result = paired_bootstrap(rows, rows)
        assert (result.difference, result.low, result.high) == (0.0, 0.0, 0.0)
        assert result.mcnemar.p_value == 1.0

    def test_what_prompts_share_cancels(self):
        """100 prompts, easy or hard for both: 60 both win, 30 both lose, 8 only the first, 2 only the second.

        The difference is (68 - 62) / 100 = 0.06. Per prompt it is 1 on 8, -1 on 2 and 0 elsewhere: its variance is
        0.10 - 0.06^2 = 0.0964 and its standard error sqrt(0.0964 / 100) = 0.0310, so the interval is about
        0.06 -+ 1.96 x 0.0310 = (-0.001, 0.121); two independent rates would have an error of 0.067.
        """
        first = settled(*([1] * 60 + [0] * 30 + [1] * 8 + [0] * 2))
        second = settled(*([1] * 60 + [0] * 30 + [0] * 8 + [1] * 2))
        result = paired_bootstrap(first, second, draws=20_000)
        assert result.difference == pytest.approx(0.06)
        assert (result.low, result.high) == pytest.approx((-0.001, 0.121), abs=0.011)
        assert (result.mcnemar.only_first, result.mcnemar.only_second) == (8, 2)
        # (|8 - 2| - 1)^2 / 10 = 2.5
        assert result.mcnemar.statistic == pytest.approx(2.5)

    def test_order_of_rows_does_not_matter(self):
        first, second = settled(1, 0, 1, 1), settled(0, 0, 1, 0)
        assert paired_bootstrap(first, second) == paired_bootstrap(first, second[::-1])

    def test_denominators_are_recomputed(self):
        """The second candidate settles one row of four and wins it: 1 / 1 against 2 / 4."""
        first = settled(1, 1, 0, 0)
        second = outcomes_of((C, C), (C, B), (C, B), (C, B))
        result = paired_bootstrap(first, second)
        assert (result.first, result.second) == (0.5, 1.0)
        assert paired_bootstrap(first, second, "half").second == pytest.approx((1 + 3 * 0.5) / 4)

    def test_other_rows(self):
        with pytest.raises(ValueError, match="row_id 1: only one of the two"):
            paired_bootstrap(settled(1, 0), settled(1))

    def test_repeated_rows(self):
        rows = [PairOutcome("a", C, C)] * 2
        with pytest.raises(ValueError, match="the first candidate's outcomes repeat"):
            paired_bootstrap(rows, rows)


class TestMcNemar:
    def test_published_value(self):
        """(|10 - 3| - 1)^2 / 13 = 36 / 13; the 95% point of chi-squared with one degree is 1.959964^2 = 3.841459."""
        assert mcnemar(10, 3).statistic == pytest.approx(2.769231, abs=1e-6)
        assert mcnemar(10, 3).p_value > 0.05
        # |b - c| - 1 = 1.959964 sqrt(b + c) gives p = 0.05: b + c = 100 and b - c = 20.59964.
        b, c = (100 + 20.59964) / 2, (100 - 20.59964) / 2
        assert mcnemar(b, c).p_value == pytest.approx(0.05, abs=1e-6)

    def test_equal_counts_say_nothing(self):
        assert mcnemar(4, 4).statistic == 0.0
        assert mcnemar(0, 0).p_value == 1.0

    def test_negative(self):
        with pytest.raises(ValueError, match="must not be negative"):
            mcnemar(-1, 2)


class TestChanceBelow:
    def test_by_hand(self):
        """X ~ Binomial(4, 3/4), threshold 3/4: P(X < 3) = 1 - 4 (27/64)(1/4) - 81/256 = 1 - 108/256 - 81/256."""
        assert chance_below(0.75, 4, 0.75) == pytest.approx(67 / 256, abs=1e-12)

    def test_reaching_the_threshold_is_not_under_it(self):
        """With n = 25 and threshold 0.68, 17 wins suffice: 17 / 25 is the threshold itself."""
        expected = sum(math.comb(25, k) * 0.5**25 for k in range(17))
        assert chance_below(0.5, 25, 0.68) == pytest.approx(expected, abs=1e-12)

    def test_a_threshold_that_rounding_lifts(self):
        """0.07 x 100 is 7.000000000000001 in floating point, and 7 / 100 reaches 0.07 all the same."""
        expected = sum(math.comb(100, k) for k in range(7)) / 2**100
        assert chance_below(0.5, 100, 0.07) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("n, wins, threshold", [(128, 87, 0.68), (128, 96, 0.72), (400, 250, 0.6), (3, 2, 0.5)])
    def test_against_exact_fractions(self, n, wins, threshold):
        from fractions import Fraction

        rate, limit = Fraction(wins, n), Fraction(str(threshold))
        expected = sum(
            math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(n + 1) if Fraction(k, n) < limit
        )
        assert chance_below(wins / n, n, threshold) == pytest.approx(float(expected), abs=1e-9)

    def test_certain_rates(self):
        assert chance_below(1.0, 10, 0.99) == 0.0
        assert chance_below(0.0, 10, 0.01) == 1.0
        assert chance_below(0.0, 10, 0.0) == 0.0

    def test_against_sampling(self):
        draws = numpy.random.default_rng(0).binomial(128, 0.7, size=200_000) / 128
        assert chance_below(0.7, 128, 0.68) == pytest.approx((draws < 0.68).mean(), abs=0.005)

    def test_with_half_wins_by_hand(self):
        """1, 1, 1/2, 0: mean 0.625, deviations^2 0.140625 x 2 + 0.015625 + 0.390625 = 0.6875, error
        sqrt(0.6875 / 3 / 4) = 0.239357; the threshold 0.75 is 0.522233 errors above, P(Z < 0.522233) = 0.699244."""
        assert chance_mean_below([1, 1, 0.5, 0], 0.75) == pytest.approx(0.699244, abs=1e-5)

    def test_all_equal(self):
        assert chance_mean_below([0.5, 0.5], 0.5) == 0.0
        assert chance_mean_below([0.5, 0.5], 0.51) == 1.0

    def test_out_of_range(self):
        with pytest.raises(ValueError, match="threshold must lie between 0 and 1, got 68"):
            chance_below(0.7, 10, 68)
        with pytest.raises(ValueError, match="n must be at least 1"):
            chance_below(0.7, 0, 0.5)


class TestLengthControl:
    def test_prediction_by_hand(self):
        """theta 0.3, psi 0.5, gamma -1, 0, 1: logits -0.2, 0.3, 0.8, whose mean rate is 0.571528.

        With phi 0.8 and tanh of 1, 0.5 and 2 in the length term: 0.696769.
        """
        gamma, tanh = numpy.array([-1.0, 0.0, 1.0]), numpy.tanh([1.0, 0.5, 2.0])
        coefficients = numpy.array([[0.3, 0.8, 0.5]])
        equal = predicted_rates(numpy.stack([numpy.ones(3), numpy.zeros(3), gamma], axis=1), coefficients)
        assert equal[0] == pytest.approx([0.450166, 0.574443, 0.689974], abs=1e-6)
        assert equal.mean() == pytest.approx(0.571528, abs=1e-6)
        raw = predicted_rates(numpy.stack([numpy.ones(3), tanh, gamma], axis=1), coefficients)
        assert raw.mean() == pytest.approx(0.696769, abs=1e-6)

    def test_length_term(self):
        """Differences 10, 20, 30 have the sample deviation 10."""
        assert length_term(numpy.array([10.0, 20.0, 30.0])) == pytest.approx(numpy.tanh([1.0, 2.0, 3.0]))

    @pytest.mark.parametrize("with_difficulty", [False, True])
    def test_recovers_a_planted_effect(self, with_difficulty):
        """4000 comparisons, theta 0.2, length coefficient 1, difficulty coefficient 0.5, gap 300 -+ 400 characters.

        The rate without the effect of length is known; the raw rate is more than 5 points above it.
        """
        generator = numpy.random.default_rng(0)
        gamma, gap = generator.normal(size=4000), generator.normal(300, 400, 4000)
        true = 1 / (1 + numpy.exp(-(0.2 + 0.5 * gamma)))
        shown = 1 / (1 + numpy.exp(-(0.2 + numpy.tanh(gap / gap.std(ddof=1)) + 0.5 * gamma)))
        wins = (generator.random(4000) < shown).astype(float)
        result = length_controlled_win_rate(
            wins.tolist(),
            1000 + gap,
            [1000] * 4000,
            difficulty=gamma if with_difficulty else None,
            draws=1000,
        )
        assert result.raw - true.mean() > 0.05
        assert abs(result.rate - true.mean()) < 0.02
        assert result.low < true.mean() < result.high
        assert result.length_coefficient == pytest.approx(1.0, abs=0.15)
        assert result.mean_length == pytest.approx(1300, abs=25)
        assert result.base_mean_length == 1000
        assert result.difficulty is with_difficulty
        assert ("without its difficulty" in result.note) is not with_difficulty

    def test_fit_is_where_the_posterior_is_highest(self):
        """The gradient of the log-likelihood with its prior, written out anew, vanishes by finite differences."""
        generator = numpy.random.default_rng(2)
        design = numpy.stack([numpy.ones(40), generator.normal(size=40)], axis=1)
        labels, weights = generator.choice([0.0, 0.5, 1.0], size=40), generator.integers(0, 3, size=40).astype(float)

        def log_posterior(theta):
            total = -sum(value**2 for value in theta) / (2 * 10.0**2)
            for row, label, weight in zip(design, labels, weights, strict=True):
                logit = row @ theta
                total += weight * (label * -math.log1p(math.exp(-logit)) + (1 - label) * -math.log1p(math.exp(logit)))
            return total

        (fitted,) = fit_logistic(design, labels, weights[None])
        for direction in numpy.eye(2):
            slope = (log_posterior(fitted + 1e-5 * direction) - log_posterior(fitted - 1e-5 * direction)) / 2e-5
            assert slope == pytest.approx(0.0, abs=1e-5)

    def test_without_differences_it_is_the_raw_rate(self):
        """75 wins of 100: the prior alone keeps the rate from being 0.75, and moves it by less than 0.001."""
        result = length_controlled_win_rate([1.0] * 75 + [0.0] * 25, [20] * 100, [20] * 100)
        assert result.rate == pytest.approx(0.75, abs=0.001)
        assert result.length_coefficient is None

    def test_equal_differences_cannot_be_told_from_quality(self):
        assert length_controlled_win_rate([1.0, 0.0], [30, 31], [20, 21]) is None

    def test_all_won_is_finite(self):
        lengths = list(range(100, 200))
        result = length_controlled_win_rate([1.0] * 100, lengths, [150] * 100)
        assert 0.99 < result.rate < 1.0

    def test_rows_without_judgement_are_left_out(self):
        whole = length_controlled_win_rate([1.0, 0.0, 0.5, 1.0], [5, 9, 7, 6], [6, 6, 6, 8])
        gaps = length_controlled_win_rate([1.0, None, 0.0, 0.5, 1.0], [5, 99, 9, 7, 6], [6, 6, 6, 6, 8])
        assert gaps == whole
        assert length_controlled_win_rate([None], [5], [6]) is None

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="lengths: has 1 entries for 2"):
            length_controlled_win_rate([1.0, 0.0], [1], [1, 2])
        with pytest.raises(ValueError, match="credits must lie between 0 and 1"):
            length_controlled_win_rate([2.0, 0.0], [1, 2], [1, 3])


class TestBradleyTerry:
    def test_two_systems_in_closed_form(self):
        """7 to 3: 400 log10(7 / 3) = 147.190714 points apart."""
        ratings, virtual = bradley_terry([[0, 7], [3, 0]])
        assert ratings[0] - ratings[1] == pytest.approx(400 * math.log10(7 / 3), abs=1e-9)
        assert ratings.mean() == pytest.approx(1000)
        assert not virtual

    def test_three_systems(self):
        wins = [[0, 7, 8], [3, 0, 6], [2, 4, 0]]
        ratings, _ = bradley_terry(wins)
        assert ratings - 1000 == pytest.approx([128.650175, -25.901715, -102.748460], abs=1e-5)
        anchored, _ = bradley_terry(wins, anchor=2)
        assert anchored == pytest.approx([1231.398634, 1076.846745, 1000.0], abs=1e-5)

    def test_expected_wins_are_the_observed_ones(self):
        """What maximal likelihood means here, on many problems at once: sum_j n_ij P(i beats j) = wins of i."""
        generator = numpy.random.default_rng(0)
        wins = generator.integers(1, 30, size=(5, 4, 4)).astype(float) + 0.5
        for table, ratings in zip(wins, bradley_terry(wins)[0], strict=True):
            for i in range(4):
                others = [j for j in range(4) if j != i]
                expected = sum((table[i, j] + table[j, i]) * expected_score(ratings[i] - ratings[j]) for j in others)
                assert expected == pytest.approx(sum(table[i, j] for j in others), abs=1e-6)

    def test_ties_as_halves_are_duplicate_rows(self):
        """2 wins, 1 loss and 3 ties: 3.5 to 2.5, as 7 to 5 of twelve half games."""
        ratings, _ = bradley_terry([[0, 3.5], [2.5, 0]])
        assert ratings[0] - ratings[1] == pytest.approx(400 * math.log10(7 / 5))

    def test_a_system_that_wins_all_gets_a_virtual_draw(self):
        """10 to 0 becomes 10.5 to 0.5: 400 log10(21)."""
        ratings, virtual = bradley_terry([[0, 10], [0, 0]])
        assert virtual
        assert ratings[0] - ratings[1] == pytest.approx(400 * math.log10(21), abs=1e-6)

    def test_a_cycle_needs_none(self):
        """A beats B, B beats C, C beats A: each wins all against one, and yet the ratings are finite and equal."""
        ratings, virtual = bradley_terry([[0, 5, 0], [0, 0, 5], [5, 0, 0]])
        assert not virtual
        assert ratings == pytest.approx([1000] * 3)

    def test_a_group_that_wins_all_needs_them(self):
        """A and B beat C whenever they meet, though both lose too: C cannot reach them."""
        _, virtual = bradley_terry([[0, 3, 4], [2, 0, 4], [0, 0, 0]])
        assert virtual

    def test_systems_that_never_met(self):
        with pytest.raises(ValueError, match="never met"):
            bradley_terry([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])

    def test_no_table(self):
        with pytest.raises(ValueError, match="square table"):
            bradley_terry([[0, 1, 2], [1, 0, 2]])

    def test_expected_score(self):
        assert expected_score(200) == pytest.approx(0.759747, abs=1e-6)
        assert expected_score(0) == 0.5

    def test_intervals_of_two_systems(self):
        """70 of 100: each resampled count k of wins gives 400 log10(k / (100 - k)), so the interval is that of the
        win rate's own bootstrap, carried over."""
        credits = [1.0] * 70 + [0.0] * 30
        result = ratings_with_intervals([credits], [(0, 1)], 2, anchor=1)
        rates = resample_counts(100) @ numpy.array(credits) / 100
        points = [1000 + 400 * math.log10(rate / (1 - rate)) for rate in numpy.percentile(rates, [2.5, 97.5])]
        assert (result.low[0], result.high[0]) == pytest.approx(tuple(points), abs=1e-6)
        assert result.ratings[0] == pytest.approx(1000 + 400 * math.log10(7 / 3))
        assert (result.low[1], result.high[1]) == (1000.0, 1000.0)

    def test_rows_without_judgement_are_no_matches(self):
        result = ratings_with_intervals([[1.0, None, 0.0, 1.0, 1.0, None]], [(0, 1)], 2, anchor=1)
        assert result.ratings[0] - 1000 == pytest.approx(400 * math.log10(3))
