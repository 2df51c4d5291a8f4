"""Configurations of trainers: TRL's words and defaults, devices, group sizes and batches, and the command line."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re

import pytest
import torch
import trl
from transformers import HfArgumentParser, TrainingArguments
from trl import TrlParser

import trl_ext
from tests.support import REPOSITORY
from tests.support.rollout_once import DEFAULTS, build, train
from tests.support.train_once import named_methods
from trl_ext.algorithms import algorithms
from trl_ext.registry import preference_losses
from trl_ext.rollouts.generation import prompt_tokens
from trl_ext.trainers import defaults
from trl_ext.trainers.policy import methods as policy_methods
from trl_ext.trainers.preference import methods as preference_methods
from trl_ext.trainers.preference.config import _NOT_CARRIED

pytestmark = pytest.mark.usefixtures("registries_as_before")

DOCUMENTED = (REPOSITORY / "docs" / "methods.md").read_text(encoding="utf-8")
POLICY_METHODS, PREFERENCE_METHODS = map(named_methods, (policy_methods, preference_methods))
BUILT_IN = {name for name in preference_losses if preference_losses[name].function.__module__.startswith("trl_ext.")}
# Each rollout serves four updates.
FOUR_UPDATES = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 40}


@pytest.fixture
def configure(tmp_path):
    def config(name: str = "PolicyConfig", **settings):
        own = getattr(trl_ext, name)
        given = DEFAULTS if issubclass(own, trl_ext.PolicyConfig) else {"use_cpu": True}
        return own(**{**given, **settings}, output_dir=str(tmp_path))

    return config


# ---- Names ----


def test_a_named_configuration_is_its_method(configure):
    for name in POLICY_METHODS:
        assert configure(f"{name}Config", num_generations=4).algorithm.replace("_", "") == name.lower()
    assert {preference_losses[configure(f"{name}Config").loss].name for name in PREFERENCE_METHODS} == BUILT_IN
    for name in PREFERENCE_METHODS:
        assert configure(f"{name}Config").loss.replace("_", "") == name.lower()
        assert getattr(trl_ext, f"{name}Trainer")._config_class is getattr(trl_ext, f"{name}Config")


@pytest.mark.parametrize(
    ("trainer", "given"),
    [
        *(("GSPOTrainer", trl_ext.PolicyConfig), ("AOTTrainer", trl_ext.PreferenceConfig)),
        *((f"{name}Trainer", getattr(trl, f"{name}Config")) for name in ("DPO", "SFT", "KTO", "Reward")),
    ],
)
def test_a_configuration_of_another_class_is_refused(trainer, given, tiny_model_path, tmp_path):
    args = given(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    wanted = trainer.replace("Trainer", "Config")
    with pytest.raises(TypeError, match=rf"takes a {wanted}, got {given.__name__} of .*from trl_ext import {wanted}$"):
        getattr(trl_ext, trainer)(tiny_model_path, args=args)


# ---- In TRL's words ----


def test_settings_in_trls_words(configure):
    """Each says what our setting says; what a named algorithm is anyway may be said again."""

    def settings(name: str, **given) -> dict:
        return configure(name, num_generations=4, **given).build_algorithm().to_dict()

    assert settings("GRPOConfig", loss_type="grpo") == settings("GRPOConfig")
    said = settings("DrGRPOConfig", loss_type="dr_grpo", scale_rewards=False, importance_sampling_level="token")
    assert said == settings("DrGRPOConfig")
    assert settings("GSPOConfig", importance_sampling_level="sequence") == settings("GSPOConfig")
    assert settings("GRPOConfig", loss_type="dapo") == {**settings("GRPOConfig"), "aggregation": "token_mean"}
    said = settings("GRPOConfig", scale_rewards=True, use_bias_correction_kl=True, delta=3.0)
    own = {"std_ddof": 1, "advantage_eps": 1e-4, "kl_ratio_correction": True, "dual_clip": 3.0}
    assert said == {**settings("GRPOConfig"), **own}
    # TRL's IPO averages over tokens, its `aot` is the paired form, and sigmoid is DPO.
    by_name = {"sigmoid": "dpo", "aot": "aot_paired", "aot_unpaired": "aot", "robust": "robust_dpo"}
    for name, loss in by_name.items():
        assert configure("PreferenceConfig", loss_type=name).loss == loss
        assert configure("PreferenceConfig", loss_type=[name], loss=loss).loss == loss
    assert configure("IPOConfig", loss_type="ipo").build_objective().loss_options == {"length_normalized": True}


def test_the_documentation_lists_the_arguments_of_trl_that_are_refused(tmp_path):
    """Each call in the left column of the table is tried."""
    page = DOCUMENTED.split("## Arguments that are refused")[1].split("\n## ")[0]
    left = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    calls = re.findall(r"`(\w+Config)\((\w+)=([^`]+)\)`", left)
    for name, argument, value in calls:
        with pytest.raises((ValueError, TypeError), match=argument):
            getattr(trl_ext, name)(str(tmp_path), use_cpu=True, **{argument: ast.literal_eval(value)})
    named = {argument for name, argument, _ in calls if name == "DPOConfig"}
    assert {*_NOT_CARRIED, "max_length", "loss_type", "label_smoothing"} == named


# ---- Defaults that are not TRL's ----

# Configurations with names of TRL's; those of TRL itself, such as ModelConfig, pass through.
SHARED = [
    name
    for name in dir(trl)
    if name.endswith("Config") and getattr(trl_ext, name, getattr(trl, name)) is not getattr(trl, name)
]


def table() -> dict[tuple[str, str], tuple[str, str]]:
    """(configuration, field) -> (here, TRL's), as docs/methods.md has them."""
    text = DOCUMENTED.partition("\n## Defaults of")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    found = {}
    for owners, field, here, theirs in [[cell.strip() for cell in line] for line in lines[1:]]:
        for owner in SHARED if owners == "all" else re.findall(r"`(\w+)`", owners):
            found[owner, field.strip("`")] = here, theirs
    return found


def test_the_table_of_defaults_is_that_of_the_classes(tmp_path):
    documented, differing = table(), set()
    assert {"DPOConfig", "GRPOConfig", "KTOConfig", "RLOOConfig", "RewardConfig", "SFTConfig"} <= set(SHARED)
    for name in SHARED:
        own = {field.name for field in dataclasses.fields(getattr(trl_ext, name))}
        resolved = getattr(trl_ext, name)(output_dir=str(tmp_path), use_cpu=True)
        stock = getattr(trl, name)(output_dir=str(tmp_path), use_cpu=True, bf16=False)
        for field in dataclasses.fields(getattr(trl, name)):
            here, theirs = getattr(resolved, field.name, None), getattr(stock, field.name)
            # transformers from 5.24 on has another name for gradient_checkpointing beside it.
            if field.name in ("use_cpu", "bf16", "activation_checkpointing") or (here == theirs and field.name in own):
                continue
            differing.add((name, field.name))
            said, of_trl = documented.get((name, field.name), ("", ""))
            assert of_trl == str(theirs), (name, field.name, theirs)
            is_told_apart = here is None or field.name == "gradient_checkpointing"
            assert said.startswith("none: ") if is_told_apart else said == str(here), (name, field.name, here)
    assert differing == set(documented)


def test_beta_defaults_to_the_losses_own(configure):
    """Which is that of its function, or 0.1."""
    for name, beta in (("SimPOConfig", 2.0), ("AOTConfig", 0.01)):
        assert configure(name).beta == configure(name).build_objective().beta == beta
        assert configure(name, beta=0.7).beta == 0.7
    online = [configure("OnlinePreferenceConfig", loss=loss) for loss in ("ipo", "simpo")]
    assert [config.beta for config in online] == [0.1, 2.0]


# ---- Device ----


@pytest.fixture
def device(monkeypatch):
    """Pretend to run on a machine with or without an accelerator and bfloat16 instructions."""

    def pretend(*, accelerator: bool, bfloat16: bool = False, launcher_asks_for_cpu: str = ""):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: accelerator)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
        monkeypatch.setenv("ACCELERATE_USE_CPU", launcher_asks_for_cpu)

    return pretend


