"""Configurations with the names of TRL's: which defaults are others, in docs/trl.md and in a run's line."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import pytest
import trl

import trl_ext
from tests.support import REPOSITORY
from tests.support.rollout_once import build

# Those of TRL itself, such as ModelConfig, pass through.
SHARED = [
    name
    for name in dir(trl)
    if name.endswith("Config") and getattr(trl_ext, name, getattr(trl, name)) is not getattr(trl, name)
]


def table() -> dict[tuple[str, str], tuple[str, str]]:
    """(configuration, field) -> (here, TRL's), as docs/trl.md has them."""
    text = (Path(REPOSITORY) / "docs" / "trl.md").read_text(encoding="utf-8").partition("\n## Defaults of")[2]
    text = text.partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    found = {}
    for owners, field, here, theirs in rows[1:]:
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


@pytest.mark.parametrize(
    "config, given, expected",
    [
        ("GRPOConfig", {}, "those of trl.GRPOConfig are beta 0.0, loss_type dapo, scale_rewards group"),
        ("GRPOConfig", {"beta": 0.0, "aggregation": "token_mean"}, "those of trl.GRPOConfig are scale_rewards group"),
        ("GRPOConfig", {"beta": 0.0, "loss_type": "dapo", "scale_rewards": "group"}, ""),
        ("RLOOConfig", {}, "those of trl.RLOOConfig are beta 0.05, num_generations 2"),
        ("RLOOConfig", {"beta": 0.05, "num_generations": 2}, ""),
        ("DrGRPOConfig", {}, ""),
        ("PolicyConfig", {}, ""),
    ],
)
def test_which_defaults_are_others(config, given, expected, tmp_path):
    line = getattr(trl_ext, config)(output_dir=str(tmp_path), use_cpu=True, **given).unlike_trl
    assert line.endswith(expected) and bool(line) is bool(expected)


def test_the_defaults_of_trl_have_its_objective(tmp_path):
    """What the documentation names, resolved."""
    given = {"loss_type": "dapo", "scale_rewards": "group", "beta": 0.0}
    objective = trl_ext.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **given).build_objective()
    assert (objective.aggregation, objective.advantage, objective.std_ddof) == ("token_mean", "group_normalized", 1)
    assert (objective.advantage_eps, objective.beta, objective.epsilon, objective.epsilon_high) == (1e-4, 0, 0.2, 0.2)


def test_a_run_says_so_once(policy_path, tmp_path, caplog):
    args = {"num_generations": 4}
    with caplog.at_level(logging.WARNING):
        build({"model": policy_path, "trainer": "GRPOTrainer", "args": args}, str(tmp_path)).train()
    lines = [record.getMessage() for record in caplog.records if "trl.GRPOConfig" in record.getMessage()]
    assert lines == [
        "GRPOConfig of trl_ext has the paper's defaults; those of trl.GRPOConfig are beta 0.0, loss_type dapo, "
        "scale_rewards group"
    ]
