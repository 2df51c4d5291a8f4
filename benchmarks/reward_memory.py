"""Compare the memory of a policy with LoRA reward models on a shared backbone and on separate bases, as in stock TRL.

`python -m benchmarks.reward_memory` creates a Qwen2 with random weights and LoRA reward models on it, and measures the
policy alone (its base is also the reference), and with one and four reward models, each configuration in a separate
process. It prints a table. With `--device cuda` it measures GPU memory, including the peak over one scoring pass of
every reward model and one training step of the policy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2ForCausalLM

from benchmarks._step_arms import qwen2
from trl_ext.models import resolve_model_path, score_sequences
from trl_ext.rewards import RewardModel, share_or_load

MIB = 2**20
VOCABULARY, BATCH_SIZE, TOKENS = 32000, 8, 256
# Numbers of reward models.
ADAPTERS = (1, 4)


def write_models(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the base and the reward adapters for the largest configuration."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("toy"))
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = qwen2(768, 12, 4 * 768, 12, 3, VOCABULARY, tie_word_embeddings=True, **ids)
    torch.manual_seed(0)
    # Save in a different type from the one that is loaded: on the CPU, weights that are not converted stay mapped to
    # their file, and copies that share its pages look smaller than they are once moved or trained.
    stored = torch.float32 if arguments.dtype == "bfloat16" else torch.bfloat16
    base = Qwen2ForCausalLM(config).to(stored)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    del base
    for index in range(max(ADAPTERS)):
        model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
        model = get_peft_model(model, lora("SEQ_CLS"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        model.save_pretrained(folder / f"reward{index}")


def lora(task_type: str) -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task_type)


def measure(kind: str, count: int, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes used by one configuration; `kind` is `shared` or `stock`. Runs in a separate process."""
    dtype, device = getattr(torch, arguments.dtype), arguments.device
    before = occupied_bytes(device)
    policy = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype).to(device)
    policy = get_peft_model(policy, lora("CAUSAL_LM"))
    folders = [str(folder / f"reward{index}") for index in range(count)]
    if kind == "shared":
        rewards = [RewardModel(path) for path in folders]
        share_or_load(rewards, policy, "always")
        backbone = rewards[0].backbone if rewards else None
        names = backbone.reward_adapters if rewards else ()
        score = [lambda sequences, name=name: backbone.score(name, sequences) for name in names]
        models = [policy]
    else:
        models = [policy, *(stock_reward_model(folder / "base", path, dtype, device) for path in folders)]
        score = [lambda sequences, model=model: score_sequences(model, sequences) for model in models[1:]]
    gc.collect()
    figures = {"parameter_bytes": unique_bytes(models), "resident_bytes": occupied_bytes(device) - before}
    if device == "cuda":
        train_step(policy, score)
        figures["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return figures


def stock_reward_model(base: Path, folder: str, dtype: torch.dtype, device: str):
    """Load a model with its own base, as `GRPOTrainer(reward_funcs=folder)` does. (PEFT also loads the head.)"""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=dtype)
    return PeftModel.from_pretrained(model, folder).to(device).eval().requires_grad_(False)


def train_step(policy, score: list) -> None:
    """Score a batch with every reward model, then train the policy on it for one step."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, VOCABULARY, (BATCH_SIZE, TOKENS), generator=generator)
    policy.gradient_checkpointing_enable()
    policy.enable_input_require_grads()
    policy.train()
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-5)
    scores = [function(ids.tolist()) for function in score] or [torch.ones(len(ids))]
    rewards = torch.stack(scores).mean(dim=0)
    ids = ids.to(policy.device)
    logits = policy(ids).logits[:, :-1]
    log_probs = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    loss = -(log_probs.view(len(ids), -1).mean(dim=1) * rewards.to(policy.device)).mean()
    loss.backward()
    optimizer.step()


def unique_bytes(models: list) -> int:
    """Bytes of parameters; storage shared by several models is counted once."""
    storages = {}
    for model in models:
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def occupied_bytes(device: str) -> int:
    """Memory used by this process: on the GPU, or physical memory, where a page mapped twice counts once."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_full_info().pss


def run(kind: str, count: int, folder: Path, arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.reward_memory", *arguments, "--worker", kind, str(count), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} with {count} reward models failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, count, folder = arguments.worker
        print(json.dumps(measure(kind, int(count), Path(folder), arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, arguments)
        results = {"policy alone": run("shared", 0, folder, sys.argv[1:])}
        for count in ADAPTERS:
            for kind in ("shared", "stock"):
                results[f"{kind}, {count}"] = run(kind, count, folder, sys.argv[1:])
    report(results)


def report(results: dict[str, dict[str, int]]) -> None:
    key = "peak_bytes" if "peak_bytes" in results["policy alone"] else "resident_bytes"
    columns = list(results["policy alone"])
    print("| policy and reference with | " + " | ".join(f"{c.removesuffix('_bytes')}, MiB" for c in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for label, figures in results.items():
        print(f"| {label} | " + " | ".join(f"{figures[c] / MIB:.0f}" for c in columns) + " |")
    for count in ADAPTERS:
        print(f"stock / shared, {count}: {results[f'stock, {count}'][key] / results[f'shared, {count}'][key]:.2f}")


if __name__ == "__main__":
    main()
