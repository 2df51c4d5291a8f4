"""Damaged files through the commands and the recipes' parser: one line that names the file or key, no traceback."""

from __future__ import annotations

import random

import pytest

from benchmarks._damage import MUTATIONS, YAML_MUTATIONS
from benchmarks._damage_targets import COMMANDS, YAML_TARGET, prepare, write_neighbours
from benchmarks.fuzz import run_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    prepare()
    folder = tmp_path_factory.mktemp("fuzz")
    write_neighbours(folder)
    return folder


@pytest.mark.parametrize("target", COMMANDS)
def test_commands(target, folder):
    """Undamaged, the command accepts its file; six kinds of damage to it are dealt with as they should be."""
    untouched = run_case(0, "as it was", target, 0, folder)
    assert untouched.accepted and untouched.defect is None, untouched
    names = random.Random(target).sample(sorted(MUTATIONS), 6)
    defects = [case for name in names if (case := run_case(1, name, target, 0, folder)).defect]
    assert not defects, defects


@pytest.mark.parametrize("mutation", YAML_MUTATIONS)
def test_configurations(mutation, folder):
    for number in range(3):
        case = run_case(number, mutation, YAML_TARGET, 0, folder)
        assert case.defect is None, case


def test_a_valid_configuration_is_accepted(folder):
    assert run_case(0, "YAML as it was", YAML_TARGET, 0, folder).accepted
    assert not run_case(0, "YAML duplicate key", YAML_TARGET, 0, folder).accepted
    assert not run_case(0, "YAML aliases", YAML_TARGET, 0, folder).accepted
