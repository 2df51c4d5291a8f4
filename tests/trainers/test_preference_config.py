"""`PreferenceConfig`: what it refuses and says, options as JSON, device defaults, and the command line."""

from __future__ import annotations

import ast
import logging
import re

import pytest
import torch
from transformers import HfArgumentParser
from trl import TrlParser

import trl_ext
import trl_ext.trainers
from tests.support import REPOSITORY
from trl_ext.trainers import (
    AOTConfig,
    CDPOConfig,
    GRPOConfig,
    IPOConfig,
    KTOConfig,
    PreferenceConfig,
    RewardConfig,
    SFTConfig,
    SimPOConfig,
    defaults,
)
from trl_ext.trainers.preference.config import _NOT_CARRIED

NAMED = [
    getattr(trl_ext.trainers, name)
    for name in trl_ext.trainers.__all__
    if name.endswith("Config")
    and name != "PreferenceConfig"
    and issubclass(getattr(trl_ext.trainers, name), PreferenceConfig)
]


@pytest.fixture
def configure(tmp_path):
    """Build a configuration with an output folder."""
    return lambda config_class=PreferenceConfig, **arguments: config_class(output_dir=str(tmp_path), **arguments)


@pytest.fixture
def device(monkeypatch):
    """Pretend to run on a machine with or without an accelerator and bfloat16 instructions."""

    def pretend(*, accelerator: bool, bfloat16: bool, launcher_asks_for_cpu: str = ""):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: accelerator)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
        monkeypatch.setenv("ACCELERATE_USE_CPU", launcher_asks_for_cpu)

    return pretend


# ---- Refusals ----


def test_a_named_configuration_keeps_its_loss(configure):
    with pytest.raises(ValueError, match="AOTConfig is the loss 'aot' and cannot be 'dpo': use PreferenceConfig"):
        configure(AOTConfig, loss="dpo")
    for config_class in NAMED:
        assert configure(config_class).loss == config_class._method


def test_a_loss_by_its_name_in_trl(configure):
    """TRL's IPO averages over tokens, its `aot` is the paired form, and sigmoid is DPO."""
    by_name = {"sigmoid": "dpo", "aot": "aot_paired", "aot_unpaired": "aot", "robust": "robust_dpo"}
    for name, loss in by_name.items():
        assert configure(loss_type=name).loss == configure(loss_type=[name], loss=loss).loss == loss
    assert configure(IPOConfig, loss_type="ipo").build_objective().loss_options == {"length_normalized": True}
    assert configure(AOTConfig, loss_type=["aot_unpaired"]).loss == "aot"
    for config_class, settings, said in (
        (IPOConfig, {"loss_type": "sigmoid"}, "loss_type 'sigmoid' selects loss dpo, which conflicts with loss ipo"),
        (
            IPOConfig,
            {"loss_type": "ipo", "length_normalized": False},
            "'ipo' selects length_normalized True, which",
        ),
        (AOTConfig, {"loss_type": ["aot"]}, "loss_type 'aot' selects loss aot_paired, which conflicts with loss aot"),
    ):
        with pytest.raises(ValueError, match=said):
            configure(config_class, **settings)


def test_an_option_given_twice(configure):
    with pytest.raises(ValueError, match="gamma is given twice, as 1.0 and in loss_kwargs as 2.0"):
        configure(SimPOConfig, gamma=1.0, loss_kwargs={"gamma": 2.0})
    assert configure(SimPOConfig, gamma=1.0, loss_kwargs={"gamma": 1.0}).build_objective().loss_options["gamma"] == 1.0
    with pytest.raises(ValueError, match="label_smoothing is given twice"):
        configure(CDPOConfig, label_smoothing=0.1, loss_kwargs={"label_smoothing": 0.2})


def test_a_configuration_can_be_built_where_gradients_are_off(configure):
    with torch.no_grad():
        assert configure().beta == 0.1


# ---- Options ----


def test_json_and_objects_are_alike(configure):
    options = {"loss": "simpo", "weighting": ["wpo", "confidence"]}
    written = configure(**options, loss_kwargs='{"gamma": 1.5}', weighting_kwargs='{"power": 2, "max_weight": null}')
    given = configure(**options, loss_kwargs={"gamma": 1.5}, weighting_kwargs={"power": 2, "max_weight": None})
    assert written.loss_kwargs == given.loss_kwargs == {"gamma": 1.5}
    objective = written.build_objective()
    assert objective.loss_options == {"gamma": 1.5}
    assert [own for _, own in objective.weightings] == [{"max_weight": None}, {"power": 2}]
    assert objective.columns == ("avg_confidence",)


def test_beta_defaults_to_the_losses_own(configure):
    """Which is that of its function, or 0.1."""
    for config_class, beta in ((SimPOConfig, 2.0), (AOTConfig, 0.01)):
        assert configure(config_class).beta == configure(config_class).build_objective().beta == beta
        assert configure(config_class, beta=0.7).beta == 0.7


# ---- Device ----


def test_without_an_accelerator_training_is_in_float32(configure, device):
    device(accelerator=False, bfloat16=False)
    config = configure()
    assert (config.use_cpu, config.bf16, config.gradient_checkpointing) == (True, False, False)


def test_a_cpu_uses_bfloat16_if_it_is_asked_for(configure, device, caplog):
    """Whatever the processor's speed: a resumed run has the precision of the run that it resumes."""
    device(accelerator=False, bfloat16=False)
    assert configure().bf16 is False
    assert configure(gradient_checkpointing=True).gradient_checkpointing is True
    with caplog.at_level(logging.WARNING):
        assert configure(bf16=True).bf16 is True
    (record,) = [record for record in caplog.records if record.name.startswith("trl_ext")]
    assert record.getMessage().endswith("only if the processor multiplies in it; else use --bf16 false")


