"""`benchmarks.seams`: its rewards, its judge, and the flags of its runs."""

from __future__ import annotations

import json

import pytest

from benchmarks import _seam_rewards, seams
from trl_ext.evaluation import OpenAIModel, RubricReward
from trl_ext.runs.studies.processes import check_runs

PROMPT = [{"role": "user", "content": "What is 47 + 38?"}]


RESPONSES = ("cat, dog, fox, and", "cat, dog, fox, bear.")


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_the_judge_answers_by_the_checker(no_key):
    """Three words of four are animals, with commas and without a full stop: the separator alone is met, 0.2 of 1.2."""
    prompt = "List four animals. Use commas."
    prompts, rubrics = [[{"role": "user", "content": prompt}]] * 2, [_seam_rewards.rubric_of(prompt)] * 2
    with _seam_rewards.judge() as url:
        rewards = {
            noise: RubricReward(OpenAIModel(f"checker-{noise}", base_url=url, api="chat"))(
                prompts, [said(text) for text in RESPONSES], rubric=rubrics
            )
            for noise in (0.0, 1.0)
        }
    assert rewards[0.0] == pytest.approx([0.2 / 1.2, 1.0])
    # A judge that is always wrong.
    assert rewards[1.0] == pytest.approx([1 - 0.2 / 1.2, 0.0])
    shares = {noise: [_seam_rewards.rubric_share(prompt, text, noise) for text in RESPONSES] for noise in rewards}
    # The texts of the questions differ in the role before the prompt, which a noise of 0 or 1 does not show.
    assert shares == {noise: pytest.approx(found) for noise, found in rewards.items()}


def test_the_judge_is_wrong_as_often_as_it_says():
    question = (
        "[conversation a]\nuser: Say red two times.\n[response a]\nred, red.{}\n[criterion a]\nfull marks for: items\n"
    )
    wrong = [not _seam_rewards.verdict(question.format(" " * number), 0.3) for number in range(1000)]
    # Four standard deviations of 1,000 draws are 0.058.
    assert abs(sum(wrong) / 1000 - 0.3) < 0.058


def test_every_run_has_flags_that_its_recipe_accepts(tmp_path):
    runs = [run for name, study in seams.STUDIES.items() for run in study.runs(tmp_path / name, 0)]
    check_runs(runs)
    assert len({run.folder for run in runs}) == len(runs)


@pytest.mark.slow
def test_a_study_runs_to_its_tables(tmp_path, capsys, no_key):
    seams.main(
        ["rubric", "--seeds", "0", "--max_steps", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "f.json")]
    )
    found = json.loads((tmp_path / "f.json").read_text())["rubric"]
    assert [one["method"] for one in found["methods"]] == ["checker", "rubric_0", "rubric_10", "rubric_30"]
    assert [one["verdict"] for one in found["comparisons"]] == ["cannot tell"] * 3
    assert "| method | seeds | reward/truth |" in capsys.readouterr().out
