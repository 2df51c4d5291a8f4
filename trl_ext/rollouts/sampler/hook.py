"""`fast_rollouts`: sampling on a CPU in place of transformers' own, for a model or a trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from trl_ext.models.packing import packing_obstacle, sliding_window, unwrapped
from trl_ext.processes import warn_once_per_run
from trl_ext.rollouts.sampler.loop import Decoder, sample
from trl_ext.rollouts.sampler.rows import CannotSample
from trl_ext.rollouts.sampler.weights import prepared, shared_copy
from trl_ext.rollouts.stopping import StopInResponse

# Where a model keeps the sampler of `generate_responses`, which has checked it.
_OF_EVALUATION = "_trl_ext_evaluation_sampler"
# Largest difference of the canary's log-probabilities, in float32 and relative to their spread in half precision.
FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1
# Settings that return something else, or whose processors depend on a row's place in the batch, and their off values.
_OTHER_SETTINGS = {"return_dict_in_generate": False, "guidance_scale": 1, "watermarking_config": None}
_OTHER_SETTINGS |= {"encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0}


class Sampler:
    """Sampling of one model, whose `generate` takes the place of the model's own.

    Attributes:
        model: the transformers model, without wrappers.
        dtype: precision of the products.
        reason: why the model's responses are left to transformers; None while they are not.
        largest_difference: of the canary's log-probabilities from a plain forward pass; None until the first call.
        log_probs: of the last call's response tokens, under the distribution from which they were drawn,
            [B, longest response]; 0 after a row's end; None if transformers sampled them.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, reason: str | None):
        self.model, self.reason = model, reason
        self.dtype = model.dtype if dtype is None else dtype
        self.largest_difference: float | None = None
        self.log_probs: Tensor | None = None
        self._asked = dtype
        if reason is not None:
            _warn(reason)

    def remove(self) -> None:
        """Restore the model's own generation."""
        self.log_probs = None
        if sampler_of(self.model) is self:
            del self.model.generate

    def generate(self, *args: Any, **kwargs: Any):
        """The model's `generate`, sampled here where that is possible."""
        self.log_probs = None
        generate = type(self.model).generate
        try:
            self._check_call(*args, **kwargs)
            return generate(self.model, *args, custom_generate=self._loop, **kwargs)
        except CannotSample as obstacle:
            _warn(obstacle)
            return generate(self.model, *args, **kwargs)

    def _check_call(self, inputs=None, generation_config=None, *others, stopping_criteria=None, **kwargs: Any) -> None:
        """Leave a call to transformers whose arguments do not reach the loop or depend on a row's place."""
        if self.reason is not None:
            raise CannotSample(self.reason)
        known = {"input_ids", "attention_mask", *vars(GenerationConfig())}
        other = [name for name in kwargs.keys() - known if kwargs[name] is not None and kwargs[name] is not False]
        if any(not isinstance(criterion, StopInResponse) for criterion in stopping_criteria or ()):
            other.append("stopping_criteria")
        if other or others:
            raise CannotSample(f"the call takes {', '.join(other) or 'further arguments'}")

    def _loop(
        self,
        model,
        input_ids: Tensor,
        logits_processor=None,
        stopping_criteria=None,
        generation_config=None,
        **model_kwargs: Any,
    ) -> Tensor:
        mode = generation_config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise CannotSample(f"the call asks for {mode.value}")
        for name, off in _OTHER_SETTINGS.items():
            if getattr(generation_config, name, None) not in (None, off):
                raise CannotSample(f"the call sets {name}")
        if input_ids.device.type != "cpu":
            raise CannotSample("the model is not on a CPU")
        # transformers from 5.18 on drops a mask that hides nothing.
        attended = model_kwargs.get("attention_mask")
        attended = torch.ones_like(input_ids) if attended is None else attended
        limit = generation_config.max_length - input_ids.shape[1]
        prompts = [row[mask != 0].tolist() for row, mask in zip(input_ids, attended, strict=True)]
        if not all(prompts):
            raise CannotSample("a prompt is empty")
        window = sliding_window(self.model.config)
        if window is not None and max(map(len, prompts)) + limit > window:
            raise CannotSample("responses can exceed the sliding window")
        if self.largest_difference is None:
            self._try()
        padding = generation_config.pad_token_id
        # Autocast would cast some products, and not those with blocked weights.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            sequences, log_probs = sample(
                Decoder(prepared(self.model, self._asked, len(prompts)), prompts, limit),
                input_ids,
                logits_processor,
                stopping_criteria,
                limit=limit,
                do_sample=bool(generation_config.do_sample),
                padding=0 if padding is None else padding,
            )
        # The tensors of inference mode could not take part in a loss.
        self.log_probs = log_probs.clone()
        return sequences.clone()

    def _try(self) -> None:
        """Compare the log-probabilities of a few tokens with those of plain forward passes, or turn sampling off."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.config.get_text_config().vocab_size
        long, short = (torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (12, 9))
        prompts, steps = [long, long, short], torch.randint(vocabulary, (3, 3), generator=generator)
        try:
            with torch.inference_mode(), torch.autocast("cpu", enabled=False):
                decoder = Decoder(prepared(self.model, self._asked, 3), prompts, 4)
                logits = torch.stack([decoder.encode(), *map(decoder.step, steps)], dim=1)
                plain, rows = shared_copy(self.model), zip(prompts, steps.T.tolist(), strict=True)
                expected = [plain(input_ids=torch.tensor([[*row, *more]])).logits[0, -4:] for row, more in rows]
            found, expected = (part.to(logits.dtype).log_softmax(-1) for part in (logits, torch.stack(expected)))
        except Exception as error:
            # Whatever a model or a private operator raises, transformers still generates.
            self.reason = (str(error).splitlines() or [type(error).__name__])[0]
        else:
            apart, half = (found - expected).abs(), self.dtype.itemsize < 4
            self.largest_difference = apart.max().item()
            allowed = HALF_TOLERANCE * expected.std().item() if half else FLOAT32_TOLERANCE * max(1, -expected.min())
            if not (apart.mean().item() if half else self.largest_difference) <= allowed:
                self.reason = f"its log-probabilities are {self.largest_difference:.1e} off a plain forward pass"
        if self.reason is not None:
            raise CannotSample(self.reason)


def _warn(reason: object) -> None:
    warn_once_per_run(f"fast rollouts: transformers generates: {reason}")


def fast_rollouts(model, *, dtype: torch.dtype | None = None) -> Sampler:
    """Make `generate` sample several times as fast on a CPU.

    A prompt is encoded once for all its samples, rows have no padding and leave the batch when they end, and products
    use weights in oneDNN's layout, which are made again at every call. Settings are transformers'. Greedy responses
    are the same; sampled ones have the same distribution and other random numbers, which depend on torch's seed and
    on a row's place in the batch. Call it once, after creating the trainer and before training.

    At the first call, a few tokens are compared with a plain forward pass. If they differ by more than rounding, or
    the model or the call needs what this sampler does not have (beams, several devices, a GPU), transformers
    generates, and one log line says why.

    Args:
        model: a causal language model of transformers, bare or with adapters, or a trainer that has one.
        dtype: precision of the products: None for that of the weights, or `torch.bfloat16`.

    Returns:
        The sampler: the `reason` if it is not used, the last call's `log_probs`, and `remove()`.
    """
    found = model if isinstance(model, nn.Module) else model.model
    inner = unwrapped(found)
    if (previous := sampler_of(inner)) is not None:
        previous.remove()
    sampler = Sampler(inner, dtype, _obstacle(found))
    if not _is_replaced(inner):
        inner.generate = sampler.generate
    return sampler


def sampler_of(model: nn.Module) -> Sampler | None:
    """The sampler that `fast_rollouts` last gave a model, with adapters or without."""
    sampler = getattr(vars(unwrapped(model)).get("generate"), "__self__", None)
    return sampler if isinstance(sampler, Sampler) else None


def evaluation_sampler(model: nn.Module) -> Sampler | None:
    """A sampler beside that of a trainer, in the precision of weights or autocast; None if it cannot be used."""
    inner = unwrapped(model)
    if inner.device.type != "cpu" or _learns_prompts(model) or _is_replaced(inner):
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    sampler = inner.__dict__.get(_OF_EVALUATION)
    if sampler is None or sampler.dtype != (dtype or inner.dtype):
        sampler = inner.__dict__[_OF_EVALUATION] = Sampler(inner, dtype, _obstacle(model))
    return sampler


def _is_replaced(model: nn.Module) -> bool:
    """Whether something else has taken the place of a model's own `generate`."""
    return "generate" in vars(model) and sampler_of(model) is None


def _learns_prompts(model: nn.Module) -> bool:
    """Whether an adapter puts vectors before the prompt, which the model inside it does not see."""
    adapters = (getattr(module, "peft_config", {}) for module in model.modules())
    return any(config.is_prompt_learning for configs in adapters for config in configs.values())


def _obstacle(model: nn.Module) -> str | None:
    """Why the responses of a model are left to transformers, as far as its class and configuration show."""
    inner = unwrapped(model)
    if _is_replaced(inner):
        return "its generate method has been replaced"
    if _learns_prompts(model):
        return "its adapter learns a prompt"
    if inner.device.type != "cpu":
        return "the model is not on a CPU; vLLM is the way there"
    if any(hasattr(weight, "ds_id") or hasattr(weight, "device_mesh") for weight in inner.parameters()):
        return "its weights are sharded"
    return packing_obstacle(inner)
