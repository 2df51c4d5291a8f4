"""Model cards: what trained a model, on what, and what came of it, as the README.md of its folder."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from peft import PeftModel

from trl_ext.evaluation.reporting.markdown import escape
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.reporting.summary import policy_row, reward_model_row
from trl_ext.evaluation.reporting.tables import Cell, estimate, policy_table, reward_model_table
from trl_ext.evaluation.reporting.values import number, pick
from trl_ext.files import write_text
from trl_ext.registry import policy_algorithms
from trl_ext.toy import MODEL_DIR

CARD_NAME = "README.md"
ARXIV_ID = re.compile(r"\d{4}\.\d{4,5}")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# How results.json counts what was trained on, and in which unit.
COUNTS = {"train_pairs": "pairs", "train_prompts": "prompts", "train_responses": "responses"}
COUNTS |= {"train_problems": "problems"}
# What a card says in a line of its own.
NOT_FIGURES = ("run", "method", "model", "data", "seed", "weights", "accuracy, sampled", "accuracy, greedy")


class WritesModelCard:
    """Mixed in before a trainer of TRL's: writes this library's card where TRL and PEFT would write theirs.

    The card names the method and its paper, the base model, the data and, once the folder holds a `results.json`, the
    figures with their intervals. Of paths, only the last part is told.
    """

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the card into `output_dir`, on the main process.

        Args:
            model_name: the card's title; by default the folder's name.
            dataset_name: what was trained on, where results.json does not say it.
            tags: for the hub, beside the trainer's own.
        """
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or []
            folder = Path(self.args.output_dir)
            card = _card(self, model_name, dataset_name, tags)
            write_text(folder / CARD_NAME, card)
            # A reward model's chosen checkpoint is the same model once more.
            if (folder / "best" / "selection.json").is_file():
                write_text(folder / "best" / CARD_NAME, card)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        card = Path(output_dir or self.args.output_dir) / CARD_NAME
        # PEFT's has the path of the base model in it.
        if card.is_file():
            write_text(card, _card(self, None, None, []))


def method_of(trainer) -> dict[str, str]:
    """What a trainer trains by: the method's `name`, and its paper's `id`, `title` and `citation`, or empty texts."""
    paper: dict[str, str] = dict(trainer._paper)
    args, objective = trainer.args, getattr(trainer, "objective", None)
    if not paper and hasattr(args, "loss") and objective is not None:
        paper = dict(_paper_of_loss(args.loss))
    elif not paper and getattr(args, "algorithm", None) in policy_algorithms:
        source = policy_algorithms[args.algorithm].paper
        paper = {"id": source} if ARXIV_ID.fullmatch(source) else {"title": source}
    return {"name": trainer._name, **{key: paper.get(key) or "" for key in ("id", "title", "citation")}}


def _paper_of_loss(name: str) -> dict[str, str]:
    """The paper of the trainer that is named after a loss; empty for a loss without one."""
    from trl_ext.trainers import preference_methods

    trainers = [value for value in vars(preference_methods).values() if hasattr(value, "_paper")]
    return next((own._paper for own in trainers if own._config_class._method == name), {})


def _card(trainer, model_name: str | None, dataset_name: str | None, tags: list[str]) -> str:
    """The whole card: what the hub reads, and the text below."""
    folder = Path(trainer.args.output_dir)
    results = _results(folder)
    run = pick(results, "run") or {}
    name = model_name or (trainer.args.hub_model_id or folder.absolute().name).split("/")[-1]
    base = run.get("model") or trainer.model.config._name_or_path
    base = "toy" if base == str(MODEL_DIR) else base
    data = run.get("dataset") or dataset_name
    is_adapter = isinstance(trainer.model, PeftModel)
    head = ModelCardData(
        model_name=name,
        base_model=base if _is_hub_name(base, folder) else None,
        datasets=data if data and _is_hub_name(data, folder) else None,
        library_name="peft" if is_adapter else "transformers",
        tags=sorted({"generated_from_trainer", *trainer._tag_names, *tags}),
    )
    kind = "An adapter of" if is_adapter else "A fine-tuned version of"
    parts = [
        f"---\n{head.to_yaml()}\n---",
        f"# {escape(name)}",
        f"{kind} {_shown(base, 'models', folder)}.",
        _method(trainer, run),
        _data(trainer, run, data),
        _figures(results),
        _how_to_repeat(folder, run),
        _versions(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _results(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_hub_name(name: str, folder: Path) -> bool:
    """Whether a name is the hub's and no path, also of what is gone by now, from a run in `folder`."""
    if name == "toy" or not HUB_NAME.fullmatch(name) or Path(name).exists():
        return False
    first, slash, _ = name.partition("/")
    run = folder.absolute()
    return not slash or (first != "runs" and Path(first).absolute() not in (run, *run.parents))


def _shown(name: str, kind: str, folder: Path) -> str:
    """A model's or a data set's name, with a link where it is the hub's, and of a path the last part."""
    if _is_hub_name(name, folder):
        return f"[{name}](https://huggingface.co/{'datasets/' if kind == 'datasets' else ''}{name})"
    if name == "toy":
        return "`toy`, which is embedded in trl_ext"
    return f"`{Path(name).name}`"


def _method(trainer, run: dict[str, Any]) -> str:
    method = method_of(trainer)
    objective = run.get("objective") or (trainer.objective.describe() if hasattr(trainer, "objective") else "")
    settings = objective.replace("`", "'")
    lines = ["## Method", "", escape(method["name"]) + (f": `{settings}`." if settings else ".")]
    title = escape(method["title"]) or f"arXiv {method['id']}"
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
    what = [_shown(data, "datasets", Path(trainer.args.output_dir))] if data else []
    return "## Data\n\n" + ", ".join(what + counts) + f"; {trainer.state.global_step} updates."


def _figures(results: dict[str, Any]) -> str:
    """The main figures, one to a line, with the intervals that they have."""
    run = Run("", Path(), results)
    table = reward_model_table([reward_model_row(run)]) if run.trains_reward_model else policy_table([policy_row(run)])
    pairs = dict(zip(table.columns, table.rows[0], strict=True)) if table.rows else {}
    if "n without ties" in pairs and not pairs["n without ties"].value:
        pairs.pop("win rate, ties dropped")
    if "gain in accuracy" in pairs:
        pairs["gain in accuracy, sampled"] = pairs.pop("gain in accuracy")
    figures = [pair for pair in pairs.items() if pair[0] not in NOT_FIGURES] + _reasoning(results)
    if not figures:
        return ""
    lines = [f"| {escape(name)} | {escape(cell.text)} |" for name, cell in figures]
    note = "On held-out data; brackets hold 95% intervals."
    if not run.trains_reward_model:
        note = "On held-out data, against the base model where a figure compares; brackets hold 95% intervals."
    return "\n".join(["## Results", "", note, "", "| figure | value |", "| :-- | --: |", *lines])


def _reasoning(results: dict[str, Any]) -> list[tuple[str, Cell]]:
    """Accuracy on problems with known answers, by decoding, before and after training."""
    found = []
    for when in ("before", "after"):
        for decoding, summary in (pick(results, "reasoning", when) or {}).items():
            if number(summary, "accuracy", "mean") is not None:
                found.append((f"accuracy {when}, {decoding}", estimate(summary["accuracy"], name="mean")))
    return found


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


def _versions(run: dict[str, Any]) -> str:
    names = ("trl_ext", "trl", "transformers", "torch", "peft")
    found = run.get("versions") or {name: version(name) for name in names}
    return "Trained with " + ", ".join(f"{name} {release}" for name, release in found.items()) + "."
