"""What the benchmarks on a pretrained model share: their flags, their folder, and the recipes that they run."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.toy_seeds import run_recipe
from trl_ext.files import write_json

DATA = Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", "data"))
# For a few hundred pairs: every parameter is trained, the last weights are kept, and a run loses at most 20 steps.
TRAINING = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_train_epochs": 1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 5,
    "logging_steps": 5,
    "eval_strategy": "no",
    "save_steps": 20,
    "save_total_limit": 1,
}


def flags_of(parser: argparse.ArgumentParser, source: str) -> argparse.Namespace:
    """The flags, with `source`, the data's file, `folder`, made for these flags, and `recipe`, the unknown ones.

    A folder holds one set of flags, as its results are kept and read again.
    """
    parser.add_argument("--model", default="smollm2", help="of the recipes' --model_name_or_path")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the training")
    given, recipe = parser.parse_known_args()
    path = given.data / source
    if not path.is_file():
        parser.error(f"{path}: no such file; give the folder that holds {source} as --data or TRL_EXT_BENCHMARK_DATA")
    settings = {name: str(value) for name, value in vars(given).items() if name != "data"} | {"recipe": recipe}
    kept = given.folder / "settings.json"
    if kept.is_file() and json.loads(kept.read_text()) != settings:
        parser.error(f"{given.folder} holds a run with other flags: give another --folder")
    write_json(kept, settings)
    return argparse.Namespace(**vars(given), source=path, recipe=recipe)


def train(recipe: str, given: argparse.Namespace, dataset: Path, settings: dict[str, Any]) -> Path:
    """The folder of a recipe's run on these pairs, which goes on or begins if it has not ended."""
    folder = given.folder / recipe
    settings = {"model_name_or_path": given.model, "dataset_name": dataset, **TRAINING, **settings}
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    run_recipe(recipe, folder, given.seed, [*flags, *given.recipe], show=True)
    return folder
