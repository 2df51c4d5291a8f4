"""The tables of docs/results.md are what the files of docs/results give."""

from __future__ import annotations

from tests.support import REPOSITORY
from tools import results
from trl_ext.evaluation.methods.runs import read_method_run


def test_the_tables_are_those_of_the_files(tmp_path):
    page = results.PAGE.read_text(encoding="utf-8")
    studies = sorted(path for path in (REPOSITORY / "docs" / "results").iterdir())
    assert [study.name for study in studies] == ["smollm2-instructions", "smollm2-word_problems"]
    for study in studies:
        assert results.with_table(page, study) == page, "run python tools/results.py"
    results.unpack(studies[1], tmp_path)
    run = read_method_run(tmp_path / "sft-1", "sft", 1)
    assert len(run.rows) == 300 and sum("response_text" in row for row in run.rows.values()) == 10
