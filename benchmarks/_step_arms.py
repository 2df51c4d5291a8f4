"""Arms of `benchmarks.step` and `benchmarks.gpu`: real trainers of TRL on random weights, with and without packing."""

from __future__ import annotations

import argparse
import platform
import resource
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import trl
import trl.trainer.utils
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from benchmarks._lengths import Group, Pair, generation_batches, groups, pairs
from trl_ext import share_prefixes
from trl_ext.models import resolve_model_path

# Hidden size, layers, intermediate size, heads, key heads, vocabulary; the last three are SmolLM2-135M and Qwen2.5's.
SIZES = {
    "24M": (512, 6, 2048, 8, 2, 2048),
    "53M": (768, 6, 3072, 12, 3, 2048),
    "135M": (576, 30, 1536, 9, 3, 49152),
    "0.5B": (896, 24, 4864, 14, 2, 151936),
    "1.5B": (1536, 28, 8960, 12, 2, 151936),
    # For comparisons of all gradients with float64: four layers of 0.5B, and a model that is small enough for a CPU.
    "0.5B/6": (896, 4, 4864, 14, 2, 151936),
    "24M/100": (64, 2, 128, 4, 2, 512),
}


def prepare(arguments: argparse.Namespace) -> None:
    """Set threads, and make TRL's fused head score only labelled positions, as it does on CUDA.

    On the CPU it scores every position, including padding and prompts, which would favour the packed arm.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU; take --device cpu")
    torch.set_num_threads(arguments.threads)
    trl.trainer.utils._use_triton = lambda device: True


def arm_arguments(trainer: str, size: str, device: str, **others: Any) -> argparse.Namespace:
    """The arguments of an arm with TRL's defaults: on a GPU, weights in float32 and passes in bfloat16."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    return argparse.Namespace(
        trainer=trainer, size=size, device=device, dtype=dtype, weights="float32", lora_r=0, **others
    )


class Arm:
    """A trainer and its optimizer, created once.

    Args:
        packed: whether to apply `share_prefixes`.
        arguments: the flags of `benchmarks.step`.
        folder: output folder of the trainer.
        like: another arm, whose parameters and optimizer this one uses instead of its own.
    """

    def __init__(self, packed: bool, arguments: argparse.Namespace, folder: Path, like: Arm | None = None):
        torch.manual_seed(0)
        AcceleratorState._reset_state()
        self.trainer = make_trainer(arguments, folder)
        # accelerate keeps the precision of autocast for the whole process.
        self.state = dict(AcceleratorState._shared_state)
        # Replaces the schedule and the training loop, which are not measured.
        if like is None:
            self.trainer.create_optimizer()
        else:
            for name in ("model", "ref_model"):
                model, other = (getattr(arm.trainer, name, None) for arm in (self, like))
                if model is not None:
                    model.load_state_dict(other.state_dict(keep_vars=True), assign=True)
            self.trainer.optimizer = like.trainer.optimizer
        # As `train()` does.
        if arguments.gradient_checkpointing:
            self.trainer.model.gradient_checkpointing_enable(self.trainer.args.gradient_checkpointing_kwargs)
        self.arguments = arguments
        self.packing = None
        if packed:
            models = self.trainer.model, getattr(self.trainer, "ref_model", None)
            self.packing = share_prefixes(*models, compile_layers=getattr(arguments, "compile_layers", False))
        # As `train()` does, which starts autocast in the model's forward pass.
        self.trainer.accelerator.prepare_model(self.trainer.model)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters."""
        return [p for p in self.trainer.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def take_weights(self, other: Arm) -> None:
        """Copy the trained weights of another arm, so that a difference of the next step is one of its computation."""
        for own, given in zip(self.parameters, other.parameters, strict=True):
            own.copy_(given)

    def accumulate(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Add up the gradients of the micro-batches of one optimizer step; return the sum of their losses.

        A policy's micro-batches are divided by `num_items_in_batch`, which is that of the whole step.
        """
        AcceleratorState._shared_state.update(self.state)
        self.trainer.current_gradient_accumulation_steps = 1 if self.arguments.trainer == "policy" else len(batches)
        # Trainers modify their input batch.
        return sum(self.trainer.training_step(self.trainer.model, dict(batch), None) for batch in batches)

    def step(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        """Run one optimizer step; return its time, loss and gradient norm."""
        self._synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = self.accumulate([batch])
        self._synchronize()
        backward_wall, backward_cpu = time.perf_counter(), time.process_time()
        norm = torch.stack([p.grad.norm() for p in self.parameters if p.grad is not None]).norm().item()
        self._synchronize()
        update_wall, update_cpu = time.perf_counter(), time.process_time()
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        self._synchronize()
        seconds = time.perf_counter() - update_wall + backward_wall - wall
        cpu_seconds = time.process_time() - update_cpu + backward_cpu - cpu
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss.item(), "gradient_norm": norm}

    def encoded_tokens(self, batch: dict[str, torch.Tensor]) -> int:
        """Number of tokens that one forward pass of this arm encodes, including any padding."""
        inputs = model_inputs(batch, self.arguments.trainer)
        plan = None if self.packing is None else self.packing.plan(*inputs)
        return inputs[0].numel() if plan is None else plan.tokens

    def _synchronize(self) -> None:
        if self.arguments.device == "cuda":
            torch.cuda.synchronize()


