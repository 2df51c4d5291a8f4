"""Reward shaping in the online recipes: what is trained on, logged and reported, that it resumes, what is refused."""

from __future__ import annotations

import shutil

import pytest
import yaml
from safetensors.torch import load_file

from tests.support import recipes
from tests.support.recipes import SHORT_ROLLOUTS, read, write_rewards

SHAPING = '["center", {"kind": "clip", "limit": 0.25}]'


@pytest.fixture
def known(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_rewards(tmp_path)
    return f"{tmp_path / 'my_rewards.py'}:known"


@pytest.mark.slow
def test_a_shaped_run_resumes_with_what_it_has_learnt(known, tmp_path, monkeypatch):
    """Four steps, and two and two: the same weights, rewards and running mean; evaluation sees the reward unshaped."""
    options = [*SHORT_ROLLOUTS, "--reward_function", known, "--reward_shaping", SHAPING]
    recipes.run(monkeypatch, "dr_grpo", *options, "--output_dir", "straight")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    metrics = read(straight, "metrics.jsonl")
    name = "rewards/known+center+clip/mean"
    shaped = [row[name] for row in metrics if name in row]
    plain = [row["rewards/known/mean"] for row in metrics if name in row]
    assert len(shaped) == 4 and all(abs(value) <= 0.25 for value in shaped) and all(0 < value < 1 for value in plain)
    results = read(straight, "results.json")
    assert set(results["rewards"]) == {"known"}
    assert results["rewards"]["known"]["policy"] == pytest.approx(results["score"]["policy"], abs=1e-6)
    (told,) = results["run"]["reward_shaping"]
    assert told["reward"] == "known" and [step["kind"] for step in told["steps"]] == ["center", "clip"]
    assert yaml.safe_load((straight / "config.yaml").read_text())["reward_shaping"] == SHAPING

    states = {
        step: read(straight / f"checkpoint-{step}", "progress_0.json")["carried_over"]["shaping_state"]
        for step in (2, 4)
    }
    # Eight responses to a step; the mean is of all of them, so two steps and four.
    assert [states[step][0]["steps"][0]["count"] for step in (2, 4)] == [16, 32]
    assert states[4][0]["steps"][0]["mean"] == pytest.approx(sum(plain) / 4, abs=1e-6)
    broken.mkdir()
    shutil.copytree(straight / "checkpoint-2", broken / "checkpoint-2")
    recipes.run(monkeypatch, "dr_grpo", *options, "--output_dir", "broken", "--resume_from_checkpoint", "last")
    assert read(broken / "checkpoint-4", "progress_0.json")["carried_over"]["shaping_state"] == states[4]
    one, two = (load_file(folder / "model.safetensors") for folder in (straight, broken))
    assert all(one[tensor].equal(two[tensor]) for tensor in one)


def test_a_value_comes_from_reference_responses(known, tmp_path, monkeypatch, capsys):
    """Where the training prompts have none, the recipe says what needs them."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"row_id": "{n}", "prompt_text": "Say {n}.", "prompt_messages": [{{"role": "user", "content": '
                f'"Say {n}."}}]}}\n' for n in range(8))
    )  # fmt: skip
    options = [*SHORT_ROLLOUTS, "--reward_function", known, "--dataset_name", str(tmp_path / "prompts.jsonl")]
    with pytest.raises(SystemExit):
        recipes.run(monkeypatch, "grpo", *options, "--reward_shaping", '["center_reference"]')
    assert "center_reference needs reference_response_text" in capsys.readouterr().err
