"""`KTOTrainer`: its loss against `trl_ext.losses.kto` in float64, truncation, weights, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from tests.support import train_once
from tests.support.tiny import pairs, response_log_prob
from tests.support.train_once import largest_difference, relative_difference, result
from trl_ext.losses import kto

pytestmark = pytest.mark.usefixtures("in_float64")


def build(path: str, folder, rows: list[dict], eval_dataset=None, **args):
    spec = {"trainer": "KTOTrainer", "model": path, "reference_seed": 1, "reference_scale": 0.02}
    spec["args"] = {"per_device_train_batch_size": 8, **args}
    data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": eval_dataset}
    return train_once.build(spec, str(folder), **data)


def test_loss_and_gradient(tiny_model_path, tmp_path):
    """One step on 4 pairs taken apart: the mean of `kto`, its divergence from each prompt with another response."""
    weights = {"desirable_weight": 1.0, "undesirable_weight": 0.8}
    trainer = build(tiny_model_path, tmp_path, pairs(4), beta=0.5, **weights)
    rows = list(trainer.train_dataset)
    assert [row["label"] for row in rows] == [True, False] * 4
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    run = result(trainer)

    _, model, reference = train_once.load_models(tiny_model_path, scale=0.02)

    def log_ratios(completions: list[list[int]]):
        both = zip(rows, completions, strict=True)
        both = [(row["prompt_ids"], ids) for row, ids in both]
        with torch.no_grad():
            base = torch.stack([response_log_prob(reference, *row) for row in both])
        return torch.stack([response_log_prob(model, *row) for row in both]) - base

    completions = [row["completion_ids"] for row in rows]
    shifted = log_ratios([completions[-1], *completions[:-1]]).detach()
    assert shifted.mean() > 0.01, "clamped at 0, the divergence would not be tested"
    labels = torch.tensor([row["label"] for row in rows])
    loss = kto(log_ratios(completions), labels, shifted, beta=0.5, **weights).mean()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    moved = torch.cat([(start[name] - run.parameters[name]).flatten() for name in start]).double()
    assert run.losses == pytest.approx([loss.item()], rel=1e-8)
    assert relative_difference(moved, gradient) < 1e-9
    assert run.logs[0]["kl"] == pytest.approx(shifted.mean().item(), rel=1e-8)


def test_the_step_and_its_metrics_are_trls(tiny_model_path, tmp_path):
    """Names and values, and parameters, of three steps of two micro-batches each."""
    runs = []
    for name, own in (("trl.KTOTrainer", {}), ("KTOTrainer", {"packing": "off"})):
        spec = {"trainer": name, "model": tiny_model_path, "reference_seed": 1, "rows": labelled(*[True, False] * 6)}
        spec["args"] = {"max_steps": 3, "learning_rate": 0.1, "gradient_accumulation_steps": 2, **own}
        runs.append(result(train_once.train(spec, str(tmp_path))))
    stock, own = runs
    assert [{k: v for k, v in entry.items() if k != "skipped_updates"} for entry in own.logs] == stock.logs
    assert len(own.logs) == 3 and largest_difference(own.parameters, stock.parameters) == 0


def test_prompts_lose_their_beginning_and_responses_their_end(tiny_model_path, tmp_path, caplog):
    whole = build(tiny_model_path, tmp_path, pairs(4)).train_dataset
    cut = build(tiny_model_path, tmp_path, pairs(4), max_prompt_tokens=20, max_response_tokens=5).train_dataset
    assert max(map(len, whole["prompt_ids"])) > 20 and max(map(len, whole["completion_ids"])) > 5
    for row, full in zip(cut, whole, strict=True):
        assert row["prompt_ids"] == full["prompt_ids"][-20:]
        assert row["completion_ids"] == full["completion_ids"][:5]
        assert row["KL_completion_ids"] == full["KL_completion_ids"][:5]
    count = sum(len(ids) > 5 for ids in whole["completion_ids"])
    assert f"train: {count} of 8 responses are longer than max_response_tokens 5 and are truncated" in caplog.text


def labelled(*labels) -> list[dict]:
    return [
        {"row_id": f"row{index}", "prompt": f"prompt {index}", "completion": f"answer {index}", "label": label}
        for index, label in enumerate(labels)
    ]


def test_several_processes_pair_the_same_rows(tiny_model_path, tmp_path):
    """Ten rows in batches of 4, tokenized by two processes, 5 rows each: batches are of all rows all the same."""
    rows = labelled(*[True, False] * 5)
    dataset = build(tiny_model_path, tmp_path, rows, per_device_train_batch_size=4, dataset_num_proc=2).train_dataset
    own = dataset["completion_ids"]
    assert dataset["KL_completion_ids"] == [own[index] for index in (3, 0, 1, 2, 7, 4, 5, 6, 9, 8)]


def test_a_last_row_that_is_alone_is_left_out(tiny_model_path, tmp_path, caplog):
    """9 rows in batches of 4: the ninth would be paired with itself, (i, i), z being its own log-ratio.
    10 rows leave two, which have each other; the paired response is that of the row before, or the batch's last."""
    held_out = Dataset.from_list(labelled(*[False, True] * 4, False))
    trainer = build(
        tiny_model_path,
        tmp_path,
        labelled(*[True, False] * 4, True),
        per_device_train_batch_size=4,
        eval_dataset={"one": held_out, "two": Dataset.from_list(labelled(*[True, False] * 5))},
    )
    rotated = [3, 0, 1, 2, 7, 4, 5, 6]
    of = {"train": trainer.train_dataset, **trainer.eval_dataset}
    for name, expected in {"train": rotated, "one": rotated, "two": [*rotated, 9, 8]}.items():
        own = of[name]["completion_ids"]
        assert of[name]["KL_completion_ids"] == [own[index] for index in expected], name
    assert "train_dataset: the last of 9 rows is left out" in caplog.text
    assert "one_dataset: the last of 9 rows" in caplog.text and caplog.text.count("is left out") == 2
    caplog.clear()
    # 5 rows: 4 with neighbours, with a loss that the fifth does not enter.
    rows = [held_out.select(range(count)) for count in (4, 5)]
    four, five = (trainer.evaluate(one)["eval_loss"] for one in rows)
    assert four == five and caplog.text.count("eval_dataset: the last of 5 rows is left out") == 1
    with pytest.raises(ValueError, match="eval_dataset has one row"):
        trainer.evaluate(held_out.select(range(1)))


@pytest.mark.parametrize("labels", [(True, True), (False, False, False), (True, None, False)])
def test_both_labels_are_needed(labels, tiny_model_path, tmp_path):
    with pytest.raises(ValueError, match="KTO needs responses of both labels"):
        build(tiny_model_path, tmp_path, labelled(*labels))
