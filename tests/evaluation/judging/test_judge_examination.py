"""Examination of a judge: figures worked by hand, the formats of pairs and verdicts, and the command."""

from __future__ import annotations

import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.support.public_evaluation import one_line_error, run_command
from trl_ext.evaluation.judging.score_judges import RewardModelJudge
from trl_ext.evaluation.methods.judge_examination import ask_judge, calibration, examine_judge
from trl_ext.evaluation.statistics.intervals import gain_interval, rate_interval
from trl_ext.evaluation.submissions.labelled_pairs import (
    LabelledPair,
    RecordedVerdict,
    read_labelled_pairs,
    read_recorded_verdicts,
)
from trl_ext.files import write_json_lines

TEXTS = [("long", "b"), ("long", "b"), ("a", "long"), ("aa", "bb")]
PAIRS = [
    LabelledPair(row_id=str(n), prompt=f"question {n}", response_a=a, response_b=b, label=label, kind=kind)
    for n, ((a, b), label, kind) in enumerate(zip(TEXTS, ["A", "B", "B", "tie"], "kkll", strict=True))
]


def verdicts(*answers: tuple, judge: str = "judge", confidence: float | None = None) -> list[RecordedVerdict]:
    """Of each pair, the verdicts with response A and with response B first."""
    return [
        RecordedVerdict(row_id=str(n), judge=judge, shown_first=shown, verdict=verdict, confidence=confidence)
        for n, row in enumerate(answers)
        for shown, verdict in zip("AB", row, strict=True)
    ]


ANSWERS = verdicts(("A", "A"), ("A", "A"), ("A", "B"), ("tie", None))


class TestFigures:
    """Agreements with A first 1, 0, 0, 1 and with B first 1, 0, 1, 1: no verdict and a tie are the same."""

    def test_by_hand(self):
        found = examine_judge(PAIRS, ANSWERS)["all"]
        assert [found[key]["rate"] for key in ("both", "agreed")] == [0.625, 0.5]
        assert (found["agreed"]["n"], found["order_agreement"]["rate"], found["without_verdict"]) == (2, 0.5, 1)
        assert (found["both"]["low"], found["both"]["high"]) == rate_interval([1, 0, 0.5, 1])
        # The first response wins both passes of one pair of four: 5/8 of all passes.
        bias, (low, high) = found["position_bias"], gain_interval(1, 0, 4)
        assert (bias["mean"], bias["low"], bias["high"]) == (0.125, low / 2, high / 2)
        assert found["self_agreement"] is None and found["calibration"] is None

    def test_length_by_hand(self):
        """The longer one is right twice in three, and equal lengths tie. The judge names it 1, 1 and 1/2 times."""
        found = examine_judge(PAIRS, ANSWERS)["all"]
        assert (found["longer"]["rate"], found["minus_longer"]["mean"]) == (0.75, -0.125)
        assert found["length_pull"]["mean"] == pytest.approx(2.5 / 3 - 2 / 3)
        assert (found["longer_right"]["rate"], found["longer_right"]["n"]) == (0.75, 2)
        assert (found["shorter_right"]["rate"], found["shorter_right"]["n"]) == (0, 1)

    def test_kinds_repeats_and_one_order(self):
        kinds = examine_judge(PAIRS, ANSWERS)["kinds"]
        assert {kind: (found["n"], found["both"]["rate"]) for kind, found in kinds.items()} == {
            "k": (2, 0.5),
            "l": (2, 0.75),
        }
        # Three answers A, A, B to one question: one of three comparisons agrees; to the other question two of two.
        more = [*ANSWERS[:2], *verdicts(("A", "A")), *verdicts(("B", "A"))]
        found = examine_judge(PAIRS, more)["all"]
        assert (found["n"], found["self_agreement"]["rate"]) == (1, pytest.approx(4 / 6))
        one = examine_judge(PAIRS, [row for row in ANSWERS if row.shown_first == "A"])["all"]
        assert (one["both"]["rate"], one["agreed"], one["position_bias"]) == (0.5, None, None)
        with pytest.raises(ValueError, match="no verdict on any"):
            examine_judge(PAIRS, [])

    def test_the_longer_one_as_a_judge(self):
        """It has the figures of `longer`, and its pull is what people lack to prefer the longer one always."""
        found = examine_judge(PAIRS, verdicts(("A", "A"), ("A", "A"), ("B", "B"), ("tie", "tie")))["all"]
        assert found["both"] == found["longer"] and found["minus_longer"]["mean"] == 0
        assert found["length_pull"]["mean"] == pytest.approx(1 / 3)

    def test_calibration_by_hand(self):
        """Brier (0.04 + 0.64 + 0.16 + 0.01) / 4; bins off by 1.6 - 1, 1 - 0.6 and 1 - 0.9: 1.1 / 4.

        Of calibrated verdicts the bins are off by 0.8 * 0.4 + 0.2 * 1.6 = 0.64, where the two on one pair are right
        together, and by 0.48 and 0.18.
        """
        found = calibration([0.8, 0.8, 0.6, 0.9], [1, 0, 1, 1], ["a", "a", "b", "c"])
        assert (found["brier"]["mean"], found["ece"]) == pytest.approx((0.2125, 0.275))
        assert found["ece_chance"] == pytest.approx(1.3 / 4, abs=0.02)
        assert (found["correct"], found["n"]) == (0.75, 4)
        told = verdicts(("A", "A"), ("A", "A"), ("A", "B"), ("tie", None), confidence=0.5)
        found = examine_judge(PAIRS, told)["all"]["calibration"]
        assert (found["n"], found["correct"], found["brier"]["mean"]) == (6, 0.5, 0.25)


