"""Tests that run vLLM itself, on a CPU. Without vLLM they are skipped. `make test-vllm` installs it and runs them."""