@pytest.mark.parametrize("config_class", [PreferenceConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig])
@pytest.mark.parametrize("name", ["fp16", "tf32"])
def test_a_cpu_refuses_a_precision_that_it_would_not_train_in(name, config_class, configure, device):
    device(accelerator=False, bfloat16=False)
    with pytest.raises(ValueError, match=f"^{name} needs a GPU, and this run is on a CPU: leave {name} out"):
        configure(config_class, **{name: True})
    assert getattr(configure(config_class, **{name: False}), name) is False


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
    args = PreferenceConfig.__new__(PreferenceConfig)
    args.use_cpu, args.fp16, args.tf32, args.bf16, args.gradient_checkpointing = False, False, None, None, None
    for name, value in asked.items():
        setattr(args, name, value)
    defaults.resolve_device_defaults(args)
    assert (args.use_cpu, args.bf16, args.gradient_checkpointing) == resolved


@pytest.mark.parametrize(("value", "use_cpu"), [("true", True), ("1", True), ("false", False), ("", False)])
def test_the_launcher_can_ask_for_the_cpu(value, use_cpu, device):
    device(accelerator=True, bfloat16=True, launcher_asks_for_cpu=value)
    assert defaults.runs_on_cpu(use_cpu=False) is use_cpu


@pytest.mark.parametrize("config_class", [PreferenceConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig])
@pytest.mark.parametrize("epochs", [0, -1.0, float("nan"), float("inf")])
def test_a_run_of_no_epochs_is_refused(epochs, config_class, configure):
    with pytest.raises(ValueError, match=f"^num_train_epochs must be a positive number, got {epochs}"):
        configure(config_class, num_train_epochs=epochs)
    assert configure(config_class, num_train_epochs=epochs, max_steps=2).max_steps == 2


# ---- Command line ----


@pytest.mark.parametrize("parser_class", [HfArgumentParser, TrlParser])
@pytest.mark.parametrize("config_class", [PreferenceConfig, *NAMED], ids=lambda value: value.__name__)
def test_command_line(parser_class, config_class, tmp_path):
    arguments = ["--output_dir", str(tmp_path), "--beta", "0.2", "--weighting", "wpo", "confidence"]
    arguments += ["--weighting_kwargs", '{"power": 2}', "--loss_columns", "avg_confidence", "--max_prompt_tokens", "9"]
    arguments += ["--bf16", "false", "--gradient_checkpointing", "true", "--aot_scope", "device"]
    (config,) = parser_class(config_class).parse_args_into_dataclasses(arguments)
    assert type(config) is config_class
    assert config.beta == 0.2
    assert config.weighting == ["wpo", "confidence"]
    assert config.weighting_kwargs == {"power": 2}
    assert config.loss_columns == ["avg_confidence"]
    assert (config.max_prompt_tokens, config.max_response_tokens) == (9, 512)
    assert (config.bf16, config.gradient_checkpointing, config.aot_scope) == (False, True, "device")


def test_options_of_a_loss_on_the_command_line(tmp_path):
    output = ["--output_dir", str(tmp_path)]
    parse = lambda config_class, *given: TrlParser(config_class).parse_args_into_dataclasses([*output, *given])[0]  # noqa: E731
    config = parse(PreferenceConfig, "--loss", "simpo", "--loss_kwargs", '{"gamma": 1}')
    assert config.build_objective().describe() == "simpo (beta 2.0, gamma 1)"
    assert parse(SimPOConfig, "--gamma_beta_ratio", "0.3").gamma_beta_ratio == 0.3
    assert parse(IPOConfig, "--length_normalized", "true").build_objective().loss_options == {
        "length_normalized": True
    }
    assert parse(CDPOConfig, "--label_smoothing", "0.2").build_objective().loss_options == {"label_smoothing": 0.2}
    assert parse(PreferenceConfig).loss_kwargs is None
    with pytest.raises(ValueError, match="loss_kwargs must be a JSON object"):
        parse(PreferenceConfig, "--loss_kwargs", "gamma")


def test_yaml_with_mappings(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"output_dir: {tmp_path}\nloss: cdpo\nloss_kwargs:\n  label_smoothing: 0.3\n"
        "weighting: [confidence]\nweighting_kwargs:\n  power: 2.0\nmax_response_tokens: null\n"
    )
    (config,) = TrlParser(PreferenceConfig).parse_args_and_config(["--config", str(path)])
    assert config.build_objective().loss_options == {"label_smoothing": 0.3}
    assert config.build_objective().weightings[0][1] == {"power": 2.0}
    assert config.max_response_tokens is None


def test_the_documentation_lists_the_arguments_of_trl_that_are_refused(tmp_path):
    """Each call in the left column of the table is tried."""
    page = (REPOSITORY / "docs" / "trl.md").read_text().split("## Arguments that are refused")[1]
    left = " ".join(line.split("|")[1] for line in page.split("\n## ")[0].splitlines() if line.startswith("| `"))
    calls = re.findall(r"`(\w+Config)\((\w+)=([^`]+)\)`", left)
    for name, argument, value in calls:
        with pytest.raises((ValueError, TypeError), match=argument):
            getattr(trl_ext, name)(str(tmp_path), use_cpu=True, **{argument: ast.literal_eval(value)})
    named = {argument for name, argument, _ in calls if name == "DPOConfig"}
    assert {*_NOT_CARRIED, "max_length", "loss_type", "label_smoothing"} == named