def test_without_an_accelerator_training_is_in_float32_unless_bfloat16_is_asked_for(device, tmp_path):
    """Whatever the processor's speed: a resumed run has the precision of the run that it resumes."""
    device(accelerator=False)
    config = trl_ext.PreferenceConfig(str(tmp_path))
    assert (config.use_cpu, config.bf16, config.gradient_checkpointing) == (True, False, False)
    assert trl_ext.PreferenceConfig(str(tmp_path), gradient_checkpointing=True).gradient_checkpointing is True
    assert trl_ext.PreferenceConfig(str(tmp_path), bf16=True).bf16 is True


@pytest.mark.parametrize(
    ("asked", "bfloat16", "resolved"),
    [
        # (use_cpu, bf16, gradient_checkpointing)
        ({}, True, (False, True, True)),
        ({}, False, (False, False, True)),
        ({"fp16": True}, True, (False, False, True)),
        ({"bf16": False, "gradient_checkpointing": False}, True, (False, False, False)),
        ({"bf16": True}, False, (False, True, True)),
        ({"use_cpu": True}, True, (True, False, False)),
        ({"use_cpu": True, "bf16": True}, True, (True, True, False)),
    ],
)
def test_resolution_with_an_accelerator(asked, bfloat16, resolved, device):
    device(accelerator=True, bfloat16=bfloat16)
    # The resolution alone: TRL's own checks that follow would look for the accelerator.
    args = trl_ext.PreferenceConfig.__new__(trl_ext.PreferenceConfig)
    args.use_cpu, args.fp16, args.tf32, args.bf16, args.gradient_checkpointing = False, False, None, None, None
    for name, value in asked.items():
        setattr(args, name, value)
    defaults.resolve_device_defaults(args)
    assert (args.use_cpu, args.bf16, args.gradient_checkpointing) == resolved


