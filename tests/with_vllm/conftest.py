"""vLLM's settings on a CPU. Without vLLM, the tests of this folder are skipped."""

from __future__ import annotations

import os

# Read when vLLM is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Compiling would take longer than the tests.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
