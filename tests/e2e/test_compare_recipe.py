"""The comparison of methods as a command: what it runs and in which order, what it reports, and what it refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.support import recipes
from tests.support.files import write_rows
from trl_ext.resilience.checkpoints import MARKER

CONFIGS = recipes.RECIPES / "configs" / "compare"
# What each method adds to the score of a prompt.
QUALITY = {"dpo": 0.0, "ipo": 0.0, "aot": 0.0, "grpo": 0.1, "sft_math": 0.0, "grpo_math": 0.3}
PROMPTS, OUTCOMES = 40, ("candidate", "tie", "base", "tie")


def wobble(*what) -> float:
    """A number in [-0.5, 0.5) that depends on what it is of, and looks like chance."""
    return int(hashlib.sha256(repr(what).encode()).hexdigest()[:8], 16) / 2**32 - 0.5


def score(recipe: str, prompt: int, seed: str) -> float:
    own = QUALITY[recipe] + 0.02 * wobble(recipe, prompt, seed)
    return 0.5 + 0.3 * wobble("prompt", prompt) + 0.05 * wobble("seed", seed) + own


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """The recipe's module, whose runs write made-up scores; `calls` has the script and the arguments of each."""
    from trl_ext.studies import processes, study

    monkeypatch.chdir(tmp_path)
    calls = []

    def run(command):
        at = next(place for place, word in enumerate(command) if word.endswith(".py"))
        given = dict(zip(*[iter(word.removeprefix("--") for word in command[at + 1 :])] * 2, strict=True))
        recipe, folder = Path(command[at]).stem, Path(given["output_dir"])
        calls.append((recipe, given))
        if (folder.parent / f"break-{folder.name}").exists():
            return 3
        fake_run(recipe, folder, given)
        return 0

    monkeypatch.setattr(processes, "run_or_stop", run)
    return SimpleNamespace(module=study, calls=calls, main=lambda *words: study.main([*words]))


def fake_run(recipe: str, folder: Path, given: dict, **about) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run = {"objective": recipe, "model": "toy", "dataset": "toy", "seed": int(given["seed"]), "optimizer_steps": 10}
    run |= {"training_seconds": 20.0, "settings_digest": recipe, "device": "cpu", "processes": 1, **about}
    (folder / "results.json").write_text(json.dumps({"run": run}))
    (folder / "config.yaml").write_text("per_device_train_batch_size: 20\ngradient_accumulation_steps: 2\n")
    if recipe == "reward_model":
        return
    named, default = ("eval_split", "test") if recipe in ("sft_math", "grpo_math") else ("prompt_split", "test_gen")
    split = given.get(named, default)
    rows = [{"row_id": f"{split}-{prompt}", "prompt_text": "p", "response_text": "r"} for prompt in range(PROMPTS)]
    for prompt, row in enumerate(rows):
        row |= {"score": score(recipe, prompt, given["seed"]), "outcome": OUTCOMES[prompt % 4]}
    write_rows(folder / "generations.jsonl", rows)


def summary(folder: str = "runs/compare") -> dict:
    return json.loads(Path(folder, "compare.json").read_text())


def stopped(compare, *words: str) -> int:
    with pytest.raises(SystemExit) as end:
        compare.main(*words)
    return end.value.code


