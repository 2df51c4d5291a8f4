"""The investigations of part two: which recipe runs each, and in what it differs from the baseline that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from tests import recipes
from trl_ext.runs.folder import config_text

CONFIGS = recipes.RECIPES / "configs" / "wildchat"
# Removed from what the baseline's file says.
GONE = "not in the file"
ENSEMBLE = [f"runs/reward-model-wildchat-{seed}" for seed in range(3)]
# REINFORCE on-policy: no ratio to clip, the KL in the reward, and an update of 16 responses from each rollout.
ON_POLICY = {
    "generation_batch_size": 16,
    "num_iterations": 1,
    "max_steps": 100,
    "warmup_steps": 80,
    "save_steps": 100,
    "generation_eval_every": 100,
    "epsilon": GONE,
    "advantage_clip": GONE,
    "kl_estimator": "k1",
    "kl_aggregation": GONE,
}
# Settings of the trainers, which TRL's defaults replace: no dropout.
NO_DROPOUT = {"disable_dropout": GONE}
FROM_GRPO = {"advantage_clip": GONE, "kl_estimator": GONE, "kl_aggregation": GONE} | NO_DROPOUT
# File -> recipe, baseline, and what the file says otherwise; a folder of its own goes without saying.
EXPECTED = {
    "confidence": ("dpo", "dpo", {"weighting": ["confidence"], "weighting_kwargs": {"power": 4, "floor": 0.3}}),
    "wpo": ("dpo", "dpo", {"weighting": ["wpo"]}),
    "cdpo": ("preference", "dpo", {"loss": "cdpo", "label_smoothing": 0.1}),
    "robust_dpo": ("preference", "dpo", {"loss": "robust_dpo", "label_smoothing": 0.1}),
    "apo_zero": ("preference", "dpo", {"loss": "apo_zero", "beta": 0.1}),
    "apo_down": ("preference", "dpo", {"loss": "apo_down", "beta": 0.1}),
    "repo": ("preference", "dpo", {"loss": "repo", "loss_kwargs": {"gamma": 0.6}, "beta": 1.0}),
    "dpo_best": (
        "dpo",
        "dpo",
        {
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_rewards/accuracies",
            "greater_is_better": True,
        },
    ),
    "kto": ("kto", "dpo", {"beta": 0.1, "per_device_train_batch_size": 8, "num_train_epochs": 1, **NO_DROPOUT}),
    "reward_model_centered": ("reward_model", "reward_model", {"center_rewards_coefficient": 0.01}),
    "reward_model_calibration": ("reward_model", "reward_model", {"select_best": "calibration"}),
    "reward_model_last": ("reward_model", "reward_model", {"select_best": "none"}),
    "grpo_leave_one_out": ("grpo", "grpo", {"advantage": "leave_one_out"}),
    "grpo_rank": ("grpo", "grpo", {"advantage": "group_rank"}),
    "gopo": ("policy", "grpo", {"algorithm": "gopo"}),
    "rloo": ("rloo", "grpo", {**ON_POLICY, "beta": 0.03}),
    "remax": ("remax", "grpo", {**ON_POLICY, "num_generations": 1, "beta": 0.05}),
    "grpo_ensemble_mean": (
        "grpo",
        "grpo",
        {"reward_model": ENSEMBLE, "reward_aggregate": "mean", "calibrate_rewards": True},
    ),
    "grpo_ensemble_min": ("grpo", "part2/grpo_ensemble_mean", {"reward_aggregate": "min"}),
    "grpo_ensemble_mean_minus_std": (
        "grpo",
        "part2/grpo_ensemble_mean",
        {"reward_aggregate": "mean_minus_std"},
    ),
    "ppo": (
        "ppo",
        "grpo",
        {
            **FROM_GRPO,
            "num_generations": 1,
            "beta": 0.05,
            "gamma": 1.0,
            "lam": 0.95,
            "value_model": "adapter",
            "value_coefficient": 0.5,
            "value_learning_rate": 5e-5,
        },
    ),
    "ppo_centered": ("ppo", "part2/ppo", {"reward_shaping": '["center_reference"]'}),
    "online_preference": (
        "online_preference",
        "grpo",
        {
            **FROM_GRPO,
            "epsilon": GONE,
            "loss": "dpo",
            "beta": 0.05,
            "pairs": "best_worst",
            "num_iterations": GONE,
            "gradient_accumulation_steps": 4,
            "learning_rate": 2e-5,
            "warmup_steps": 40,
            "save_steps": 50,
            "generation_eval_every": 50,
        },
    ),
    "online_preference_replay": (
        "online_preference",
        "part2/online_preference",
        {
            "replay_capacity": 128,
            "replay_fraction": 0.5,
            "replay_max_age": 4,
            "replay_weights": "length_normalized",
        },
    ),
}
# What follows from these settings, in words of the trainers.
FOLLOWS = {
    "kto": {"train_sampling_strategy"},
    "online_preference": {"keep_groups", "vllm_importance_sampling_correction"},
}
# What a file says, and its baseline has by default.
SAME_WHEN_RESOLVED = {
    "grpo_ensemble_mean": {"reward_aggregate"},
    "online_preference_replay": {"replay_fraction", "replay_max_age"},
}
FILES = [CONFIGS / "part2" / f"{name}.yaml" for name in EXPECTED]
# Nothing is trained by these.
OF_SAMPLING = {"best_of_n", "sweep_generation"}
HEAD = re.compile(
    r"(# .+\n)+#   accelerate launch recipes/(?P<recipe>\w+)\.py --config (?P<path>\S+)\n"
    r"# Baseline: recipes/configs/wildchat/(?P<baseline>\S+)\.yaml\n"
)


def settings(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def named_in(path: Path) -> tuple[str, str]:
    """The recipe and the baseline that the comment at the beginning of a file names."""
    head = HEAD.match(path.read_text())
    assert head is not None, f"{path} must begin with what it is, its command and its baseline"
    assert recipes.REPOSITORY / head["path"] == path
    return head["recipe"], head["baseline"]


def test_every_file_is_here():
    assert {path.stem for path in (CONFIGS / "part2").glob("*.yaml")} - OF_SAMPLING == EXPECTED.keys()


@pytest.mark.parametrize("name", [name for name, (recipe, *_) in EXPECTED.items() if recipes.is_online(recipe)])
def test_warm_up_and_evaluations_are_counted_in_responses(name, monkeypatch):
    """The course's 20 and 25 rollouts of 64 responses, however many updates a rollout serves."""
    parsed = recipes.parse(monkeypatch, EXPECTED[name][0], "--config", str(CONFIGS / "part2" / f"{name}.yaml"))
    arguments, training = parsed[0], parsed[-1]
    each = training.generation_batch_size / training.updates_per_rollout
    counted = [training.warmup_steps, training.save_steps, arguments.generation_eval_every]
    assert [steps * each for steps in counted] == [20 * 64, 25 * 64, 25 * 64]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_differs_from_its_baseline_as_intended(path):
    recipe, baseline, expected = EXPECTED[path.stem]
    assert named_in(path) == (recipe, baseline)
    own, other = settings(path), settings(CONFIGS / f"{baseline}.yaml")
    differs = {
        name: own.get(name, GONE) for name in own.keys() | other.keys() if own.get(name, GONE) != other.get(name, GONE)
    }
    folder = f"runs/{path.stem.replace('_', '-')}-wildchat"
    assert differs == {**expected, "output_dir": folder}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_run_has_differs_from_its_baselines_as_intended(path, monkeypatch):
    """Resolved with all defaults, which recipes and losses have of their own: nothing but what the file says, and what
    follows from that."""
    recipe, baseline, expected = EXPECTED[path.stem]
    other_recipe = EXPECTED.get(Path(baseline).name, (baseline,))[0]
    own, other = (
        yaml.safe_load(config_text(*recipes.parse(monkeypatch, script, "--config", str(file))))
        for script, file in ((recipe, path), (other_recipe, CONFIGS / f"{baseline}.yaml"))
    )
    differs = {name for name in own.keys() & other.keys() if own[name] != other[name]}
    # What only one of two configuration classes has, or only one of them sets.
    if {recipe, other_recipe} <= {"dpo", "preference"} or recipe == other_recipe:
        differs |= own.keys() ^ other.keys()
    follows = FOLLOWS.get(path.stem, set()) | ({"algorithm"} if recipes.is_online(recipe) else set())
    assert differs - follows <= {*expected, "output_dir"}
    told = {name for name, value in expected.items() if value is not GONE and name in own.keys() & other.keys()}
    assert told - SAME_WHEN_RESOLVED.get(path.stem, set()) <= differs


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
    with safe_open("ppo_centered/value_head.safetensors", "pt") as file:
        assert file.metadata()["value_model"] == "adapter"

    run(monkeypatch, "online_preference_replay", *rewarded)
    assert {"replay/size", "replay/weight_max", "pairs/count"} <= logged("online_preference_replay")
    assert Path("online_preference_replay/checkpoint-2/replay.safetensors").is_file()


def test_the_best_checkpoint_needs_pairs_to_choose_by(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run(monkeypatch, "dpo_best", *PAIRS, "--eval_split=none")
    message = "load_best_model_at_end chooses a checkpoint on held-out rows, and there are none"
    assert message in capsys.readouterr().err
