"""`python -m trl_ext.algorithms --explain NAME`: one screen with what is in the row, and with what runs."""

from __future__ import annotations

import inspect
import re

import pytest

from trl_ext.advantages import ADVANTAGES
from trl_ext.algorithms import PolicyObjective, algorithms
from trl_ext.algorithms.__main__ import main
from trl_ext.algorithms.explain import explain
from trl_ext.losses import kl_estimate
from trl_ext.registry import policy_algorithms, preference_losses

OWN = '''
from trl_ext import policy_algorithm, preference_loss

@policy_algorithm("explained_gate", advantage="group_rank", beta=0.02)
def gate(scores, *, strength, width=0.5):
    """A smooth gate: `ratio A`."""
    return -scores.log_ratio * scores.advantages * strength

@preference_loss("explained_square", needs_reference=False, columns=("sure",), paper="2401.00001", title="Squares")
def square(scores, *, beta, tau=2.0):
    """Squares: `(1 - beta margin)^2`."""
    return (1 - beta * scores.margin).square()

def halves(rewards, group_size, weight=0.5):
    """Half of each: `weight r`."""
    return rewards * weight

@policy_algorithm("explained_regression", ratio="none", beta=0.5)
def regression(scores, *, beta):
    return (beta * (scores.log_probs - scores.ref_log_probs) - scores.advantages).square()

def neither(scores):
    return scores
'''


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
    text = explain(name)
    objective = PolicyObjective(name)
    assert len(text.splitlines()) <= 50 and max(map(len, text.splitlines())) <= 119
    for flag in ("advantage", "ratio", "surrogate", "aggregation", "epsilon", "epsilon_high", "ratio_cap", "std_ddof"):
        value = getattr(objective, flag)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        assert (f"--{flag} {shown}" in text) == (value is not None), flag
    assert (f"--beta {objective.beta:g} --kl_estimator {objective.kl_estimator}" in text) == (objective.beta > 0)
    assert f"{ADVANTAGES[objective.advantage].__name__}, trl_ext/advantages.py:" in text
    for flag, (values, reason) in algorithms[name].fixed.items():
        assert f"--{flag} {' or '.join(values)}: {reason}" in text


def test_a_line_is_where_the_function_is():
    path, line = re.search(r"clipped_surrogate, (\S+):(\d+)", explain("dapo")).groups()
    assert (path, int(line)) == ("trl_ext/losses/policy.py", inspect.getsourcelines(algorithms["dapo"].function)[1])


@pytest.mark.parametrize("name", list(preference_losses))
def test_a_loss_is_explained(name):
    text, entry = explain(name), preference_losses[name]
    assert len(text.splitlines()) <= 50
    assert f"recommended beta: {entry.default_beta:g}" in text
    assert f"batch_coupled:    {'yes' if entry.batch_coupled else 'no'}" in text
    assert f"needs_reference:  {'yes' if entry.needs_reference else 'no'}" in text
    assert entry.title in text and all(f"{option} " in text for option in entry.options)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (
            "gate",
            ["explained_gate: A smooth gate", "strength (required)  width 0.5", "--advantage group_rank", "0.02"],
        ),
        (
            "explained_square",
            ["`(1 - beta margin)^2`", "Squares, arXiv 2401.00001", "tau 2", "sure", "0.1, the library"],
        ),
        ("halves", ["an advantage", "`weight r`", "weight 0.5"]),
        ("regression", ["--beta 0.5: of the reference, in the surrogate; no KL term"]),
    ],
)
def test_your_own(function, parts, own_file):
    text = explain(f"{own_file}:{function}")
    assert f"{own_file}:" in text
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


def test_without_docstrings(monkeypatch):
    """As under `python -OO`."""
    monkeypatch.setattr(kl_estimate, "__doc__", None)
    assert "no docstring" in explain("grpo")


def test_the_command(capsys):
    main(["--explain", "gspo"])
    assert capsys.readouterr().out == explain("gspo") + "\n"
