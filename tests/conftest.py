"""Fixtures: tiny models and tokenizers built here, so that no test needs a download."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory) -> str:
    """A folder with a two-layer Qwen2 of random weights and a byte tokenizer with a ChatML template."""
    from tests.tiny import save_tiny_model

    path = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(path)
    return str(path)


@pytest.fixture(scope="session")
def wildchat() -> Path:
    """The folder of the course's WildChat pairs, from TRL_EXT_BENCHMARK_DATA; the test is skipped without it."""
    data = Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data"))
    folder = data / "wildchat_benchmark"
    if not (folder / "test_prefs.jsonl").is_file():
        pytest.skip("the WildChat pairs are not here")
    return folder
