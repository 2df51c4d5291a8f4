"""A vLLM server that is not there, does not answer, or dies while a policy trains on its responses."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.faults_once import build
from tests.support.train_once import largest_difference, parameters
from trl_ext.resilience.checkpoints import last_checkpoint
from trl_ext.resilience.faults import TrainingFault
from trl_ext.trainers.policy.vllm_server import ServerLostError, _WatchedClient


@pytest.fixture
def spec(policy_path):
    return lambda **keys: {"trainer": "PolicyTrainer", "model": policy_path, **keys}


class Server:
    """What TRL's client asks of a vLLM server, on this machine; it generates `answers` times before it dies."""

    def __init__(self, *, answers: int = 10**9):
        self.left = answers

    def __enter__(self) -> Server:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                models = {"data": [{"id": "policy"}]}
                info = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
                answers = {"/v1/models": models, "/server_info": info}
                self._reply(200, answers.get(self.path.partition("?")[0], {}))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.left -= 1
                if owner.left < 0:
                    owner.http.socket.close()
                    self.connection.close()
                    return
                self._reply(200, {"choices": [c for p in body["prompt"] for c in self._choices(p, body["n"])]})

            @staticmethod
            def _choices(prompt: list[int], count: int) -> list[dict]:
                for index in range(count):
                    ids = [10 + index, 2]
                    names = [f"token_id:{token}" for token in ids]
                    logprobs = {"tokens": names, "token_logprobs": [-1.0, -1.0], "top_logprobs": [None, None]}
                    yield {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}

            def _reply(self, status: int, content: dict) -> None:
                payload = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def with_vllm(monkeypatch):
    """TRL's own client and generation, where vLLM is not installed: weights are not sent, and waits are short."""
    from trl.generation import vllm_client, vllm_generation
    from trl.trainer import grpo_trainer

    for module in (vllm_client, vllm_generation, grpo_trainer):
        monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: True, raising=False)
    retries = vllm_client.Retry
    monkeypatch.setattr(vllm_client, "Retry", lambda **keys: retries(**{**keys, "backoff_factor": 0.01}))
    for name in ("init_communicator", "update_named_params", "reset_prefix_cache"):
        monkeypatch.setattr(vllm_client.VLLMClient, name, lambda *_, **__: None)


def vllm_arguments(url: str, **others) -> dict:
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 1.0}
    return {**server, "beta": 0.0, **others}


def test_a_vllm_server_that_dies_leaves_a_checkpoint(with_vllm, spec, tmp_path):
    """It answers two rollouts and is gone at the third: stopped with the parameters after two steps."""
    args = vllm_arguments("", save_strategy="no", vllm_importance_sampling_correction=False)
    with Server(answers=2) as server:
        stopped = build(spec(args={**args, "vllm_server_base_url": server.url}), str(tmp_path / "run"))
        with pytest.raises(TrainingFault, match="the vLLM server is gone.*--resume_from_checkpoint .ConnectionError"):
            stopped.train()
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    with Server() as server:
        args = {**args, "vllm_server_base_url": server.url}
        resumed = build(spec(args=args), str(tmp_path / "run"))
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        straight = build(spec(args=args), str(tmp_path / "straight"))
        straight.train()
    assert resumed.state.global_step == 4
    assert largest_difference(parameters(resumed), parameters(straight)) == 0.0


def test_a_dead_vllm_server_is_told_to_every_process():
    """What the first process sends the others instead of responses raises in each, where they are looked at."""
    import pickle

    class Client:
        base_url = "http://here"
        synchronised = 0

        def update_named_params(self, *_):
            raise ConnectionError("gone")

        def reset_prefix_cache(self):
            self.synchronised += 1

        def generate(self, **_):
            raise AssertionError("is not asked any more")

    client = _WatchedClient(Client())
    assert client.base_url == "http://here"
    client.update_named_params([], [])
    client.reset_prefix_cache()
    sent = pickle.loads(pickle.dumps(client.generate(prompts=[[1]])))
    assert client.synchronised == 0
    with pytest.raises(ServerLostError, match="ConnectionError: gone"):
        [ids for ids in sent["prompt_ids"]]  # noqa: C416