class TestAsking:
    def test_both_orders(self):
        asked = []

        def first(prompt, response_a, response_b):
            asked.append((prompt[0]["content"], response_a, response_b))
            return "A"

        found, usage = ask_judge(first, PAIRS)
        assert [row.verdict for row in found[:4]] == ["A", "B", "A", "B"] and len(found) == 8
        assert usage.calls == 8 and ("question 2", "long", "a") in asked
        assert examine_judge(PAIRS, found)["all"]["position_bias"]["mean"] == 0.5

    def test_a_reward_model_has_confidence(self):
        """Rewards are lengths: 4 and 1, so 1 / (1 + e^-3) for the longer one."""
        model = SimpleNamespace(score=lambda prompts, texts, **_: torch.tensor([float(len(text)) for text in texts]))
        found, _ = ask_judge(RewardModelJudge(model), PAIRS)
        assert [row.verdict for row in found] == ["A", "A", "A", "A", "B", "B", "tie", "tie"]
        assert {round(row.confidence, 9) for row in found} == {round(1 / (1 + math.exp(-3)), 9), 0.5}


class TestFormats:
    def test_llmbar(self, tmp_path):
        (tmp_path / "Natural").mkdir()
        rows = [{"input": "say", "output_1": "x", "output_2": "y", "label": label} for label in (1, 2)]
        (tmp_path / "Natural" / "dataset.json").write_text(json.dumps(rows))
        pairs = read_labelled_pairs(tmp_path)
        assert [(p.row_id, p.label, p.kind, p.prompt) for p in pairs] == [
            ("natural:0", "A", "natural", "say"),
            ("natural:1", "B", "natural", "say"),
        ]
        told = [{"subset": "natural", "index": 1, "label": "2", "judges": {"one": ["1", None], "two": ["2", "2"]}}]
        write_json_lines(tmp_path / "verdicts.jsonl", told)
        found = read_recorded_verdicts(tmp_path / "verdicts.jsonl", pairs)
        assert [(v.shown_first, v.verdict) for v in found["one"]] == [("A", "A"), ("B", None)]
        assert examine_judge(pairs, found["two"])["all"]["both"]["rate"] == 1

    def test_pandalm(self, tmp_path):
        """A majority of the annotators is the label, and three different ones are a tie."""
        told = [(1, 1, 0), (2, 0, 1), (0, 0, 2)]
        rows = [
            {"idx": n, "cmp_key": "x_y", "instruction": "do", "input": "it" * n, "response1": True, "response2": "b"}
            | {f"annotator{k + 1}": one for k, one in enumerate(row)}
            for n, row in enumerate(told)
        ]
        (tmp_path / "testset-v1.json").write_text(json.dumps(rows))
        (tmp_path / "v.json").write_text(
            json.dumps([{"idx": 0, "gpt_result": "1"}, {"idx": 1, "gpt_result": "garbage"}])
        )
        pairs = read_labelled_pairs(tmp_path)
        assert [pair.label for pair in pairs] == ["A", "tie", "tie"]
        assert (pairs[0].prompt, pairs[1].prompt, pairs[0].response_a) == ("do", "do\n\nit", "True")
        found = read_recorded_verdicts(tmp_path / "v.json", pairs)["gpt-3.5-turbo"]
        assert [(v.row_id, v.verdict) for v in found] == [("0", "A"), ("1", None)]

    @pytest.mark.parametrize(
        "row, message",
        [
            ({"prompt": "p", "response_a": "a", "response_b": "b"}, "row 1: label: Field required"),
            ({"prompt": "p", "response_a": "a", "response_b": "b", "label": "a"}, "row 1: label: Input should be 'A'"),
            (None, "must hold rows, and at least one"),
        ],
    )
    def test_errors(self, tmp_path, row, message):
        write_json_lines(tmp_path / "pairs.jsonl", [] if row is None else [row])
        with pytest.raises(ValueError, match=message):
            read_labelled_pairs(tmp_path / "pairs.jsonl")


