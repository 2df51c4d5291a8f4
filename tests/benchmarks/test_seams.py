"""`benchmarks.seams`: its rewards, its judge, its other samplers, and the flags of its runs."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import _other_sampler, _seam_rewards, seams
from trl_ext.evaluation import OpenAIModel, RubricReward
from trl_ext.runs.studies.processes import check_runs
from trl_ext.toy.scoring import score

PROMPT = [{"role": "user", "content": "What is 47 + 38?"}]


RESPONSES = ("cat, dog, fox, and", "cat, dog, fox, bear.")


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    "response, marks, right",
    [
        ("<think>7+8=15 4+3+1=8</think> <answer>85</answer>", [1, 1, 1], 1),
        # The carry is forgotten: nothing counts from there on, not even an answer that is right by chance.
        ("<think>7+8=15 4+3=7</think> <answer>75</answer>", [1, 0, 0], 0),
        ("<think>7+8=15 4+3=7</think> <answer>85</answer>", [1, 0, 0], 1),
        ("85", [0], 0),
        # What follows the last step earns nothing.
        ("<think>7+8=15 4+3+1=8</think> <answer>85</answer> 7+8=15", [1, 1, 1, 0], 0),
    ],
)
def test_marks_end_at_the_first_wrong_step(response, marks, right):
    arguments = {"prompts": [PROMPT], "completions": [said(response)], "answer": ["85"]}
    assert _seam_rewards.marks(**arguments) == [marks]
    assert _seam_rewards.marks(**arguments, steps=[response.split(" ")]) == [marks]
    assert _seam_rewards.marks_in_sum(**arguments) == [sum(marks)]
    assert _seam_rewards.right(**arguments) == [right]


def test_the_right_steps_earn_the_full_score():
    for prompt in ("What is 47 + 38?", "What is 20 + 31?", "What is 99 + 99?"):
        assert score(prompt, " ".join(_seam_rewards.worked_addition(prompt))) == 1.0


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


def test_rounded_weights():
    """Four bits have levels from -7 to 7: with 0.7 as the largest weight, multiples of 0.1."""
    weights = torch.tensor([[0.7, 0.26, -0.12], [7.0, 0.4, 0.6]])
    torch.testing.assert_close(
        _other_sampler.rounded(weights, "int4"), torch.tensor([[0.7, 0.3, -0.1], [7.0, 0.0, 1.0]])
    )
    # bfloat16 has seven bits after the point: 1 + 1/256 is between 1 and 1 + 1/128, and ties go to even.
    assert _other_sampler.rounded(torch.tensor([[1 + 1 / 256]]), "bfloat16").item() == 1.0


def test_lagged_weights():
    model, weights = torch.nn.Linear(1, 1, bias=False), _other_sampler.other_weights("lag2")
    found = []
    for value in range(5):
        model.weight.data.fill_(value)
        found.append(weights(model)[0].item())
    assert found == [0, 0, 0, 1, 2]


def test_every_run_has_flags_that_its_recipe_accepts(tmp_path):
    runs = [run for name, study in seams.STUDIES.items() for run in study.runs(tmp_path / name, 0)]
    check_runs(runs)
    assert len({run.folder for run in runs}) == len(runs)
    other = next(run for run in runs if run.name == "lagged-0")
    place = other.command().index(str(seams.SAMPLER))
    assert other.command()[place + 1] == "lag8" and other.command()[place + 2].endswith("grpo_math.py")


@pytest.mark.slow
def test_a_study_runs_to_its_tables(tmp_path, capsys, no_key):
    seams.main(
        ["steps", "--seeds", "0", "--max_steps", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "f.json")]
    )
    found = json.loads((tmp_path / "f.json").read_text())["steps"]
    assert [one["method"] for one in found["methods"]] == ["answer", "sum", "steps"]
    assert [one["verdict"] for one in found["comparisons"]] == ["cannot tell"] * 2
    assert "| method | seeds | reward/right |" in capsys.readouterr().out
