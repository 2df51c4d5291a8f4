"""The benchmark of human labels beside a judge: its reading of public verdicts, and its figures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import judge_bias
from tests.support import REPOSITORY
from trl_ext.files import write_json_lines


@pytest.fixture
def data(tmp_path) -> Path:
    """Three pairs with two judges, one of which gives no verdict once, and two pairs with annotators."""
    verdicts = [("1", ["1", "1"], ["2", "1"]), ("2", ["2", "1"], [None, "2"]), ("1", ["1", "1"], ["2", "2"])]
    rows = [{"label": label, "judges": {"a": a, "b": b}} for label, a, b in verdicts]
    write_json_lines(tmp_path / "llmbar" / "verdicts.jsonl", rows)
    (tmp_path / "pandalm").mkdir()
    people = [{"idx": i, "annotator1": 1, "annotator2": i, "annotator3": 2} for i in (0, 1)]
    judged = [{"idx": 1, "gpt_result": "Tie"}, {"idx": 0, "gpt_result": "1"}]
    for name, rows in zip(judge_bias.PANDALM, (people, judged), strict=True):
        (tmp_path / name).write_text(json.dumps(rows))
    return tmp_path


def test_values(data):
    """Orders are averaged, no verdict is a tie, and the files of PandaLM are joined by `idx`; its 0 is a tie."""
    pools = judge_bias.llmbar(data) | judge_bias.pandalm(data)
    values = {name: [column.tolist() for column in pool] for name, pool in pools.items()}
    assert values["LLMBar, a"] == [[1, 0, 1], [1, 0.5, 1]]
    assert values["LLMBar, b"] == [[1, 0, 1], [0.5, 0.25, 0]]
    assert values["PandaLM, gpt-3.5-turbo"] == [pytest.approx([0.5, 2 / 3]), [1, 0.5]]


def test_table_and_results(data, monkeypatch, capsys):
    flags = ["--data", data, "--folder", data / "out", "--samples", 2, "--labels", 5, "--rows", 20]
    monkeypatch.setattr(sys, "argv", ["judge_bias", *map(str, flags)])
    judge_bias.main()
    results = json.loads((data / "out" / "results.json").read_text())["results"]
    assert len(results) == 15 and len(capsys.readouterr().out.splitlines()) == 2 + 15
    assert results["LLMBar, a"]["5"]["effective_n"] > 0


def test_coverage_on_recorded_verdicts():
    """300 samples of GPT-4's verdicts; a coverage of 95% is measured as 91% to 98%."""
    folder = Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / judge_bias.LLMBAR).is_file():
        pytest.skip("the verdicts of LLMBar are not here")
    pools = judge_bias.llmbar(folder)
    assert len(pools) == 18 and len(pools["LLMBar, GPT-4/Vanilla"][0]) == 419
    found = judge_bias.measure(*pools["LLMBar, GPT-4/Vanilla"], 100, 400, 300)
    assert 0.91 <= found["coverage"] <= 0.98 and 0.75 < found["width_ratio"] < 0.85
