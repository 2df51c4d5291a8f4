"""`--profile`: where the time of a training step goes, in a table and in the metrics.

One clock runs through training and is always in one phase, so the phases add up to the time that has passed. While a
run is profiled, methods of its trainer are replaced by ones that change the phase; otherwise nothing is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from trl_ext.models import packing_of
from trl_ext.models.batches import temporarily
from trl_ext.trainers.profile.processor import matrix_product_peak, now, operations_per_token

# The phases of a step, and their names in the table.
PHASES = {
    "sampling": "sampling",
    "scoring": "scoring",
    "update": "forward and backward",
    "optimizer": "optimizer",
    "waiting": "waiting",
}
# Methods of trainers and their phases. What is left of a rollout after sampling is scoring.
_METHODS = {
    "training_step": "update",
    "evaluate": "evaluation",
    "_generate_and_score_completions": "scoring",
    "_generate": "sampling",
    "_generate_single_turn": "sampling",
}
_SUMMED = ("tokens", "sampled", "operations")


class ProfiledTraining:
    """Mixin before a TRL trainer whose configuration has `profile`.

    Attributes:
        step_profile: the profile of the training in progress; None without `profile`.
    """

    step_profile: StepProfile | None = None

    def train(self, *args: Any, **kwargs: Any):
        with profiled(self):
            return super().train(*args, **kwargs)


@contextmanager
def profiled(trainer) -> Iterator[None]:
    """Profile the training in this block if the configuration asks for it, and print the table at its end."""
    if not trainer.args.profile or trainer.step_profile is not None:
        yield
        return
    profile = StepProfile(trainer)
    with profile.attached():
        yield
        table = profile.table()
    if table and trainer.is_world_process_zero():
        print(table, flush=True)


def measured(trainer, phase: str) -> AbstractContextManager[None]:
    """Count the time of this block as a phase of the trainer's profile, if it has one."""
    profile = getattr(trainer, "step_profile", None)
    return nullcontext() if profile is None else profile.phase(phase)


