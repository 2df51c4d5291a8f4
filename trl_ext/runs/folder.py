"""The folder of a run: files of an earlier run, and the settings in its config.yaml."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from trl_ext.evaluation.comparing.runs import OF_THE_SEED
from trl_ext.files import read_yaml
from trl_ext.processes import is_main_process, warn_once_per_run
from trl_ext.resilience.checkpoints import check_checkpoint, last_checkpoint
from trl_ext.resilience.secrets import without_secrets

# Files that a training run writes into its folder, in addition to checkpoints.
RESULT_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "generations.jsonl",
    "scores.jsonl",
    "results.json",
    "report.png",
)


def open_run_folder(output_dir: str, *, overwrite: bool, resume_from_checkpoint: str | None) -> str | None:
    """Check that a run may write into its folder; return the checkpoint to resume from, if any."""
    folder = Path(output_dir)
    if overwrite and resume_from_checkpoint:
        raise ValueError("give --overwrite_output_dir or --resume_from_checkpoint, not both")
    if resume_from_checkpoint and resume_from_checkpoint.lower() != "false":
        return _checkpoint_to_resume(folder, resume_from_checkpoint)
    earlier = _earlier_run(folder)
    if earlier and not overwrite:
        resume = "" if last_checkpoint(folder) is None else " resume it with --resume_from_checkpoint,"
        raise FileExistsError(
            f"{output_dir} holds an earlier run ({', '.join(earlier[:3])}): choose another --output_dir,{resume} or "
            "begin anew with --overwrite_output_dir"
        )
    return None


def _checkpoint_to_resume(folder: Path, wanted: str) -> str | None:
    """The checkpoint at this path, or the folder's last one for `last` or `true`.

    Returns None, to start over, if a run ended before its first checkpoint: a scheduler repeats the same command.
    """
    if wanted.lower() not in ("last", "true"):
        check_checkpoint(wanted)
        return wanted
    last = last_checkpoint(folder)
    begun = (folder / "config.yaml").is_file() and set(_earlier_run(folder)) <= {"metrics.jsonl"}
    if last is None and not begun:
        raise FileNotFoundError(
            f"{folder} has no checkpoint to resume: leave out --resume_from_checkpoint, or give "
            "--overwrite_output_dir in its place"
        )
    if is_main_process():
        print(f"{folder} has no checkpoint yet: its run begins anew" if last is None else f"resuming from {last}")
    return last and str(last)


def _earlier_run(folder: Path) -> list[str]:
    """Names of the files that a run left. Arguments alone come from a run that failed before its first step."""
    files = [folder / name for name in RESULT_FILES if name != "config.yaml"]
    names = [path.name for path in files if path.exists() and path.stat().st_size]
    return names + [path.name for path in sorted(folder.glob("checkpoint-*"))]


def clear_run_folder(output_dir: str) -> None:
    """Remove the files of an earlier run, so that none of them is mistaken for the new run's."""
    folder = Path(output_dir)
    model_files = ("adapter_*", "model*.safetensors*", "*config.json", "training_args.bin", "reward_model.json")
    for path in [*(folder / name for name in RESULT_FILES), *(p for name in model_files for p in folder.glob(name))]:
        path.unlink(missing_ok=True)
    folders = ("samples", "reference_log_probs")
    for path in [*folder.glob("checkpoint-*"), *(folder / name for name in folders)]:
        shutil.rmtree(path, ignore_errors=True)


# ---- Settings ----

# Arguments of a single call, and arguments derived from others or from the device.
_NOT_OF_THE_RUN = (
    "resume_from_checkpoint",
    "overwrite_output_dir",
    "use_cpu",
    "steps_per_generation",
    # A course name that gradient_accumulation_steps replaces.
    "train_batch_size",
)


def config_text(*instances: Any) -> str:
    """The resolved arguments as YAML that `--config` can read, without secrets and empty values."""
    values: dict[str, Any] = {}
    for instance in instances:
        for field in dataclasses.fields(instance):
            value = getattr(instance, field.name)
            # An empty value is kept if it is not the default.
            told = value is not None or field.default not in (None, dataclasses.MISSING)
            if field.init and told and field.name not in _NOT_OF_THE_RUN:
                values[field.name] = value
    if "report_to" in values:
        values["report_to"] = values["report_to"] or "none"
    plain = without_secrets(json.loads(json.dumps(values, default=_plain)))
    return yaml.safe_dump(plain, sort_keys=True, allow_unicode=True)


