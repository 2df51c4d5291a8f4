"""The names and behaviours of TRL and transformers, some private, that the two seams of `PreferenceTrainer` stand on.

When one of these fails after an upgrade, its message says what moved and what in `trl_ext` stands on it.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
import trl
from packaging.version import Version

from tests.support.train_once import build

SEAM_ONE = "trl_ext.trainers.preference.trainer.PreferenceTrainer.get_batch_samples"
SEAM_TWO = "trl_ext.trainers.preference.trainer.PreferenceTrainer._compute_loss"
FUSED_OUTPUT = "trl_ext.trainers.preference.trainer.PreferenceTrainer._scores"


@pytest.fixture(scope="module")
def stock(tiny_model_path, tmp_path_factory) -> trl.DPOTrainer:
    """Stock `trl.DPOTrainer`, whose reference differs from its policy, with WPO's outputs on."""
    spec = {"model": tiny_model_path, "trainer": "trl.DPOTrainer", "reference_seed": 1}
    trainer = build({**spec, "args": {"use_weighting": True}}, str(tmp_path_factory.mktemp("stock")))
    trainer.use_weighting = False
    return trainer


@pytest.fixture
def batch(stock) -> dict:
    return next(iter(stock.get_train_dataloader()))


@pytest.fixture
def without_losses(stock, monkeypatch):
    """Stock TRL in the state in which the second seam calls its loss step."""
    monkeypatch.setattr(stock, "precompute_ref_logps", True)
    monkeypatch.setattr(stock, "loss_types", [])
    monkeypatch.setattr(stock, "loss_weights", [])
    stock._metrics["train"].clear()
    stock.model.train()  # the mode under which metrics are kept
    return stock


class OnlyCallable:
    """A model that can be called and nothing else."""

    __slots__ = ("calls", "model")

    def __init__(self, model):
        self.model, self.calls = model, []

    def __call__(self, **kwargs):
        self.calls.append(kwargs)
        return self.model(**kwargs)


def with_reference(batch: dict, chosen: list[float], rejected: list[float]) -> dict:
    return {**batch, "ref_chosen_logps": torch.tensor(chosen), "ref_rejected_logps": torch.tensor(rejected)}


def test_version():
    installed = Version(version("trl"))
    assert Version("1.16") <= installed < Version("1.17"), (
        f"trl {installed} is installed, and the seams of trl_ext are checked against 1.16: run this file against the "
        "new version, mend what it names, and widen the requirement in pyproject.toml"
    )


# ---- Seam two: the loss step ----


def test_compute_loss_only_calls_the_model(without_losses, batch):
    model = OnlyCallable(without_losses.model)
    try:
        without_losses._compute_loss(model, with_reference(batch, [0.0, 0.0], [0.0, 0.0]), False)
    except AttributeError as error:
        pytest.fail(
            f"DPOTrainer._compute_loss reads {error.name!r} of its model: _Tap, in {SEAM_TWO}, can only be called"
        )
    assert len(model.calls) == 1, (
        f"DPOTrainer._compute_loss calls the model {len(model.calls)} times: {SEAM_TWO} keeps the output of the first"
    )
    assert model.calls[0].get("fused_lm_head") is True, (
        "DPOTrainer._compute_loss no longer asks the model for its fused LM head: "
        f"{FUSED_OUTPUT} and _score_window_ahead read that head's output"
    )
    assert "labels" in model.calls[0], (
        "DPOTrainer._compute_loss no longer passes labels: PreferenceTrainer._score_window_ahead calls the model alike"
    )
    extra = set(model.calls[0]) - {"input_ids", "attention_mask", "labels", "use_cache", "fused_lm_head"}
    assert not extra, (
        f"DPOTrainer._compute_loss passes {extra} to the model: PreferenceTrainer._score_window_ahead does not"
    )


def test_empty_list_of_losses_is_zero_and_metrics_are_logged(without_losses, batch):
    loss = without_losses._compute_loss(without_losses.model, with_reference(batch, [0.0] * 2, [0.0] * 2), False)
    assert isinstance(loss, float) and loss == 0.0, (
        f"DPOTrainer._compute_loss with loss_types=[] returned {loss!r} and not 0.0: {SEAM_TWO} adds its own loss"
    )
    expected = {"entropy", "num_tokens", "logits/chosen", "logits/rejected", "mean_token_accuracy", "rewards/chosen"}
    expected |= {"rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected"}
    logged = set(without_losses._metrics["train"])
    assert logged == expected, f"DPOTrainer logs other metrics: {logged ^ expected}; the README and recipes name these"


