"""Every YAML file builds what it says, and the course's words for batches, baselines and lengths mean it to TRL."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import REPOSITORY, recipes
from tests.support.trl_private import BeforeLoss
from trl_ext import PolicyTrainer, cli
from trl_ext.algorithms import algorithms
from trl_ext.runs.configs import read_config
from trl_ext.runs.course_config import CourseConfig
from trl_ext.runs.folder import config_text
from trl_ext.toy import MODEL_DIR

CONFIGS = sorted((recipes.RECIPES / "configs").glob("**/*.yaml"))
CONFIGS = [path for path in CONFIGS if path.parent.name != "compare" and not path.name.startswith("_")]
COMMAND = re.compile(r"^# .*recipes/(\w+)\.py --config (\S+)$", re.MULTILINE)


def recipe_of(path: Path) -> str:
    """The recipe that runs a file: the one that its comment names with it, else the one of its name."""
    commands = {REPOSITORY / config: recipe for recipe, config in COMMAND.findall(path.read_text())}
    return commands.get(path, path.stem)


def test_recipe_configurations_build(monkeypatch):
    assert len(CONFIGS) > 30
    for path in CONFIGS:
        with monkeypatch.context() as patch:
            _check_configuration(path, patch)


def _check_configuration(path: Path, monkeypatch) -> None:
    parts = recipes.parse(monkeypatch, recipe_of(path), "--config", str(path))
    values = read_config(path)
    for key, value in values.items():
        holder = next(part for part in parts if hasattr(part, key))
        # The course's word is also transformers' for something else: trl_ext/runs/course_config.py.
        built = getattr(holder, "responses_per_update" if key == "train_batch_size" else key)
        built = getattr(built, "value", built)
        # `none` is nothing.
        assert built == value or (value, built) == ("none", None), (path, key, value, built)


def test_a_file_stands_over_its_base(tmp_path, monkeypatch, capsys):
    """Over several levels, relative to each file, with a null; config.yaml holds the result without a base."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "_base.yaml").write_text("beta: 0.3\nseed: 1\nmax_prompt_tokens: 64\n")
    (tmp_path / "deep" / "middle.yaml").write_text("base: ../_base.yaml\nseed: 2\n")
    path = tmp_path / "deep" / "own.yaml"
    path.write_text("base: middle.yaml\nmax_prompt_tokens: null\nreport_to: [none]\n")
    *_, training = recipes.parse(monkeypatch, "dpo", f"--config={path}", "--learning_rate=0.5")
    assert (training.beta, training.seed, training.learning_rate) == (0.3, 2, 0.5)
    assert training.max_prompt_tokens is None
    written = yaml.safe_load(config_text(training))
    assert written["seed"] == 2 and "base" not in written
    path.write_text("base: missing.yaml\n")
    assert "there is no base 'missing.yaml'" in recipes.refused(monkeypatch, capsys, "dpo", f"--config={path}")
    assert not [name for name in cli.shipped_configs() if Path(name).name.startswith("_")]


def course_run(monkeypatch, recipe: str) -> tuple:
    """The recipe's arguments and its trainer's configuration, on the course's model and adapter."""
    path = recipes.RECIPES / "configs" / "wildchat" / f"{recipe}.yaml"
    arguments, model, training = recipes.parse(monkeypatch, recipe, "--config", str(path))
    assert model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (model.use_peft, model.lora_r, model.lora_alpha, model.lora_dropout) == (True, 32, 64, 0.05)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert model.lora_target_modules == projections
    # TRL's default would switch the adapter's dropout off.
    assert getattr(training, "disable_dropout", False) is False
    assert model.dtype == "bfloat16" and training.bf16
    return arguments, training


@pytest.mark.parametrize(("method", "beta", "every"), [("dpo", 0.005, 100), ("ipo", 0.1, 100), ("aot", 0.2, 50)])
def test_the_course_runs(method, beta, every, monkeypatch):
    """The course's settings, number by number."""
    arguments, training = course_run(monkeypatch, method)
    assert (training.loss, training.beta) == (method, beta)
    assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.95, 0.0)
    assert (training.learning_rate, training.warmup_steps, training.max_grad_norm) == (5e-5, 100, 1.0)
    assert training.lr_scheduler_type == "constant_with_warmup"
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 4)
    assert training.num_train_epochs == 3
    assert (training.max_prompt_tokens, training.max_response_tokens) == (700, 512)
    assert (training.eval_steps, training.save_steps, arguments.generation_eval_every) == (every, every, every)
    assert (arguments.num_generation_prompts, arguments.max_new_tokens) == (32, 256)
    assert arguments.generation_temperature == 0