def test_methods_are_run_and_compared(compare, capsys):
    compare.main("--methods", "dpo,ipo,grpo", "--seeds", "0-2")
    names = [Path(given["output_dir"]).name for _, given in compare.calls]
    wanted = [f"{name}-{seed}" for name in ("reward_model", "dpo", "ipo", "grpo") for seed in range(3)]
    assert names == wanted, "reward models first"
    assert compare.calls[10][1]["reward_model"] == "runs/compare/reward_model-1", "each online run has its seed's own"

    found = summary()
    assert (found["metric"], found["baseline"], found["prompts"]) == ("score", "dpo", PROMPTS)
    dpo, ipo, grpo = found["methods"]
    expected = sum(score("ipo", p, str(s)) for p in range(PROMPTS) for s in range(3)) / (3 * PROMPTS)
    assert ipo["mean"] == pytest.approx(expected)
    assert [one["verdict"] for one in found["comparisons"]] == ["indistinguishable", "higher"]
    assert found["comparisons"][1]["difference"]["mean"] == pytest.approx(grpo["mean"] - dpo["mean"])
    assert (dpo["optimizer_steps"], dpo["training_seconds"]) == (10, 20)
    printed = capsys.readouterr().out
    numbered = [line.split(",")[0] for line in printed.splitlines() if line.startswith("===")]
    assert numbered == [f"=== run {number} of 12" for number in range(1, 13)]
    header = next(line for line in printed.splitlines() if line.startswith("method"))
    column = header.index("score")
    assert f"{grpo['mean']:.3f}" == next(r for r in printed.splitlines() if r.startswith("grpo "))[column : column + 5]
    against = next(row for row in printed.splitlines() if row.startswith("grpo ") and row.endswith("higher"))
    assert f"{grpo['mean'] - dpo['mean']:+.4f}" in against
    assert {path.name for path in Path("runs/compare").iterdir()} >= {"compare.md", "report.html"}

    # The second time nothing is left to run.
    compare.calls.clear()
    compare.main("--methods", "dpo,ipo,grpo", "--seeds", "0-2")
    assert not compare.calls and summary() == found


def test_what_was_begun_is_taken_up(compare):
    assert stopped(compare, "--methods", "dpo,ipo,dpo") == 2
    Path("runs/compare").mkdir(parents=True)
    Path("runs/compare/break-ipo-1").touch()
    assert stopped(compare, "--methods", "dpo,ipo", "--seeds", "0,1,2") == 1
    found = summary()
    assert "Not finished, and left out: ipo-1." in found["notes"]
    assert found["comparisons"][0]["paired_seeds"] == [0, 2], "on the seeds that both have"
    assert [one["seeds"] for one in found["methods"]] == [3, 2]

    Path("runs/compare/break-ipo-1").unlink()
    Path("runs/compare/ipo-1/checkpoint-5").mkdir()
    Path("runs/compare/ipo-1/checkpoint-5", MARKER).touch()
    compare.calls.clear()
    compare.main("--methods", "dpo,ipo", "--seeds", "0,1,2")
    ((recipe, given),) = compare.calls
    assert (recipe, given["seed"], given["resume_from_checkpoint"]) == ("ipo", "1", "last")
    assert summary()["comparisons"][0]["paired_seeds"] == [0, 1, 2]


def test_finished_runs_of_a_folder_are_compared_and_none_is_run(compare):
    """Their names, one of them a recipe that is evaluated on other data, do not matter."""
    for name in ("sft", "mine"):
        for seed in (3, 4):
            fake_run("dpo", Path("old", f"{name}-{seed}"), {"seed": str(seed)})
    words = ["--methods", "mine,sft", "--seeds", "3-4", "--runs", "old", "--baseline", "sft", "--metric", "win_rate"]
    compare.main(*words)
    assert not compare.calls and not Path("old/compare.json").exists()
    found = summary()
    # Of four prompts, one is won, one lost and two are ties, on every seed: 0.5, and nothing to test.
    assert [one["mean"] for one in found["methods"]] == [0.5, 0.5]
    assert found["comparisons"][0]["verdict"] == "indistinguishable" and "searched no settings" in found["notes"][0]
    assert stopped(compare, *words[:3], "3-5", *words[4:]) == 2


@pytest.mark.parametrize(
    ("about", "given", "expected"),
    [
        ({"dataset": "other"}, {}, "has the dataset 'other' and"),
        ({"settings_digest": "x"}, {}, "differ in more than their seed"),
        ({}, {"prompt_split": "other"}, "were evaluated on different prompts"),
        ({"seed": 9}, {}, "is of seed 9, not 1"),
    ],
)
def test_runs_that_are_not_alike_are_refused(about, given, expected, compare, capsys):
    for seed in ("0", "1"):
        for name in ("dpo", "ipo"):
            results, words = (about, given) if name == "ipo" and seed == "1" else ({}, {})
            fake_run(name, Path("old", f"{name}-{seed}"), {"seed": seed, **words}, **results)
    if "settings_digest" in about:
        Path("old", "ipo-1", "config.yaml").write_text("learning_rate: 1.0\n")
    assert stopped(compare, "--methods", "dpo,ipo", "--seeds", "0-1", "--runs", "old") == 2
    assert expected in capsys.readouterr().err


