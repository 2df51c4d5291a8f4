"""Waiting for a vLLM server, and stopping cleanly if it is missing or dies during training."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from trl.import_utils import is_vllm_available

from trl_ext.processes import is_main_process
from trl_ext.resilience.faults import FaultOfAllProcesses

# Seconds between two checks of a server that is not up, and to wait for its answer to one.
_PAUSE, _PATIENCE = 2.0, 5.0


class ServerLostError(FaultOfAllProcesses):
    """The vLLM server is gone; the message says what to do."""


def wait_for_server(args, model: Any) -> None:
    """Wait until the server of `use_vllm` with `vllm_mode` server reports that it is healthy.

    Without `use_vllm` it returns at once. In another mode it only checks that vLLM is installed.

    TRL's own wait never ends if a server answers but is not healthy, or accepts the connection and does not answer.

    Args:
        args: a `PolicyConfig`.
        model: the policy, for the command that starts a server.

    Raises:
        ImportError: vLLM is not installed; the message names the extra.
        ServerLostError: after `vllm_server_timeout` seconds; the message has the command.
    """
    if args.use_vllm and not is_vllm_available():
        raise ImportError(
            "use_vllm needs vLLM, which is not installed: pip install 'trl_ext[vllm]', or leave use_vllm out"
        )
    # Only the main process talks to the server.
    if not (args.use_vllm and args.vllm_mode == "server" and is_main_process()):
        return
    address = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    end = time.monotonic() + args.vllm_server_timeout
    while (found := _health(address, min(_PATIENCE, max(end - time.monotonic(), 0.1)))) is not None:
        if time.monotonic() >= end:
            raise ServerLostError(
                f"no vLLM server at {address} within vllm_server_timeout {args.vllm_server_timeout:g} seconds "
                f"({found}): start one on GPUs of its own with `{start_command(args, model)}`, or use --vllm_mode "
                "colocate"
            )
        time.sleep(max(min(_PAUSE, end - time.monotonic()), 0))


def _health(address: str, patience: float) -> str | None:
    """Why a server is not healthy; None if it is."""
    try:
        with urlopen(f"{address}/health", timeout=patience):
            return None
    except HTTPError as error:
        return f"/health answers {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        return str(getattr(error, "reason", None) or error or type(error).__name__)


def start_command(args, model: Any) -> str:
    """The command that starts a server for a policy, with the flags that TRL needs."""
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "MODEL"
    port = "" if args.vllm_server_base_url or args.vllm_server_port == 8000 else f" --port {args.vllm_server_port}"
    transfer = json.dumps({"backend": "nccl"})
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(name)}{port} --weight-transfer-config '{transfer}' "
        "--logprobs-mode processed_logprobs --max-logprobs -1"
    )


def watch_server(trainer) -> None:
    """Make every process of a run see a server's death at the same point, where the run can save and end."""
    generation = getattr(trainer, "vllm_generation", None)
    if getattr(generation, "vllm_client", None) is not None:
        generation.vllm_client = _WatchedClient(generation.vllm_client)


class _WatchedClient:
    """Wraps TRL's client on the main process; its errors are raised when responses are requested.

    By then, TRL's client has retried for about a minute. The other processes do not talk to the server and wait for
    the responses. They receive an object in their place that raises the error in each of them.
    """

    def __init__(self, client):
        self._client = client
        self._failure: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def update_named_params(self, *args: Any, **kwargs: Any) -> None:
        self._try(self._client.update_named_params, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> None:
        self._try(self._client.reset_prefix_cache, *args, **kwargs)

    def image_features(self, images: list, **kwargs: Any) -> list:
        features = self._try(self._client.image_features, images, **kwargs)
        return [None] * len(images) if features is None else features

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        output = self._try(self._client.generate, *args, **kwargs)
        if output is not None:
            return output
        lost = _Lost(self._failure)
        return {"prompt_ids": lost, "completion_ids": lost, "logprobs": None}

    def _try(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """The result of a call; None if it or an earlier one has failed."""
        if self._failure is None:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                self._failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return None


class _Lost:
    """Replaces the responses in every process, and raises an error when they are read."""

    def __init__(self, failure: str):
        self.failure = failure

    def __iter__(self, *_: Any):
        raise ServerLostError(
            "the vLLM server is gone, and did not come back within a minute: start it again, and go on with "
            f"--resume_from_checkpoint ({self.failure})"
        )

    __getitem__ = __len__ = __iter__
