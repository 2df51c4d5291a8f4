"""Policy rollouts as TRL's own generation does not make them.

They are sampled fast on a CPU, ended by stop strings, and greedy for baselines such as ReMax's.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import gather
from transformers import StoppingCriteriaList

from trl_ext.models.batches import temporarily
from trl_ext.rollouts.generation import without_own_settings
from trl_ext.rollouts.sampler import Sampler, fast_rollouts, sampler_of
from trl_ext.rollouts.stopping import StopInResponse, cut_at_stop, end_of_stop

# transformers' generation settings for always taking the most likely token.
_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
# The same for vLLM.
_GREEDY_VLLM = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


class PolicyGeneration:
    """Mixin for a subclass of TRL's `GRPOTrainer` whose configuration has `fast_rollouts` and `stop`.

    `args.stop` lists texts that end a response, or is None. A response keeps its stop string, and no token after the
    one that completes it. If that token extends beyond the stop string, reward functions receive the text only up to
    the string's end.
    """

    _has_begun = False

    def has_ended(self, ids: list[int]) -> bool:
        """Whether a response, given as token ids, ended by itself or at a stop string, and not at the limit."""
        if ids and ids[-1] in self.eos_token_ids:
            return True
        stop = self.args.stop
        return bool(stop) and end_of_stop(self._tokenizer.decode(ids, skip_special_tokens=True), stop) is not None

    @property
    def sampler(self) -> Sampler | None:
        """What samples on a CPU in place of transformers; None for vLLM, a GPU, or `fast_rollouts off`."""
        args, model = self.args, self.accelerator.unwrap_model(self.model)
        others = self.use_vllm or args.use_transformers_continuous_batching or args.torch_compile
        if others or args.fast_rollouts == "off" or model.device.type != "cpu":
            return None
        if not self._has_begun:
            self._has_begun = True
            return sampler_of(model) or fast_rollouts(model, dtype=torch.bfloat16 if args.bf16 else None)
        return sampler_of(model)

    @property
    def sampled_responses(self) -> int:
        """How many responses training has sampled so far over all processes, with those that were not trained on."""
        return (self.rollouts + self.further_rollouts) * self.args.generation_batch_size

    def _samples_the_policy(self) -> bool:
        """Whether responses are drawn from the policy's own distribution, without truncation or penalties."""
        args = self.args
        whole = args.top_p == 1 and not args.top_k and args.min_p is None and args.repetition_penalty == 1
        # Rollouts of several turns would be of several engines, if one of their turns is left to transformers.
        return whole and not args.generation_kwargs and not self.tools

    def _generate_single_turn(self, *args, **kwargs):
        sampler = self.sampler
        with without_own_settings(self.model):
            completion_ids, log_probs = self._generate_to_stop(*args, **kwargs)
        if sampler is not None and sampler.log_probs is not None and self._samples_the_policy():
            rows = sampler.log_probs.tolist()
            log_probs = [row[: len(ids)] for row, ids in zip(rows, completion_ids, strict=True)]
        return completion_ids, log_probs

    def _generate_to_stop(self, *args, **kwargs):
        if not self.args.stop:
            return super()._generate_single_turn(*args, **kwargs)
        model = self.accelerator.unwrap_model(self.model_wrapped)
        generate = model.generate

        def generate_to_stop(*, input_ids, **inputs):
            stops = StopInResponse(self._tokenizer, self.args.stop, input_ids.shape[1])
            return generate(input_ids=input_ids, stopping_criteria=StoppingCriteriaList([stops]), **inputs)

        with temporarily(model, generate=generate_to_stop):
            completion_ids, log_probs = super()._generate_single_turn(*args, **kwargs)
        # transformers pads a response that has met a stop string while others continue.
        cut = [cut_at_stop(self._tokenizer, ids, self.args.stop) for ids in completion_ids]
        completion_ids = [
            ids if stopped is None else stopped[0] for ids, stopped in zip(completion_ids, cut, strict=True)
        ]
        if log_probs is not None:
            log_probs = [own[: len(ids)] for own, ids in zip(log_probs, completion_ids, strict=True)]
        return completion_ids, log_probs

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self.args.stop:
            completions = [_text_cut_at_stop(one, self.args.stop) for one in completions]
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate(self, prompts: list):
        output = super()._generate(prompts)
        if self.args.stop:
            self._log_what_ended(output[1])
        return output

    def _log_what_ended(self, completion_ids: list[list[int]]) -> None:
        """Replace TRL's metrics of ended responses, which do not count those that end at a stop string."""
        device = self.accelerator.device
        lengths = gather(torch.tensor([len(ids) for ids in completion_ids], device=device)).float()
        ended = gather(torch.tensor([self.has_ended(ids) for ids in completion_ids], device=device))
        of_ended = lengths[ended] if ended.any() else torch.zeros(1)
        figures = {"clipped_ratio": (~ended).float().mean()}
        figures |= {f"{name}_terminated_length": getattr(of_ended, name)() for name in ("mean", "min", "max")}
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in figures.items():
            metrics[f"completions/{name}"][-1] = value.item()


def _text_cut_at_stop(completion: str | list[dict[str, Any]], stop: list[str]) -> str | list[dict[str, Any]]:
    """A completion, or the model's text in its messages, up to the end of the first stop string."""
    if isinstance(completion, str):
        return completion[: end_of_stop(completion, stop)]
    return [
        {**message, "content": _text_cut_at_stop(message["content"], stop)}
        if message.get("role") == "assistant" and isinstance(message.get("content"), str)
        else message
        for message in completion
    ]


@torch.no_grad()
def greedy_rewards(trainer, inputs: list[dict], group_size: int, mode: str) -> tuple[torch.Tensor, list[bool]]:
    """Rewards of one greedy response to each prompt, and for which of them they are not finite; logs both.

    `inputs` has each of this process's prompts `group_size` times in a row. The rewards are the trainer's totals over
    all processes, [N / group_size]; the flags are of this process's prompts.
    """
    rows = [dict(row) for row in inputs[::group_size]]
    prompts = [row["prompt"] for row in rows]
    prompt_ids, images, multimodal_fields = trainer._tokenize_prompts(prompts)
    # What reward functions report on greedy responses would shift the rows of the sampled rollout.
    discarded = temporarily(trainer, _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list))
    with greedy_generation(trainer), discarded:
        completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, multimodal_fields, 1)
        texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        messages = isinstance(prompts[0], list)
        completions = [[{"role": "assistant", "content": text}] for text in texts] if messages else texts
        rewards = trainer.total_rewards(rows, prompts, completions, completion_ids)
    lengths = gather(torch.tensor([len(ids) for ids in completion_ids], device=rewards.device))
    if mode == "train":
        trainer.state.num_input_tokens_seen += int(lengths.sum())
    metrics = trainer._metrics[mode]
    metrics["greedy/reward"].append(rewards.nanmean().item())
    metrics["greedy/mean_length"].append(lengths.float().mean().item())
    metrics["greedy/num_rollouts"].append(float(len(lengths)))
    return rewards, [index in trainer.reward_guard.not_finite for index in range(len(rows))]


def greedy_generation(trainer) -> AbstractContextManager[None]:
    """Within the block, the trainer samples greedily, whichever engine it uses."""
    if trainer.use_vllm:
        return temporarily(trainer.vllm_generation, **_GREEDY_VLLM)
    config = copy.deepcopy(trainer.generation_config)
    config.update(**_GREEDY)
    # TRL applies `generation_kwargs` over the model's own settings, so both must be greedy.
    return temporarily(trainer, generation_config=config, generation_kwargs={**trainer.generation_kwargs, **_GREEDY})
