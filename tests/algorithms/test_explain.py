"""`python -m trl_ext.algorithms --explain NAME`: what is in the row, and the source of what runs."""

from __future__ import annotations

import inspect

import pytest

from trl_ext import losses
from trl_ext.advantages import ADVANTAGES
from trl_ext.algorithms import PolicyObjective, algorithms
from trl_ext.algorithms.__main__ import main
from trl_ext.algorithms.explain import explain
from trl_ext.registry import policy_algorithms, preference_losses
from trl_ext.settings import SETTINGS

OWN = """
from trl_ext import policy_algorithm, preference_loss

@policy_algorithm("explained_gate", advantage="group_rank", beta=0.02)
def gate(scores, *, strength, width=0.5):
    return -scores.log_ratio * scores.advantages * strength

@preference_loss("explained_square", needs_reference=False, columns=("sure",), paper="2401.00001")
def square(scores, *, beta, tau=2.0, power):
    return (1 - beta * scores.margin).square()

def halves(rewards, group_size, weight=0.5):
    return rewards * weight

def neither(scores):
    return scores
"""


@pytest.fixture(scope="module")
def own_file(tmp_path_factory):
    tables = (policy_algorithms, preference_losses)
    saved = [dict(table._entries) for table in tables]
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    yield path
    for table, entries in zip(tables, saved, strict=True):
        table._entries = entries


@pytest.mark.parametrize("name", list(algorithms))
def test_an_algorithm_is_explained_with_the_settings_that_run(name):
    text, objective, row = explain(name), PolicyObjective(name), algorithms[name]
    for flag in SETTINGS:
        value = getattr(objective, flag)
        shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
        assert (f"\n--{flag} {shown}\n" in text) == (value is not None), flag
    for function in (ADVANTAGES[objective.advantage], row.function):
        assert inspect.getsource(function) in text + "\n"
    assert ("def kl_estimate(" in text) == bool(objective.beta and not row.takes_beta)
    for flag, (values, reason) in row.fixed.items():
        assert f"--{flag} is {' or '.join(values)}: {reason}" in text


def test_a_line_is_where_the_function_is():
    line = inspect.getsourcelines(algorithms["dapo"].function)[1]
    assert f"# trl_ext/losses/policy.py:{line}\ndef clipped_surrogate(" in explain("dapo")


@pytest.mark.parametrize("name", list(preference_losses))
def test_a_loss_is_explained(name):
    lines, entry = explain(name).splitlines(), preference_losses[name]
    yes = {True: "true", False: "false"}
    row = [f"paper {entry.paper}"] if entry.paper else []
    row += [f"beta {entry.default_beta:g}"]
    row += [f"batch_coupled {yes[entry.batch_coupled]}", f"needs_reference {yes[entry.needs_reference]}"]
    assert {*row, *inspect.getsource(entry.function).splitlines()} <= {*lines}


@pytest.mark.parametrize(("name", "function"), [*ADVANTAGES.items(), ("kto", losses.kto)])
def test_another_function_is_its_source(name, function):
    assert explain(name).endswith(inspect.getsource(function).rstrip())


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("gate", ["explained_gate: ", "--advantage group_rank", "--beta 0.02", "def gate(", "def kl_estimate("]),
        ("square", ["paper 2401.00001", "option tau 2", "option power (required)", "('sure',)"]),
        ("explained_square", ["def square("]),
        ("halves", ["def halves("]),
    ],
)
def test_your_own(function, parts, own_file):
    text = explain(f"{own_file}:{function}")
    assert f"# {own_file}:" in text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grop", "no algorithm, preference loss or advantage is called 'grop'; did you mean 'grpo'?"),
        ("nowhere.py:f", "no file 'nowhere.py'"),
        ("{own}:neither", "decorate it with @trl_ext.policy_algorithm or @trl_ext.preference_loss"),
        ("{own}:halve", "did you mean 'halves'?"),
    ],
)
def test_an_unknown_name_is_one_line(name, message, own_file, capsys):
    with pytest.raises(SystemExit):
        main(["--explain", name.format(own=own_file)])
    assert message in capsys.readouterr().err


def test_the_command(capsys):
    main(["--explain", "gspo"])
    assert capsys.readouterr().out == explain("gspo") + "\n"
