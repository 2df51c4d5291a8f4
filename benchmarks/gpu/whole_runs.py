"""Parts F and G: three optimizer steps from data to weights, generation included, and the scoring of a rollout."""

from __future__ import annotations

import random
import time
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

import trl_ext
from benchmarks._lengths import wildchat_lengths
from benchmarks._step_arms import arm_arguments, make_model, make_trainer
from benchmarks.gpu.machine import synchronize, timed
from benchmarks.gpu.steps import SHRINK, VARIANTS, WORKLOADS, counts, grpo_groups
from trl_ext.models import resolve_model_path, score_sequences, share_prefixes

STEPS = 3
# Of a run: its library, and its settings beside the library's defaults.
RUNS = {
    "stock": (trl, {}),
    "tuned": (trl, {"gradient_checkpointing": False, "pad_to_multiple_of": 64}),
    "trl_ext": (trl_ext, {}),
    "trl_ext, compiled": (trl_ext, {"compile_layers": True, "gradient_checkpointing": False}),
}


class StepClock(TrainerCallback):
    """The time at the start and after every optimizer step, with the generation and the data that it needs."""

    def __init__(self, device: str):
        self.device, self.times = device, []

    def on_step_end(self, args, state, control, **kwargs):
        synchronize(self.device)
        self.times.append(time.perf_counter())

    on_train_begin = on_step_end


def distinct_letters(completions, **_) -> list[float]:
    """A reward that costs nothing and differs between responses."""
    return [float(len(set(text))) for text in completions]


def train(run: str, workload: str, size: str, folder: Path, device: str, quick: bool) -> dict[str, Any]:
    """Seconds of the three steps of a run; the first meets every width for the first time."""
    library, own = RUNS[run]
    draw, shrink = random.Random(0), SHRINK if quick else 1
    units, micro_batch, group = counts(workload, quick)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("toy"))
    # Words of one token each.
    texts = {number: tokenizer.decode([number]) for number in range(16, len(tokenizer))}
    words = [number for number, text in texts.items() if text[0] == " " and text[1:].isalpha()]

    def text(tokens: int) -> str:
        return tokenizer.decode(draw.choices(words, k=max(4, tokens // shrink)))

    if workload == "grpo":
        rows = [{"prompt": text(draw.randint(200, 700))} for _ in range(units * STEPS)]
        settings = {"reward": distinct_letters, "max_completion_length": 256 // shrink, "beta": 0.0}
    else:
        columns = ("prompt", "chosen", "rejected")
        rows = [dict(zip(columns, map(text, row), strict=True)) for row in wildchat_lengths()[: units * STEPS]]
        settings = {"per_device_train_batch_size": micro_batch}
    settings |= {"gradient_accumulation_steps": units // micro_batch, "max_steps": STEPS, "logging_strategy": "no"}
    AcceleratorState._reset_state()
    torch.manual_seed(0)
    given = {"gradient_checkpointing": device == "cuda", "batch_size": micro_batch, "group_size": group}
    arguments = arm_arguments(WORKLOADS[workload][0], size, device, **given)
    trainer = make_trainer(arguments, folder, library=library, rows=Dataset.from_list(rows), **settings | own)
    trainer.remove_callback(PrinterCallback)
    clock = StepClock(device)
    trainer.add_callback(clock)
    with VARIANTS["tuned" if run == "tuned" else "stock"].around():
        trainer.train()
    packing = getattr(trainer, "packing", None)
    seconds = [end - start for start, end in pairwise(clock.times)]
    return {run: {"seconds": seconds, "packing": packing and packing.describe()}}


def score(size: str, device: str, quick: bool) -> dict[str, Any]:
    """Seconds to score a rollout with a reward model of this size, by precision, padded and packed."""
    torch.manual_seed(0)
    model, exact, result = make_model(arm_arguments("reward", size, device)), None, {}
    units, _, group_size = counts("grpo", quick)
    groups = grpo_groups(0, units, group_size, model.config.vocab_size, SHRINK if quick else 1)
    rows = [group.prompt + response for group in groups for response in group.responses]

    def run():
        return score_sequences(model, rows, batch_size=16, pad_token_id=2)

    for dtype, packed in product(("float32", "bfloat16"), (False, True)):
        model.to(getattr(torch, dtype))
        packing = share_prefixes(model, quiet=True) if packed else None
        scores = run()
        exact = scores if exact is None else exact
        result[f"{dtype}, {'packed' if packed else 'padded'}"] = {
            "seconds": median(timed(device, run) for _ in range(3)),
            "difference_to_float32": ((scores - exact).norm() / exact.norm()).item(),
        }
        if packing:
            packing.remove()
    return result
