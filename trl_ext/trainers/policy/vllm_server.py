"""Stopping cleanly if a vLLM server dies during training."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from trl_ext.resilience.faults import FaultOfAllProcesses

_GONE = (
    "the vLLM server is gone, and did not come back within a minute: start it again, and go on with "
    "--resume_from_checkpoint"
)
_REFUSED = (
    "the vLLM server refused a request: start it with settings that fit those of the run, and go on with "
    "--resume_from_checkpoint"
)


class ServerLostError(FaultOfAllProcesses):
    """The vLLM server is gone or refused a request; the message says what to do."""


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
                # TRL names the status of an answer with an error.
                what = _REFUSED if re.search(r"\b4\d\d\b", str(error)[:60]) else _GONE
                self._failure = f"{what} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        return None


class _Lost:
    """Replaces the responses in every process, and raises an error when they are read."""

    def __init__(self, failure: str):
        self.failure = failure

    def __iter__(self, *_: Any):
        raise ServerLostError(self.failure)

    __getitem__ = __len__ = __iter__
