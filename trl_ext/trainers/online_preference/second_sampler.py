"""The second sampler of online preferences: the reference, or its geometric mixture with the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from trl.trainer.utils import use_adapter

from trl_ext.models.batches import temporarily

# The samplers, and that of losses which are defined by it.
SECOND_SAMPLERS = ("policy", "reference", "mixture")
SECOND_SAMPLER_OF = {"xpo": "reference", "nash_md": "mixture"}


class MixtureWithReference(LogitsProcessor):
    """Turns the policy's logits into those of `policy^(1 - weight) reference^weight`, token by token.

    It serves one call of transformers' `generate`, whose rows stay in place; temperature, top-k and top-p come later.

    Args:
        reference: a context whose value is the reference.
        attention_mask: of the prompts, which are padded on the left, [B, L].
        weight: exponent of the reference.
    """

    def __init__(self, reference: Callable[[], AbstractContextManager], attention_mask: Tensor, weight: float):
        self.reference, self.mask, self.weight = reference, attention_mask, weight
        self.cache = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.cache is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(scores), 1)], dim=1)
            input_ids = input_ids[:, -1:]
        positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -input_ids.size(1) :]
        inputs = {"input_ids": input_ids, "attention_mask": self.mask, "position_ids": positions}
        with self.reference() as model:
            last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
            output = model(**inputs, **last, past_key_values=self.cache, use_cache=True)
        self.cache = output.past_key_values
        own, other = scores.log_softmax(dim=-1), output.logits[:, -1].to(scores).log_softmax(dim=-1)
        return (1 - self.weight) * own + self.weight * other


class SecondSampling:
    """Mixin: with `args.second_sampler`, the second half of the responses to a prompt is not the policy's."""

    def _is_second(self, place: int) -> bool:
        return self.args.across and place % self.group_size >= self.group_size // 2

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        found, log_probs = {}, None
        for second in (False, True):
            # Groups are whole on each process.
            rows = [row for row in range(len(prompt_ids)) if self._is_second(row) == second]
            if rows:
                with self._second_sampler() if second else nullcontext():
                    ids, log_probs = super()._generate_single_turn([prompt_ids[row] for row in rows], *args, **kwargs)
                found.update(zip(rows, ids, strict=True))
        return [found[row] for row in range(len(prompt_ids))], None if self.args.across else log_probs

    @contextmanager
    def _second_sampler(self) -> Iterator[None]:
        if self.args.second_sampler == "reference":
            with self._reference() as model, temporarily(self, model_wrapped=model):
                yield
            return
        policy = self.accelerator.unwrap_model(self.model_wrapped)
        generate = policy.generate

        def generate_from_mixture(*, attention_mask, **kwargs):
            mixture = MixtureWithReference(self._reference, attention_mask, self.args.mixture_weight)
            processors = LogitsProcessorList([mixture])
            return generate(attention_mask=attention_mask, logits_processor=processors, **kwargs)

        # The fast sampler moves rows between steps, and leaves a call with such a processor to transformers.
        with temporarily(policy, generate=generate_from_mixture):
            yield

    @contextmanager
    def _reference(self) -> Iterator:
        if self.ref_model is not None:
            yield self.accelerator.unwrap_model(self.ref_model)
            return
        policy = self.accelerator.unwrap_model(self.model)
        with use_adapter(policy, "ref" if "ref" in policy.peft_config else None):
            yield policy

    def _labels(self, chosen: int, rejected: int, rewards: list[float]) -> dict[str, float]:
        """A pair's rewards, and with a second sampler which response it drew and how probably the policy's wins."""
        labels = {"chosen_reward": rewards[chosen], "rejected_reward": rewards[rejected]}
        if not self.args.across:
            return labels
        second = self._is_second(chosen)
        own, other = (rejected, chosen) if second else (chosen, rejected)
        lead = rewards[own] - rewards[other]
        won = 0.5 if abs(lead) <= self.args.tie_tolerance else float(lead > 0)
        if self._has_judge and len(self.reward_func_names) == 1:
            # The judge has compared the policy's responses with the second sampler's alone.
            won = self._rollout[0][own, -1].item()
        return {**labels, "second_is_chosen": float(second), "win_probability": won}
