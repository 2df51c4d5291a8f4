"""Fixtures: tiny models and tokenizers built here, so that no test needs a download."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")
# DeepSpeed, where it is installed, prints to standard output that it looked for a GPU in vain.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Reference log-probabilities of earlier runs, as the trainers keep them, must not reach the tests.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="trl-ext-tests-")

import pytest

from tests.support import REPOSITORY

atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def no_garbage_among_modules():
    """Imported modules are left out of garbage collection.

    A trainer collects garbage when its training starts, and looking through a million objects of torch and
    transformers took half of the tests' processor time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def own_tables(registries_as_before, monkeypatch):
    """Leave the tables of losses and algorithms as they were, and load files of one's own anew."""
    for name in [name for name in sys.modules if name.startswith("trl_ext_user_")]:
        monkeypatch.delitem(sys.modules, name)
    loaded = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name.startswith("trl_ext_user_") and name not in loaded]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory) -> str:
    """A folder with a two-layer Qwen2 of random weights and a byte tokenizer with a ChatML template."""
    from tests.support.tiny import save_tiny_model

    path = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(path)
    return str(path)


@pytest.fixture(scope="module")
def policy_path(tiny_model_path, tmp_path_factory) -> str:
    """A folder with the tiny model, some of whose sampled responses end and some are cut."""
    from tests.support.rollout_once import save_policy

    return save_policy(tiny_model_path, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def toy():
    """The embedded model and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_ext.toy import MODEL_DIR

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def additions():
    """Twelve problems of the embedded benchmark, and their prompts."""
    from trl_ext.data.math import load_math, math_prompt

    rows = load_math("toy", "test")[:12]
    return rows, [math_prompt(row, None) for row in rows]


@pytest.fixture(scope="module")
def in_float64():
    """For a whole module: `tests.support.float64.float64_throughout`."""
    from tests.support.float64 import float64_throughout

    with float64_throughout():
        yield


@pytest.fixture
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.fixture
def registries_as_before():
    """Whatever a test registers is gone after it; what the library registers is there before it."""
    import trl_ext.losses  # noqa: F401
    from trl_ext.algorithms import algorithms
    from trl_ext.registry import preference_losses, preference_weightings

    with patch.dict(algorithms), patch.dict(preference_losses), patch.dict(preference_weightings):
        yield


@pytest.fixture
def bfloat16_on_the_cpu():
    """Leaves out a test of mixed precision where torch has no attention in bfloat16."""
    import torch

    states = torch.zeros(1, 1, 512, 32, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(states, states, states)
    except RuntimeError as error:
        # A processor with AMX under ATEN_CPU_CAPABILITY=default, which no machine has.
        pytest.skip(f"torch has no bfloat16 attention here: {error}")


@pytest.fixture(scope="session")
def wildchat() -> Path:
    """The folder of the course's WildChat pairs, from TRL_EXT_BENCHMARK_DATA; the test is skipped without it."""
    data = Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data"))
    folder = data / "wildchat_benchmark"
    if not (folder / "test_prefs.jsonl").is_file():
        pytest.skip("the WildChat pairs are not here")
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What is long is slow, too."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)


def pytest_sessionstart(session):
    """One of several test processes ignores Ctrl-C, and what it starts would too, which some tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session):
    """By now the test modules, and torch with them, are imported, and nothing has run."""
    torch = sys.modules.get("torch")
    session.config.torch_threads = torch.get_num_threads() if torch else None


@pytest.fixture(autouse=True)
def torch_threads_as_before(request):
    """A test may lower the number of threads for speed; with another number, sums differ in their last bits."""
    yield
    threads = request.config.torch_threads
    if threads is not None:
        sys.modules["torch"].set_num_threads(threads)


@pytest.fixture(autouse=True)
def warnings_anew():
    """As in a process of its own: what an earlier test has warned of is said again."""
    from trl_ext.processes import begin_warnings

    begin_warnings()
