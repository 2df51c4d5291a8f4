"""The investigations of part two: which recipe runs each, and the baseline that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support import REPOSITORY, recipes

CONFIGS = recipes.RECIPES / "configs" / "wildchat"
# Nothing is trained by best_of_n.
FILES = sorted(path for path in (CONFIGS / "part2").glob("*.yaml") if path.stem != "best_of_n")
HEAD = re.compile(
    r"(# .+\n)+#   accelerate launch recipes/(?P<recipe>\w+)\.py --config (?P<path>\S+)\n"
    r"# Baseline: recipes/configs/wildchat/(?P<baseline>\S+)\.yaml\n"
)


def named_in(path: Path) -> tuple[str, str]:
    """The recipe and the baseline that the comment at the beginning of a file names."""
    head = HEAD.match(path.read_text())
    assert head is not None, f"{path} must begin with what it is, its command and its baseline"
    assert REPOSITORY / head["path"] == path
    return head["recipe"], head["baseline"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_warm_up_and_evaluations_are_counted_in_responses(path, monkeypatch):
    """The course's 20 and 25 rollouts of 64 responses, however many updates a rollout serves."""
    recipe, _ = named_in(path)
    if not recipes.is_online(recipe):
        return
    parsed = recipes.parse(monkeypatch, recipe, "--config", str(path))
    arguments, training = parsed[0], parsed[-1]
    each = training.generation_batch_size / training.updates_per_rollout
    counted = [training.warmup_steps, training.save_steps, arguments.generation_eval_every]
    assert [steps * each for steps in counted] == [20 * 64, 25 * 64, 25 * 64]


# ---- One short run of each family ----

TOY = ["--dataset_name=toy", "--model_name_or_path=toy", "--dtype=float32", "--bf16=false", "--use_cpu=true"]
SHORT = [*TOY, "--max_steps=2", "--warmup_steps=0", "--logging_steps=1", "--save_steps=1", "--eval_steps=1"]
SHORT += ["--per_device_train_batch_size=4", "--gradient_accumulation_steps=1", "--gradient_checkpointing=false"]
COMPARED = [*SHORT, "--num_generation_prompts=4", "--num_eval_prompts=4", "--generation_eval_every=0"]
PAIRS = [*COMPARED, "--max_new_tokens=8", "--per_device_eval_batch_size=64"]
ROLLOUTS = [*(flag for flag in COMPARED if "eval_steps" not in flag), "--generation_batch_size=8"]
ROLLOUTS += ["--max_completion_length=8", "--min_new_tokens=1", "--save_steps=2"]


def run(monkeypatch, name: str, *arguments: str) -> dict:
    """What results.json says of a short run of a file in this process."""
    path = CONFIGS / "part2" / f"{name}.yaml"
    recipe, _ = named_in(path)
    recipes.run(monkeypatch, recipe, "--config", str(path), "--output_dir", name, *arguments)
    return json.loads((Path(name) / "results.json").read_text())["run"]


def logged(name: str) -> set[str]:
    lines = (Path(name) / "metrics.jsonl").read_text().splitlines()
    return {metric for line in lines for metric in json.loads(line)}


@pytest.mark.slow
def test_a_run_of_each_family(tmp_path, monkeypatch):
    """Two steps of the embedded model, each with what its investigation changes in force."""
    monkeypatch.chdir(tmp_path)
    weighted = "dpo (beta 0.005, weighted by confidence column avg_confidence power 4 floor 0.3)"
    assert run(monkeypatch, "confidence", *PAIRS, "--eval_split=none")["objective"] == weighted

    # Of two checkpoints, the one with the better figure is what is saved in the end.
    run(monkeypatch, "dpo_best", *PAIRS)
    state = json.loads(Path("dpo_best/checkpoint-2/trainer_state.json").read_text())
    figures = {row["step"]: row["eval_rewards/accuracies"] for row in state["log_history"] if "eval_loss" in row}
    best = Path(state["best_model_checkpoint"])
    assert best.name == f"checkpoint-{max(figures, key=figures.get)}" and len(figures) == 2
    final, kept = (load_file(folder / "adapter_model.safetensors") for folder in (Path("dpo_best"), best))
    assert all(final[name].equal(kept[name]) for name in kept)

    # Each of 2,000 pairs is two labelled responses.
    assert run(monkeypatch, "kto", *PAIRS, "--eval_split=none")["train_responses"] == 4000

    assert run(monkeypatch, "reward_model_centered", *SHORT)["objective"] == "Bradley-Terry (centring 0.01)"
    ensemble = ["--reward_model", *["reward_model_centered"] * 3]
    (found,) = run(monkeypatch, "grpo_ensemble_min", *ROLLOUTS, *ensemble)["ensembles"]
    assert (found["aggregate"], found["calibrated_on"], len(found["members"])) == ("min", 256, 3)

    rewarded = [*ROLLOUTS, "--reward_model", "reward_model_centered"]
    found = run(monkeypatch, "ppo_centered", *rewarded)
    assert found["settings"]["algorithm"] == "ppo"
    assert [step["kind"] for step in found["reward_shaping"][0]["steps"]] == ["center_reference"]
    assert Path("ppo_centered/value_head.safetensors").is_file()

    run(monkeypatch, "online_preference_replay", *rewarded)
    assert {"replay/size", "replay/weight_max", "pairs/count"} <= logged("online_preference_replay")
    assert Path("online_preference_replay/checkpoint-2/replay.json").is_file()


def test_the_best_checkpoint_needs_pairs_to_choose_by(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = f"--config={CONFIGS / 'part2' / 'dpo_best.yaml'}"
    message = "load_best_model_at_end chooses a checkpoint on held-out rows, and there are none"
    assert message in recipes.refused(monkeypatch, capsys, "dpo", config, *PAIRS, "--eval_split=none")
