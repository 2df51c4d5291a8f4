"""Model cards: the README.md of a model's folder, with its training method, data and results."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment
from peft import PeftModel

from trl_ext.algorithms import algorithms
from trl_ext.files import markdown_line, read_json, write_json, write_text
from trl_ext.models.loading import portable_name
from trl_ext.registry import preference_losses

CARD_NAME = "README.md"
ARXIV_ID = re.compile(r"\d{4}\.\d{4,5}")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# The hub's model behind an embedded one, and the embedded models' licence.
HUB_BASE = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
LICENCES = {"toy": "apache-2.0", "smollm2": "apache-2.0"}
# Embedded models and data, and how cards describe them.
OURS = {name: f"`{name}`, which is embedded in trl_ext" for name in ("toy", "instructions", "word_problems")}
OURS["smollm2"] = f"[SmolLM2-135M-Instruct](https://huggingface.co/{HUB_BASE['smollm2']}), quantized to 4 bits"


class WritesModelCard:
    """Mixin for a TRL trainer that writes this library's card where TRL and PEFT would write theirs.

    Attributes:
        card_results: Markdown with the results for the card; empty until the run has some.
    """

    card_results = ""

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the card into `output_dir`, on the main process, as TRL's method of this name does."""
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or []
            write_text(Path(self.args.output_dir) / CARD_NAME, _card(self, model_name, dataset_name, tags))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        for path in folder.rglob("adapter_config.json"):
            config = read_json(path)
            config["base_model_name_or_path"] = portable_name(config["base_model_name_or_path"] or "") or None
            write_json(path, config)
        card = folder / CARD_NAME
        # PEFT's card contains the path of the base model.
        if card.is_file():
            write_text(card, _card(self, None, None, []))


def _card(trainer, model_name: str | None, dataset_name: str | None, tags: list[str]) -> str:
    """The whole card: `model_card.md` with the trainer's and the run's values."""
    args, folder, is_adapter = trainer.args, Path(trainer.args.output_dir), isinstance(trainer.model, PeftModel)
    run = _run(folder)
    name = model_name or (args.hub_model_id or folder.absolute().name).split("/")[-1]
    base = portable_name(run.get("model") or trainer.model.config._name_or_path)
    dataset = run.get("dataset") or dataset_name
    metadata = ModelCardData(
        model_name=name,
        license=LICENCES.get(base),
        base_model=HUB_BASE.get(base) or (base if _is_hub_name(base) else None),
        datasets=dataset if dataset and _is_hub_name(dataset) else None,
        library_name="peft" if is_adapter else "transformers",
        tags=sorted({"generated_from_trainer", *trainer._tag_names, *tags}),
    )
    # Such as train_pairs.
    counts = {key.removeprefix("train_"): run[key] for key in run if key.startswith("train_")}
    counts = [f"{count} {unit}" for unit, count in counts.items() if isinstance(count, int)]
    if not counts and hasattr(trainer.train_dataset, "__len__"):
        counts = [f"{len(trainer.train_dataset)} rows"]
    prompt: Any = "What is the capital of France?"
    if getattr(getattr(trainer, "processing_class", None), "chat_template", None):
        prompt = [{"role": "user", "content": prompt}]
    objective = getattr(trainer, "objective", None) or getattr(trainer, "algorithm", None)
    settings = run.get("objective") or (objective.describe() if objective else "")
    # The command to train again runs where training was started; of a folder elsewhere, only the last part is told.
    here, there = Path.cwd().resolve(), folder.resolve()
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["markdown_line"] = markdown_line
    template = environment.from_string(Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))
    return template.render(
        metadata=metadata.to_yaml(),
        name=name,
        is_adapter=is_adapter,
        base=_shown(base),
        model=args.hub_model_id or ".",
        is_reward_model="reward-trainer" in trainer._tag_names,
        # transformers finds only bases that are on the hub.
        needs_loading=is_adapter and not _is_hub_name(base),
        prompt=json.dumps(prompt),
        method=trainer._name,
        settings=settings.replace("`", "'"),
        paper=paper_of(trainer),
        data=[*([_shown(dataset, "datasets/")] if dataset else []), *counts],
        updates=trainer.state.global_step,
        results=trainer.card_results,
        recipe=run.get("recipe") if (folder / "config.yaml").is_file() else None,
        folder=there.relative_to(here).as_posix() if there.is_relative_to(here) else there.name,
        libraries=[f"{name} {version(name)}" for name in ("trl_ext", "trl", "transformers", "torch", "peft")],
    )


def paper_of(trainer) -> dict[str, str]:
    """The paper of the training method, by its `id` on arXiv and its `title`; a key may be missing."""
    if trainer._paper:
        return trainer._paper
    for field, table in (("loss", preference_losses), ("algorithm", algorithms)):
        name = getattr(trainer.args, field, None)
        if name in table:
            source = table[name].paper
            return {"id" if ARXIV_ID.fullmatch(source) else "title": source}
    return {}


def _run(folder: Path) -> dict[str, Any]:
    """The entry `run` of `results.json`; empty if there is none yet."""
    path = folder / "results.json"
    return read_json(path).get("run", {}) if path.is_file() else {}


def _is_hub_name(name: str) -> bool:
    """Whether a name is on the hub rather than a path."""
    return name not in OURS and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _shown(name: str, kind: str = "") -> str:
    """The name of a model or dataset, linked if it is on the hub; for a path, its last part."""
    if _is_hub_name(name):
        return f"[{name}](https://huggingface.co/{kind}{name})"
    return OURS.get(name) or f"`{Path(name).name}`"
