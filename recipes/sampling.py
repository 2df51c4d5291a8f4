"""What recipes share that sample and do not train: what samples, and a folder in which an interrupted run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from reward_sources import RewardSources
from training import ModelArguments
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import get_quantization_config

from trl_ext import load_benchmark
from trl_ext.evaluation import GroundTruthJudge, PairwiseJudge, WinRate, judge_pairs, win_rate
from trl_ext.files import read_yaml, write_text
from trl_ext.models import resolve_model_path
from trl_ext.rollouts import Generation, SamplingSettings, TransformersEngine, VLLMEngine

# What a run that goes on may differ in from what it was begun with.
_MAY_DIFFER = ("output_dir", "use_vllm", "vllm_gpu_memory_utilization")

JUDGE_CACHE = "judge_cache.jsonl"
JUDGES = ("ground_truth", "openai", "none")


@contextmanager
def kept_when_interrupted() -> Iterator[None]:
    """End the program with one line on Ctrl-C, around what saves as it goes."""
    try:
        yield
    except KeyboardInterrupt:
        print("\ninterrupted: what was saved is kept, and the same command goes on from there")
        raise SystemExit(130) from None


@dataclass
class SampledArguments(RewardSources):
    """Prompts, the reward, the judge, and how responses are sampled."""

    dataset_name: str = field(
        default="toy", metadata={"help": "toy, a folder of {split}.jsonl, one .jsonl file, or a hub dataset."}
    )
    prompt_split: str = field(default="test_gen", metadata={"help": "Prompts to respond to."})
    num_prompts: int | None = field(default=None, metadata={"help": "The first so many. Default: all."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Drop bad rows and say how many and why."})
    output_dir: str | None = field(default=None, metadata={"help": "Where results go."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier run in output_dir."})
    judge: str | None = field(
        default=None,
        metadata={
            "help": "Who compares responses with the base's, which are greedy: ground_truth (toy only), openai, or "
            "none. Default: ground_truth on toy, none on everything else."
        },
    )
    judge_model: str = field(default="gpt-5.4", metadata={"help": "For the judge openai; key in OPENAI_API_KEY."})
    judge_base_url: str | None = field(default=None, metadata={"help": "Of a server with OpenAI's API."})
    max_prompt_tokens: int | None = field(default=None, metadata={"help": "Longer prompts lose their beginning."})
    max_new_tokens: int = field(default=256, metadata={"help": "Longest response, in tokens."})
    generation_batch_size: int = field(default=32, metadata={"help": "Prompts per batch of generation."})
    reward_batch_size: int = field(default=32, metadata={"help": "Responses per batch of a reward model."})
    use_vllm: bool = field(default=False, metadata={"help": "Sample with vLLM, which the extra vllm installs."})
    vllm_gpu_memory_utilization: float = field(default=0.9, metadata={"help": "Share of the GPU's memory for vLLM."})
    use_cpu: bool = field(default=False, metadata={"help": "Use no accelerator even if there is one."})
    save_every: int = field(default=512, metadata={"help": "Responses between saves, from which a run goes on."})
    seed: int = field(default=42, metadata={"help": "Of the sampling."})

    def __post_init__(self):
        for name in ("num_prompts", "save_every", "reward_batch_size", "max_new_tokens", "generation_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.judge is None:
            self.judge = "ground_truth" if self.dataset_name == "toy" else "none"
        if self.judge not in JUDGES:
            raise ValueError(f"judge must be one of {', '.join(JUDGES)}, got {self.judge!r}")
        if self.judge == "ground_truth" and self.dataset_name != "toy":
            raise ValueError("judge ground_truth is for toy, the only benchmark whose responses have a known score")

    @property
    def has_ground_truth(self) -> bool:
        return self.dataset_name == "toy"


def load_prompts(arguments: SampledArguments) -> list[dict[str, Any]]:
    """The prompts to respond to.

    One file has one split, which need not be named: `prompt_split` is set to it.

    Raises:
        FileNotFoundError, ValueError: no such data or split, or fewer prompts than are asked for.
    """
    benchmark = load_benchmark(arguments.dataset_name, skip_bad_rows=arguments.skip_bad_rows)
    if Path(arguments.dataset_name).is_file() and arguments.prompt_split == SampledArguments.prompt_split:
        (arguments.prompt_split,) = benchmark
    if arguments.prompt_split not in benchmark:
        raise ValueError(
            f"{arguments.dataset_name} has no split {arguments.prompt_split!r}: it has {', '.join(benchmark)}; name "
            "one with --prompt_split"
        )
    rows = benchmark[arguments.prompt_split]
    if arguments.num_prompts is not None and arguments.num_prompts > len(rows):
        raise ValueError(f"{arguments.prompt_split} has {len(rows)} prompts: ask for no more with --num_prompts")
    return list(rows)[: arguments.num_prompts]


def load_judge(arguments: SampledArguments) -> PairwiseJudge | None:
    """The judge that was asked for; None for none.

    Raises:
        ImportError, ValueError: the judge cannot be used.
    """
    if arguments.judge == "openai":
        from trl_ext.evaluation import OpenAIJudge

        return OpenAIJudge(arguments.judge_model, base_url=arguments.judge_base_url)
    return GroundTruthJudge() if arguments.judge == "ground_truth" else None


def judge_against(
    judge: PairwiseJudge,
    prompts: Sequence[dict[str, Any]],
    own: Sequence[dict[str, Any]],
    base: Sequence[Generation],
    folder: Path,
) -> tuple[WinRate, list[str | None]]:
    """The win rate of sampled rows against the base's responses; a judge's verdicts are kept in the folder.

    Beside it the outcome of each row: `candidate`, `base` or `tie`, None where the judge failed.
    """
    result = judge_pairs(
        judge,
        prompts,
        [row["response_text"] for row in own],
        [generation.text for generation in base],
        candidate_finished=[row["finished"] for row in own],
        base_finished=[generation.finished for generation in base],
        cache=folder / JUDGE_CACHE,
    )
    outcomes = [None if one.error else one.first if one.first == one.second else "tie" for one in result.outcomes]
    return win_rate(result.outcomes), outcomes


def response_ids(row: dict[str, Any], tokenizer) -> list[int]:
    """A sampled row's text as token ids, with the end token where it ended, for diagnostics."""
    ids = tokenizer(row["response_text"], add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if row["finished"] and tokenizer.eos_token_id is not None else ids


def open_folder(
    folder: Path, resolved: str, *, overwrite: bool, files: Sequence[str], responses: str = "generations.jsonl"
) -> None:
    """Make the folder, or find in it a run that was begun with the same settings and is not finished.

    Args:
        folder: of the run; its config.yaml is written.
        resolved: the settings, as YAML.
        overwrite: whether to remove what an earlier run left.
        files: what the recipe writes.
        responses: which files in it grow while it samples, as a pattern.

    Raises:
        FileExistsError: it holds another run, or a finished one, or a run of training.
        ValueError: its config.yaml is damaged.
    """
    way_out = "choose another --output_dir, or give --overwrite_output_dir"
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--output_dir {folder} is a file: name a folder")
    if overwrite:
        for path in [*(folder / name for name in files), *folder.glob(responses)]:
            path.unlink(missing_ok=True)
    if (folder / "metrics.jsonl").exists():
        raise FileExistsError(f"{folder} holds a training run: {way_out}")
    config = folder / "config.yaml"
    if (folder / "results.json").exists():
        settings = _change(config, resolved) or "with the same settings" if config.exists() else "with no config.yaml"
        raise FileExistsError(f"{folder} holds a finished evaluation {settings}: {way_out}")
    begun = [path for path in folder.glob(responses) if path.stat().st_size]
    if begun:
        if not config.exists():
            raise FileExistsError(f"{folder} holds responses and no config.yaml that says of what: {way_out}")
        changed = _change(config, resolved)
        if changed:
            raise FileExistsError(f"{folder} holds an unfinished evaluation {changed}: {way_out}")
        count = sum(path.read_bytes().count(b"\n") for path in begun)
        print(f"going on in {folder}, which holds {count} responses")
    write_text(folder / "config.yaml", resolved)


def _change(config: Path, resolved: str) -> str | None:
    """The first setting that differs from those of an earlier run, in words; None where all are alike.

    Raises:
        ValueError: its config.yaml is damaged.
    """
    earlier, now = read_yaml(config), yaml.safe_load(resolved)
    if not isinstance(earlier, dict):
        raise ValueError(
            f"{config} does not hold the settings of an evaluation: choose another --output_dir, or give "
            "--overwrite_output_dir"
        )
    for name in sorted({*earlier, *now} - {*_MAY_DIFFER}):
        if earlier.get(name) != now.get(name):
            return f"whose {name} was {earlier.get(name)!r}, now {now.get(name)!r}"
    return None


def load_engine(arguments, model: ModelArguments, settings: SamplingSettings, accelerator):
    """What samples, and its tokenizer.

    Args:
        arguments: the recipe's, with `use_vllm`, `vllm_gpu_memory_utilization` and `seed`.
        model: what to load.
        settings: how to sample.
        accelerator: of the run.

    Raises:
        ValueError: the model cannot be loaded, a new adapter is asked for, or vLLM is to run in several processes or
            on an adapter.
        ImportError: vLLM is asked for and not installed.
    """
    path = resolve_model_path(model.model_name_or_path)
    if model.use_peft:
        raise ValueError("--use_peft is for training: give the folder of a trained adapter as --model_name_or_path")
    if arguments.use_vllm and accelerator.num_processes > 1:
        raise ValueError("vLLM is for one process here: launch with --num_processes 1")
    if arguments.use_vllm and (Path(path) / "adapter_config.json").exists():
        raise ValueError(f"vLLM loads no adapter by its folder: merge {path} into its base, or leave out --use_vllm")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=model.model_revision)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        if arguments.use_vllm:
            memory = arguments.vllm_gpu_memory_utilization
            options = {"revision": model.model_revision, "dtype": model.dtype or "auto", "seed": arguments.seed}
            return VLLMEngine(path, tokenizer, settings, gpu_memory_utilization=memory, **options), tokenizer
        dtype = "float32" if accelerator.device.type == "cpu" else model.dtype or "auto"
        loaded = AutoModelForCausalLM.from_pretrained(
            path,
            revision=model.model_revision,
            dtype=dtype,
            attn_implementation=model.attn_implementation,
            quantization_config=get_quantization_config(model),
        )
    except OSError as error:
        raise ValueError(
            f"the model {model.model_name_or_path!r} could not be loaded; without a network, give a copy's folder "
            f"with --model_name_or_path. ({error})"
        ) from error
    return TransformersEngine(loaded.to(accelerator.device).eval(), tokenizer, settings), tokenizer
