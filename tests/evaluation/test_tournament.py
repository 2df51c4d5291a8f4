"""Tournaments: wins counted by hand, and ratings."""

import math

import pytest

from tests.support.public_evaluation import plan, response_rows, write_assets
from trl_ext.evaluation.methods.tournament import run_tournament
from trl_ext.evaluation.submissions.assets import load_base, load_prompts
from trl_ext.evaluation.submissions.candidates import known_score_judge
from trl_ext.evaluation.submissions.rows import Response


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


def test_a_tournament_needs_the_base(systems):
    prompts, responses = systems
    with pytest.raises(ValueError, match="needs the system 'base' and at least one other, got good"):
        run_tournament(known_score_judge(prompts), prompts, {"good": responses["good"]})


class TestTournament:
    def test_matches_by_hand(self, systems):
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

    def test_one_policy_in_closed_form(self, systems):
        """Good wins 9 of 10 with ties as halves: 400 log10(9) = 381.697 above the base, which expects 0.1."""
        prompts, responses = systems
        two = {name: responses[name] for name in ("base", "good")}
        result = run_tournament(known_score_judge(prompts), prompts, two)
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

    def test_losing_all_needs_virtual_draws(self, systems):
        """Bad loses all 10; with a draw half each way 10.5 to 0.5: 400 log10(21) below the base."""
        prompts, responses = systems
        two = {name: responses[name] for name in ("base", "bad")}
        result = run_tournament(known_score_judge(prompts), prompts, two)
        assert result.ratings.virtual_draws
        bad = next(row for row in result.table() if row["name"] == "bad")
        assert bad["rating"] == pytest.approx(1000 - 400 * math.log10(21), abs=1e-6)
        # Every sample is the same ten losses, and yet these are no certainty: Wilson's bounds of 0.5 wins in 11 are
        # 0.004764 and 0.321448, which is 400 log10(0.321448 / 0.678552) = -129.79 points.
        assert bad["low"] < bad["rating"] < bad["high"] == pytest.approx(1000 - 129.79, abs=1.5)

    def test_unjudged_rows_are_counted(self, systems):
        from trl_ext.evaluation import JudgeError

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
