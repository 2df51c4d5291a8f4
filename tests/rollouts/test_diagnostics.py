"""Diagnostics of generated text, against values worked by hand."""

import json
import subprocess
import sys

import pytest

from trl_ext.evaluation import diagnose_generations
from trl_ext.rollouts.diagnostics import distinct_ngram_ratio

CAT = "the cat sat on the mat the cat sat"


def test_no_ngram_crosses_texts():
    """ "a b" and "c a": two bigrams, both distinct; "b c" is none."""
    assert distinct_ngram_ratio([["a", "b"], ["c", "a"]], 2) == 1.0
    assert distinct_ngram_ratio([["a", "b"], ["a", "b"], ["c"]], 2) == 0.5


COLLAPSED = ["mean unique-token ratio 0.025 is below 0.1", "mean dominant-token fraction 1.000 is above 0.5"]
CASES = {
    "one text": (
        ([CAT],),
        {"mean_tokens": 9, "distinct_1": 5 / 9, "distinct_2": 0.75, "unique_token_ratio": 5 / 9}
        | {"dominant_token_fraction": 3 / 9, "repetition": 0, "repetition_ngram": 4, "empty_fraction": 0}
        | {"truncated_fraction": None, "collapsed": False, "collapse_reasons": []},
    ),
    # "a" seven times has four 4-grams, one distinct: 1 - 1/4. The second text has one 4-gram, the third none.
    "repetition": ((["a a a a a a a", "a b c d", "a b"],), {"repetition": (0.75 + 0) / 2}),
    # Pooled: 2 distinct of 6 tokens. Per text: 1/4 and 2/2, mean 0.625. Dominant: 1 and 1/2, mean 0.75.
    "pooled and per text": (
        (["x x x x", "x y"],),
        {"distinct_1": 2 / 6, "distinct_2": 2 / 4, "unique_token_ratio": 0.625, "dominant_token_fraction": 0.75}
        | {"mean_tokens": 3},
    ),
    # Ids 5 5 5 6: 2 distinct of 4, the most frequent 3 of 4.
    "token ids": (
        (["one word"], [[5, 5, 5, 6]]),
        {"mean_tokens": 4, "unique_token_ratio": 0.5, "dominant_token_fraction": 0.75},
    ),
    # Two of four are empty; the ratios are over the other two, the mean length over all: (2 + 1) / 4.
    "empty responses": (
        (["a b", "", " \n", "c"],),
        {"empty_fraction": 0.5, "mean_tokens": 0.75, "unique_token_ratio": 1, "dominant_token_fraction": 0.75},
    ),
    "all empty": (
        (["", ""],),
        {"collapsed": True, "collapse_reasons": ["no response has a token"], "mean_tokens": 0, "empty_fraction": 1}
        | {"unique_token_ratio": None, "distinct_1": None, "compression_ratio": None},
    ),
    # "no" forty times: unique 1/40 = 0.025, dominant 1.
    "one token forever": ((["no " * 40] * 3,), {"collapsed": True, "collapse_reasons": COLLAPSED}),
    # Two ids in turn, 20 tokens: unique 2/20 = 0.1 and dominant 10/20 = 0.5, neither beyond its threshold.
    "the thresholds themselves": (
        (["t"], [[0, 1] * 10]),
        {"unique_token_ratio": 0.1, "dominant_token_fraction": 0.5, "collapsed": False},
    ),
    "truncated, by finished": ((["a"] * 4, None, [True, False, True, True], 1), {"truncated_fraction": 0.25}),
    "truncated, by the limit": ((["a"] * 4, [[1, 2, 3], [1], [2], [4, 5, 6]], None, 3), {"truncated_fraction": 0.5}),
    "JSON": ((["a b", "c"],), {"n": 2, "mean_tokens": 1.5, "repetition": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name):
    given, expected = CASES[name]
    given = dict(zip(("responses", "token_ids", "finished", "max_new_tokens"), given, strict=False))
    found = json.loads(json.dumps(diagnose_generations(given.pop("responses"), **given).to_dict()))
    assert {key: found[key] for key in expected} == {
        key: pytest.approx(value, abs=1e-12) if isinstance(value, float) else value for key, value in expected.items()
    }


def test_compression_of_repetitive_text():
    """480 bytes into 34, give or take one with the build of zlib."""
    ratio = diagnose_generations(["the cat sat on the mat. "] * 20).compression_ratio
    assert 480 / 36 < ratio < 480 / 32


@pytest.mark.parametrize(
    ("responses", "given", "phrases"),
    [
        ([], {}, "responses: must be a non-empty list"),
        ("a text", {}, "responses: must be a non-empty list"),
        (["a", "b"], {"token_ids": [[1]]}, "token_ids: has 1 entries for 2 responses"),
        (["a"], {"finished": [True] * 3}, "finished: has 3 entries for 1 responses"),
    ],
)
def test_refusals(responses, given, phrases):
    with pytest.raises(ValueError, match=phrases):
        diagnose_generations(responses, **given)


def test_win_rate_is_the_function_whatever_was_imported_first():
    code = "import trl_ext.evaluation.statistics.win_rate\nfrom trl_ext.evaluation import win_rate\nwin_rate([])"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
