"""`RewardTrainer` equals TRL's where both have a loss, divides batches exactly, and loses neither pairs nor head."""

from __future__ import annotations

import math

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support.reward_once import THREE_STEPS, build, lora, rows_with, scores_one_by_one, train
from tests.support.tiny import pairs
from tests.support.train_once import largest_difference, parameters, relative_difference, result

# ---- Equal to TRL ----

MARGIN, CENTERING = {"margin": lambda row: row["avg_confidence"]}, {"center_rewards_coefficient": 0.01}
# name -> (columns, options)
OBJECTIVES = {
    "bradley-terry": ({}, {}),
    "margin": (MARGIN, {}),
    "centering": ({}, CENTERING),
    "margin and centering": (MARGIN, CENTERING),
}


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_trained_as_trl_trains_bit_by_bit(objective, adapter, tiny_model_path, tmp_path):
    columns, options = OBJECTIVES[objective]
    rows = rows_with(16, **columns)
    stock, own = (
        train(
            tiny_model_path,
            tmp_path / str(is_stock),
            rows,
            stock=is_stock,
            peft_config=lora(task_type="SEQ_CLS") if adapter else None,
            **THREE_STEPS,
            **options,
            **({} if is_stock else {"packing": "off"}),
        )
        for is_stock in (True, False)
    )
    assert len(result(own).logs) == 3
    for entry, expected in zip(result(own).logs, result(stock).logs, strict=True):
        # Centring is added to each pair's loss, and not to their mean: the last bit of the logged mean may differ.
        # Extremes are of the whole step here, and means of those of its micro-batches with TRL.
        extremes = {name: entry[name] for name in ("min_reward", "max_reward")}
        assert extremes["min_reward"] <= expected["min_reward"] and extremes["max_reward"] >= expected["max_reward"]
        expected |= {**extremes, "loss": pytest.approx(expected["loss"], rel=1e-6), "skipped_updates": 0.0}
        assert entry == expected
    assert largest_difference(parameters(own), parameters(stock)) == 0.0


def test_two_runs_with_one_seed_are_alike(tiny_model_path, tmp_path):
    """The score head is not in the language model's file, and is drawn at random."""
    heads = {
        name: build(tiny_model_path, tmp_path / name, seed=seed).model.score.weight.detach().clone()
        for name, seed in (("one", 3), ("again", 3), ("other", 4))
    }
    assert (heads["one"] == heads["again"]).all()
    assert (heads["one"] - heads["other"]).abs().max() > 1e-2


# ---- The loss ----


def test_loss_of_a_step_by_the_formula(tiny_model_path, tmp_path):
    """With d = r+ - r- - 2 m: 0.8 log(1 + e^-d) + 0.2 log(1 + e^d) + 0.05 (r+ + r-)^2, over scores taken singly."""
    options = {"margin_column": "avg_confidence", "margin_scale": 2.0, "label_smoothing": 0.2}
    options |= {"center_rewards_coefficient": 0.05, "per_device_train_batch_size": 4}
    trainer = build(tiny_model_path, tmp_path, **options)
    rows = pairs(4)
    scores = scores_one_by_one(trainer.model, trainer.processing_class, rows)
    trainer.model.float()
    trainer.train()
    losses = []
    for (chosen, rejected), row in zip(scores, rows, strict=True):
        d = chosen - rejected - 2 * row["avg_confidence"]
        losses.append(0.8 * math.log1p(math.exp(-d)) + 0.2 * math.log1p(math.exp(d)) + 0.05 * (chosen + rejected) ** 2)
    assert result(trainer).logs[0]["loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)


def gradient(trainer) -> torch.Tensor:
    """One step of SGD at learning rate 1 changes the parameters by minus the gradient. [P]."""
    before = parameters(trainer)
    trainer.train()
    after = parameters(trainer)
    return torch.cat([(before[name] - after[name]).flatten() for name in sorted(before)]).double()


def test_a_ragged_last_window_has_the_gradient_of_its_mean(tiny_model_path, tmp_path):
    """Five pairs as micro-batches of 2, 2 and 1, and as one of 5; TRL's gradient is another, as a mean of means is."""
    whole = {"per_device_train_batch_size": 5}
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    rows = rows_with(5, margin=lambda row: 4 * row["avg_confidence"])
    expected = gradient(build(tiny_model_path, tmp_path / "whole", rows, **whole))
    own = gradient(build(tiny_model_path, tmp_path / "split", rows, **split))
    stock = gradient(build(tiny_model_path, tmp_path / "stock", rows, stock=True, **split))
    assert relative_difference(own, expected) < 1e-5
    assert relative_difference(stock, expected) > 0.05


# ---- Held-out figures ----


def test_held_out_accuracy_counts_pairs_and_not_batches(tiny_model_path, tmp_path):
    """9 pairs in batches of 4, 4 and 1: TRL averages the three batches, the last pair weighing as much as four."""
    rows = pairs(9, seed=4)
    arguments = {"eval_rows": rows, "per_device_eval_batch_size": 4, "seed": 1}
    own = build(tiny_model_path, tmp_path / "own", **arguments)
    metrics = own.evaluate()
    stock = build(tiny_model_path, tmp_path / "stock", stock=True, **arguments).evaluate()
    scores = scores_one_by_one(own.model, own.processing_class, rows)
    margins = [chosen - rejected for chosen, rejected in scores]
    assert metrics["eval_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 9)
    assert metrics["eval_margin"] == pytest.approx(sum(margins) / 9, rel=1e-4)
    assert abs(stock["eval_accuracy"] - metrics["eval_accuracy"]) > 0.01
    assert metrics.keys() == stock.keys()


# ---- Refusals ----


def test_models_that_are_no_reward_models(tiny_model_path, tmp_path):
    two = AutoModelForSequenceClassification.from_pretrained(tiny_model_path, num_labels=2)
    with pytest.raises(ValueError, match="has 2 labels, and a reward model has one"):
        build(two, tmp_path)
    two.save_pretrained(tmp_path / "two")
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match="two has 2 labels, and a reward model has one"):
        build(str(tmp_path / "two"), tmp_path)
    get_peft_model(two, lora(task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter is an adapter, and training starts from a whole model: merge"):
        build(str(tmp_path / "adapter"), tmp_path)
    assert not isinstance(build(tiny_model_path, tmp_path).model, PeftModel)