# ---- Trainers ----


def make_model(arguments: argparse.Namespace):
    """A Qwen2 with random weights, or the embedded model for the size `toy`."""
    labels = {"num_labels": 1} if arguments.trainer == "reward" else {}
    dtype = getattr(torch, arguments.weights)
    if arguments.size == "toy":
        kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
        return kind.from_pretrained(resolve_model_path("toy"), dtype=dtype, **labels)
    config = qwen2(*SIZES[arguments.size], tie_word_embeddings=True, eos_token_id=1, pad_token_id=2, **labels)
    # On a GPU the weights are drawn there, which is faster.
    with torch.device(arguments.device):
        return (Qwen2ForSequenceClassification if labels else Qwen2ForCausalLM)(config).to(dtype)


def qwen2(
    hidden: int, layers: int, intermediate: int, heads: int, key_heads: int, vocabulary: int, **settings: Any
) -> Qwen2Config:
    """The configuration of a Qwen2 of this shape, whose weights are random."""
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": key_heads, "vocab_size": vocabulary}
    return Qwen2Config(**shape, bos_token_id=None, **settings)


def make_trainer(arguments: argparse.Namespace, folder: Path, *, library=trl, rows=None, reward=None, **settings: Any):
    """Create the DPOTrainer, RewardTrainer or GRPOTrainer of a library, with its defaults but for `settings`.

    Without `rows`, its data set is never read, and the batches of a policy replace its rollouts.
    """
    common = {"output_dir": str(folder), "use_cpu": arguments.device != "cuda", "bf16": arguments.dtype == "bfloat16"}
    common |= {"gradient_checkpointing": arguments.gradient_checkpointing, "learning_rate": 1e-6, **settings}
    common |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "model_init_kwargs": None}
    given, lora = {"processing_class": AutoTokenizer.from_pretrained(resolve_model_path("toy"))}, None
    if arguments.lora_r:
        task = "SEQ_CLS" if arguments.trainer == "reward" else "CAUSAL_LM"
        options = {"r": arguments.lora_r, "lora_alpha": 2 * arguments.lora_r, "target_modules": "all-linear"}
        lora = given["peft_config"] = LoraConfig(**options, task_type=task)
    model = make_model(arguments)
    if arguments.trainer == "preference":
        rows = rows or Dataset.from_list([{side: _turn(side) for side in ("prompt", "chosen", "rejected")}] * 2)
        reference = None if lora else make_copy(model, arguments)
        return library.DPOTrainer(model, reference, args=library.DPOConfig(**common), train_dataset=rows, **given)
    if arguments.trainer == "reward":
        rows = Dataset.from_list([{"chosen_ids": [5, 6], "rejected_ids": [5, 7]}] * 2)
        return library.RewardTrainer(model, args=library.RewardConfig(**common), train_dataset=rows, **given)
    common["per_device_train_batch_size"] = arguments.batch_size * arguments.group_size
    args = library.GRPOConfig(num_generations=arguments.group_size, disable_dropout=True, **common)
    prompts = rows or Dataset.from_list([{"prompt": "a"}] * 2)
    trainer = library.GRPOTrainer(model, reward or zero_reward, args=args, train_dataset=prompts, **given)
    if rows is None:
        trainer._prepare_inputs = lambda batch: batch
    return trainer


def _turn(side: str) -> list[dict[str, str]]:
    return [{"role": "user" if side == "prompt" else "assistant", "content": side}]


def make_copy(model, arguments: argparse.Namespace):
    """The reference for DPO; TRL would load it from the model's path, if it had one."""
    reference = make_model(arguments)
    reference.load_state_dict(model.state_dict())
    return reference


def zero_reward(completions, **_) -> list[float]:
    """Never called."""
    return [0.0] * len(completions)


