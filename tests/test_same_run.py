"""A run is resumed with the settings it was begun with."""

from __future__ import annotations

import pytest
import yaml

from tests.recipes import RECIPES

BEGUN = {"algorithm": "grpo", "seed": 42, "learning_rate": 5e-4, "save_steps": 2, "max_steps": 30}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check given settings against `BEGUN`."""
    monkeypatch.syspath_prepend(str(RECIPES))
    from same_run import check_same_settings

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(BEGUN))
    return lambda **settings: check_same_settings(config, yaml.safe_dump({**BEGUN, **settings}))


@pytest.mark.parametrize(
    "settings", [{}, {"save_steps": 5, "per_device_train_batch_size": 4, "vllm_mode": "server", "eval_steps": 3}]
)
def test_what_does_not_change_the_run_may_change(check, settings):
    check(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "dr_grpo"}, "begun with algorithm 'grpo', and now it is 'dr_grpo': resume it with its own"),
        ({"seed": 9, "learning_rate": 1e-5}, r"learning_rate 0.0005, and now it is 1e-05 \(and seed\)"),
        ({"beta": 0.1}, "begun with beta None, and now it is 0.1"),
    ],
)
def test_what_changes_it_is_refused(check, settings, message):
    with pytest.raises(ValueError, match=message):
        check(**settings)


def test_a_longer_run_is_said(check, capsys, caplog):
    check(max_steps=60)
    assert "max_steps 60, and the run was begun with 30" in capsys.readouterr().out + caplog.text


def test_without_a_configuration_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    from same_run import check_same_settings

    check_same_settings(tmp_path / "config.yaml", "seed: 1")
    (tmp_path / "config.yaml").write_text("not: [closed")
    check_same_settings(tmp_path / "config.yaml", "seed: 1")
