"""How a policy trainer samples: fast on a CPU, to stop strings, and greedily for baselines such as ReMax's."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor
from transformers import StoppingCriteriaList

from trl_ext.models.batches import temporarily
from trl_ext.rollouts.sampler import Sampler, fast_rollouts, sampler_of
from trl_ext.rollouts.stopping import StopInResponse, end_of_stop
from trl_ext.trainers.policy.reward_functions import Rewards

# transformers' generation settings for always taking the most likely token.
_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
# The same for vLLM.
_GREEDY_VLLM = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def install_sampler(trainer) -> Sampler | None:
    """Make a policy sample fast on a CPU; None for vLLM, a GPU, or `fast_rollouts off`, where nothing is changed."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    others = trainer.use_vllm or args.use_transformers_continuous_batching or args.torch_compile
    if others or args.fast_rollouts == "off" or model.device.type != "cpu":
        return None
    return sampler_of(model) or fast_rollouts(model, dtype=torch.bfloat16 if args.bf16 else None)


def samples_the_policy(trainer) -> bool:
    """Whether responses are drawn from the policy's own distribution, without truncation or penalties."""
    args = trainer.args
    whole = args.top_p == 1 and not args.top_k and args.min_p is None and args.repetition_penalty == 1
    # Rollouts of several turns would be of several engines, if one of their turns is left to transformers.
    return whole and not args.generation_kwargs and not trainer.tools


def ending_at_stop(trainer) -> AbstractContextManager[None]:
    """Within the block, transformers also ends a response at a stop string of the trainer's."""
    if not trainer.args.stop:
        return nullcontext()
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    generate = model.generate

    def generate_to_stop(*, input_ids, **inputs):
        stops = StopInResponse(trainer._tokenizer, trainer.args.stop, input_ids.shape[1])
        return generate(input_ids=input_ids, stopping_criteria=StoppingCriteriaList([stops]), **inputs)

    return temporarily(model, generate=generate_to_stop)


def text_cut_at_stop(completion: str | list[dict[str, Any]], stop: list[str]) -> str | list[dict[str, Any]]:
    """A completion, or the model's text in its messages, up to the end of the first stop string."""
    if isinstance(completion, str):
        return completion[: end_of_stop(completion, stop)]
    return [
        {**message, "content": text_cut_at_stop(message["content"], stop)}
        if message.get("role") == "assistant" and isinstance(message.get("content"), str)
        else message
        for message in completion
    ]


@torch.no_grad()
def greedy_rewards(trainer, inputs: list[dict]) -> tuple[Tensor, Rewards]:
    """Rewards of one greedy response to each prompt; logs their mean and length.

    `inputs` has each of this process's prompts once for each response of its group. Returns the totals over all
    processes, [N / group size], and what they were made of.
    """
    rows = [dict(row) for row in inputs[:: trainer.group_size]]
    prompts = [row["prompt"] for row in rows]
    prompt_ids, images, multimodal_fields = trainer._tokenize_prompts(prompts)
    # What reward functions report on greedy responses would shift the rows of the sampled rollout.
    discarded = temporarily(trainer, _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list))
    with sampling_greedily(trainer), discarded:
        completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, multimodal_fields, 1)
        texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        messages = isinstance(prompts[0], list)
        completions = [[{"role": "assistant", "content": text}] for text in texts] if messages else texts
        rewards = trainer.reward(rows, prompts, completions, completion_ids)
    totals, lengths = trainer.total(rewards), gather(rewards.lengths)
    if trainer.model.training:
        trainer.state.num_input_tokens_seen += int(lengths.sum())
    metrics = trainer.metrics
    metrics["greedy/reward"].append(totals.nanmean().item())
    metrics["greedy/mean_length"].append(lengths.float().mean().item())
    metrics["greedy/num_rollouts"].append(float(len(lengths)))
    return totals, rewards


def sampling_greedily(trainer) -> AbstractContextManager[None]:
    """Within the block, the trainer samples greedily, whichever engine it uses."""
    if trainer.use_vllm:
        return temporarily(trainer.vllm_generation, **_GREEDY_VLLM)
    config = copy.deepcopy(trainer.generation_config)
    config.update(**_GREEDY)
    # TRL applies `generation_kwargs` over the model's own settings, so both must be greedy.
    return temporarily(trainer, generation_config=config, generation_kwargs={**trainer.generation_kwargs, **_GREEDY})
