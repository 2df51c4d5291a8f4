"""Greedy rollouts alongside the sampled ones, for baselines such as ReMax's."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# transformers' generation settings for always taking the most likely token.
_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
# The same for vLLM.
_GREEDY_VLLM = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@torch.no_grad()
def greedy_rewards(trainer, inputs: list[dict], group_size: int) -> tuple[torch.Tensor, list[int]]:
    """Rewards of one greedy response to each prompt, and the lengths of these responses in tokens.

    Args:
        trainer: a `PolicyTrainer`.
        inputs: the rollout's rows on this process: each prompt `group_size` times in a row.
        group_size: responses per prompt in the rollout.

    Returns:
        The trainer's total rewards over all processes, one per prompt, [N / group_size]; and this process's lengths.
    """
    rows = [dict(row) for row in inputs[::group_size]]
    prompts = [row["prompt"] for row in rows]
    prompt_ids, images, multimodal_fields = trainer._tokenize_prompts(prompts)
    with _greedy_generation(trainer), _reports_discarded(trainer):
        completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, multimodal_fields, 1)
        texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        messages = isinstance(prompts[0], list)
        completions = [[{"role": "assistant", "content": text}] for text in texts] if messages else texts
        rewards = trainer.total_rewards(rows, prompts, completions, completion_ids)
    return rewards, [len(ids) for ids in completion_ids]


@contextmanager
def _greedy_generation(trainer) -> Iterator[None]:
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        saved = {name: getattr(engine, name) for name in _GREEDY_VLLM}
        try:
            for name, value in _GREEDY_VLLM.items():
                setattr(engine, name, value)
            yield
        finally:
            for name, value in saved.items():
                setattr(engine, name, value)
        return
    saved = trainer.generation_config, trainer.generation_kwargs
    config = copy.deepcopy(trainer.generation_config)
    config.update(**_GREEDY)
    # TRL applies `generation_kwargs` over the model's own settings, so both must be greedy.
    trainer.generation_config, trainer.generation_kwargs = config, {**trainer.generation_kwargs, **_GREEDY}
    try:
        yield
    finally:
        trainer.generation_config, trainer.generation_kwargs = saved


@contextmanager
def _reports_discarded(trainer) -> Iterator[None]:
    """Discard what reward functions report on greedy responses, which would shift the rows of the sampled rollout."""
    saved = trainer._pending_extra_logs, trainer._pending_metrics
    trainer._pending_extra_logs, trainer._pending_metrics = defaultdict(list), defaultdict(list)
    try:
        yield
    finally:
        trainer._pending_extra_logs, trainer._pending_metrics = saved
