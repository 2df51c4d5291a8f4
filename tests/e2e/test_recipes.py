"""The recipes end to end: what a run leaves behind, how it is refused, interrupted, resumed and repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from tests.support import recipes
from tests.support.files import read_rows
from tests.support.recipes import SHORT_PREFERENCE, check_run, read, write_labelled_pairs
from trl_ext.toy import score


@pytest.mark.slow
def test_a_launched_run_shows_its_steps_and_its_table(tmp_path):
    done = recipes.launch("aot", *SHORT_PREFERENCE, "--save_total_limit=3", folder=tmp_path)
    run, printed = tmp_path / "runs" / "aot-toy", done.stdout
    results = check_run(run, 4)
    for name in (
        "win rate, ties as half",
        "held-out accuracy, log-ratio",
        "KL to the base",
        "mean length",
    ):
        assert name in printed
    assert printed.count("prompt: ") == 3
    lines = [line for line in printed.splitlines() if line.startswith("step ") and " lr " in line]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert len({line.index("accuracy") for line in lines}) == 1, "aligned"
    assert "it/s]" not in done.stderr, "no bars where there is no terminal"
    rows = read_rows(run / "generations.jsonl")
    assert len(rows) == 12 == results["win_rate"]["n_total"] and results["preferences"]["after"]["n"] == 400
    for row in rows:
        assert row["score"] == score(row["prompt_text"], row["response_text"], finished=row["finished"])
    metrics = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in metrics if "eval_loss" in row] == [2, 4]
    assert [row["step"] for row in metrics if "kl" in row] == [0, 2, 4]
    samples = sorted((run / "samples").iterdir())
    assert [path.name for path in samples] == [f"step_{step:06}.jsonl" for step in (0, 2, 4)]
    first = read_rows(samples[0])
    assert len(first) == 3 and all(row["response_text"] == row["base_response_text"] for row in first)


@pytest.mark.long
def test_interrupted_run_resumes_to_the_same_model(tmp_path, monkeypatch):
    """Ctrl-C in the middle, then --resume_from_checkpoint: the parameters equal those of a run without the break."""
    from safetensors.torch import load_file

    arguments = [*SHORT_PREFERENCE, "--max_steps=24", "--eval_strategy=no", "--generation_eval_every=0"]
    arguments.append("--num_eval_prompts=4")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    recipes.run(monkeypatch, "aot", *arguments, f"--output_dir={straight}")
    command = recipes.launch_command("aot", *arguments, f"--output_dir={broken}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, env=recipes.environment(), cwd=tmp_path, start_new_session=True, **pipes)
    deadline = time.time() + 120
    while not (broken / "checkpoint-2" / "trainer_state.json").exists():
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    # The launcher ends at once, and the recipe, which has its output, after its step.
    printed, _ = process.communicate(timeout=60)
    assert "received SIGINT and ended at step " in printed
    assert not (broken / "results.json").exists(), "the run ended before it was interrupted"
    assert not list(broken.glob(".*")), "a half-written file was left"
    recipes.run(monkeypatch, "aot", *arguments, f"--output_dir={broken}", "--resume_from_checkpoint")
    expected, resumed = (load_file(run / "model.safetensors") for run in (straight, broken))
    assert all(expected[name].equal(resumed[name]) for name in expected)
    rows = read_rows(broken / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 25))
    results = [json.loads((run / "results.json").read_text()) for run in (straight, broken)]
    assert results[0]["win_rate"] == results[1]["win_rate"]
    # The time of both parts.
    assert results[1]["run"]["training_seconds"] >= rows[-1]["seconds"] - 0.1
    # Resuming where training had ended, as after a crash in the evaluation, trains no further.
    (broken / "results.json").unlink()
    recipes.run(monkeypatch, "aot", *arguments, f"--output_dir={broken}", "--resume_from_checkpoint")
    run = json.loads((broken / "results.json").read_text())["run"]
    assert run["optimizer_steps"] == 24 and run["training_seconds"] >= rows[-1]["seconds"] - 0.1


def test_own_loss_from_a_file(tmp_path, monkeypatch, tiny_model_path):
    """DESIGN's ten-line loss, given as file.py:function; one file of pairs as the data, so nothing held out."""
    (tmp_path / "my_file.py").write_text(
        "import torch\n"
        "from trl_ext import preference_loss\n\n"
        '@preference_loss("squared_hinge_of_a_test", needs_reference=True)\n'
        "def squared_hinge(scores, *, beta):\n"
        "    return torch.relu(1 - beta * scores.margin).square()\n"
    )
    write_labelled_pairs(tmp_path / "pairs.jsonl", 8)
    monkeypatch.chdir(tmp_path)
    flags = ["--loss=my_file.py:squared_hinge", "--dataset_name=pairs.jsonl", "--max_steps=2", "--logging_steps=1"]
    flags += [f"--model_name_or_path={tiny_model_path}", "--per_device_train_batch_size=4"]
    recipes.run(monkeypatch, "preference", *flags)
    run = tmp_path / "runs" / "squared_hinge-pairs"
    assert read(run, "results.json")["run"]["objective"] == "squared_hinge_of_a_test (beta 0.1)"
    # At policy = reference the margin is 0 and the loss (1 - 0)^2 = 1.
    assert read(run, "metrics.jsonl")[0]["loss"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_two_processes_train_and_compare_as_one_does(tmp_path, monkeypatch):
    """2 ranks x 4 pairs see the optimizer batches of 1 x 4 x accumulation 2: AOT's losses and the comparison agree."""
    from tests.support.train_once import in_processes

    arguments = [*SHORT_PREFERENCE, "--eval_strategy=no", "--save_strategy=no", "--learning_rate=1e-3"]
    arguments.append("--warmup_steps=0")
    one, two = tmp_path / "one", tmp_path / "two"
    recipes.run(monkeypatch, "aot", *arguments, f"--output_dir={one}")
    script = [str(recipes.RECIPES / "aot.py"), *arguments, "--gradient_accumulation_steps=1", "--use_cpu=true"]
    in_processes(2, *script, f"--output_dir={two}", cwd=tmp_path)
    losses, results = [], []
    for run in (one, two):
        rows = read_rows(run / "metrics.jsonl")
        losses.append([row["loss"] for row in rows if "loss" in row])
        results.append(json.loads((run / "results.json").read_text()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] - 1e-3, "the losses tell nothing if training does not move"
    assert [result["run"]["processes"] for result in results] == [1, 2]
    assert results[0]["win_rate"] == results[1]["win_rate"]
    one, other = (result["preferences"]["after"]["summed"]["margin"] for result in results)
    assert one == pytest.approx(other, rel=1e-4)