def test_reference_log_probabilities_are_read_from_the_batch(without_losses, batch):
    without_losses._compute_loss(without_losses.model, with_reference(batch, [-3.0, -5.0], [-11.0, -2.0]), False)
    metrics = {name: values[0] for name, values in without_losses._metrics["train"].items()}
    for side, mean in (("chosen", -4.0), ("rejected", -6.5)):
        log_ratio = metrics[f"rewards/{side}"] / without_losses.beta
        assert log_ratio == pytest.approx(metrics[f"logps/{side}"] - mean, rel=1e-4), (
            f"DPOTrainer._compute_loss does not read ref_{side}_logps from the batch under precompute_ref_logps: "
            f"{SEAM_TWO} passes its reference that way, and rewards/* would be wrong"
        )


def test_compute_ref_log_probs(stock, batch):
    result_of = stock.compute_ref_log_probs(stock.ref_model, batch)
    assert len(result_of) == 2 and all(values.shape == (2,) for values in result_of), (
        "DPOTrainer.compute_ref_log_probs no longer returns one sum for each chosen and each rejected response: "
        "PreferenceTrainer._reference passes them on as ref_chosen and ref_rejected"
    )
    assert not any(values.requires_grad for values in result_of)


def test_batch_layout(batch):
    assert set(batch) == {"input_ids", "attention_mask", "completion_mask"}, (
        f"TRL's collator gives {set(batch)}: every key that is not the trainer's own goes into the model in "
        "PreferenceTrainer._score_window_ahead"
    )
    assert len(batch["input_ids"]) == 4, (
        "a batch of 2 pairs no longer has 2 chosen rows and then 2 rejected rows: _scores halves it in the middle"
    )
    prompt_of = [
        row[: mask.argmax()].tolist()
        for row, mask in zip(*map(batch.get, ("input_ids", "completion_mask")), strict=True)
    ]
    assert prompt_of[:2] == prompt_of[2:] and prompt_of[0] != prompt_of[1], (
        "rows i and i + n of a batch no longer belong to one pair: PreferenceTrainer._scores halves it in the middle"
    )


# ---- What TRL prepares ----


def test_prepared_columns(stock):
    missing = {"prompt_ids", "chosen_ids", "rejected_ids"} - set(stock.train_dataset.column_names)
    assert not missing, (
        f"DPOTrainer._prepare_dataset no longer yields {missing}: PreferenceTrainer._prepare_dataset truncates them"
    )
    assert "avg_confidence" in stock.train_dataset.column_names, (
        "DPOTrainer._prepare_dataset drops the dataset's own columns: PreferenceTrainer passes them to the loss"
    )


# ---- Seam one: the accumulation window ----


def test_get_batch_samples(stock):
    iterator = iter(stock.get_train_dataloader())
    batches, items = stock.get_batch_samples(iterator, 3, torch.device("cpu"))
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 4] and items is None, (
        f"Trainer.get_batch_samples no longer returns a list of batches and a count that TRL leaves None: {SEAM_ONE}"
    )
    batches, _ = stock.get_batch_samples(iterator, 3, torch.device("cpu"))
    assert len(batches) == 1, f"the last window is no longer the shorter one: {SEAM_ONE} normalises by its pairs"


def test_trainer_divides_by_the_number_of_micro_batches(stock, batch, monkeypatch):
    monkeypatch.setattr(
        stock, "compute_loss", lambda model, *_, **__: sum(p.sum() for p in model.parameters()) * 0 + 6
    )
    monkeypatch.setattr(stock, "current_gradient_accumulation_steps", 3, raising=False)
    reported = stock.training_step(stock.model, batch).item()
    assert reported == 2.0, (
        f"Trainer.training_step turned a loss of 6 in a window of 3 micro-batches into {reported} and not 2: "
        "trl_ext.trainers.preference.optimizer_batch.Window.scale undoes a division by the number of micro-batches"
    )
    stock.model.zero_grad()


def test_a_short_last_window_is_divided_by_its_own_size(tiny_model_path, tmp_path):
    """3 micro-batches accumulated by 2: windows of 2 and of 1."""
    sizes = []

    class Recording(trl.DPOTrainer):
        def compute_loss(self, *args, **kwargs):
            sizes.append(self.current_gradient_accumulation_steps)
            return super().compute_loss(*args, **kwargs)

    spec = {"model": tiny_model_path, "trainer": "trl.DPOTrainer", "pairs": 6}
    spec["args"] = {"gradient_accumulation_steps": 2, "max_steps": 2}
    build(spec, str(tmp_path), trainer_class=Recording).train()
    assert sizes == [2, 2, 1], (
        f"Trainer divides by {sizes} and not by the number of micro-batches in each window: Window.scale undoes that"
    )
