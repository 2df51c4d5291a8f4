"""Diagnostics of generated text, against values worked by hand."""

import json
import subprocess
import sys

import pytest

from trl_ext.evaluation import diagnose_generations
from trl_ext.rollouts.diagnostics import distinct_ngram_ratio

CAT = "the cat sat on the mat the cat sat"


class TestDistinct:
    @pytest.mark.parametrize("n, expected", [(1, 5 / 9), (2, 6 / 8), (3, 6 / 7), (4, 1.0)])
    def test_one_text(self, n, expected):
        """Nine words, five distinct; of the 8 bigrams "the cat" and "cat sat" recur; of the 7 trigrams one does."""
        assert distinct_ngram_ratio([CAT.split()], n) == pytest.approx(expected, abs=1e-12)

    def test_no_ngram_crosses_texts(self):
        """ "a b" and "c a": two bigrams, both distinct; "b c" is none."""
        assert distinct_ngram_ratio([["a", "b"], ["c", "a"]], 2) == 1.0
        assert distinct_ngram_ratio([["a", "b"], ["a", "b"], ["c"]], 2) == 0.5


def test_one_text():
    result = diagnose_generations([CAT])
    assert result.mean_tokens == 9
    assert result.distinct_1 == pytest.approx(0.555556, abs=1e-6)
    assert result.distinct_2 == 0.75
    assert result.unique_token_ratio == pytest.approx(5 / 9)
    assert result.dominant_token_fraction == pytest.approx(3 / 9)
    assert (result.repetition, result.repetition_ngram) == (0.0, 4)
    assert (result.empty_fraction, result.truncated_fraction) == (0.0, None)
    assert (result.collapsed, result.collapse_reasons) == (False, [])


def test_repetition_counts_four_grams():
    """ "a" seven times has four 4-grams, one distinct: 1 - 1/4. The second text has one 4-gram, the third none."""
    result = diagnose_generations(["a a a a a a a", "a b c d", "a b"])
    assert result.repetition == pytest.approx((0.75 + 0.0) / 2)


def test_pooled_against_per_text():
    """Pooled: 2 distinct of 6 tokens. Per text: 1/4 and 2/2, mean 0.625. Dominant: 1 and 1/2, mean 0.75."""
    result = diagnose_generations(["x x x x", "x y"])
    assert result.distinct_1 == pytest.approx(2 / 6)
    assert result.distinct_2 == pytest.approx(2 / 4)
    assert result.unique_token_ratio == pytest.approx(0.625)
    assert result.dominant_token_fraction == pytest.approx(0.75)
    assert result.mean_tokens == 3


def test_token_ids_replace_words():
    """Ids 5 5 5 6: 2 distinct of 4, the most frequent 3 of 4."""
    result = diagnose_generations(["one word"], token_ids=[[5, 5, 5, 6]])
    assert (result.mean_tokens, result.unique_token_ratio, result.dominant_token_fraction) == (4, 0.5, 0.75)


def test_empty_responses():
    """Two of four are empty; the ratios are over the other two, the mean length over all: (2 + 1) / 4."""
    result = diagnose_generations(["a b", "", " \n", "c"])
    assert (result.empty_fraction, result.mean_tokens) == (0.5, 0.75)
    assert (result.unique_token_ratio, result.dominant_token_fraction) == (1.0, 0.75)


def test_all_empty():
    result = diagnose_generations(["", ""])
    assert (result.collapsed, result.collapse_reasons) == (True, ["no response has a token"])
    assert (result.mean_tokens, result.empty_fraction) == (0.0, 1.0)
    assert result.unique_token_ratio is result.distinct_1 is result.compression_ratio is None


class TestTruncation:
    def test_from_finished(self):
        result = diagnose_generations(["a"] * 4, finished=[True, False, True, True], max_new_tokens=1)
        assert result.truncated_fraction == 0.25

    def test_from_the_limit(self):
        result = diagnose_generations(["a"] * 4, token_ids=[[1, 2, 3], [1, 2], [1], [4, 5, 6]], max_new_tokens=3)
        assert result.truncated_fraction == 0.5


class TestCompression:
    def test_repetitive_text(self):
        """480 bytes into 34, give or take one with the build of zlib."""
        ratio = diagnose_generations(["the cat sat on the mat. "] * 20).compression_ratio
        assert 480 / 36 < ratio < 480 / 32


class TestCollapse:
    def test_one_token_forever(self):
        """ "no" forty times: unique 1/40 = 0.025, dominant 1."""
        result = diagnose_generations(["no " * 40] * 3)
        assert result.collapsed
        assert result.collapse_reasons == [
            "mean unique-token ratio 0.025 is below 0.1",
            "mean dominant-token fraction 1.000 is above 0.5",
        ]

    def test_the_thresholds_themselves_are_fine(self):
        """Two ids in turn, 20 tokens: unique 2/20 = 0.1 and dominant 10/20 = 0.5, neither beyond its threshold."""
        alternating = [0, 1] * 10
        result = diagnose_generations(["t"], token_ids=[alternating])
        assert (result.unique_token_ratio, result.dominant_token_fraction) == (0.1, 0.5)
        assert not result.collapsed


def test_to_dict_is_json():
    result = json.loads(json.dumps(diagnose_generations(["a b", "c"]).to_dict()))
    assert (result["n"], result["mean_tokens"], result["repetition"]) == (2, 1.5, None)


def test_invalid_input():
    with pytest.raises(ValueError, match="responses: must be a non-empty list"):
        diagnose_generations([])
    with pytest.raises(ValueError, match="responses: must be a non-empty list"):
        diagnose_generations("a text")
    with pytest.raises(ValueError, match="token_ids: has 1 entries for 2 responses"):
        diagnose_generations(["a", "b"], token_ids=[[1]])
    with pytest.raises(ValueError, match="finished: has 3 entries for 1 responses"):
        diagnose_generations(["a"], finished=[True] * 3)


def test_win_rate_is_the_function_whatever_was_imported_first():
    code = "import trl_ext.evaluation.statistics.win_rate\nfrom trl_ext.evaluation import win_rate\nwin_rate([])"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
