"""Whether a run that is resumed is the run that was begun: its settings against those of its folder's config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trl_ext.trainers.defaults import warn_once_per_run

# What may change between the parts of a run, whose course it does not change, by the beginning of the name: what is
# written and evaluated beside, how an optimizer batch is dealt out, the device, and what faults do.
_MAY_CHANGE = ("output_dir", "run_name", "report_to", "push_to_hub", "hub_", "disable_tqdm", "project", "trackio_")
_MAY_CHANGE += ("save_", "log", "eval_", "num_eval_prompts", "num_generation_prompts", "generation_eval_", "max_hours")
_MAY_CHANGE += (
    "per_device_",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "auto_find_batch_size",
    "packing",
)
_MAY_CHANGE += ("bf16", "fp16", "tf32", "dtype", "deepspeed", "fsdp", "torch_compile", "ddp_", "dataloader_")
_MAY_CHANGE += ("use_vllm", "vllm_", "reward_timeout", "reward_errors", "max_skipped_updates")
# What says how far the run goes, which a learning rate's schedule depends on.
_LENGTHS = ("max_steps", "num_train_epochs", "n_steps", "n_grpo_steps")


def check_same_settings(config: Path, resolved: str) -> None:
    """Refuse to go on with other settings than a run was begun with.

    Args:
        config: its config.yaml; where there is none, nothing is known and nothing refused.
        resolved: the settings now, as config.yaml has them.

    Raises:
        ValueError: settings differ that decide what is trained; the message names the first and both values.
    """
    if not config.is_file():
        return
    try:
        begun = yaml.safe_load(config.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        begun = None
    if not isinstance(begun, dict):
        return
    now: dict[str, Any] = yaml.safe_load(resolved)
    names = [name for name in sorted({*begun, *now}) if not name.startswith(_MAY_CHANGE)]
    changed = [name for name in names if begun.get(name) != now.get(name)]
    for name in (name for name in changed if name in _LENGTHS):
        warn_once_per_run(
            f"going on with {name} {now.get(name)}, and the run was begun with {begun.get(name)}: a learning rate "
            "that falls towards the end falls by the new one"
        )
    changed = [name for name in changed if name not in _LENGTHS]
    if changed:
        name = changed[0]
        more = f" (and {', '.join(changed[1:4])})" if changed[1:] else ""
        raise ValueError(
            f"{config.parent} holds a run that was begun with {name} {begun.get(name)!r}, and now it is "
            f"{now.get(name)!r}{more}: resume it with its own settings (--config {config}), or begin another run in "
            "another --output_dir"
        )
