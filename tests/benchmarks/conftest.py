"""A fixture of the benchmarks that compute in this process."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def as_before(monkeypatch):
    """Undo what a run sets for its whole process: the scoring of TRL's head, the precision, and the environment."""
    import trl.trainer.utils
    from accelerate.state import AcceleratorState

    monkeypatch.setattr(trl.trainer.utils, "_use_triton", trl.trainer.utils._use_triton)
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    AcceleratorState._reset_state()