def test_the_course_run_of_the_reward_model(monkeypatch):
    arguments, training = course_run(monkeypatch, "reward_model")
    assert (training.learning_rate, training.num_train_epochs) == (3e-5, 3)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (8, 4)
    assert (training.eval_steps, training.save_steps) == (25, 25)
    assert (training.load_best_model_at_end, training.metric_for_best_model) == (True, "accuracy")
    assert (training.max_prompt_tokens, training.max_response_tokens) == (700, 512)
    assert arguments.eval_split == "test_prefs" and arguments.selection_split is None


def test_the_course_runs_online(monkeypatch):
    """The course's settings, number by number: 25 rollouts of 16 prompts x 4, each serving 8 updates."""
    for method in ("grpo", "dr_grpo", "gspo"):
        arguments, training = course_run(monkeypatch, method)
        objective = training.build_algorithm()
        assert arguments.reward_model == ["runs/reward-model-wildchat/checkpoint-200"]
        assert (training.generation_batch_size, training.num_generations, training.num_iterations) == (64, 4, 2)
        assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (8, 2)
        assert training.updates_per_rollout == 8 and training.max_steps == 8 * 25
        assert (objective.epsilon, objective.epsilon_high) == (0.2, 0.2)
        assert (objective.beta, objective.kl_estimator, objective.kl_aggregation) == (0.01, "k3", "token_mean")
        assert objective.advantage_clip == 5
        assert (training.min_new_tokens, training.max_completion_length) == (32, 256)
        assert training.generation_kwargs == {"min_new_tokens": 32}
        assert (training.temperature, training.top_p, training.learning_rate) == (0.8, 0.95, 1e-5)
        assert (training.max_grad_norm, training.adam_beta1, training.adam_beta2) == (0.5, 0.9, 0.95)
        # Both every 25 rollouts, on 32 prompts.
        assert (arguments.generation_eval_every, training.save_steps) == (200, 200)
        assert (arguments.num_generation_prompts, arguments.generation_temperature) == (32, 0)
        named = f"berkeley_{method}"
        assert {**objective.to_dict(), "algorithm": named} == algorithms[named].to_dict()


# ---- The investigations of part two ----


COURSE = recipes.RECIPES / "configs" / "wildchat"
# Nothing is trained by best_of_n.
FILES = sorted(path for path in (COURSE / "part2").glob("*.yaml") if path.stem != "best_of_n")
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


def test_warm_up_and_evaluations_are_counted_in_responses(monkeypatch):
    """The course's 20 and 25 rollouts of 64 responses, however many updates a rollout serves."""
    recipe_of_file = {path: named_in(path)[0] for path in FILES}
    online = {path: recipe for path, recipe in recipe_of_file.items() if recipes.is_online(recipe)}
    assert online
    for path, recipe in online.items():
        arguments, _, training = recipes.parse(monkeypatch, recipe, "--config", str(path))
        each = training.generation_batch_size / training.updates_per_rollout
        counted = [training.warmup_steps, training.save_steps, arguments.generation_eval_every]
        assert [steps * each for steps in counted] == [20 * 64, 25 * 64, 25 * 64], path


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
    path = COURSE / "part2" / f"{name}.yaml"
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
    config = f"--config={COURSE / 'part2' / 'dpo_best.yaml'}"
    message = "load_best_model_at_end chooses a checkpoint on held-out rows, and there are none"
    assert message in recipes.refused(monkeypatch, capsys, "dpo", config, *PAIRS, "--eval_split=none")


# ---- `CourseConfig` ----


@pytest.fixture
def build(tmp_path):
    def build(**settings) -> CourseConfig:
        return CourseConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **settings)

    return build