# ---- Batches ----


def make_batches(arguments: argparse.Namespace, trainer) -> list[dict[str, torch.Tensor]]:
    """The batches of a run, padded as by the trainer's own collator or rollout."""
    vocabulary = trainer.model.config.vocab_size
    if arguments.trainer == "policy":
        rows = groups(arguments.lengths, arguments.group_size, vocabulary=vocabulary)
        batches = policy_batches(rows, arguments.batch_size)
    else:
        rows, size = pairs(arguments.lengths, vocabulary=vocabulary), arguments.batch_size
        rows = [example(pair, arguments.trainer) for pair in rows]
        starts = range(0, len(rows) - size + 1, size)
        batches = [trainer.data_collator(rows[start : start + size]) for start in starts]
    if len(batches) < arguments.pairs:
        raise ValueError(f"--pairs {arguments.pairs}: {arguments.lengths} has {len(batches)} batches of this size")
    device = arguments.device
    return [{name: value.to(device) for name, value in batch.items()} for batch in batches[: arguments.pairs]]


def example(pair: Pair, trainer: str) -> dict[str, Any]:
    if trainer == "preference":
        return {"prompt_ids": pair.prompt, "chosen_ids": pair.chosen, "rejected_ids": pair.rejected}
    return {"chosen_ids": pair.prompt + pair.chosen, "rejected_ids": pair.prompt + pair.rejected}


def policy_batches(rows: list[Group], size: int) -> list[dict[str, torch.Tensor]]:
    """A micro-batch of `size` whole groups from each generation batch, which TRL pads to one width.

    Successive batches use different positions, so that every position in a generation batch occurs. Prompts are padded
    on the left.
    """
    batches = []
    for index, generation in enumerate(generation_batches(rows)):
        widest = max(len(group.prompt) for group in generation)
        longest = max(len(response) for group in generation for response in group.responses)
        start = index * size % len(generation)
        batches.append(rollout(generation[start : start + size], widest, longest))
    return batches


def rollout(chosen: list[Group], widest: int, longest: int) -> dict[str, torch.Tensor]:
    """The rollout that GRPOTrainer builds from sampled groups, with advantages of both signs."""
    prompts = [group.prompt for group in chosen for _ in group.responses]
    responses = [response for group in chosen for response in group.responses]
    batch = {"prompt": (prompts, widest, True), "completion": (responses, longest, False)}
    tensors = {}
    for name, (sequences, width, left) in batch.items():
        ids = torch.full((len(sequences), width), 2)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
            ids[row, place] = torch.tensor(sequence)
            mask[row, place] = 1
        tensors |= {f"{name}_ids": ids, f"{name}_mask": mask}
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(responses), generator=generator)
    return {**tensors, "advantages": advantages, "num_items_in_batch": tensors["completion_mask"].sum()}


def model_inputs(batch: dict[str, torch.Tensor], trainer: str) -> tuple[torch.Tensor, ...]:
    """`input_ids`, `attention_mask` and, except for a reward model, `labels` of a batch, each [B, L]."""
    if trainer == "reward":
        return batch["input_ids"], batch["attention_mask"]
    if trainer == "preference":
        ids, mask, counts = batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    else:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        counts = torch.cat([torch.zeros_like(batch["prompt_mask"]), batch["completion_mask"]], dim=1)
    return ids, mask, ids.masked_fill(counts == 0, -100)


def count_tokens(batch: dict[str, torch.Tensor], trainer: str) -> dict[str, int]:
    """Number of positions in the padded batch, of tokens, and of positions that the head scores."""
    ids, mask, *labels = model_inputs(batch, trainer)
    labelled = int((labels[0] != -100).sum()) if labels else 0
    return {"padded_tokens": ids.numel(), "real_tokens": int(mask.sum()), "labelled_tokens": labelled}


def describe_machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """The hardware and software versions of a measurement."""
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else processor()
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "accelerate", "peft", "datasets")}
    return {"device": name, "threads": torch.get_num_threads(), "versions": versions}


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


# ---- Memory ----


class Peak:
    """Peak memory above that at the start of the block: of the GPU, or resident memory in a separate process."""

    def __init__(self, device: str):
        self._cuda = device == "cuda"
        self.bytes = 0

    def __enter__(self) -> Peak:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._before = _resident("VmRSS")
            # Reset Linux's high-water mark.
            Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *_) -> None:
        peak = torch.cuda.max_memory_allocated() if self._cuda else _resident("VmHWM")
        self.bytes = peak - self._before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
