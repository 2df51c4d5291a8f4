"""Generate responses from a causal language model, in batches of similar length."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from trl_ext.data.conversation import text_ids, truncate_prompt
from trl_ext.models import score_responses
from trl_ext.models.batches import in_batches, pad_rows, temporarily
from trl_ext.models.packing import unwrapped
from trl_ext.rollouts.sampler import evaluation_sampler
from trl_ext.rollouts.stopping import StopInResponse, check_stop, cut_at_stop

ANSWER_END = "</answer>"


@dataclass(frozen=True)
class Generation:
    """One sampled response.

    Attributes:
        prompt_ids: the prompt that the model received; if it was too long, without its beginning.
        response_ids: generated tokens, including the end token or a stop string.
        text: the response without special tokens, including a stop string that ended it.
        finished: False if it was truncated at the token limit.
        log_probs: log-probability of each response token under the distribution from which it was drawn; None if the
            engine does not give them in float32 or better.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    text: str
    finished: bool
    log_probs: list[float] | None = None


def recorded_log_probs(generations: Sequence[Generation]) -> list[Tensor] | None:
    """Token log-probabilities of responses as their engine recorded them; None if it did not."""
    if any(generation.log_probs is None for generation in generations):
        return None
    return [torch.tensor(generation.log_probs) for generation in generations]


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings as for `generate_responses`; the defaults are those of the reasoning course.

    vLLM forms its own batches, whatever `batch_size` is.
    """

    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = (ANSWER_END,)
    max_prompt_tokens: int | None = None
    batch_size: int = 32
    top_k: int = 0
    repetition_penalty: float = 1.0
    template_kwargs: dict[str, Any] | None = None

    def __post_init__(self):
        check_stop(self.stop)
        for name, least in {"max_new_tokens": 1, "max_prompt_tokens": 1, "batch_size": 1, "temperature": 0}.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


def generate_responses(
    model,
    tokenizer,
    prompts: Sequence[list[dict] | str],
    *,
    max_new_tokens: int,
    max_prompt_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 32,
    seed: int = 0,
    fast: bool = True,
    progress: str | None = None,
) -> list[Generation]:
    """Generate one response for each prompt, messages or plain text, in order.

    Only the settings given here are used, and not those saved with the model. The random state of the process is
    restored. On a CPU, responses are sampled as by `fast_rollouts`.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer, with a chat template if prompts are messages.
        max_prompt_tokens: longer prompts lose their beginning; None for no limit.
        temperature: 0 for greedy decoding.
        top_k: the number of most likely tokens to sample from; 0 for all.
        repetition_penalty: above 1, tokens of prompt and response become less likely (arXiv 1909.05858); 1 for none.
        stop: strings that end a response; the string remains in the response.
        template_kwargs: arguments for the chat template in addition to the messages, such as `enable_thinking`.
        fast: False leaves sampling to transformers.
        progress: label of the progress bar; None for no bar.

    Raises:
        ValueError: a bad setting, an empty prompt, a special token to stop at, or one prompt instead of a list.
    """
    if isinstance(prompts, str) or any(isinstance(prompt, dict) for prompt in prompts):
        raise ValueError("prompts must be a list of prompts: give [prompt]")
    stop = check_stop(stop, tokenizer)
    limits = {"max_prompt_tokens": max_prompt_tokens, "batch_size": batch_size, "stop": stop}
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    common = {"max_new_tokens": max_new_tokens, "repetition_penalty": repetition_penalty}
    SamplingSettings(**limits, **sampling, **common)
    end_ids = end_token_ids(model, tokenizer)
    config = GenerationConfig(
        eos_token_id=sorted(end_ids),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids, default=0),
        do_sample=temperature > 0,
        **(sampling if temperature > 0 else {}),
        **common,
    )
    prompt_ids = [prompt_tokens(tokenizer, prompt, max_prompt_tokens, template_kwargs) for prompt in prompts]
    if not all(prompt_ids):
        raise ValueError(f"prompt {prompt_ids.index([])} is empty: there is nothing to continue")
    sampler = evaluation_sampler(model) if fast else None
    generate = model.generate if sampler is None else sampler.generate

    def generated(rows: list[int]) -> list[Generation]:
        ids, mask = pad_rows([prompt_ids[i] for i in rows], config.pad_token_id, "left")
        width = ids.size(1)
        output = generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([StopInResponse(tokenizer, stop, width)] if stop else []),
        )
        # Half precision rounds them differently from a pass for scores, with which they would be compared.
        recorded = sampler is not None and sampler.log_probs is not None and sampler.dtype.itemsize >= 4
        log_probs = sampler.log_probs.tolist() if recorded else [None] * len(rows)
        found = []
        for row, tokens, own in zip(rows, output[:, width:].tolist(), log_probs, strict=True):
            end = next((i for i, token in enumerate(tokens) if token in end_ids), None)
            response = tokens if end is None else tokens[: end + 1]
            stopped = cut_at_stop(tokenizer, response, stop)
            finished = end is not None or stopped is not None
            response, text = stopped or (response, tokenizer.decode(response, skip_special_tokens=True))
            found.append(Generation(prompt_ids[row], response, text, finished, own and own[: len(response)]))
        return found

    order = sorted(range(len(prompts)), key=lambda i: -len(prompt_ids[i]))
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), without_own_settings(model):
        torch.manual_seed(seed)
        return in_batches(model, generated, order, batch_size=batch_size, progress=progress)


@contextmanager
def without_own_settings(model) -> Iterator[None]:
    """Within the block, transformers takes no generation setting from those saved with a model."""
    # transformers fills settings that a call leaves at None; an adapter's wrapper has settings of its own.
    plain = {"generation_config": GenerationConfig()}
    with temporarily(model, **plain), temporarily(unwrapped(model), **plain):
        yield


def end_token_ids(model, tokenizer) -> set[int]:
    """Ids of the tokens that end a response: the tokenizer's and those of the model's generation settings."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}


