"""Best-of-n: what is picked, the curve over n, resumed sampling, data to fine-tune on; diagnostics of responses."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from tests.support.files import assistant, user
from tests.support.recipes import read
from trl_ext.evaluation import best_of_n_curve, diagnose_generations
from trl_ext.rollouts import Generation, best_of_n, demonstrations, kl_bound, pick_best
from trl_ext.rollouts.diagnostics import distinct_ngram_ratio

ROWS = [
    {"row_id": name, "prompt": [user(text)], "kind": kind}
    for name, text, kind in (("a", "first", "x"), ("b", "second", "y"))
]


def rows_of(rewards, scores=None):
    scores = rewards if scores is None else scores
    return [{"reward": reward, "score": known} for reward, known in zip(rewards, scores, strict=True)]


class Engine:
    """Texts that tell prompt, seed and place; calls are counted."""

    def __init__(self, fail_at: int | None = None, texts=None):
        self.calls, self.fail_at, self.texts = 0, fail_at, texts

    def __call__(self, prompts, *, seed=0, progress=None):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        found = [f"{prompt[-1]['content']} {seed} {place}" for place, prompt in enumerate(prompts)]
        found = found if self.texts is None else self.texts[: len(prompts)]
        return [Generation([1], [*range(len(text))], text, not text.startswith("cut")) for text in found]


def reward(prompts, completions, completion_ids, finished, kind, **columns):
    """A number that depends on the text alone."""
    assert len(prompts) == len(kind) == len(finished) == len(completion_ids) == len(completions)
    return [random.Random(completion[0]["content"]).random() for completion in completions]


# ---- Picking ----


def test_the_first_of_equals_is_picked_and_the_unscorable_never():
    rows = [{"reward": value, "sample": place} for place, value in enumerate([None, 1.0, 2.0, 2.0, None])]
    assert pick_best(rows, 1) is None
    assert [pick_best(rows, n)["sample"] for n in (2, 3, 4, 5)] == [1, 2, 2, 2]
    assert pick_best(rows)["sample"] == 2


def test_kl_bound():
    """log n - (n - 1) / n, and above what it is for four outcomes that are alike: 0.173980 for n = 2."""
    expected = {1: 0, 2: 0.193147, 4: 0.636294, 8: 1.204442, 16: 1.835089, 64: 3.174508, 128: 3.859843}
    for n, value in expected.items():
        assert kl_bound(n) == pytest.approx(value, abs=1e-6)
    # The best of 2 of 4 equally likely outcomes is of rank i with probability (i^2 - (i-1)^2) / 16.
    chances = [(i**2 - (i - 1) ** 2) / 16 for i in range(1, 5)]
    exact = sum(chance * math.log(4 * chance) for chance in chances)
    assert exact == pytest.approx(0.173980, abs=1e-6) and exact < kl_bound(2)


# ---- The curve ----


def test_the_curve_worked_by_hand():
    """One prompt: proxy .1 .9 .4 .7 with gold .2 .3 .8 .6; gold of the pick is highest at n = 2 and falls to .3."""
    found = best_of_n_curve([rows_of([0.1, 0.9, 0.4, 0.7], [0.2, 0.3, 0.8, 0.6])], [4, 1, 2, 3])
    values = {
        row["n"]: [row[name]["mean"] for name in ("gold", "proxy", "oracle", "regret")] for row in found["curve"]
    }
    assert list(values) == [1, 2, 3, 4]
    assert values[1] == pytest.approx([0.475, 0.525, 0.475, 0])
    assert values[2] == pytest.approx([0.483333, 0.75, 0.65, 0.166667], abs=1e-6)
    assert values[3] == pytest.approx([0.375, 0.85, 0.75, 0.375])
    assert values[4] == pytest.approx([0.3, 0.9, 0.8, 0.5])
    assert found["peak"]["n"] == 2
    assert found["peak"]["change"]["mean"] == pytest.approx(0.3 - 0.483333, abs=1e-6)
    assert found["curve"][3]["gain"]["mean"] == pytest.approx(0.3 - 0.475)


def test_the_curve_is_the_mean_over_all_choices():
    """Against picking the best of every subset, for several prompts, with unscorable samples left out."""
    numbers = random.Random(3)
    samples = [rows_of([numbers.random() for _ in range(5)], [numbers.random() for _ in range(5)]) for _ in range(6)]
    samples[0].insert(2, {"reward": None, "score": 9.0})
    found = best_of_n_curve(samples, [1, 3, 5])
    for row in found["curve"]:
        means = []
        for group in samples:
            known = [entry for entry in group if entry["reward"] is not None]
            picks = [pick_best(choice) for choice in itertools.combinations(known, row["n"])]
            means.append([sum(pick[name] for pick in picks) / len(picks) for name in ("reward", "score")])
        proxy, gold = (sum(values) / len(values) for values in zip(*means, strict=True))
        assert row["proxy"]["mean"] == pytest.approx(proxy) and row["gold"]["mean"] == pytest.approx(gold)
        assert row["gold"]["low"] <= gold <= row["gold"]["high"]
    assert found["n_prompts"] == 6


def test_prompts_without_enough_rewards_are_left_out_of_every_n():
    """Without gold scores there is the proxy alone."""
    found = best_of_n_curve([[{"reward": 1.0}, {"reward": 2.0}], [{"reward": 5.0}, {"reward": None}]], [1, 2])
    assert (found["n_prompts"], found["left_out"]) == (1, 1)
    assert [row["proxy"]["mean"] for row in found["curve"]] == [1.5, 2.0]
    assert found["peak"] is None and set(found["curve"][0]) == {"n", "kl_bound", "proxy"}


# ---- Sampling ----


def test_samples_are_scored():
    result = best_of_n(ROWS, Engine(), reward, 4, seed=1)
    found = [[(row["row_id"], row["sample"]) for row in group] for group in result]
    assert found == [[(name, sample) for sample in range(4)] for name in "ab"]
    for row in itertools.chain(*result):
        assert row["reward"] == random.Random(row["response_text"]).random()
        assert row["generated_num_tokens"] == len(row["response_text"])
    assert result[1][0]["prompt_text"] == "second"


@pytest.mark.parametrize("cut", [0, 5])
def test_an_interrupted_sampling_goes_on(cut, tmp_path):
    """Parts of 3 of 8 responses: after a break in the third, or a cut within the second, the rest is done."""
    straight = best_of_n(ROWS, Engine(), reward, 4, seed=1, path=tmp_path / "straight.jsonl", save_every=3)
    seeds = [row["response_text"].split()[-2] for row in itertools.chain(*straight)]
    assert len(set(seeds)) == 3, "equal prompts of two parts must differ"
    path = tmp_path / "broken.jsonl"
    with pytest.raises(KeyboardInterrupt):
        best_of_n(ROWS, Engine(fail_at=3), reward, 4, seed=1, path=path, save_every=3)
    assert len(read(tmp_path, "broken.jsonl")) == 6
    path.write_bytes(path.read_bytes()[: -cut or None])
    engine = Engine()
    result = best_of_n(ROWS, engine, reward, 4, seed=1, path=path, save_every=3)
    assert engine.calls == (2 if cut else 1)
    assert result == straight
    assert path.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()
    other = [{**row, "row_id": row["row_id"] * 2} for row in ROWS]
    with pytest.raises(ValueError, match="line 1 is not row_id aa, sample 0"):
        best_of_n(other, Engine(), reward, 4, path=path, save_every=3)


def test_a_file_is_of_one_setting(tmp_path):
    """Other or unknown settings are refused; where the model lies and the batch size may change."""
    path, settings = tmp_path / "rows.jsonl", {"model": "m", "model_sha256": "a" * 64, "stop": ("x",)}
    straight = best_of_n(ROWS, Engine(), reward, 4, path=path, settings=settings)
    free = {"model": "elsewhere", "batch_size": 8}
    assert best_of_n(ROWS, Engine(fail_at=1), reward, 4, path=path, settings=settings | free) == straight
    for other, words in (
        ({"stop": ("y",)}, "made with stop"),
        ({"model_sha256": "b" * 64}, "made with model_sha256 aa"),
    ):
        with pytest.raises(FileExistsError, match=words):
            best_of_n(ROWS, Engine(), reward, 4, path=path, settings=settings | other)
    (tmp_path / "rows.settings.json").unlink()
    with pytest.raises(FileExistsError, match="rows.jsonl"):
        best_of_n(ROWS, Engine(), reward, 4, path=path, settings=settings)


def test_the_penalty_for_truncated_responses_and_rewards_that_are_no_numbers():
    """By hand: 3 - 1 < 2.5, so that the whole response is picked; what has no reward gets none."""
    engine = Engine(texts=["cut", "whole", "cut again", "so", "so"])
    values = [3.0, 2.5, None, math.nan, math.inf]
    [rows] = best_of_n(ROWS[:1], engine, lambda **columns: values, 5, missing_eos_penalty=1.0)
    assert [row["reward"] for row in rows] == [2.0, 2.5, None, None, None]
    assert pick_best(rows)["response_text"] == "whole"


# ---- Data to fine-tune on ----


def sampled(texts, rewards) -> list[dict]:
    return [
        {"sample": place, "response_text": text, "reward": value, "finished": not text.startswith("cut")}
        for place, (text, value) in enumerate(zip(texts, rewards, strict=True))
    ]


def test_what_is_kept():
    """Of a: d is the best whole one; truncated, empty and unscored ones are left out."""
    result = [
        sampled(["b", "cut off", "b", "d", " ", "e"], [2.0, 9.0, 3.0, 4.0, 8.0, None]),
        sampled(["x", "y", "z", "cut", "cut", "cut"], [1.0, 1.0, 0.5, 2, 2, 2]),
    ]

    first, second = demonstrations(result, ROWS)
    placed = {"reward": 4.0, "sample": 3, "best_of": 6}
    assert first == {"row_id": "a", "prompt": ROWS[0]["prompt"], "completion": [assistant("d")], **placed}
    assert (second["row_id"], second["completion"], second["sample"]) == ("b", [assistant("x")], 0)
    plain = [{**prompt, "prompt": "text"} for prompt in ROWS]
    assert demonstrations(result, plain)[0]["completion"] == "d"


# ---- Diagnostics ----


def test_no_ngram_crosses_texts():
    """ "a b" and "c a": two bigrams, both distinct; "b c" is none."""
    assert distinct_ngram_ratio([["a", "b"], ["c", "a"]], 2) == 1.0
    assert distinct_ngram_ratio([["a", "b"], ["a", "b"], ["c"]], 2) == 0.5


COLLAPSED = ["mean unique-token ratio 0.025 is below 0.1", "mean dominant-token fraction 1.000 is above 0.5"]
CASES = {
    "one text": (
        (["the cat sat on the mat the cat sat"],),
        {"mean_tokens": 9, "distinct_1": 5 / 9, "distinct_2": 0.75, "unique_token_ratio": 5 / 9}
        | {"dominant_token_fraction": 3 / 9, "repetition": 0, "empty_fraction": 0}
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
    "truncated": ((["a"] * 4, None, [True, False, True, True]), {"truncated_fraction": 0.25}),
    "JSON": ((["a b", "c"],), {"n": 2, "mean_tokens": 1.5, "repetition": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name):
    given, expected = CASES[name]
    given = dict(zip(("responses", "token_ids", "finished"), given, strict=False))
    found = json.loads(json.dumps(diagnose_generations(given.pop("responses"), **given)))
    assert {key: found[key] for key in expected} == {
        key: pytest.approx(value, abs=1e-12) if isinstance(value, float) else value for key, value in expected.items()
    }


# ---- Refusals ----

PICKED = [{"reward": 1.0}, {"reward": 2.0}]


@pytest.mark.parametrize(
    ("function", "given", "options", "phrases"),
    [
        (pick_best, (PICKED, 3), {}, "n .*number of responses, 2, got 3"),
        (best_of_n_curve, ([PICKED], [3]), {}, "no prompt has 3 responses with a reward"),
        (best_of_n, (ROWS, Engine(), reward, 0), {}, "samples must be at least 1, got 0"),
        (best_of_n, ([], Engine(), reward, 2), {}, "0 prompts for 0 rows"),
        (best_of_n, (ROWS[:1], Engine(), lambda **columns: [1.0], 4), {}, "for each of 4: 1 values"),
    ],
)
def test_refusals(function, given, options, phrases):
    with pytest.raises(ValueError, match=phrases):
        function(*given, **options)
