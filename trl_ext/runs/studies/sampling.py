"""A run that only samples from one model: its folder, in which it can resume, its engine and its judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import get_quantization_config

from trl_ext import load_benchmark
from trl_ext.data.benchmark import EMBEDDED, known_score
from trl_ext.evaluation import GroundTruthJudge, PairwiseJudge, WinRate, judge_pairs, win_rate
from trl_ext.files import write_json, write_text
from trl_ext.models import resolve_model_path
from trl_ext.rollouts import Generation, SamplingSettings, TransformersEngine, VLLMEngine
from trl_ext.rollouts.generation import warn_of_ignored_settings
from trl_ext.runs.arguments import ModelArguments, one_line_errors, parse_arguments, toy_config
from trl_ext.runs.folder import changed_settings, config_text, settings_digest
from trl_ext.runs.online import RewardSources
from trl_ext.runs.results import say_written
from trl_ext.trainers.defaults import check_at_least, runs_on_cpu

# Settings that may change when a run is resumed.
_MAY_CHANGE = ("output_dir", "use_vllm", "vllm_gpu_memory_utilization")

JUDGE_CACHE = "judge_cache.sqlite"
JUDGES = ("ground_truth", "openai", "none")


@dataclass
class EngineArguments:
    """The sampling engine, and the output folder."""

    output_dir: str | None = field(default=None, metadata={"help": "Where results go. Default: in runs/."})
    use_vllm: bool = field(default=False, metadata={"help": "Sample with vLLM, which the extra vllm installs."})
    vllm_gpu_memory_utilization: float = field(default=0.9, metadata={"help": "Share of the GPU's memory for vLLM."})
    use_cpu: bool = field(default=False, metadata={"help": "Use no accelerator even if there is one."})
    save_every: int = field(default=512, metadata={"help": "Responses between saves, from which a run goes on."})
    seed: int = field(default=42, metadata={"help": "Of the sampling."})

    def place(self, name: str) -> None:
        """Set the default `output_dir`."""
        if self.output_dir is None:
            self.output_dir = f"runs/{name}-{Path(self.dataset_name).absolute().stem}"


class SamplingRun:
    """A recipe's sampling run, from its arguments to its results.

    Args:
        argument_class: class of the recipe's own arguments.
        config: name of the file in configs/toy that is used without arguments.
        description: text for `--help`.
        files: the files that the recipe writes, including config.yaml and results.json.
        responses: glob pattern of the files that grow during sampling.

    Attributes:
        arguments, model: the parsed arguments.
        folder: the run's folder.
        accelerator: the run's accelerator.

    Raises:
        ValueError, OSError: see `parse_arguments`.
    """

    def __init__(
        self,
        argument_class: type,
        *,
        config: str,
        description: str,
        files: Sequence[str],
        responses: str = "generations.jsonl",
    ):
        self.started = time.time()
        types = (argument_class, ModelArguments)
        self.arguments, self.model = parse_arguments(types, default_config=toy_config(config), description=description)
        self.resolved = config_text(self.arguments, self.model)
        self.files, self.responses = files, responses
        self.folder = Path(self.arguments.output_dir)
        self.accelerator = Accelerator(cpu=runs_on_cpu(self.arguments.use_cpu))

    @property
    def is_main_process(self) -> bool:
        return self.accelerator.is_main_process

    def open(self) -> None:
        """Create the folder, or resume an unfinished run with the same settings in it.

        Raises:
            FileExistsError: the folder holds another run, a finished run or a training run.
            ValueError: its config.yaml is damaged.
        """
        if self.is_main_process:
            self._open()
        self.accelerator.wait_for_everyone()

    def _open(self) -> None:
        folder, config = self.folder, self.folder / "config.yaml"
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(f"--output_dir {folder} is a file: name a folder")
        if self.arguments.overwrite_output_dir:
            for path in [*(folder / name for name in self.files), *folder.glob(self.responses)]:
                path.unlink(missing_ok=True)
        begun = [path for path in folder.glob(self.responses) if path.stat().st_size]
        changed = changed_settings(config, self.resolved, _MAY_CHANGE) if config.exists() else {}
        found = None
        if (folder / "metrics.jsonl").exists():
            found = "a training run"
        elif (folder / "results.json").exists() or changed and begun:
            state = "a finished" if (folder / "results.json").exists() else "an unfinished"
            differences = [f"whose {name} was {earlier!r}, now {now!r}" for name, (earlier, now) in changed.items()]
            found = f"{state} evaluation {(differences or ['with the same settings'])[0]}"
        if found is not None:
            raise FileExistsError(
                f"{folder} holds {found}: choose another --output_dir, or give --overwrite_output_dir"
            )
        if begun:
            count = sum(path.read_bytes().count(b"\n") for path in begun)
            print(f"going on in {folder}, which holds {count} responses")
        write_text(config, self.resolved)

    def load_engine(self, settings: SamplingSettings):
        """The sampling engine and its tokenizer.

        Raises:
            ValueError: the model cannot be loaded, a new adapter is requested, or vLLM is requested with several
                processes or with an adapter.
            ImportError: vLLM is requested and not installed.
        """
        arguments, model = self.arguments, self.model
        path = resolve_model_path(model.model_name_or_path)
        if model.use_peft:
            raise ValueError(
                "--use_peft is for training: give the folder of a trained adapter as --model_name_or_path"
            )
        if arguments.use_vllm and self.accelerator.num_processes > 1:
            raise ValueError("vLLM is for one process here: launch with --num_processes 1")
        if arguments.use_vllm and (Path(path) / "adapter_config.json").exists():
            raise ValueError(
                f"vLLM loads no adapter by its folder: merge {path} into its base, or leave out --use_vllm"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, revision=model.model_revision)
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
            if arguments.use_vllm:
                memory = arguments.vllm_gpu_memory_utilization
                options = {"revision": model.model_revision, "dtype": model.dtype or "auto", "seed": arguments.seed}
                return VLLMEngine(path, tokenizer, settings, gpu_memory_utilization=memory, **options), tokenizer
            dtype = "float32" if self.accelerator.device.type == "cpu" else model.dtype or "auto"
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
        warn_of_ignored_settings(loaded, asdict(settings))
        return TransformersEngine(loaded.to(self.accelerator.device).eval(), tokenizer, settings), tokenizer

    def progress(self, label: str) -> str | None:
        """The label of a progress bar; None in all but the main process."""
        return label if self.is_main_process else None

    def describe(self, objective: str, settings: SamplingSettings | None = None, **own: Any) -> dict[str, Any]:
        """The description of the run for results.json; pass `settings` if all responses share them."""
        sampling = {} if settings is None else {"sampling": asdict(settings)}
        return {
            "objective": objective,
            "model": self.model.model_name_or_path,
            "dataset": self.arguments.dataset_name,
            **own,
            **sampling,
            "engine": "vllm" if self.arguments.use_vllm else "transformers",
            "settings_digest": settings_digest(self.resolved),
            "seed": self.arguments.seed,
            "processes": self.accelerator.num_processes,
            "device": self.accelerator.device.type,
            "total_seconds": round(time.time() - self.started, 1),
            "versions": {name: version(name) for name in ("trl_ext", "trl", "transformers", "torch")},
        }

    def end(self, results: dict[str, Any], table: str) -> None:
        """Write results.json after all other files, and print the table, the duration and the files."""
        # A folder that contains it is a finished run.
        write_json(self.folder / "results.json", results)
        print(f"\n{table}")
        say_written(results["run"], self.folder, self.files)


@contextmanager
def sampling_errors() -> Iterator[None]:
    """Exit with a one-line message on errors that a user can fix, and on Ctrl-C."""
    try:
        with one_line_errors():
            yield
    except KeyboardInterrupt:
        print("\ninterrupted: what was saved is kept, and the same command goes on from there")
        raise SystemExit(130) from None


def name_of_reward(reward: Any) -> str:
    """The name of a reward model or function, for the results."""
    return getattr(reward, "__name__", type(reward).__name__)


def add_true_scores(rows: Sequence[dict[str, Any]], score: Callable[..., float]) -> None:
    """Add to sampled rows their known `score`."""
    for row in rows:
        row["score"] = score(row["prompt_text"], row["response_text"], finished=row["finished"])


# ---- Prompts and judge ----


@dataclass
class SampledArguments(EngineArguments, RewardSources):
    """Prompts, the reward, the judge, and how responses are sampled."""

    dataset_name: str = field(
        default="toy",
        metadata={"help": "toy, instructions, a folder of {split}.jsonl, one .jsonl file, or a hub dataset."},
    )
    prompt_split: str = field(default="test_gen", metadata={"help": "Prompts to respond to."})
    num_prompts: int | None = field(default=None, metadata={"help": "The first so many. Default: all."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Drop bad rows and say how many and why."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier run in output_dir."})
    judge: str | None = field(
        default=None,
        metadata={
            "help": "Who compares responses with the base's, which are greedy: ground_truth (embedded data "
            "only), openai, or none. Default: ground_truth on embedded data, none on everything else."
        },
    )
    judge_model: str = field(default="gpt-5.4", metadata={"help": "For the judge openai; key in OPENAI_API_KEY."})
    judge_base_url: str | None = field(default=None, metadata={"help": "Of a server with OpenAI's API."})
    max_prompt_tokens: int | None = field(default=None, metadata={"help": "Longer prompts lose their beginning."})
    max_new_tokens: int = field(default=256, metadata={"help": "Longest response, in tokens."})
    generation_batch_size: int = field(default=32, metadata={"help": "Prompts per batch of generation."})
    reward_batch_size: int = field(default=32, metadata={"help": "Responses per batch of a reward model."})

    def __post_init__(self):
        counts = ("num_prompts", "save_every", "reward_batch_size", "max_new_tokens", "generation_batch_size")
        check_at_least(self, dict.fromkeys(counts, 1))
        if self.judge is None:
            self.judge = "ground_truth" if self.score_function else "none"
        if self.judge not in JUDGES:
            raise ValueError(f"judge must be one of {', '.join(JUDGES)}, got {self.judge!r}")
        if self.judge == "ground_truth" and self.score_function is None:
            known = " and ".join(EMBEDDED)
            raise ValueError(f"judge ground_truth is for {known}, the benchmarks whose responses have a known score")

    @property
    def score_function(self) -> Callable[..., float] | None:
        """The known score of a response, `f(prompt_text, response, *, finished=True)`; None for none."""
        return known_score(self.dataset_name)


def load_prompts(arguments: SampledArguments) -> list[dict[str, Any]]:
    """The prompts to respond to.

    A single file has only one split, which need not be named; `prompt_split` is set to it.

    Raises:
        FileNotFoundError, ValueError: the data or split does not exist, or has fewer prompts than requested.
    """
    name, split = arguments.dataset_name, arguments.prompt_split
    alone = Path(name).is_file() and split == SampledArguments.prompt_split
    benchmark = load_benchmark(name, splits=None if alone else split, skip_bad_rows=arguments.skip_bad_rows)
    if alone:
        (arguments.prompt_split,) = benchmark
    rows = benchmark[arguments.prompt_split]
    if arguments.num_prompts is not None and arguments.num_prompts > len(rows):
        raise ValueError(f"{arguments.prompt_split} has {len(rows)} prompts: ask for no more with --num_prompts")
    return list(rows)[: arguments.num_prompts]


def load_judge(arguments: SampledArguments) -> PairwiseJudge | None:
    """The requested judge; None for none.

    Raises:
        ImportError, ValueError: the judge cannot be used.
    """
    if arguments.judge == "none":
        return None
    if arguments.judge == "ground_truth":
        return GroundTruthJudge(arguments.score_function)
    from trl_ext.evaluation import OpenAIJudge

    return OpenAIJudge(arguments.judge_model, base_url=arguments.judge_base_url)


def judge_against(
    judge: PairwiseJudge,
    prompts: Sequence[dict[str, Any]],
    own: Sequence[dict[str, Any]],
    base: Sequence[Generation],
    folder: Path,
) -> tuple[WinRate, list[str | None]]:
    """The win rate of sampled rows against the base's responses; a judge's verdicts are kept in the folder.

    Also returns the outcome of each row: `candidate`, `base` or `tie`, or None if the judge failed.
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
    """The token ids of a sampled row's text, with the end token if the response finished, for diagnostics."""
    ids = tokenizer(row["response_text"], add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if row["finished"] and tokenizer.eos_token_id is not None else ids