class StepProfile(TrainerCallback):
    """The time of a trainer's steps by phase, its tokens, and its work.

    `sampling` makes responses. `scoring` is the rest of a rollout (rewards, log-probabilities, advantages) and every
    pass without gradients. `update` is the rest of a training step. `optimizer` includes clipping. `waiting` is all
    else: data, logs and checkpoints. Waiting for other processes is part of the phase in which it happens. Evaluations
    are not part of the step, and time before the first step is left out.

    Tokens per second are those that pass forward and backward, without padding, over the time of the steps. Work is
    `operations_per_token` times the tokens that the policy and its reference encode, where packing encodes a common
    prefix once, and those that are sampled. The share of the peak is work per second over the `matrix_product_peak` of
    all processes. Prompts in sampling, reward models and separate value models take time and are not counted as work.

    Args:
        trainer: a `ProfiledTraining`.
    """

    def __init__(self, trainer):
        self.trainer, self.device = trainer, trainer.accelerator.device
        args = trainer.args
        self.dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else trainer.model.dtype
        (self.peak,) = self._over_processes([matrix_product_peak(self.device, self.dtype)])
        self.forward_operations, self.update_operations = operations_per_token(trainer.model)
        self._total, self._window = Counter(), Counter()
        self._phase, self._since = "setup", now(self.device)
        # The phase and the packed tokens before the pass in progress.
        self._before = ("setup", 0)

    # ---- Phases ----

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in a phase in this block; an evaluation, which also samples and scores, is one phase."""
        outer = self._phase
        self._switch(outer if outer == "evaluation" else name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, phase: str) -> None:
        moment = now(self.device)
        self._window[self._phase] += moment - self._since
        self._phase, self._since = phase, moment

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Measure the trainer in this block."""
        trainer = self.trainer
        methods = {name: self._timed(name, getattr(trainer, name)) for name in _METHODS if hasattr(trainer, name)}
        models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
        hooks = [model.register_forward_pre_hook(self._before_pass) for model in models]
        hooks += [model.register_forward_hook(self._after_pass, with_kwargs=True) for model in models]
        trainer.add_callback(self)
        try:
            with temporarily(trainer, step_profile=self, log=self._logging(trainer.log), **methods):
                yield
        finally:
            trainer.remove_callback(self)
            for hook in hooks:
                hook.remove()

    def _timed(self, name: str, method: Callable) -> Callable:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any):
            with self.phase(_METHODS[name]):
                result = method(*args, **kwargs)
            if name == "training_step" and self.trainer.accelerator.sync_gradients:
                self._switch("optimizer")
            elif name == "_generate_single_turn":
                self.count_sampled(sum(map(len, result[0])))
            return result

        return timed

    def count_sampled(self, tokens: float) -> None:
        """Count response tokens that this process has sampled, unless for an evaluation."""
        if self._phase != "evaluation":
            self._window.update(sampled=tokens, operations=self.forward_operations * tokens)

    def _before_pass(self, model: nn.Module, args: tuple) -> None:
        self._before = self._phase, _packed_tokens(model)
        if self._phase == "update" and not torch.is_grad_enabled():
            self._switch("scoring")

    def _after_pass(self, model: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        outer, packed = self._before
        if self._phase in ("update", "scoring"):
            tokens = _tokens(*args, **kwargs)
            encoded = _packed_tokens(model) - packed or tokens
            if self._phase == "update":
                self._window.update(tokens=tokens, operations=self.update_operations * encoded)
            else:
                self._window.update(operations=self.forward_operations * encoded)
        if self._phase != outer:
            self._switch(outer)

    def on_step_begin(self, args, state, control, **kwargs):
        if self._phase == "setup":
            self._switch("waiting")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._switch("waiting")

    def on_step_end(self, args, state, control, **kwargs):
        self._window["steps"] += 1

    # ---- Figures ----

    def _logging(self, log: Callable) -> Callable:
        def logged(logs: dict[str, float], *args: Any, **kwargs: Any):
            # Only the metrics of steps have a learning rate.
            if "learning_rate" in logs and self._window["steps"]:
                logs = {**logs, **{f"profile/{name}": value for name, value in self._figures(self._close()).items()}}
            return log(logs, *args, **kwargs)

        return logged

    def _over_processes(self, counts: list[float]) -> list[float]:
        counts = torch.tensor(counts, dtype=torch.float64).to(self.device)
        return self.trainer.accelerator.reduce(counts, reduction="sum").tolist()

    def _close(self) -> Counter:
        """What was counted since the last call: tokens and work over all processes, times of this one."""
        self._switch(self._phase)
        sums = self._over_processes([self._window[name] for name in _SUMMED])
        window, self._window = Counter({**self._window, **dict(zip(_SUMMED, sums, strict=True))}), Counter()
        self._total.update(window)
        return window

    def _figures(self, counts: Counter) -> dict[str, float]:
        """Seconds of a step by phase, tokens per second, and the share of the peak."""
        spent = sum(counts[phase] for phase in PHASES)
        phases = [*PHASES, "evaluation"] if counts["evaluation"] else PHASES
        figures = {f"{phase}_seconds": counts[phase] / counts["steps"] for phase in phases}
        figures["tokens_per_second"] = counts["tokens"] / spent
        if counts["sampling"]:
            figures["sampled_tokens_per_second"] = counts["sampled"] / counts["sampling"]
        return {**figures, "peak_share": counts["operations"] / spent / self.peak}

    def table(self) -> str:
        """The profile of the steps so far, as text; empty without a step. Every process must call this."""
        self._close()
        steps = self._total["steps"]
        if not steps:
            return ""
        figures = self._figures(self._total)
        step = sum(figures[f"{phase}_seconds"] for phase in PHASES)
        rows = {**PHASES, "step": "step", "evaluation": "evaluation, apart"}
        lines = [f"{f'profile of {steps} steps':<24}{'seconds':>10}{'share':>8}"]
        for phase, name in rows.items():
            if value := {**figures, "step_seconds": step}.get(f"{phase}_seconds"):
                lines.append(f"{name:<24}{value:10.4f}{value / step:8.1%}")
        rates = f"{figures['tokens_per_second']:,.0f} tokens/s"
        if "sampled_tokens_per_second" in figures:
            rates += f", {figures['sampled_tokens_per_second']:,.0f} tokens/s in sampling"
        peak = f"{self.peak / 1e12:.3g} TFLOP/s in {str(self.dtype).removeprefix('torch.')}"
        return "\n".join([*lines, f"{rates}, {figures['peak_share']:.1%} of the processor's peak of {peak}"])


def _packed_tokens(model: nn.Module) -> int:
    """Tokens that the model has encoded in packed passes."""
    return getattr(packing_of(model), "packed_tokens", 0)


def _tokens(input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *_: Any, **__: Any) -> int:
    """Tokens of a pass, without padding where a mask shows it."""
    if attention_mask is not None and attention_mask.dim() == 2:
        return int(attention_mask.sum())
    return 0 if input_ids is None else input_ids.numel()