def prompt_tokens(
    tokenizer, prompt: list[dict] | str, max_prompt_tokens: int | None, template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of a prompt: messages go through the chat template, and long prompts lose their beginning."""
    # The tokenizer warns about texts that are too long for the model, but the prompt is cut here.
    warn = {"verbose": max_prompt_tokens is None}
    if isinstance(prompt, str):
        ids = text_ids(tokenizer, prompt, **warn)
    else:
        options = {"add_generation_prompt": True, "return_dict": True, "tokenizer_kwargs": warn}
        ids = tokenizer.apply_chat_template(prompt, **options, **(template_kwargs or {}))["input_ids"]
    return truncate_prompt(ids, max_prompt_tokens)


def without_template(tokenizer, prompts: Sequence[list[dict] | str]) -> str | None:
    """A line about plain texts that a model with a chat template is prompted with; None if nothing is to be said.

    Texts that hold special tokens, or end with a colon or a tag as a text to continue does, are taken to be intended.
    """
    special = tokenizer.all_special_tokens
    texts = (prompt for prompt in prompts if isinstance(prompt, str))
    plain = [text for text in texts if not text.rstrip().endswith((":", ">")) and not any(s in text for s in special)]
    if not tokenizer.chat_template or len(plain) <= len(prompts) / 2:
        return None
    return (
        "the prompts are plain text, to which the model's chat template is not applied: rename the column to "
        "prompt_text, or give messages, unless plain text is intended"
    )


# ---- Engines with fixed settings ----


@dataclass
class TransformersEngine:
    """Samples with a transformers model; call it with prompts and a seed to get one `Generation` per prompt."""

    model: Any
    tokenizer: Any
    settings: SamplingSettings

    def __call__(
        self, prompts: Sequence[list[dict] | str], *, seed: int = 0, progress: str | None = None
    ) -> list[Generation]:
        settings = vars(self.settings)
        return generate_responses(self.model, self.tokenizer, prompts, **settings, seed=seed, progress=progress)


class VLLMEngine:
    """Samples with vLLM, from the same prompt token ids as transformers; called like `TransformersEngine`.

    `options` are arguments for `vllm.LLM`, such as `gpu_memory_utilization`.
    """

    def __init__(self, model_path: str, tokenizer, settings: SamplingSettings, **options: Any):
        try:
            import vllm
        except ImportError as error:
            raise ImportError("sampling with vLLM needs its package: pip install 'trl_ext[vllm]'") from error
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # vLLM cannot split the prefill of a request with a seed on a CPU ("CPU Generator does not use offset").
            options.setdefault("enable_chunked_prefill", False)
        self.tokenizer, self.settings = tokenizer, settings
        self._sampling = vllm.SamplingParams
        self._model = vllm.LLM(model=model_path, **options)

    def __call__(
        self, prompts: Sequence[list[dict] | str], *, seed: int = 0, progress: str | None = None
    ) -> list[Generation]:
        settings = self.settings
        limits = settings.max_prompt_tokens, settings.template_kwargs
        prompt_ids = [prompt_tokens(self.tokenizer, prompt, *limits) for prompt in prompts]
        # One seed per request: equal prompts get different responses, whatever else is in the batch.
        sampling = [
            self._sampling(
                max_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k or -1,
                repetition_penalty=settings.repetition_penalty,
                stop=list(settings.stop) or None,
                include_stop_str_in_output=True,
                seed=seed * 1_000_003 + index,
            )
            for index in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": ids} for ids in prompt_ids]
        # With a disabled bar, vLLM divides by the time that it does not measure.
        shown = progress is not None and not os.environ.get("TQDM_DISABLE")
        outputs = self._model.generate(requests, sampling, use_tqdm=shown)
        samples = [output.outputs[0] for output in outputs]
        return [
            Generation(ids, list(sample.token_ids), sample.text, sample.finish_reason == "stop")
            for ids, sample in zip(prompt_ids, samples, strict=True)
        ]


# ---- Entropy ----


def response_entropies(model, generations: Sequence[Generation], **options: Any) -> list[float | None]:
    """Mean entropy over the tokens of each response, in nats, at temperature 1; None for a response without tokens.

    The options are those of `score_responses`.
    """
    prompt_ids, response_ids = ([getattr(g, name) for g in generations] for name in ("prompt_ids", "response_ids"))
    entropies = score_responses(model, prompt_ids, response_ids, entropy=True, **options)
    return [values.mean().item() if len(values) else None for values in entropies]
