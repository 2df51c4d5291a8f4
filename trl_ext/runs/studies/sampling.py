"""A run that only samples from one model: its folder, in which it can resume, its engine and its judge."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.hf_argparser import HfArg
from trl import get_quantization_config

from trl_ext.files import write_json, write_text
from trl_ext.models import resolve_model_path
from trl_ext.rollouts import SamplingSettings, TransformersEngine, VLLMEngine
from trl_ext.rollouts.generation import warn_of_ignored_settings
from trl_ext.runs.arguments import ModelArguments, one_line_errors, parse_arguments
from trl_ext.runs.configs import toy_config
from trl_ext.runs.finish import describe_machine, say_written
from trl_ext.runs.folder import changed_settings, config_text, settings_digest
from trl_ext.trainers.defaults import runs_on_cpu

# Settings that may change when a run is resumed.
_MAY_CHANGE = ("output_dir", "use_vllm", "vllm_gpu_memory_utilization")


@dataclass
class EngineArguments:
    """The sampling engine, and the output folder."""

    output_dir: str | None = HfArg(default=None, help="Where results go. Default: in runs/.")
    use_vllm: bool = HfArg(default=False, help="Sample with vLLM, which the extra vllm installs.")
    vllm_gpu_memory_utilization: float = HfArg(default=0.9, help="Share of the GPU's memory for vLLM.")
    use_cpu: bool = HfArg(default=False, help="Use no accelerator even if there is one.")
    save_every: int = HfArg(default=512, help="Responses between saves, from which a run goes on.")
    seed: int = HfArg(default=42, help="Of the sampling.")

    def place(self, name: str) -> None:
        """Set the default `output_dir`."""
        if self.output_dir is None:
            self.output_dir = f"runs/{name}-{Path(self.dataset_name).absolute().stem}"


class SamplingRun:
    """A recipe's sampling run, from its arguments to its results.

    `config` is the file in configs/toy that is used without arguments, `files` are those that the recipe writes,
    config.yaml and results.json among them, and `responses` is the one that grows during sampling.
    """

    def __init__(self, argument_class: type, *, config: str, description: str, files: Sequence[str], responses: str):
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
        """Create the folder, or resume an unfinished run with the same settings in it."""
        if self.is_main_process:
            self._open(self.folder, self.folder / "config.yaml")
        self.accelerator.wait_for_everyone()

    def _open(self, folder: Path, config: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(f"--output_dir {folder} is a file: name a folder")
        if self.arguments.overwrite_output_dir:
            for name in self.files:
                (folder / name).unlink(missing_ok=True)
        responses = folder / self.responses
        begun = responses.read_bytes() if responses.exists() else b""
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
            count = begun.count(b"\n")
            print(f"going on in {folder}, which holds {count} responses")
        write_text(config, self.resolved)

    def load_engine(self, settings: SamplingSettings):
        """The sampling engine and its tokenizer."""
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
            "total_seconds": round(time.time() - self.started, 1),
            **describe_machine(self.accelerator),
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