def settings_digest(resolved: str) -> str:
    """A short digest of resolved arguments, equal for runs that differ only in their seed."""
    values = {name: value for name, value in yaml.safe_load(resolved).items() if name not in OF_THE_SEED}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Convert values that JSON cannot hold: nested configurations, and types, which become their names."""
    return value.to_dict() if hasattr(value, "to_dict") else str(value)


# Settings that may change when a run is resumed: what is reported, when it is saved and evaluated, how an optimizer
# batch is split (the trainer checks that it stays the same), the device and the engine, and what happens on a fault.
_MAY_CHANGE_NAMES = """
output_dir run_name report_to project trackio_space_id trackio_bucket_id trackio_static_space_id disable_tqdm debug
include_num_input_tokens_seen skip_memory_metrics push_to_hub hub_model_id hub_strategy hub_private_repo
hub_always_push hub_revision logging_steps logging_strategy logging_first_step logging_nan_inf_filter log_level
log_level_replica log_on_each_node log_completions log_unique_prompts log_multimodal log_completions_hub_repo
num_completions_to_print

save_steps save_strategy save_total_limit save_only_model save_on_each_node eval_steps eval_strategy
eval_on_start eval_delay eval_split eval_every eval_packing eval_accumulation_steps eval_do_concat_batches
eval_use_gather_object batch_eval_metrics do_train do_eval do_predict prediction_loss_only bf16_full_eval
fp16_full_eval num_eval_prompts num_kl_prompts num_generation_prompts generation_eval_every
generation_eval_batch_size per_device_eval_batch_size

per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
activation_checkpointing activation_checkpointing_kwargs activation_offloading torch_empty_cache_steps

bf16 fp16 tf32 dtype deepspeed fsdp fsdp_config local_rank packing compile_layers tokens_per_pass fast_rollouts
torch_compile torch_compile_backend torch_compile_mode ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_static_graph ddp_timeout dataset_num_proc dataloader_num_workers
dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
vllm_max_model_length vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
vllm_tensor_parallel_size

reward_timeout reward_errors max_skipped_updates
"""
_MAY_CHANGE = frozenset(_MAY_CHANGE_NAMES.split())
# Settings that determine the run's length, on which the learning-rate schedule depends.
_LENGTHS = ("max_steps", "num_train_epochs", "n_steps", "n_grpo_steps")


def changed_settings(config: Path, resolved: str, may_change: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from an earlier config.yaml: name -> (earlier value, present value).

    `resolved` are the present ones, as `config_text` returns them; names in `may_change`, and those that are no longer
    settings, are not compared.
    """
    earlier, now = read_yaml(config), yaml.safe_load(resolved)
    names = [name for name in sorted(now) if name not in may_change]
    return {name: (earlier.get(name), now.get(name)) for name in names if earlier.get(name) != now.get(name)}


def check_same_settings(config: Path, resolved: str) -> None:
    """Refuse to resume a training run with settings other than those in its config.yaml, if it exists."""
    if not config.is_file():
        return
    # Packing leaves out padding, but SFT's, which is TRL's and has strategies, changes what a batch holds.
    may_change = _MAY_CHANGE - {"packing"} if "packing_strategy:" in resolved else _MAY_CHANGE
    changed = changed_settings(config, resolved, may_change)
    for name in [name for name in changed if name in _LENGTHS]:
        begun, now = changed.pop(name)
        warn_once_per_run(
            f"resuming with {name} {now}, and the run was begun with {begun}: the learning-rate schedule follows the "
            "new one"
        )
    if changed:
        (name, (begun, now)), *others = changed.items()
        more = f" (and {', '.join(other for other, _ in others[:3])})" if others else ""
        raise ValueError(
            f"{config.parent} holds a run that was begun with {name} {begun!r}, and now it is {now!r}{more}: resume "
            f"it with its own settings (--config {config}), or begin another run in another --output_dir"
        )