class TestCommand:
    @pytest.fixture
    def run(self, capsys, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        write_json_lines(tmp_path / "pairs.jsonl", [pair.model_dump() for pair in PAIRS])
        return partial(run_command, capsys, "examine_judge", "--pairs", "pairs.jsonl")

    def test_a_judge_is_asked_and_its_verdicts_are_read_again(self, run, tmp_path):
        (tmp_path / "mine.py").write_text("def longer(prompt, a, b):\n    return 'A' if len(a) >= len(b) else 'B'\n")
        code, out, err = run("--judge", "mine.py:longer", "--json", "--out", "o.json", "--save_verdicts", "v.jsonl")
        assert code == 0, err
        found = json.loads(out)
        assert json.loads((tmp_path / "o.json").read_text()) == found
        # At equal lengths it names the response shown first, which agrees with a tie by 1/2.
        assert found["judges"]["mine.py:longer"]["all"]["both"]["rate"] == 0.625 and found["usage"]["calls"] == 8
        again = json.loads(run("--verdicts", "v.jsonl", "--json")[1])
        assert again["judges"] == found["judges"]
        _, out, _ = run("--verdicts", "v.jsonl")
        assert "mine.py:longer      4  0.62  [" in out and "where people prefer the longer response: 1.00" in out
        assert "| mine.py:longer | 4 | 0.62" in run("--verdicts", "v.jsonl", "--markdown")[1]

    def test_errors(self, run, tmp_path):
        write_json_lines(tmp_path / "v.jsonl", [row.model_dump() for row in ANSWERS])
        assert "unknown --judge_name 'gpt'" in one_line_error(run("--verdicts", "v.jsonl", "--judge_name", "gpt"))
        write_json_lines(tmp_path / "v.jsonl", [{"row_id": "9", "shown_first": "A", "verdict": "A"}])
        assert "row_id 9: none of the 4 pairs" in one_line_error(run("--verdicts", "v.jsonl"))
        assert "no file nowhere.jsonl" in one_line_error(run("--verdicts", "nowhere.jsonl"))
