"""`fast_rollouts`: sampling on a CPU in place of transformers' own, for a model or a trainer."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteriaList
from transformers.generation import StopStringCriteria

from trl_ext.models.batches import evaluating
from trl_ext.models.packing import packing_obstacle, sliding_window, unwrapped
from trl_ext.processes import warn_once_per_run
from trl_ext.rollouts.sampler.loop import Decoder, sample
from trl_ext.rollouts.sampler.rows import CannotSample
from trl_ext.rollouts.sampler.weights import prepared, without_wrappers

# Where a model keeps its samplers, which have checked it: the one of its trainer, and the one of `sampled_fast`.
_ATTRIBUTE, _OF_EVALUATION = "_trl_ext_sampler", "_trl_ext_evaluation_sampler"
# Largest difference of the canary's log-probabilities, in float32 and relative to their spread in half precision.
FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1
# Generation settings that this sampler does not have, with the values at which they change nothing.
_WITHOUT_EFFECT = {
    "num_beams": (None, 1),
    "use_cache": (None, True),
    "return_dict_in_generate": (None, False),
    "guidance_scale": (None, 1, 1.0),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "cache_implementation": (None, "dynamic", "hybrid"),
    "token_healing": (None, False),
    "use_mtp": (None, False),
}
_ARGUMENTS = frozenset(
    {
        "input_ids",
        "inputs",
        "attention_mask",
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "synced_gpus",
    }
)

# Processors and criteria that treat a row alike wherever it is in the batch.
_ROW_BY_ROW = {
    "EosTokenCriteria", "EpsilonLogitsWarper", "EtaLogitsWarper", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "MaxLengthCriteria", "MaxTimeCriteria",
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "StopInResponse", "StopStringCriteria", "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
}  # fmt: skip


class Sampler:
    """Sampling of one model, which `fast_rollouts` puts in place of its `generate`.

    Attributes:
        model: the transformers model, without wrappers.
        dtype: precision of the products.
        reason: why the model's responses are left to transformers, in a few words; None while they are not.
        largest_difference: of the canary's log-probabilities from a plain forward pass; None until the first call.
        log_probs: of the last call's response tokens, under the distribution from which they were drawn,
            [B, longest response]; 0 after a row's end; None if transformers sampled them.
        left: number of calls that were left to transformers, by reason.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, quiet: bool):
        self.model = model
        self.dtype = model.dtype if dtype is None else dtype
        self.quiet = quiet
        self.reason = _obstacle(model) if "generate" not in vars(model) else "its generate method has been replaced"
        self.largest_difference: float | None = None
        self.log_probs: Tensor | None = None
        self.left: Counter[str] = Counter()
        self._generate = model.generate
        self._asked = dtype

    def install(self) -> None:
        """Replace the model's own generation, unless something else has replaced it."""
        if self.reason is None and "generate" not in vars(self.model):
            self.model.generate = self.generate

    def uninstall(self) -> None:
        """Restore the model's own generation until the next `install`."""
        if vars(self.model).get("generate") == self.generate:
            del self.model.generate

    def remove(self) -> None:
        """Restore the model's own generation."""
        self.uninstall()
        self.log_probs = None
        if sampler_of(self.model) is self:
            delattr(self.model, _ATTRIBUTE)

    def describe(self) -> str:
        """One line: how responses are sampled, or why transformers samples them."""
        if self.reason is not None:
            return f"fast rollouts: off, transformers generates: {self.reason}"
        if self.largest_difference is None:
            left = "".join(f"; transformers generated: {reason}" for reason in self.left)
            return f"fast rollouts: undecided until the first batch that it can sample{left}"
        return (
            f"fast rollouts: on, in {str(self.dtype).removeprefix('torch.')} (log-probabilities differ from the plain "
            f"forward by at most {self.largest_difference:.1e})"
        )

    def generate(self, *args: Any, **kwargs: Any):
        """The model's `generate`, sampled here where that is possible."""
        self.log_probs = None
        try:
            return self._sampled(*args, **kwargs)
        except CannotSample as obstacle:
            self.left[str(obstacle)] += 1
            if self.left[str(obstacle)] == 1:
                warn_once_per_run(f"fast rollouts: transformers generates: {obstacle}")
            return self._generate(*args, **kwargs)

    def _sampled(self, *args: Any, tokenizer=None, **kwargs: Any) -> Tensor:
        if self.reason is not None:
            raise CannotSample(self.reason)
        if args:
            kwargs = {**dict(zip(("inputs", "generation_config"), args, strict=False)), **kwargs}
        extra = sorted(name for name, value in kwargs.items() if value is not None and name not in _ARGUMENTS)
        settings = copy.deepcopy(kwargs.get("generation_config") or self.model.generation_config)
        extra = [name for name in extra if not hasattr(settings, name)]
        if len(args) > 2 or extra or kwargs.get("synced_gpus"):
            raise CannotSample(f"the call takes {', '.join(extra) or 'further arguments'}")
        for name, harmless in _WITHOUT_EFFECT.items():
            own = getattr(self.model.generation_config, name, None)
            value = next(
                (one for one in (kwargs.get(name), getattr(settings, name, None), own) if one is not None), None
            )
            if value not in harmless:
                raise CannotSample(f"the call sets {name}")
        # transformers drops the tokenizer of a call with a loop of its own, so it cannot make this criterion.
        stop = kwargs.pop("stop_strings", None) or settings.stop_strings or self.model.generation_config.stop_strings
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        criteria += [StopStringCriteria(tokenizer, stop)] if stop else []
        if stop and self.model.generation_config.stop_strings:
            raise CannotSample("the model's own settings have stop strings")
        settings.stop_strings = None
        # Given beside a generation_config, transformers calls them deprecated.
        own = [name for name in kwargs if name not in _ARGUMENTS and hasattr(settings, name)]
        settings.update(**{name: kwargs.pop(name) for name in own})
        kwargs["generation_config"] = settings
        return self._generate(**kwargs, stopping_criteria=criteria, custom_generate=self._loop)

    def _loop(
        self,
        model,
        input_ids: Tensor,
        logits_processor=None,
        stopping_criteria=None,
        generation_config=None,
        **model_kwargs: Any,
    ) -> Tensor:
        # transformers from 5.18 on drops a mask that hides nothing.
        attended = model_kwargs.get("attention_mask")
        attended = torch.ones_like(input_ids) if attended is None else attended
        limit = generation_config.max_length - input_ids.shape[1]
        prompts = [row[mask != 0].tolist() for row, mask in zip(input_ids, attended, strict=True)]
        self._check_lengths(max(map(len, prompts)) + limit)
        if not all(prompts):
            raise CannotSample("a prompt is empty")
        if self.model.device.type != "cpu":
            raise CannotSample("the model is not on a CPU")
        for name in (type(one).__name__ for one in (*logits_processor, *stopping_criteria)):
            if name not in _ROW_BY_ROW:
                raise CannotSample(f"{name} may depend on a row's position in the batch")
        if self.largest_difference is None:
            self._try()
        padding = generation_config.pad_token_id
        decoder = Decoder(self.model, prompts, limit)
        with self._computing(len(prompts)):
            sequences, self.log_probs = sample(
                decoder,
                input_ids,
                logits_processor,
                stopping_criteria,
                do_sample=bool(generation_config.do_sample),
                padding=0 if padding is None else padding,
            )
        # The tensors of inference mode could not take part in a loss.
        self.log_probs = self.log_probs.clone()
        return sequences.clone()

    @contextmanager
    def _computing(self, rows: int) -> Iterator[None]:
        # Autocast would cast some products, and not those with blocked weights.
        with prepared(self.model, self._asked, rows), torch.inference_mode(), torch.autocast("cpu", enabled=False):
            yield

    def _check_lengths(self, longest: int) -> None:
        window = sliding_window(self.model.config)
        if window is not None and longest > window:
            raise CannotSample("responses can exceed the sliding window")

    def _try(self) -> None:
        """Compare the log-probabilities of a few tokens with those of plain forward passes, or turn sampling off."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.config.get_text_config().vocab_size
        prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (12, 9)]
        steps = torch.randint(vocabulary, (3, 3), generator=generator)
        decoder = Decoder(self.model, [prompts[0], prompts[0], prompts[1]], 4)
        try:
            with self._computing(3):
                logits = [decoder.encode(), *(decoder.step(tokens).clone() for tokens in steps)]
        except CannotSample as obstacle:
            self.reason = str(obstacle)
        except (RuntimeError, TypeError, KeyError, ValueError) as error:
            # Whatever a model or a private operator raises, transformers still generates.
            self.reason = (str(error).splitlines() or [type(error).__name__])[0]
        else:
            given = torch.stack(logits, dim=1).log_softmax(-1)
            expected = torch.stack([self._plain(prompts[row == 2] + steps[:, row].tolist()) for row in range(3)])
            apart = (given - expected).abs()
            self.largest_difference = apart.max().item()
            half = self.dtype.itemsize < 4
            allowed = HALF_TOLERANCE * expected.std().item() if half else FLOAT32_TOLERANCE * max(1, -expected.min())
            if not (apart.mean().item() if half else self.largest_difference) <= allowed:
                self.reason = f"its log-probabilities are {self.largest_difference:.1e} off a plain forward pass"
        if self.reason is not None or not self.quiet:
            warn_once_per_run(self.describe())
        if self.reason is not None:
            raise CannotSample(self.reason)

    @torch.no_grad()
    def _plain(self, tokens: list[int]) -> Tensor:
        with evaluating(self.model), without_wrappers(self.model):
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -4:]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _learns_prompts(model: nn.Module) -> bool:
    """Whether an adapter puts vectors before the prompt, which the model inside it does not see."""
    while not hasattr(model, "peft_config") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values())


def _obstacle(model: nn.Module) -> str | None:
    obstacle = packing_obstacle(model)
    if obstacle is not None:
        return obstacle
    if model.device.type != "cpu":
        return "the model is not on a CPU; vLLM is the way there"
    if not model._supports_logits_to_keep():
        return "it scores every position"
    if getattr(model, "is_quantized", False):
        return "its weights are quantized"
    if any(hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "its weights are sharded"
    return None


def fast_rollouts(model, *, dtype: torch.dtype | None = None, quiet: bool = False) -> Sampler:
    """Make `generate` sample several times as fast on a CPU.

    The prompt of a group of samples is encoded once, rows have their own lengths without padding, rows that have ended
    leave the batch, and products use weights in oneDNN's layout, which are made again at every call. Settings are
    transformers': temperature, top-p, top-k, penalties and stop strings. Greedy responses are the same; sampled ones
    have the same distribution and other random numbers, which depend on torch's seed and on a row's place in the
    batch.

    Call it once, after creating the trainer and before training:

        trainer = trl.GRPOTrainer(...)
        fast_rollouts(trainer)

    At the first call, a few tokens are compared with a plain forward pass. If they differ by more than rounding, or
    the model or the call needs what this sampler does not have (beams, several devices, a GPU), transformers
    generates, and one log line says why.

    Args:
        model: a causal language model of transformers, bare or with adapters, or a trainer that has one.
        dtype: precision of the products: None for that of the weights, or `torch.bfloat16`.
        quiet: omit the log line when the sampler is used, but not the one that says why it is not.

    Returns:
        The sampler: the `reason` if it is not used, the last call's `log_probs`, and `remove()`.

    Raises:
        TypeError: the argument is neither a model nor a trainer, or `dtype` is no floating-point dtype of torch.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point dtype such as torch.bfloat16, got {dtype!r}")
    given = type(model).__name__
    model = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    inner = unwrapped(model)
    if not hasattr(inner, "generate"):
        raise TypeError(f"fast_rollouts takes a causal language model or a trainer, got {given}")
    previous = sampler_of(inner)
    if previous is not None:
        previous.remove()
    sampler = Sampler(inner, dtype, quiet)
    if _learns_prompts(model):
        sampler.reason = "its adapter learns a prompt"
    inner.__dict__[_ATTRIBUTE] = sampler
    sampler.install()
    if sampler.reason is not None:
        warn_once_per_run(sampler.describe())
    return sampler


def sampler_of(model: nn.Module) -> Sampler | None:
    """The sampler that `fast_rollouts` last gave a model, with adapters or without."""
    return unwrapped(model).__dict__.get(_ATTRIBUTE)


@contextmanager
def sampled_fast(model: nn.Module) -> Iterator[Sampler | None]:
    """Within the block, a model samples as by `fast_rollouts`, in the precision of its weights or of autocast.

    The value is None for GPUs. A sampler that the model had, such as a trainer's, is there again afterwards.
    """
    inner = unwrapped(model)
    if inner.device.type != "cpu" or _learns_prompts(model):
        yield None
        return
    earlier = sampler_of(inner)
    sampler = inner.__dict__.get(_OF_EVALUATION)
    if earlier is not None:
        earlier.uninstall()
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    if sampler is None or sampler.dtype != (dtype or inner.dtype):
        sampler = inner.__dict__[_OF_EVALUATION] = Sampler(inner, dtype, quiet=True)
        if sampler.reason is not None:
            warn_once_per_run(sampler.describe())
    sampler.install()
    try:
        yield sampler
    finally:
        sampler.uninstall()
        if earlier is not None:
            earlier.install()