def test_a_dry_run_prints_and_runs_nothing(compare, capsys):
    compare.main("--methods", "dpo,grpo", "--seeds", "0-1", "--dry_run")
    lines = capsys.readouterr().out.splitlines()
    names = [f"{name}-{seed}" for name in ("reward_model", "dpo", "grpo") for seed in (0, 1)]
    assert lines[0::2] == [f"# {name}: new" for name in names]
    assert not compare.calls and not Path("runs").exists()
    # Methods with a reward function need no reward model.
    Path("own.yaml").write_text("reward_function: [rewards.py:short]\n")
    Path("methods.yaml").write_text("methods: {grpo: {config: own.yaml}, rloo: {config: own.yaml}}\n")
    compare.main("--config", "methods.yaml", "--seeds", "0", "--dry_run")
    printed = capsys.readouterr().out
    assert all(f"# {name}-0: new" in printed for name in ("grpo", "rloo"))
    assert "reward_model" not in printed


def test_a_job_for_each_seed_and_the_report_afterwards(compare):
    words = ["--methods", "dpo,grpo"]
    for seed in range(2):
        compare.main(*words, "--seeds", str(seed), "--no_report")
        names = [Path(given["output_dir"]).name for _, given in compare.calls[3 * seed :]]
        assert names == [f"{name}-{seed}" for name in ("reward_model", "dpo", "grpo")]
    assert not Path("runs/compare/compare.json").exists(), "jobs that run at the same time do not report"
    compare.main(*words, "--seeds", "0-1")
    assert len(compare.calls) == 6 and summary()["comparisons"][0]["verdict"] == "higher"


@pytest.mark.parametrize(
    ("words", "content", "expected"),
    [
        (["--methods", "sft_math,dpo"], None, "problems with known answers and prompts are compared apart"),
        (["--config", "file.yaml", "--methods", "mne"], {"methods": {"mine": {"recipe": "dpo"}}}, "mean 'mine'?"),
        (["--methods", "dpo", "--baseline", "ipo"], None, "the baseline 'ipo' is not among the methods: dpo"),
        (["--methods", "dpo", "--seeds", "0-x"], None, "--seeds 0-x: give numbers from 0"),
        (["--config", "file.yaml"], {"method": {}}, "unknown key 'method'; did you mean 'methods'?"),
    ],
)
def test_what_is_refused(words, content, expected, compare, capsys):
    if content is not None:
        Path("file.yaml").write_text(yaml.safe_dump(content))
    assert stopped(compare, *words) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert not compare.calls


def test_prompts_without_a_judge_need_a_metric(compare, capsys):
    """Before anything runs: runs on another benchmark than the embedded one leave no score and no outcome."""
    Path("config.yaml").write_text("dataset_name: ./wildchat_benchmark\n")
    Path("file.yaml").write_text(yaml.safe_dump({"methods": {"dpo": {"config": "config.yaml"}}}))
    assert stopped(compare, "--config", "file.yaml") == 2
    error = capsys.readouterr().err
    assert "./wildchat_benchmark comes with no judge" in error and error.count("\n") == 1 and not compare.calls
    compare.main("--config", "file.yaml", "--dry_run")
    compare.main("--config", "file.yaml", "--seeds", "0", "--no_report")
    compare.main("--config", "file.yaml", "--seeds", "0-1", "--metric", "score", "--baseline", "dpo")
    assert [call["seed"] for _, call in compare.calls] == ["0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_of_the_files_has_arguments_that_its_recipe_takes(path, compare, monkeypatch):
    study = compare.module.read_study(compare.module.parse(["--config", str(path), "--seeds", "3"]))
    for run in study.runs():
        arguments, _, training = recipes.parse(monkeypatch, run.recipe, *run.flags())
        assert training.seed == 3
