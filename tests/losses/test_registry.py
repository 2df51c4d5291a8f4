"""Names of losses: duplicates, hints, functions from a user's own file, and checks of options."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

from trl_ext.losses import PreferenceObjective, PreferenceScores, dpo
from trl_ext.registry import preference_loss, preference_losses, preference_weighting

LOSS_FILE = '''
import torch
from trl_ext import preference_loss

@preference_loss("squared_hinge", needs_reference=True)
def squared_hinge(scores, *, beta):
    """Squared hinge on the reference-corrected margin; per-pair losses, shape [B]."""
    return torch.relu(1 - beta * scores.margin).square()
'''


@pytest.fixture(autouse=True)
def no_module_of_a_test_folder(registries_as_before, tmp_path):
    """No module loaded from a test's folder stays."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder, text, name="my_losses.py"):
    path = folder / name
    path.write_text(text)
    return path


# Margins 3 and -2, of which the squared hinge at beta 0.1 is (1 - 0.3)^2 = 0.49 and (1 + 0.2)^2 = 1.44.
SCORES = PreferenceScores(
    chosen=torch.tensor([-20.0, -15.0]),
    rejected=torch.tensor([-30.0, -12.0]),
    ref_chosen=torch.tensor([-22.0, -14.0]),
    ref_rejected=torch.tensor([-29.0, -13.0]),
)


# ---- Names ----


def test_a_name_is_given_once():
    with pytest.raises(
        ValueError,
        match=r"the preference loss 'dpo' is already defined by trl_ext\.losses\.preference\.dpo; "
        "give yours another name",
    ):
        preference_loss("dpo")(lambda scores, *, beta: -scores.margin)
    assert preference_losses["dpo"].function is dpo


def test_a_notebook_cell_may_run_twice():
    def run_cell(factor):
        @preference_loss("linear")
        def linear(scores, *, beta):
            return -factor * beta * scores.margin

        return linear

    run_cell(1.0)
    second = run_cell(2.0)
    assert preference_losses["linear"].function is second


def test_objects_are_given_a_name_once():
    first, other = functools.partial(dpo), functools.partial(dpo)
    preference_loss("an_object")(first)
    preference_loss("an_object")(first)
    with pytest.raises(ValueError, match="the preference loss 'an_object' is already defined by"):
        preference_loss("an_object")(other)
    assert preference_losses["an_object"].function is first


def test_policy_weights_cannot_be_normalised():
    """Their mean over the optimizer batch is known only once the batch has been trained on."""
    with pytest.raises(ValueError, match="cannot both read policy weights and be normalised"):
        preference_weighting("both", normalize=True, needs_policy_weights=True)


def test_unknown_name_lists_the_known_and_hints():
    with pytest.raises(ValueError) as error:
        preference_losses["robust_dop"]
    message = str(error.value)
    assert message.startswith("unknown preference loss 'robust_dop'; did you mean 'robust_dpo'?")
    assert ", ".join(sorted(preference_losses)) in message and "file.py:function" in message
    with pytest.raises(ValueError, match="unknown preference weighting 'dpo'"):
        PreferenceObjective("dpo", weightings=["dpo"])


# ---- Files ----


