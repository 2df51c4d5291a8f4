"""Greedy rollouts alongside the sampled ones, for baselines such as ReMax's."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import AbstractContextManager

import torch

from trl_ext.trainers.defaults import temporarily

# transformers' generation settings for always taking the most likely token.
_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
# The same for vLLM.
_GREEDY_VLLM = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@torch.no_grad()
def greedy_rewards(trainer, inputs: list[dict], group_size: int) -> tuple[torch.Tensor, list[int]]:
    """Rewards of one greedy response to each prompt, and the lengths of these responses in tokens.

    `inputs` has each of this process's prompts `group_size` times in a row. The rewards are the trainer's totals over
    all processes, [N / group_size]; the lengths are this process's.
    """
    rows = [dict(row) for row in inputs[::group_size]]
    prompts = [row["prompt"] for row in rows]
    prompt_ids, images, multimodal_fields = trainer._tokenize_prompts(prompts)
    # What reward functions report on greedy responses would shift the rows of the sampled rollout.
    discarded = temporarily(trainer, _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list))
    with _greedy_generation(trainer), discarded:
        completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, multimodal_fields, 1)
        texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        messages = isinstance(prompts[0], list)
        completions = [[{"role": "assistant", "content": text}] for text in texts] if messages else texts
        rewards = trainer.total_rewards(rows, prompts, completions, completion_ids)
    return rewards, [len(ids) for ids in completion_ids]


def _greedy_generation(trainer) -> AbstractContextManager[None]:
    if trainer.use_vllm:
        return temporarily(trainer.vllm_generation, **_GREEDY_VLLM)
    config = copy.deepcopy(trainer.generation_config)
    config.update(**_GREEDY)
    # TRL applies `generation_kwargs` over the model's own settings, so both must be greedy.
    return temporarily(trainer, generation_config=config, generation_kwargs={**trainer.generation_kwargs, **_GREEDY})
