"""The benchmark of stopping early: its samples have the rate that it says, and its table and results."""

from __future__ import annotations

import json
import sys

import numpy
import pytest

from benchmarks import fewer_verdicts
from benchmarks.judge_bias import PANDALM
from trl_ext.files import write_json_lines

# Response A wins both orders, B does, and the one shown first does.
TABLE = numpy.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])


def test_samples_have_the_rate_and_the_judges_bias():
    """With a third of the pairs undecided, a rate of 0.7 takes 0.5 + 0.2 * 3 / 2 of wins among the others."""
    drawn = fewer_verdicts.sample(TABLE, 0.7, 60_000, numpy.random.default_rng(0))
    assert drawn.mean() == pytest.approx(0.7, abs=0.01)
    assert ((drawn == 1).all(axis=1)).mean() == pytest.approx(0.8 * 2 / 3, abs=0.01)
    # Where the orders disagree, the candidate wins if it is shown first.
    assert (drawn[drawn[:, 0] != drawn[:, 1]] == [0, 1]).all()
    assert fewer_verdicts.sample(TABLE, 0.9, 10, numpy.random.default_rng(0)) is None
    biased = fewer_verdicts.sample(numpy.array([[1.0, 0.5], [0.5, 0.0]]), 0.75, 10, numpy.random.default_rng(0))
    assert (biased == [0.5, 1]).all()


def test_table_and_results(tmp_path, monkeypatch, capsys):
    (tmp_path / "llmbar" / "natural").mkdir(parents=True)
    pairs = [{"input": "q", "output_1": "a", "output_2": "b", "label": 1}] * 3
    (tmp_path / "llmbar" / "natural" / "dataset.json").write_text(json.dumps(pairs))
    told = [["1", "1"], ["2", "2"], ["1", "2"]]
    rows = [{"subset": "natural", "index": n, "label": "1", "judges": {"j": row}} for n, row in enumerate(told)]
    write_json_lines(tmp_path / "llmbar" / "verdicts.jsonl", rows)
    (tmp_path / "pandalm").mkdir()
    # On four prompts, x and y against z: 1, 1, 0, 0 and 1, 0, 0, 0; and x against y, which is not needed.
    outcomes = {"x_z": "1122", "y_z": "1222", "x_y": "1111"}
    rows = [
        {"idx": f"{key}{n}", "cmp_key": key, "instruction": str(n), "input": "", "gpt_result": one}
        for key, told in outcomes.items()
        for n, one in enumerate(told)
    ]
    for name in PANDALM:
        (tmp_path / name).write_text(json.dumps(rows))
    # Against z: differences 0, 1, 0, 0 have variance 3/16, and 1/4 + 3/16 unpaired. The others have a constant.
    found = fewer_verdicts.paired(tmp_path)
    assert (found["min"], found["max"], found["comparisons"]) == (pytest.approx(3 / 7), 1, 3)
    flags = ["--data", tmp_path, "--folder", tmp_path / "out", "--samples", 3, "--rows", 40, "--rates", 0.5, 0.8]
    monkeypatch.setattr(sys, "argv", ["fewer_verdicts", *map(str, flags)])
    fewer_verdicts.main()
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [row["rate"] for row in results] == [0.5, 0.8] and 0 < results[1]["judges"]["j"]["share"] <= 1
    assert "paired: " in capsys.readouterr().out
