"""Parts F and G: three optimizer steps from data to weights, generation included, and the scoring of a rollout."""

from __future__ import annotations

import argparse
import random
import time
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
from benchmarks.gpu.devices import Device, timed
from benchmarks.gpu.steps import grpo_groups, without_cudnn
from trl_ext.models import resolve_model_path, score_sequences, share_prefixes

STEPS = 3
# Of a run: its classes of DPO and GRPO, and flags beside those of all runs.
TUNED = {"gradient_checkpointing": False, "pad_to_multiple_of": 64}
RUNS = {
    "stock": ("stock, TRL's defaults", trl, {}),
    "tuned": ("stock, tuned", trl, TUNED),
    "trl_ext": ("trl_ext, its defaults", trl_ext, {}),
}


class StepClock(TrainerCallback):
    """Wall seconds of every optimizer step, with the generation and the data that it needs."""

    def __init__(self, device: Device):
        self.device, self.seconds = device, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.device.synchronize()
        self.before = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.device.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.before)
        self.before = now


def distinct_letters(completions, **_) -> list[float]:
    """A reward that costs nothing and differs between responses."""
    return [float(len(set(text))) for text in completions]


def train(run: str, workload: str, size: str, device: Device, quick: bool, folder: Path) -> dict[str, Any]:
    """Seconds of the three steps of a run; the first meets every width for the first time."""
    label, library, own = RUNS[run]
    cuda, shrink = device.name == "cuda", 16 if quick else 1
    draw = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("toy"))
    words = [
        number
        for number in range(16, len(tokenizer))
        if tokenizer.decode([number]).startswith(" ") and tokenizer.decode([number]).strip().isalpha()
    ]

    def text(tokens: int) -> str:
        return tokenizer.decode(draw.choices(words, k=max(4, tokens // shrink)))

    rows_per_pass = (4 if quick else 8) if workload == "grpo" else (2 if quick else 4)
    passes = 2 if quick else (8 if workload == "grpo" else 16)
    common = {
        "output_dir": str(folder),
        "use_cpu": not cuda,
        "bf16": cuda,
        "gradient_checkpointing": cuda,
        "per_device_train_batch_size": rows_per_pass,
        "gradient_accumulation_steps": passes,
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "beta": 0.0 if workload == "grpo" else 0.1,
        **own,
    }
    AcceleratorState._reset_state()
    arguments = argparse.Namespace(trainer=workload, size=size, device=device.name, weights="float32")
    torch.manual_seed(0)
    model, clock = make_model(arguments), StepClock(device)
    if workload == "grpo":
        group = 4 if quick else 8
        needed = rows_per_pass * passes // group * STEPS
        prompts = Dataset.from_list([{"prompt": text(draw.randint(200, 700))} for _ in range(needed)])
        args = library.GRPOConfig(num_generations=group, max_completion_length=256 // shrink, **common)
        trainer = library.GRPOTrainer(
            model, distinct_letters, args=args, train_dataset=prompts, processing_class=tokenizer, callbacks=[clock]
        )
    else:
        lengths = wildchat_lengths()[: rows_per_pass * passes * STEPS]
        columns = ("prompt", "chosen", "rejected")
        pairs = Dataset.from_list([dict(zip(columns, map(text, row), strict=True)) for row in lengths])
        args = library.DPOConfig(**common)
        trainer = library.DPOTrainer(
            model,
            make_copy(model, arguments),
            args=args,
            train_dataset=pairs,
            processing_class=tokenizer,
            callbacks=[clock],
        )
    trainer.remove_callback(PrinterCallback)
    with without_cudnn() if run == "tuned" else torch.enable_grad():
        trainer.train()
    packing = getattr(trainer, "packing", None)
    return {
        "label": label,
        "seconds": clock.seconds,
        "median_after_the_first": median(clock.seconds[1:]),
        "rows": rows_per_pass * passes,
        "packing": packing and packing.describe(),
    }


def score(size: str, device: Device, quick: bool) -> dict[str, Any]:
    """Seconds to score a rollout with a reward model of this size, by precision, padded and packed."""
    arguments = argparse.Namespace(trainer="reward", size=size, device=device.name, weights="float32")
    torch.manual_seed(0)
    model, result, scores = make_model(arguments), {}, {}
    groups = grpo_groups(0, 2 if quick else 8, 4 if quick else 8, model.config.vocab_size, 20 if quick else 1)
    rows = [group.prompt + response for group in groups for response in group.responses]
    for dtype in ("float32", "bfloat16"):
        model = model.to(getattr(torch, dtype))
        for packed in (False, True):
            packing = share_prefixes(model, quiet=True) if packed else None
            name = f"{dtype}, {'packed' if packed else 'padded'}"

            def run(name: str = name, model=model) -> None:
                scores[name] = score_sequences(model, rows, batch_size=16, pad_token_id=2)

            run()
            seconds = [timed(device, run)["seconds"] for _ in range(3)]
            apart = (scores[name] - scores["float32, padded"]).norm() / scores["float32, padded"].norm()
            result[name] = {"seconds": median(seconds), "difference_to_float32": apart.item()}
            if packing is not None:
                result[name]["packing"] = packing.describe()
                packing.remove()
    return result