def test_sizes_of_the_course_become_those_of_trl(build):
    """256 responses to a rollout, 64 to an update in passes of 16: 4 passes an update, 4 updates a pass over them.

    Two passes over the rollout are 8 updates, so 10 rollouts are 80.
    """
    sizes = {"rollout_batch_size": 256, "train_batch_size": 64, "per_device_train_batch_size": 16, "group_size": 8}
    config = build(**sizes, epochs_per_rollout_batch=2, n_grpo_steps=10)
    assert (config.generation_batch_size, config.num_generations, config.num_iterations) == (256, 8, 2)
    assert (config.gradient_accumulation_steps, config.steps_per_generation) == (4, 16)
    assert (config.updates_per_rollout, config.max_steps) == (8, 80)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rollout_batch_size": 60, "group_size": 8}, "generation_batch_size .60. must be divisible"),
        ({"rollout_batch_size": 96, "train_batch_size": 64}, "train_batch_size 64 .* rollout_batch_size 96"),
        ({"train_batch_size": 24, "per_device_train_batch_size": 16}, "train_batch_size 24 .* 16"),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, "--train_batch_size means gradient_accumul"),
        ({"group_size": 4, "num_generations": 8}, "group_size means num_generations 4, and num_generations is 8"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        (
            {"length_normalization": "mean"},
            "unknown --length_normalization 'mean'.* Known: masked_mean, masked_normalize",
        ),
        ({"algorithm": "dr_grpo", "use_std_normalization": True}, "without the standard deviation"),
        ({"algorithm": "dr_grpo", "length_normalization": "masked_mean"}, "without length normalisation"),
        ({"algorithm": "no_baseline", "use_std_normalization": True}, "Rewards times log-probabilities"),
        ({"stop": ["</answer>"], "mask_truncated_completions": True}, "mask_truncated_completions"),
    ],
)
def test_what_contradicts_is_refused_with_the_numbers(settings, expected, build):
    with pytest.raises(ValueError, match=expected):
        build(**{"per_device_train_batch_size": 8, **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"algorithm": "grpo"}, ("group_normalized", "clip", "sequence_mean")),
        ({"algorithm": "grpo", "use_std_normalization": False}, ("group_centered", "clip", "sequence_mean")),
        ({"algorithm": "grpo", "length_normalization": "masked_normalize"}, ("group_normalized", "clip", "constant")),
        ({"algorithm": "dr_grpo"}, ("group_centered", "clip", "constant")),
        ({"algorithm": "no_baseline"}, ("no_baseline", "reinforce", "sequence_mean")),
        ({"algorithm": "reinforce_with_baseline"}, ("group_normalized", "reinforce", "sequence_mean")),
        ({"algorithm": "grpo_no_clip"}, ("group_normalized", "no_clip", "sequence_mean")),
    ],
)
def test_algorithms_and_normalizations(settings, expected, build):
    objective = build(**settings).build_algorithm()
    assert (objective.advantage, objective.surrogate, objective.aggregation) == expected


@pytest.mark.parametrize("algorithm", ["grpo", "grpo_no_clip", "reinforce_with_baseline"])
def test_the_courses_advantages_and_no_divergence(algorithm, build):
    """Rewards 1, 0, 0, 0: mean 1/4, sum of squares 9/16 + 3/16, so the sample's deviation is sqrt(3/4 / 3) = 1/2.

    Advantages 3/4 and -1/4 over 1/2 + 1e-6; the population's deviation, sqrt(3)/4, would give 1.732 and -0.577.
    """
    objective = build(algorithm=algorithm).build_algorithm()
    found = objective.advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    assert found.tolist() == pytest.approx([0.75 / 0.500001, *[-0.25 / 0.500001] * 3], abs=1e-6)
    assert objective.beta == 0


def test_what_the_course_sets_can_be_given(build):
    given = build(std_ddof=0, advantage_eps=1e-4, beta=0.04).build_algorithm()
    assert (given.std_ddof, given.advantage_eps, given.beta) == (0, 1e-4, 0.04)
    # What is not of the course stays as its paper has it, and nothing that an estimator does not read is set.
    assert build(algorithm="gspo").build_algorithm().std_ddof == 0
    assert build(algorithm="rloo").build_algorithm().beta == 0.03
    for settings in ({"algorithm": "dr_grpo"}, {"algorithm": "no_baseline"}, {"use_std_normalization": False}):
        config = build(**settings)
        assert (config.std_ddof, config.advantage_eps, config.beta) == (None, None, 0)


# ---- Batches ----


@pytest.mark.parametrize(
    ("sizes", "rows", "responses"),
    [
        # An update is 4 passes of 4, a rollout 2 updates.
        ({"rollout_batch_size": 32, "train_batch_size": 16, "per_device_train_batch_size": 4}, [4] * 8, [32]),
        ({"rollout_batch_size": 16, "train_batch_size": 16, "per_device_train_batch_size": 4}, [4] * 8, [16, 16]),
        # Neither word: one pass of 8, transformers' default.
        ({}, [8, 8], [8, 8]),
    ],
)
def test_passes_and_rollouts_are_as_large_as_was_asked(sizes, rows, responses, build):
    """Two updates of the embedded model: the rows of each pass, and the responses of each rollout."""
    passes, rollouts = [], []

    def reward(completions, **columns):
        rollouts.append(len(completions))
        return [float(index % 2) for index in range(len(completions))]

    class Counting(BeforeLoss, PolicyTrainer):
        def before_loss(self, inputs):
            passes.append(len(inputs["completion_ids"]))
            return inputs

    trainer = Counting(
        AutoModelForCausalLM.from_pretrained(MODEL_DIR),
        reward_funcs=reward,
        args=build(group_size=4, max_steps=2, max_completion_length=4, disable_tqdm=True, save_strategy="no", **sizes),
        processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
        train_dataset=Dataset.from_list([{"prompt": f"{n} + 1 ="} for n in range(20)]),
    )
    trainer.train()
    assert (passes, rollouts) == (rows, responses)
    assert trainer.rollouts * trainer.args.generation_batch_size == sum(responses)
