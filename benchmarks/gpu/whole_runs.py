"""Parts F and G: three optimizer steps from data to weights, generation included, and the scoring of a rollout."""

from __future__ import annotations

import argparse
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
from benchmarks._step_arms import make_copy, make_model
from benchmarks.gpu.devices import synchronize, timed
from benchmarks.gpu.steps import VARIANTS, grpo_groups
from trl_ext.models import resolve_model_path, score_sequences, share_prefixes

STEPS = 3
# Of a run: its library, and flags beside those of all runs.
RUNS = {
    "stock": ("stock, TRL's defaults", trl, {}),
    "tuned": ("stock, tuned", trl, {"gradient_checkpointing": False, "pad_to_multiple_of": 64}),
    "trl_ext": ("trl_ext, its defaults", trl_ext, {}),
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


def train(run: str, workload: str, size: str, device: str, quick: bool, folder: Path) -> dict[str, Any]:
    """Seconds of the three steps of a run; the first meets every width for the first time."""
    label, library, own = RUNS[run]
    cuda, grpo, shrink = device == "cuda", workload == "grpo", 16 if quick else 1
    draw = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("toy"))
    # Words of one token each.
    texts = {number: tokenizer.decode([number]) for number in range(16, len(tokenizer))}
    words = [number for number, text in texts.items() if text[0] == " " and text[1:].isalpha()]

    def text(tokens: int) -> str:
        return tokenizer.decode(draw.choices(words, k=max(4, tokens // shrink)))

    micro_batch, passes, group = (4 if grpo else 2, 2, 4) if quick else (8, 8, 8) if grpo else (4, 16, 8)
    rows = micro_batch * passes
    common = {
        "output_dir": str(folder),
        "use_cpu": not cuda,
        "bf16": cuda,
        "gradient_checkpointing": cuda,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": passes,
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "beta": 0.0 if grpo else 0.1,
        **own,
    }
    AcceleratorState._reset_state()
    arguments = argparse.Namespace(trainer=workload, size=size, device=device, weights="float32")
    torch.manual_seed(0)
    model, clock = make_model(arguments), StepClock(device)
    given = {"processing_class": tokenizer, "callbacks": [clock]}
    if grpo:
        data = Dataset.from_list([{"prompt": text(draw.randint(200, 700))} for _ in range(rows // group * STEPS)])
        args = library.GRPOConfig(num_generations=group, max_completion_length=256 // shrink, **common)
        trainer = library.GRPOTrainer(model, distinct_letters, args=args, train_dataset=data, **given)
    else:
        columns = ("prompt", "chosen", "rejected")
        lengths = wildchat_lengths()[: rows * STEPS]
        data = Dataset.from_list([dict(zip(columns, map(text, row), strict=True)) for row in lengths])
        reference = make_copy(model, arguments)
        trainer = library.DPOTrainer(model, reference, args=library.DPOConfig(**common), train_dataset=data, **given)
    trainer.remove_callback(PrinterCallback)
    with VARIANTS["tuned" if run == "tuned" else "stock"].around():
        trainer.train()
    packing = getattr(trainer, "packing", None)
    seconds = [end - start for start, end in pairwise(clock.times)]
    return {label: {"seconds": seconds, "rows": rows, "packing": packing and packing.describe()}}


def score(size: str, device: str, quick: bool) -> dict[str, Any]:
    """Seconds to score a rollout with a reward model of this size, by precision, padded and packed."""
    torch.manual_seed(0)
    model = make_model(argparse.Namespace(trainer="reward", size=size, device=device, weights="float32"))
    groups = grpo_groups(0, 2 if quick else 8, 4 if quick else 8, model.config.vocab_size, 20 if quick else 1)
    rows = [group.prompt + response for group in groups for response in group.responses]
    result, exact = {}, None

    def run():
        return score_sequences(model, rows, batch_size=16, pad_token_id=2)

    for dtype, packed in product(("float32", "bfloat16"), (False, True)):
        model.to(getattr(torch, dtype))
        packing = share_prefixes(model, quiet=True) if packed else None
        scores = run()
        exact = scores if exact is None else exact
        result[f"{dtype}, {'packed' if packed else 'padded'}"] = {
            "seconds": median(timed(device, run)["seconds"] for _ in range(3)),
            "difference_to_float32": ((scores - exact).norm() / exact.norm()).item(),
            "packing": packing and packing.describe(),
        }
        if packing:
            packing.remove()
    return result
