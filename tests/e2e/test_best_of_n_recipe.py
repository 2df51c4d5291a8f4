"""The recipe of best-of-n: its curve and data to fine-tune on, that it goes on, and what it refuses in one line."""

from __future__ import annotations

import pytest

from tests.support import recipes
from tests.support.files import write_rows
from tests.support.recipes import read, write_rewards
from trl_ext import load_benchmark
from trl_ext.toy import score

SHORT = ["--num_prompts=12", "--n", "1", "2", "4", "--generation_batch_size=24", "--save_every=24", "--use_cpu=true"]


@pytest.fixture
def known(tmp_path, monkeypatch) -> str:
    """The true score as a reward function in a file."""
    monkeypatch.chdir(tmp_path)
    write_rewards(tmp_path)
    return "my_rewards.py:known"


def test_the_recipe_and_a_round_trip_through_fine_tuning(known, tmp_path, monkeypatch, capsys):
    """By the true score itself there is no regret; the best responses train a model, which then likes them better."""
    options = [*SHORT, "--reward_function", known, "--prompt_split", "train_gen", "--keep", "best"]
    recipes.run(monkeypatch, "best_of_n", *options, "--output_dir", "straight")
    folder = tmp_path / "straight"
    results, samples = read(folder, "results.json"), read(folder, "samples.jsonl")
    prompts = load_benchmark("toy")["train_gen"].select(range(12))
    assert [(row["row_id"], row["sample"]) for row in samples] == [
        (row_id, sample) for row_id in prompts["row_id"] for sample in range(4)
    ]
    for row in samples:
        assert row["reward"] == score(row["prompt_text"], row["response_text"], finished=row["finished"])
        assert row["score"] == row["reward"]
    curve = results["best_of_n"]["curve"]
    assert [row["n"] for row in curve] == [1, 2, 4]
    assert all(row["regret"]["mean"] == 0 and row["gold"] == row["proxy"] for row in curve)
    best = [max(group, key=lambda row: row["reward"]) for group in zip(*[iter(samples)] * 4, strict=True)]
    assert curve[2]["gold"]["mean"] == pytest.approx(sum(row["reward"] for row in best) / 12)
    assert results["score"]["policy"] == curve[2]["gold"]["mean"]
    assert results["win_rate"] == curve[2]["win_rate"]
    assert [row["response_text"] for row in read(folder, "generations.jsonl")] == [
        row["response_text"] for row in best
    ]
    credits = {"candidate": 1.0, "tie": 0.5, "base": 0.0}
    won = [credits[row["outcome"]] for row in read(folder, "generations.jsonl")]
    assert sum(won) / 12 == pytest.approx(results["win_rate"]["half"]["rate"])
    printed = capsys.readouterr().out
    for text in ("KL bound", "best possible", "0.636", "win rate, ties as half", "12 responses to 12 prompts"):
        assert text in printed
    assert (folder / "best_of_n.png").read_bytes().startswith(b"\x89PNG")
    kept = [row for row in best if row["finished"] and row["response_text"].strip()]
    demonstrations = read(folder, "sft.jsonl")
    assert [row["completion"][0]["content"] for row in demonstrations] == [row["response_text"] for row in kept]
    short = ["--max_steps=6", "--learning_rate=1e-3", f"--per_device_train_batch_size={len(kept)}"]
    short += ["--logging_steps=1", "--prompt_split=none", "--eval_split=none", "--save_strategy=no"]
    recipes.run(monkeypatch, "rlhf_sft", "--demonstrations=straight/sft.jsonl", "--output_dir=tuned", *short)
    losses = [row["loss"] for row in read(tmp_path / "tuned", "metrics.jsonl") if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]


def test_a_file_of_prompts_needs_no_split_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.py").write_text(
        "def long(completion_ids, **columns):\n    return list(map(len, completion_ids))\n"
    )
    rows = [{"row_id": f"p{i}", "prompt_text": f"Name fruit number {i}."} for i in range(3)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    short = ["--n", "1", "2", "--max_new_tokens", "4", "--use_cpu=true", "--output_dir", "run"]
    rewarded = ["--reward_function", "long.py:long", "--missing_eos_penalty", "9"]
    recipes.run(monkeypatch, "best_of_n", *short, "--dataset_name", "prompts.jsonl", *rewarded)
    samples = read(tmp_path / "run", "samples.jsonl")
    assert not all(row["finished"] for row in samples)
    for row in samples:
        assert row["reward"] == row["generated_num_tokens"] - 9 * (not row["finished"])
    assert [row["row_id"] for row in samples] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert not any("score" in row for row in samples), "the score is known on the embedded benchmark alone"


def test_the_configuration_of_part_two(monkeypatch):
    """With the settings of the course's search over decoding."""
    path = recipes.RECIPES / "configs" / "wildchat" / "part2" / "best_of_n.yaml"
    flags = ["--n", "1", "--temperature", "0.5", "--top_p", "0.9", "--repetition_penalty", "1.1"]
    arguments, model = recipes.parse(monkeypatch, "best_of_n", "--config", str(path), *flags)
    assert arguments.judge == "none" and model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
    settings = arguments.settings()
    assert (settings.max_prompt_tokens, settings.max_new_tokens) == (700, 256)
    assert (settings.temperature, settings.top_p, settings.repetition_penalty) == (0.5, 0.9, 1.1)
