"""`benchmarks.rollouts`: a run on the embedded model."""

from __future__ import annotations

from benchmarks import rollouts
from trl_ext.files import read_json


def test_a_run_on_the_embedded_model(tmp_path, capsys):
    path = tmp_path / "figures.json"
    arms = ["generate float32", "sampler float32"]
    rollouts.main(
        ["--size", "toy", "--prompts", "2", "--samples", "2", "--rounds", "1", "--arms", *arms, "--json", str(path)]
    )
    figures = read_json(path)
    assert list(figures["calls"]) == arms and all(len(calls) == 1 for calls in figures["calls"].values())
    # Four responses that end by themselves or after 96 tokens.
    assert all(4 < calls[0]["tokens"] <= 4 * 96 for calls in figures["calls"].values())
    printed = capsys.readouterr().out
    assert all(arm in printed for arm in arms)
