"""Sample responses with fixed settings, with transformers or with vLLM."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.rollouts.generation import Generation, generate_responses, prompt_tokens
from trl_ext.rollouts.stopping import check_stop

ANSWER_END = "</answer>"


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings as for `generate_responses`; the defaults are those of the reasoning course.

    vLLM forms its own batches, whatever `batch_size` is, and does not support `no_repeat_ngram_size`.
    """

    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = (ANSWER_END,)
    max_prompt_tokens: int | None = None
    batch_size: int = 32
    top_k: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    def __post_init__(self):
        check_stop(self.stop)
        for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("top_k", 0), ("no_repeat_ngram_size", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}; 1 is none")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}; 0 is greedy decoding")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


class TransformersEngine:
    """Samples with a transformers model; call it with prompts and a seed to get one `Generation` per prompt."""

    def __init__(self, model, tokenizer, settings: SamplingSettings):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings

    def __call__(
        self, prompts: Sequence[list[dict] | str], *, seed: int = 0, progress: str | None = None
    ) -> list[Generation]:
        settings = dataclasses.asdict(self.settings)
        return generate_responses(self.model, self.tokenizer, prompts, **settings, seed=seed, progress=progress)


class VLLMEngine:
    """Samples with vLLM, from the same prompt token ids as transformers; called like `TransformersEngine`.

    Args:
        model_path: a folder or hub name.
        tokenizer: the model's tokenizer.
        settings: sampling settings.
        options: arguments for `vllm.LLM`, such as `gpu_memory_utilization`.

    Raises:
        ImportError: vLLM is not installed; the message names the extra.
        ValueError: vLLM does not support a setting.
    """

    def __init__(self, model_path: str, tokenizer, settings: SamplingSettings, **options: Any):
        try:
            import vllm
        except ImportError as error:
            raise ImportError("sampling with vLLM needs its package: pip install 'trl_ext[vllm]'") from error
        if settings.no_repeat_ngram_size:
            raise ValueError("vLLM has no no_repeat_ngram_size: leave it at 0, or sample with transformers")
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
        prompt_ids = [prompt_tokens(self.tokenizer, prompt, settings.max_prompt_tokens) for prompt in prompts]
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
        results = []
        for ids, output in zip(prompt_ids, outputs, strict=True):
            sample = output.outputs[0]
            results.append(Generation(ids, list(sample.token_ids), sample.text, sample.finish_reason == "stop"))
        return results