def test_the_launcher_can_ask_for_the_cpu(device):
    for value, use_cpu in (("true", True), ("1", True), ("false", False), ("", False)):
        device(accelerator=True, bfloat16=True, launcher_asks_for_cpu=value)
        assert defaults.runs_on_cpu(use_cpu=False) is use_cpu


# ---- Group sizes and batches ----


def test_a_group_of_one(configure):
    """Only where nothing is compared within a group."""
    for name in ("remax", "reinforce"):
        config = configure(algorithm=name, num_generations=1)
        assert (config.num_generations, config.num_generations_eval, config.generation_batch_size) == (1, 1, 8)
    for name in set(algorithms) - {"remax", "reinforce"}:
        with pytest.raises(ValueError, match=rf"'{name}' compares the responses to one prompt"):
            configure(algorithm=name, num_generations=1)


def test_the_group_size_is_the_algorithms(configure):
    for name, size in {"grpo": 8, "rloo": 4, "remax": 1, "dapo": 16}.items():
        config = configure(algorithm=name, num_generations=None, per_device_train_batch_size=16)
        assert config.num_generations == size


def test_a_greedy_baseline_needs_whole_groups_on_every_process(configure, monkeypatch):
    """Two processes of two rows hold one group of four together, but neither holds it whole."""
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))
    settings = {"per_device_train_batch_size": 2, "num_generations": 4}
    assert configure(algorithm="grpo", **settings).generation_batch_size == 4
    with pytest.raises(ValueError, match="2 responses per process do not divide into groups of 4"):
        configure(algorithm="remax", **settings)
    assert configure(algorithm="remax", **settings, generation_batch_size=8).steps_per_generation == 2


def test_fewer_prompts_than_a_rollout_holds_are_refused(policy_path, tmp_path):
    """A rollout of 16 responses in groups of 4 is of four prompts; three would train nothing at all."""
    spec = {"model": policy_path, "args": {"steps_per_generation": 2}}
    train({**spec, "prompts": 4}, str(tmp_path))
    with pytest.raises(ValueError, match="prompts"):
        train({**spec, "prompts": 3}, str(tmp_path))


def test_the_budgets_must_fit_the_context(policy_path, tmp_path):
    """The tiny model has 4096 positions: what the longest prompt leaves of them fits, one more does not."""
    trainer = build({"model": policy_path}, str(tmp_path))
    longest = max(len(prompt_tokens(trainer.processing_class, row["prompt"], 512)) for row in trainer.train_dataset)
    assert 0 < longest < 512
    build({"model": policy_path, "args": {"max_completion_length": 4096 - longest}}, str(tmp_path))
    with pytest.raises(ValueError, match="up to 4097 tokens, and the model's context holds 4096: lower --max_c"):
        build({"model": policy_path, "args": {"max_completion_length": 4097 - longest}}, str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Rows in a rollout / rows per forward pass = micro-batches; times iterations, over accumulation.
        ({"generation_batch_size": 64, "num_iterations": 2, "gradient_accumulation_steps": 2}, 8),
        ({}, 1),
        ({"gradient_accumulation_steps": 4}, 1),
        ({"steps_per_generation": 4, "num_iterations": 3}, 12),
        # 3 micro-batches, 2 to an update: after 3 updates, two rollouts are used up.
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 3),
    ],
)
def test_updates_per_rollout(settings, expected, configure):
    assert configure(**settings).updates_per_rollout == expected


