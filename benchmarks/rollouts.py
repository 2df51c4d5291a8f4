"""Compare transformers' generation on a CPU with `fast_rollouts`, on the same prompts.

`python -m benchmarks.rollouts --size 135M` makes a model of random weights and samples G responses of fixed length to
each prompt: with transformers' `generate` and with the sampler, each in float32 and in bfloat16. Each arm runs once
before it is measured; then all arms alternate. Tokens per second count response tokens of whole calls, including the
prompts' forward pass and the layout of the weights. `--size toy` takes the embedded model and benchmark, whose
responses are about ten tokens long, and lets them end. Wall seconds are valid on an idle machine only.

`.venv/vllm/bin/python -m benchmarks.rollouts --vllm` adds vLLM, in the environment that `make test-vllm` makes. vLLM
loads its weights once; its prefix cache is emptied before each call.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from trl_ext.evaluation.command_line import CommandParser, at_least_one, format_table, one_line_errors
from trl_ext.files import write_json

# Hidden size, intermediate size, layers, heads, key heads, vocabulary.
SIZES = {"24M": (256, 768, 8, 4, 2, 49152), "135M": (576, 1536, 30, 9, 3, 49152)}
ARMS = ("generate float32", "generate bfloat16", "sampler float32", "sampler bfloat16")
VLLM_ARMS = ("vllm float32", "vllm bfloat16")


def parse(argv: Sequence[str] | None = None):
    parser = CommandParser(prog="python -m benchmarks.rollouts", description=__doc__)
    parser.add_argument("--size", choices=["toy", *SIZES], default="135M")
    parser.add_argument("--prompts", type=at_least_one, default=8)
    parser.add_argument("--samples", type=at_least_one, default=4, help="responses to a prompt")
    parser.add_argument("--tokens", type=at_least_one, default=96, help="response tokens")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="measured calls of each arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--vllm", action="store_true", help="also measure vLLM in both precisions")
    parser.add_argument("--block_size", type=at_least_one, default=32, help="of vLLM's prefix cache, in tokens")
    parser.add_argument("--threads", type=at_least_one, default=2, help="of torch")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args(argv)
    if arguments.vllm:
        if arguments.size == "toy":
            parser.error("vLLM's attention on a CPU does not support the head size of toy; choose another --size")
        if importlib.util.find_spec("vllm") is None:
            parser.error("--vllm needs the environment of make test-vllm: call .venv/vllm/bin/python")
        arguments.arms += VLLM_ARMS
    return arguments


def prepare(arguments):
    """The model in float32, a left-padded batch, and generation settings."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": arguments.tokens}
    if arguments.size == "toy":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from trl_ext import load_benchmark
        from trl_ext.models import resolve_model_path
        from trl_ext.rollouts.generation import prompt_tokens

        path = resolve_model_path("toy")
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        rows = load_benchmark("toy")["train_prefs"].select(range(arguments.prompts))
        prompts = [prompt_tokens(tokenizer, row["prompt"], None) for row in rows]
        settings |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    else:
        torch.manual_seed(0)
        hidden, intermediate, layers, heads, key_heads, vocabulary = SIZES[arguments.size]
        shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": key_heads, "vocab_size": vocabulary}
        config = LlamaConfig(**shape, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
        model = LlamaForCausalLM(config)
        lengths = torch.linspace(69, 116, arguments.prompts).int().tolist()
        prompts = [torch.randint(3, vocabulary, (length,)).tolist() for length in lengths]
        settings |= {"pad_token_id": 0}
    rows = [prompt for prompt in prompts for _ in range(arguments.samples)]
    width = max(map(len, rows))
    batch = {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }
    return model.float().eval(), batch, GenerationConfig(**settings)


def arms(arguments, model) -> dict[str, Callable]:
    """The function that generates, of each arm."""
    import copy

    import torch

    from trl_ext.rollouts.sampler import fast_rollouts

    made: dict[str, Callable] = {}
    for name in arguments.arms:
        kind, dtype = name.split()
        if kind == "vllm":
            made[name] = vllm_generate(model, dtype, arguments.block_size)
        elif kind == "generate":
            made[name] = copy.deepcopy(model).to(getattr(torch, dtype)).generate
        else:
            own = copy.deepcopy(model)
            fast_rollouts(own, dtype=getattr(torch, dtype))
            made[name] = own.generate
    return made


def vllm_generate(model, dtype: str, block_size: int) -> Callable:
    """A vLLM of `model`, called like `generate` with a left-padded batch."""
    import torch

    # vLLM reads these when it is imported.
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # Prompts are shared in whole blocks. vLLM's default on a CPU, 128 tokens, is longer than these prompts.
        settings = {"skip_tokenizer_init": True, "max_model_len": 1024, "block_size": block_size}
        llm = vllm.LLM(model=folder, dtype=dtype, **settings)

    def generate(input_ids, attention_mask, generation_config):
        rows = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        sampling = vllm.SamplingParams(
            temperature=generation_config.temperature,
            max_tokens=generation_config.max_new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        # As TRL does after each update: only the samples of one call share the prefill of their prompt.
        llm.reset_prefix_cache()
        outputs = llm.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
        responses = torch.tensor([list(output.outputs[0].token_ids) for output in outputs])
        return torch.cat([input_ids, responses], 1)

    return generate


def measure(arguments) -> dict[str, Any]:
    """Seconds and tokens per second of each call, and their medians."""
    import torch

    torch.set_num_threads(arguments.threads)
    model, batch, settings = prepare(arguments)
    width = batch["input_ids"].shape[1]
    calls: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.arms}
    made = arms(arguments, model)
    for index in range(-1, arguments.rounds):
        # Alternate which arm goes first, so that none always benefits from the caches.
        for name in list(made)[:: -1 if index % 2 else 1]:
            torch.manual_seed(index + 1)
            began, began_cpu = time.perf_counter(), time.process_time()
            output = made[name](**batch, generation_config=settings)
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
            responses = output[:, width:]
            ended = settings.eos_token_id is not None
            tokens = int((responses != settings.pad_token_id).sum()) if ended else responses.numel()
            if index >= 0:
                calls[name].append({"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens})
    figures: dict[str, Any] = {"tokens_per_second": {}, "seconds": {}, "cpu_seconds": {}}
    for name, own in calls.items():
        figures["tokens_per_second"][name] = median(one["tokens"] / one["seconds"] for one in own)
        for figure in ("seconds", "cpu_seconds"):
            figures[figure][name] = median(one[figure] for one in own)
    return {
        "settings": {name: value for name, value in vars(arguments).items() if name != "json"},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "torch": torch.__version__,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "calls": calls,
        **figures,
    }


def table(figures: dict[str, Any]) -> str:
    rows = []
    for name in figures["calls"]:
        row = [name, round(figures["tokens_per_second"][name])]
        for seconds in (figures["seconds"], figures["cpu_seconds"]):
            row += [seconds[name], next(iter(seconds.values())) / seconds[name]]
        rows.append(row)
    return format_table(["arm", "tokens/s", "wall seconds", "ratio", "CPU seconds", "ratio"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors():
        arguments = parse(argv)
        figures = measure(arguments)
        print(table(figures))
        if arguments.json:
            write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