@pytest.mark.parametrize("place", ["my_file:", "my_file.py:", "my_package.losses:", "{folder}/my_file.py:"])
def test_a_loss_of_ones_own(place, tmp_path, monkeypatch):
    """From a file beside the command, from a module on the path, and from an absolute path."""
    (tmp_path / "my_package").mkdir()
    write(tmp_path / "my_package", LOSS_FILE, "losses.py")
    write(tmp_path, LOSS_FILE, "my_file.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    objective = PreferenceObjective(place.format(folder=tmp_path) + "squared_hinge")
    assert (objective.beta, objective.needs_reference, objective.batch_coupled) == (0.1, True, False)
    assert objective(SCORES).tolist() == pytest.approx([0.49, 1.44], abs=1e-6)


def test_a_weighting_from_a_file(tmp_path):
    """l(0.3) * 2 and l(-0.2) * 2."""
    path = write(
        tmp_path,
        "from trl_ext import preference_weighting\n\n"
        "@preference_weighting('double')\ndef double(scores):\n    return 2 * (scores.chosen < 0)\n",
    )
    losses = PreferenceObjective("dpo", beta=0.1, weightings=[f"{path}:double"])(SCORES)
    assert losses.tolist() == pytest.approx([1.108709, 1.596278], abs=1e-5)


def test_by_function_name_and_by_registered_name(tmp_path):
    path = write(tmp_path, LOSS_FILE.replace('"squared_hinge"', '"sq"'))
    by_function = preference_losses.find(f"{path}:squared_hinge")
    assert by_function.name == "sq"
    assert preference_losses.find(f"{path}:sq") is by_function
    assert preference_losses.find("sq") is by_function


def test_two_files_of_one_name(tmp_path):
    for folder, name in (("a", "first"), ("b", "second")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, LOSS_FILE.replace('"squared_hinge"', f'"{name}"'))
    entries = [preference_losses.find(f"{tmp_path}/{folder}/my_losses.py:squared_hinge") for folder in "ab"]
    assert [entry.name for entry in entries] == ["first", "second"]


def test_a_file_that_the_script_imported_as_well(tmp_path, monkeypatch):
    """One function, two module names: still the same function, not a duplicate."""
    path = write(tmp_path, LOSS_FILE, "my_imported_losses.py")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("my_imported_losses")
    assert preference_losses.find(f"{path}:squared_hinge").name == "squared_hinge"


PLAIN = "def plain(scores, *, beta):\n    return -beta * scores.margin\n"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (PLAIN, "my_losses.py:plain", r"my_losses\.py.*decorate it with @trl_ext\.preference_loss\('plain'\)"),
        (
            LOSS_FILE,
            "my_losses.py:squared_hing",
            "has no preference loss 'squared_hing': it defines squared_hinge; did you mean 'squared_hinge'",
        ),
        ("x = 1\n", "my_losses.py:f", r"has no preference loss 'f': it defines no \w+"),
        ("", "absent.py:f", r"no file 'absent\.py' to take a function from"),
        ("", "absent_module:f", r"no file 'absent_module\.py' and no module 'absent_module'"),
        (LOSS_FILE.replace('"squared_hinge"', '"dpo"'), "my_losses.py:squared_hinge", "'dpo' is already defined"),
    ],
)
def test_what_a_file_does_not_give(text, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        preference_losses.find(name)
    assert preference_losses["dpo"].function is dpo


def test_a_syntax_error_names_the_file_and_is_gone_once_mended(tmp_path):
    path = write(tmp_path, "def broken(:\n    pass\n")
    with pytest.raises(SyntaxError) as error:
        preference_losses.find(f"{path}:squared_hinge")
    assert (error.value.filename, error.value.lineno) == (str(path), 1)
    write(tmp_path, LOSS_FILE)
    assert preference_losses.find(f"{path}:squared_hinge").name == "squared_hinge"


def test_an_error_in_the_file_surfaces(tmp_path):
    path = write(tmp_path, "import a_module_that_is_not_installed\n" + LOSS_FILE)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_installed"):
        preference_losses.find(f"{path}:squared_hinge")


# ---- Options ----


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (
            "cdpo",
            {"label_smooting": 0.1},
            "'cdpo' has no option 'label_smooting': it takes label_smoothing; did you mean 'label_smoothing'?",
        ),
        ("simpo", {"margin": 0.1}, "'simpo' has no option 'margin': it takes gamma, gamma_beta_ratio."),
        ("dpo", {"label_smoothing": 0.1}, "'dpo' has no option 'label_smoothing': it takes none."),
        ("shifted", {"scale": 2.0}, "'shifted' needs the option 'shift', which has no default"),
    ],
)
def test_wrong_options(loss, options, message):
    preference_loss("shifted")(lambda scores, *, beta, shift, scale=1.0: scale * (scores.margin - shift))
    with pytest.raises(ValueError) as error:
        preference_losses[loss].check_options(options)
    assert str(error.value).startswith(message)