def test_the_best_checkpoint_must_be_saved_between_rollouts(configure):
    best = {"save_strategy": "steps", "eval_strategy": "steps", "load_best_model_at_end": True}
    for settings in ({**best, "save_steps": 3, "eval_steps": 3}, {"save_strategy": "steps", "save_steps": 0.5}):
        with pytest.raises(ValueError, match="must be a multiple of 4"):
            configure(**FOUR_UPDATES, **settings)
    assert configure(**FOUR_UPDATES, **best, save_steps=8, eval_steps=4).save_steps == 8
    # Without a choice among them, checkpoints need no evaluation.
    assert configure(**FOUR_UPDATES, **{**best, "load_best_model_at_end": False}, save_steps=3, eval_steps=3)


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ({"algorithm": "reinforce", "num_iterations": 2}, 2),
        ({"algorithm": "rloo", "steps_per_generation": 4}, 4),
        ({"algorithm": "rloo", "gradient_accumulation_steps": 4}, None),
        ({"algorithm": "grpo", "num_iterations": 2}, None),
        # 3 micro-batches, in updates of 2: three updates of two rollouts, one of which holds parts of both.
        ({"algorithm": "opo", "gradient_accumulation_steps": 2, "steps_per_generation": 3}, 3),
    ],
)
def test_updates_off_policy_without_a_ratio_are_reported(settings, updates, configure, caplog):
    caplog.set_level(logging.WARNING)
    configure(**settings)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("trl_ext")]
    expected = f"{settings['algorithm']} has no importance ratio, and a rollout serves {updates} updates"
    assert [line[: len(expected)] for line in lines] == ([expected] if updates else [])


# ---- Options and the command line ----


def test_json_and_objects_are_alike(configure):
    options = {"loss": "simpo", "weighting": ["wpo", "confidence"]}
    texts = {"loss_kwargs": '{"gamma": 1.5}', "weighting_kwargs": '{"power": 2, "max_weight": null}'}
    mappings = {"loss_kwargs": {"gamma": 1.5}, "weighting_kwargs": {"power": 2, "max_weight": None}}
    for given in (texts, mappings):
        config = configure("PreferenceConfig", **options, **given)
        objective = config.build_objective()
        assert config.loss_kwargs == objective.loss_options == {"gamma": 1.5}
        assert [options for _, options in objective.weightings] == [
            {"max_weight": None},
            {"column": "avg_confidence", "power": 2, "floor": 0.3},
        ]
        assert objective.columns == ("avg_confidence",)
    twice = configure("SimPOConfig", gamma=1.0, loss_kwargs={"gamma": 1.0})
    assert twice.build_objective().loss_options == {"gamma": 1.0}


@pytest.mark.parametrize("parser_class", [HfArgumentParser, TrlParser])
def test_command_line(parser_class, tmp_path):
    shared = ["--output_dir", str(tmp_path), "--beta", "0.2", "--max_prompt_tokens", "9", "--use_cpu"]
    arguments = [*shared, "--learning_rate", "1e-5", "--num_generations", "4", "--share_backbone", "never"]
    arguments += ["--advantage_clip", "5", "--min_new_tokens", "3", "--missing_eos_penalty", "0.5"]
    arguments += ["--generation_kwargs", '{"top_k": 9}']
    for name in ("Policy", *POLICY_METHODS):
        (config,) = parser_class(getattr(trl_ext, f"{name}Config")).parse_args_into_dataclasses(arguments)
        objective = config.build_algorithm()
        assert (config.beta, objective.beta, objective.advantage_clip) == (0.2, 0.2, 5.0)
        assert config.generation_kwargs == {"top_k": 9, "min_new_tokens": 3}
        assert (config.max_prompt_tokens, config.share_backbone, config.missing_eos_penalty) == (9, "never", 0.5)
        assert (config.bf16, config.gradient_checkpointing, config.disable_dropout) == (False, False, True)
    arguments = [*shared, "--weighting", "wpo", "confidence", "--weighting_kwargs", '{"power": 2}', "--bf16", "false"]
    arguments += ["--loss_columns", "avg_confidence", "--gradient_checkpointing", "true", "--aot_scope", "device"]
    for name in ("Preference", *PREFERENCE_METHODS):
        (config,) = parser_class(getattr(trl_ext, f"{name}Config")).parse_args_into_dataclasses(arguments)
        assert (config.beta, config.weighting, config.weighting_kwargs) == (0.2, ["wpo", "confidence"], {"power": 2})
        assert (config.loss_columns, config.aot_scope) == (["avg_confidence"], "device")
        assert (config.max_prompt_tokens, config.max_response_tokens) == (9, 512)
        assert (config.bf16, config.gradient_checkpointing) == (False, True)
