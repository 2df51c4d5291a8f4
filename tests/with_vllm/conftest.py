"""vLLM's settings on a CPU, and the model that it runs. Without vLLM, the tests of this folder are skipped."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import pytest

# Read when vLLM is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Compiling would take longer than the tests.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


@pytest.fixture(scope="session")
def wide_toy_path(tmp_path_factory) -> str:
    """A folder with the embedded model as vLLM can run it on a CPU."""
    from tests.with_vllm.training import save_wide_toy

    path = tmp_path_factory.mktemp("wide-toy")
    save_wide_toy(path)
    return str(path)


@pytest.fixture(autouse=True)
def engines_are_shut_down(monkeypatch):
    """One engine at a time in this process, where each would otherwise live until the end."""
    import vllm

    make, made = vllm.LLM.__init__, []

    def make_and_note(llm, *args, **kwargs):
        make(llm, *args, **kwargs)
        made.append(llm)

    monkeypatch.setattr(vllm.LLM, "__init__", make_and_note)
    yield
    for llm in made:
        llm.llm_engine.engine_core.shutdown()


def keep_weights(layer, remove_weight: bool) -> None:
    """Replaces `dispatch_cpu_unquantized_gemm` of vLLM, which packs a layer's weights and loads no others later."""
    from torch.nn.functional import linear

    layer.cpu_linear = linear


@pytest.fixture
def colocated(monkeypatch) -> Callable[[str], None]:
    """Lets TRL load weights into a vLLM of this process; call it to choose the dtype, which TRL leaves to vLLM."""
    from trl.generation import vllm_generation
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_weights)
    # TRL sets these. A later trainer in this process would take them for a launcher's.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    llm = vllm_generation.LLM
    return lambda dtype: monkeypatch.setattr(vllm_generation, "LLM", functools.partial(llm, dtype=dtype))
