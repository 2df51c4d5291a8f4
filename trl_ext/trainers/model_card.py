"""Model cards: the README.md of a model's folder, with its training method, data and results."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from peft import PeftModel

from trl_ext.files import markdown_line, write_text
from trl_ext.registry import policy_algorithms, preference_losses
from trl_ext.toy import MODEL_DIR

CARD_NAME = "README.md"
ARXIV_ID = re.compile(r"\d{4}\.\d{4,5}")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# Models and data that have a name of this library's, and how cards describe them.
OURS = {name: f"`{name}`, which is embedded in trl_ext" for name in ("toy", "instructions", "word_problems")}
OURS["smollm2"] = (
    "[SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), quantized to 4 bits"
)
# The entries of results.json that count the training data, with their units.
COUNTS = {"train_pairs": "pairs", "train_prompts": "prompts", "train_responses": "responses"}
COUNTS |= {"train_problems": "problems"}


class WritesModelCard:
    """Mixin for a TRL trainer that writes this library's card where TRL and PEFT would write theirs.

    The card names the method and its paper, the base model and the data. It shows only the last part of a path.

    Attributes:
        card_results: Markdown with the results for the card; empty until the run has some.
    """

    card_results = ""

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the card into `output_dir`, on the main process.

        Args:
            model_name: the card's title; the folder's name by default.
            dataset_name: the training data, where results.json does not name it.
            tags: for the hub, in addition to the trainer's own.
        """
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or []
            folder = Path(self.args.output_dir)
            card = _card(self, model_name, dataset_name, tags)
            write_text(folder / CARD_NAME, card)
            # The selected checkpoint of a reward model is a copy of the model.
            if (folder / "best" / "selection.json").is_file():
                write_text(folder / "best" / CARD_NAME, card)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        card = Path(output_dir or self.args.output_dir) / CARD_NAME
        # PEFT's card contains the path of the base model.
        if card.is_file():
            write_text(card, _card(self, None, None, []))


def method_of(trainer) -> dict[str, str]:
    """The training method's `name`, and its paper's `id`, `title` and `citation`, which may be empty."""
    paper: dict[str, str] = dict(trainer._paper)
    args = trainer.args
    if not paper and getattr(args, "loss", None) in preference_losses:
        paper = preference_losses[args.loss].citation
    elif not paper and getattr(args, "algorithm", None) in policy_algorithms:
        source = policy_algorithms[args.algorithm].paper
        paper = {"id": source} if ARXIV_ID.fullmatch(source) else {"title": source}
    return {"name": trainer._name, **{key: paper.get(key) or "" for key in ("id", "title", "citation")}}


def _card(trainer, model_name: str | None, dataset_name: str | None, tags: list[str]) -> str:
    """The whole card: metadata for the hub, and the text below."""
    folder = Path(trainer.args.output_dir)
    run = _run(folder)
    name = model_name or (trainer.args.hub_model_id or folder.absolute().name).split("/")[-1]
    base = run.get("model") or trainer.model.config._name_or_path
    base = "toy" if base == str(MODEL_DIR) else base
    data = run.get("dataset") or dataset_name
    is_adapter = isinstance(trainer.model, PeftModel)
    head = ModelCardData(
        model_name=name,
        base_model=base if _is_hub_name(base) else None,
        datasets=data if data and _is_hub_name(data) else None,
        library_name="peft" if is_adapter else "transformers",
        tags=sorted({"generated_from_trainer", *trainer._tag_names, *tags}),
    )
    kind = "An adapter of" if is_adapter else "A fine-tuned version of"
    parts = [
        f"---\n{head.to_yaml()}\n---",
        f"# {markdown_line(name)}",
        f"{kind} {_shown(base, 'models')}.",
        _method(trainer, run),
        _data(trainer, run, data),
        trainer.card_results,
        _how_to_repeat(folder, run),
        _versions(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _run(folder: Path) -> dict[str, Any]:
    """The entry `run` of `results.json`; empty if there is none yet."""
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    # A folder may hold another program's file of this name.
    run = results.get("run") if isinstance(results, dict) else None
    return run if isinstance(run, dict) else {}


def _is_hub_name(name: str) -> bool:
    """Whether a name is on the hub rather than a path."""
    return name not in OURS and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _shown(name: str, kind: str) -> str:
    """The name of a model or dataset, linked if it is on the hub; for a path, its last part."""
    if _is_hub_name(name):
        return f"[{name}](https://huggingface.co/{'datasets/' if kind == 'datasets' else ''}{name})"
    return OURS.get(name) or f"`{Path(name).name}`"


def _method(trainer, run: dict[str, Any]) -> str:
    method = method_of(trainer)
    objective = run.get("objective") or (trainer.objective.describe() if hasattr(trainer, "objective") else "")
    settings = objective.replace("`", "'")
    lines = ["## Method", "", markdown_line(method["name"]) + (f": `{settings}`." if settings else ".")]
    title = markdown_line(method["title"]) or f"arXiv {method['id']}"
    if method["id"]:
        lines += ["", f"Paper: [{title}](https://arxiv.org/abs/{method['id']})."]
    elif method["title"]:
        lines += ["", f"Source: {title}."]
    if method["citation"]:
        lines += ["", f"```bibtex\n{method['citation']}\n```"]
    return "\n".join(lines)


def _data(trainer, run: dict[str, Any], data: str | None) -> str:
    counts = [f"{run[key]} {unit}" for key, unit in COUNTS.items() if run.get(key) is not None]
    if not counts and hasattr(trainer.train_dataset, "__len__"):
        counts = [f"{len(trainer.train_dataset)} rows"]
    what = [_shown(data, "datasets")] if data else []
    return "## Data\n\n" + ", ".join(what + counts) + f"; {trainer.state.global_step} updates."


def _how_to_repeat(folder: Path, run: dict[str, Any]) -> str:
    recipe = run.get("recipe")
    if not recipe or not (folder / "config.yaml").is_file():
        return ""
    command = f"trl-ext train {recipe} --config config.yaml --output_dir again"
    return (
        "## Training it again\n\n`config.yaml` in this folder holds every argument. Files that it names, of data, "
        "reward models or functions, are where they were when this was trained, as seen from the folder that it was "
        f"started in: start it there.\n\n```bash\n{command}\n```"
    )


def _versions() -> str:
    names = ("trl_ext", "trl", "transformers", "torch", "peft")
    return "Trained with " + ", ".join(f"{name} {version(name)}" for name in names) + "."
