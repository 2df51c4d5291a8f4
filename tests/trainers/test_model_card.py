"""The card in a model's folder: method, paper, data and figures are the run's own, and nobody's paths are in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.support import REPOSITORY, recipes
from tests.support.tiny import save_tiny_model
from tests.support.trl_private import describe_as
from trl_ext import AOTTrainer
from trl_ext.evaluation.reporting.tables import results_section
from trl_ext.losses import PreferenceObjective  # noqa: F401  the losses register before a test copies their table
from trl_ext.trainers.model_card import WritesModelCard

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


def stand_in(folder: Path, *, base: str = "org/base", **args) -> WritesModelCard:
    """A trainer as far as a card reads it, of AOT on three rows after seven updates."""
    trainer = WritesModelCard()
    trainer.args = SimpleNamespace(output_dir=str(folder), hub_model_id=None, loss="aot", **args)
    trainer.objective = SimpleNamespace(describe=lambda: "aot (beta 0.1)")
    trainer.model = SimpleNamespace(config=SimpleNamespace(_name_or_path=base))
    trainer.state = SimpleNamespace(global_step=7)
    trainer.train_dataset = range(3)
    describe_as(trainer, AOTTrainer, ["trl_ext"])
    trainer.is_world_process_zero = lambda: True
    return trainer


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_notebooks_card_before_there_are_results(tmp_path):
    trainer = stand_in(tmp_path / "my-run")
    trainer.create_model_card(dataset_name="org/pairs", tags="course")
    card = (tmp_path / "my-run" / "README.md").read_text()
    assert head_of(card) == {
        "base_model": "org/base",
        "datasets": "org/pairs",
        "library_name": "transformers",
        "model_name": "my-run",
        "tags": ["course", "generated_from_trainer", "trl_ext"],
    }
    assert "AOT: `aot (beta 0.1)`." in card and "https://arxiv.org/abs/2406.05882" in card
    assert "[org/pairs](https://huggingface.co/datasets/org/pairs), 3 rows; 7 updates." in card
    assert "## Results" not in card and "again" not in card
    assert 'generate = pipeline("text-generation", model=".")' in card


def test_figures_have_their_intervals(tmp_path):
    rate = {"rate": 0.75, "low": 0.6, "high": 0.86, "n": 40}
    run = {"recipe": "aot", "objective": "aot (beta 0.2)", "model": "org/other", "dataset": "toy", "train_pairs": 2000}
    results = {
        "run": run,
        "win_rate": {"half": rate, "agreed": {**rate, "rate": 0.0, "n": 0}},
        "score": {"policy": 0.8, "base": 0.5, "gain": {"mean": 0.3, "low": 0.25, "high": 0.35}},
        "kl": {"mean": 1.234, "low": 1.1, "high": 1.3},
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "config.yaml").write_text("beta: 0.2\n")
    trainer = stand_in(tmp_path)
    trainer.card_results = results_section(results)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    rows = dict(line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| "))
    assert rows["win rate, ties as half"] == r"0.750 \[0.600, 0.860\]"
    assert rows["gain in true score"] == r"0.300 \[0.250, 0.350\]"
    assert rows[r"KL to the base \(nats per response\)"] == r"1.23 \[1.10, 1.30\]"
    assert "win rate, ties dropped" not in rows, "no row counts for it"
    # The recipe knows them better than the trainer.
    assert "org/other" in card and "org/base" not in card and "`toy`, which is embedded in trl_ext, 2000 pairs" in card
    assert f"trl-ext train aot --config {tmp_path.name}/config.yaml --output_dir {tmp_path.name}-again" in card


def test_of_a_path_the_last_part_is_told(tmp_path):
    trainer = stand_in(tmp_path / "run", base="/home/someone/lab/base-7b")
    trainer.create_model_card(dataset_name="/home/someone/lab/secret_pairs")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "`base-7b`" in card and "`secret_pairs`" in card
    assert "someone" not in card and str(tmp_path) not in card
    assert {"base_model", "datasets"} & set(head_of(card)) == set()


def _block(card: str, language: str) -> str:
    return card.split(f"```{language}\n")[1].split("```")[0]


@pytest.mark.slow
@pytest.mark.parametrize("base", ["toy", "hub", "folder"])
def test_the_cards_own_lines_load_the_model_elsewhere_and_train_it_again(base, tmp_path, monkeypatch):
    """An adapter on the embedded model, on a snapshot of a hub model, and on a folder, in a fresh process each."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    folder = {"hub": snapshot, "folder": here / "base-7b"}.get(base)
    here.mkdir()
    if folder is not None:
        save_tiny_model(folder)
    if base == "hub":
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.chdir(here)
    rows = [json.dumps({"prompt": f"say {n}", "chosen": f"{n}", "rejected": "no"}) for n in range(8)]
    Path("mine.jsonl").write_text("\n".join(rows))
    flags = ["--dataset_name=mine.jsonl", "--max_steps=1", "--use_peft=true", "--per_device_train_batch_size=4"]
    flags += ["--use_cpu=true", "--eval_strategy=no", "--disable_tqdm=true", "--output_dir=runs/mine"]
    flags += ["--save_steps=1", f"--hub_token={SECRET}"]
    lora = ["--lora_target_modules", "q_proj", "v_proj"]
    recipes.run(monkeypatch, "aot", *flags, f"--model_name_or_path={folder or base}", *lora)

    cards = [path.read_text() for path in sorted(Path("runs/mine").rglob("README.md"))]
    assert len(cards) >= 2, "PEFT writes one into each checkpoint"
    for text in cards:
        assert "2406.05882" in text and head_of(text)["library_name"] == "peft"
        assert head_of(text).get("base_model") == {"hub": "org/tiny"}.get(base)
        assert not [private for private in (str(tmp_path), str(REPOSITORY), SECRET) if private in text]
    card = Path("runs/mine/README.md").read_text()
    saved = json.loads(Path("runs/mine/adapter_config.json").read_text())["base_model_name_or_path"]
    assert saved == {"toy": "toy", "hub": "org/tiny", "folder": str(folder)}[base]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-m", *_block(card, "bash").replace("trl-ext", "trl_ext").split()]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert json.loads(Path("runs/mine-again/results.json").read_text())["run"]["dataset"] == "mine.jsonl"
    shutil.copytree("runs/mine", elsewhere)
    script = [sys.executable, "-c", _block(card, "python")]
    used = subprocess.run(script, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert used.returncode == 0 and "generated_text" in used.stdout, used.stderr
