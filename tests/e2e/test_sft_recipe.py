"""The SFT recipe end to end: what it trains on, what it leaves, that it resumes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import recipes
from tests.support.recipes import check_figures, read, refused
from tests.support.train_once import in_processes
from trl_ext.data.math import load_math
from trl_ext.evaluation.reasoning import category_of, grader
from trl_ext.runs import reasoning

SHORT = [
    "--max_steps=6",
    "--num_eval_prompts=16",
    "--generation_eval_every=3",
    "--num_generation_prompts=4",
    "--save_steps=3",
    "--save_total_limit=3",
    "--logging_steps=1",
    "--disable_tqdm=true",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    recipes.launch("sft", *SHORT, folder=folder)
    return folder


@pytest.mark.slow
def test_rows_are_graded_and_beside_the_base(finished):
    run = finished / "runs" / "sft-toy"
    rows, base = read(run, "generations.jsonl"), read(run, "samples/base_sampled.jsonl")
    check_figures(run, results := read(run, "results.json"))
    assert results["run"]["filtered"] == {"kept": 293, "of": 400} and results["run"]["train_responses"] == 293
    problems = load_math("toy", "test")[:16]
    assert [row["row_id"] for row in rows] == [row["row_id"] for row in problems]
    for row, other, problem in zip(rows, base, problems, strict=True):
        rewards = grader()(row["response_text"], problem)
        assert row["category"] == category_of(rewards["format_reward"], rewards["answer_reward"])
        assert row["score"] == rewards["reward"] and row["answer"] == problem["answer"]
        assert row["base_response_text"] == other["response_text"]
        assert row["base_score"] == grader()(other["response_text"], problem)["reward"]
    evaluations = [row for row in read(run, "metrics.jsonl") if "eval_score" in row]
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    for row in evaluations:
        rows = read(run, f"samples/step_{row['step']:06d}.jsonl")
        wrong = [one["generated_num_tokens"] for one in rows if one["category"] != "correct"]
        assert row["eval_score"] == sum(one["answer_reward"] for one in rows) / 4
        assert row["eval_rewards/format"] == sum(one["format_reward"] for one in rows) / 4
        assert row["eval_completions/mean_length"] == sum(one["generated_num_tokens"] for one in rows) / 4
        assert row.get("eval_completions/mean_length_incorrect") == (sum(wrong) / len(wrong) if wrong else None)
        assert row["eval_entropy"] == pytest.approx(sum(one["entropy"] for one in rows) / 4)


@pytest.mark.long
def test_a_run_of_the_defaults_learns_to_add(tmp_path):
    """Sampled accuracy from about 0.17 to at least 0.6, and an interval of the paired difference clear of zero."""
    recipes.launch("sft", folder=tmp_path)
    results = read(tmp_path / "runs" / "sft-toy", "results.json")
    assert results["score"]["base"] < 0.25 and results["score"]["policy"] > 0.6
    assert results["score"]["gain"]["low"] > 0.4
    assert results["reasoning"]["gain"]["greedy"]["low"] > 0


@pytest.mark.slow
def test_several_processes(finished, tmp_path):
    """Two processes divide the evaluation: the base's greedy responses are those that one process finds."""
    arguments = [*SHORT, "--per_device_train_batch_size=16", "--use_cpu=true"]
    in_processes(2, str(recipes.RECIPES / "sft.py"), *arguments, cwd=tmp_path)
    run, alone = (folder / "runs" / "sft-toy" for folder in (tmp_path, finished))
    assert read(run, "results.json")["run"]["processes"] == 2
    assert len(read(run, "generations.jsonl")) == 16
    for row, expected in zip(
        read(run, "samples/base_greedy.jsonl"), read(alone, "samples/base_greedy.jsonl"), strict=True
    ):
        assert row["entropy"] == pytest.approx(expected["entropy"], abs=1e-5)
        assert {**row, "entropy": None} == {**expected, "entropy": None}


class TestChoosingDemonstrations:
    """What the recipe trains on, before any model is loaded."""

    @staticmethod
    def choose(monkeypatch, *arguments: str):
        parsed = recipes.parse(monkeypatch, "sft", *arguments)[0]
        rows, counts = reasoning.choose_demonstrations(parsed, reasoning.load_problems(parsed, parsed.train_split))
        return rows.to_list(), counts

    def test_filtered_and_counted(self, monkeypatch, capsys):
        rows, counts = self.choose(monkeypatch, "--num_examples=100")
        assert "kept 293 of 400 responses" in capsys.readouterr().out
        assert counts == {"kept": 293, "of": 400} and len(rows) == 100
        problems = {row["row_id"]: row for row in load_math("toy", "train")}
        for row in rows:
            assert grader()(row["completion"][0]["content"], problems[row["row_id"]])["reward"] == 1
        # Smaller sizes are the beginning of larger ones.
        assert self.choose(monkeypatch, "--num_examples=30")[0] == rows[:30]

    def test_templates_and_solutions(self, monkeypatch, tmp_path):
        (tmp_path / "train.jsonl").write_text(json.dumps({"question": "Sum?", "answer": "2+2=4.\n#### 4"}) + "\n")
        (row,), counts = self.choose(monkeypatch, f"--dataset_name={tmp_path}")
        assert counts == {"kept": 1, "of": 1}
        assert row["prompt"].endswith("User: Sum?\nAssistant: <think>")
        assert row["completion"] == " 2+2=4. </think> <answer> 4 </answer>"
        (row,), _ = self.choose(monkeypatch, f"--dataset_name={tmp_path}", "--prompt_template=question_only")
        assert (row["prompt"], row["completion"]) == ("Sum?", "2+2=4.\n\\boxed{4}")


@pytest.mark.parametrize("left", [["metrics.jsonl"], ["metrics.jsonl", "checkpoint-2/model.safetensors"]])
def test_a_folder_without_a_whole_checkpoint_says_how_to_begin_anew(left, monkeypatch, capsys, tmp_path):
    """Without a flag and with --resume_from_checkpoint, in one line each; neither sends the user to the other."""
    monkeypatch.chdir(tmp_path)
    for name in left:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("{}\n")
    names = ", ".join(Path(name).parts[0] for name in left)
    said = refused(monkeypatch, capsys, "sft", "--output_dir=run")
    assert f"({names})" in said and "--overwrite_output_dir" in said and "--resume_from_checkpoint" not in said
    said = refused(monkeypatch, capsys, "sft", "--output_dir=run", "--resume_from_checkpoint")
    assert f"no checkpoint to resume, only {names}" in said and "--overwrite_output_dir" in said
    # With a checkpoint that is whole, resuming is one of the ways.
    (tmp_path / "run" / "checkpoint-1").mkdir()
    (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").write_text("{}")
    # No tensors: the length of the header, and the header.
    (tmp_path / "run" / "checkpoint-1" / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    # Whose learning rate can go on.
    torch.save({}, tmp_path / "run" / "checkpoint-1" / "scheduler.pt")
    assert "resume it with --resume_from_checkpoint" in refused(monkeypatch, capsys, "sft", "--output_dir=run")
