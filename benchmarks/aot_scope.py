"""Compare the time of AOT steps that sort over the whole optimizer batch with steps that sort within micro-batches.

`python -m benchmarks.aot_scope` alternates the two within one run, on the same model and on pairs of equal length, and
prints the ratio of adjacent steps. With accumulated micro-batches, the global scope scores the batch once more
without gradients; with one micro-batch per step it should cost nothing extra.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, Qwen2ForCausalLM, TrainerCallback

from benchmarks._step_arms import qwen2
from trl_ext import AOTConfig, AOTTrainer
from trl_ext.models import resolve_model_path


class Alternate(TrainerCallback):
    """Times every optimizer step and switches the scope after each."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {"device": [], "global": []}

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[args.aot_scope].append(time.perf_counter() - self.started)
        args.aot_scope = "device" if args.aot_scope == "global" else "global"


def equal_pairs(count: int, tokens: int = 96) -> Dataset:
    """Pairs whose prompt and responses all have about `tokens` tokens, so that every step does the same work."""
    source = random.Random(0)
    words = ("fox", "river", "seven", "blue")
    text = lambda: " ".join(source.choice(words) for _ in range(tokens))  # noqa: E731
    return Dataset.from_list([{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(count)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8, help="adjacent pairs of steps to time (default: %(default)s)")
    parser.add_argument("--micro_batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--lora", action="store_true", help="train an adapter, with the base as the reference")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("toy"))
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model_config = qwen2(256, 6, 1024, 4, 4, len(tokenizer), **ids)
    torch.manual_seed(0)
    model, reference = Qwen2ForCausalLM(model_config), Qwen2ForCausalLM(model_config)
    # The first two steps of each scope are warm-up.
    steps = 2 * (arguments.pairs + 2)
    alternate = Alternate()
    settings = {"per_device_train_batch_size": arguments.micro_batch, "max_steps": steps, "logging_steps": 1000}
    settings |= {"gradient_accumulation_steps": arguments.accumulation, "aot_scope": "device", "save_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = AOTTrainer(
            model,
            None if arguments.lora else reference,
            args=AOTConfig(folder, **settings, report_to="none", disable_tqdm=True),
            train_dataset=equal_pairs(steps * arguments.micro_batch * arguments.accumulation),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, target_modules="all-linear") if arguments.lora else None,
            callbacks=[alternate],
        )
        trainer.train()
    device, over_all = (alternate.seconds[scope][2:] for scope in ("device", "global"))
    ratios = [b / a for a, b in zip(device, over_all, strict=True)]
    medians = [statistics.median(values) for values in (device, over_all, ratios)]
    print("{:.3f} s within micro-batches, {:.3f} s over the batch, ratio {:.2f}".format(*medians))
    print(f"{len(ratios)} pairs of steps, ratios from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
