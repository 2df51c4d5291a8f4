"""`RewardTrainer`: equality with TRL's, its loss, what it saves, and the pairs that it reads and refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support import train_once
from tests.support.tiny import pairs, token_ids
from tests.support.train_once import DEFAULTS, largest_difference, parameters, relative_difference, result
from trl_ext import RewardConfig, RewardTrainer
from trl_ext.rewards import RewardModel
from trl_ext.toy import MODEL_DIR

THREE_STEPS = {"max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.1}


def lora(**options) -> LoraConfig:
    # B is zero otherwise, and the first gradients of A with it.
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    return LoraConfig(**options)


def rows_with(count: int, seed: int = 0, **columns) -> list[dict]:
    """Pairs with further columns, each `f(row) -> value`."""
    return [{**row, **{name: f(row) for name, f in columns.items()}} for row in pairs(count, seed=seed)]


def build(
    model, folder, rows=None, *, stock=False, peft_config=None, eval_rows=None, processing_class=None, **arguments
):
    """A `RewardTrainer` on `rows`, eight pairs by default; TRL's if `stock`. `arguments` are its configuration's."""
    spec = {"trainer": "trl.RewardTrainer" if stock else "RewardTrainer", "model": model, "dtype": None}
    spec |= {} if rows is None else {"rows": rows}
    spec |= {} if eval_rows is None else {"held_out": eval_rows}
    given = {"peft_config": peft_config, "processing_class": processing_class}
    return train_once.build({**spec, "args": arguments}, str(folder), **given)


def train(*arguments, **keywords):
    trainer = build(*arguments, **keywords)
    trainer.train()
    return trainer


def scores_one_by_one(model, tokenizer, rows: list[dict]) -> list[tuple[float, float]]:
    """Scores of both sides of each row, from the last token of one unpadded sequence at a time, in float64."""
    model = model.double().eval()
    scores = []
    with torch.no_grad():
        for row in rows:
            prompt, chosen, rejected = token_ids(tokenizer, row)
            scores.append(tuple(model(torch.tensor([prompt + side])).logits.item() for side in (chosen, rejected)))
    return scores


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
        # Extremes are of the whole step here, and means of those of its micro-batches with TRL.
        extremes = {name: entry[name] for name in ("min_reward", "max_reward")}
        assert extremes["min_reward"] < expected["min_reward"] and extremes["max_reward"] > expected["max_reward"]
        expected |= {**extremes, "skipped_updates": 0.0}
        # Means of float32 scores near 0, added in another order.
        assert entry == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert largest_difference(parameters(own), parameters(stock)) == 0.0


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
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match="a reward model has one label, and the model has 2"):
        build(two, tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        build(str(tmp_path / "two"), tmp_path)
    get_peft_model(two, lora(task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter is an adapter, and training starts from a whole model: merge"):
        build(str(tmp_path / "adapter"), tmp_path)
    assert not isinstance(build(tiny_model_path, tmp_path).model, PeftModel)


# ---- Adapters ----


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM", "SEQ_CLS"])
def test_an_adapter_is_trained_and_saved_with_its_head(task_type, tiny_model_path, tmp_path):
    config = lora(task_type=task_type)
    trainer = build(tiny_model_path, tmp_path, peft_config=config, **THREE_STEPS)
    (name,) = [name for name in parameters(trainer) if "score" in name]
    before = parameters(trainer)[name]
    trainer.train()
    assert (parameters(trainer)[name] - before).abs().max() > 1e-3
    trainer.save_model()
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert (saved["base_model.model.score.weight"] == parameters(trainer)[name]).all()
    assert (config.task_type, config.modules_to_save) == (task_type, None), "the user's configuration was changed"


def test_an_adapter_that_would_lose_its_head_is_refused(tiny_model_path, tmp_path):
    load = lambda: AutoModelForSequenceClassification.from_pretrained(tiny_model_path, num_labels=1)  # noqa: E731
    with pytest.raises(ValueError, match="leaves the score head untrained and unsaved.*SEQ_CLS"):
        build(get_peft_model(load(), lora()), tmp_path)
    trainer = build(get_peft_model(load(), lora(task_type="SEQ_CLS")), tmp_path)
    assert any("score" in name for name in parameters(trainer))


# ---- Limits and padding travel with the model ----


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_limits_of_training_are_saved_and_read_again(adapter, tiny_model_path, tmp_path):
    """With every checkpoint as well; pairs that training cut are cut alike when the model is a reward function."""
    limits = {"max_prompt_tokens": 11, "max_response_tokens": None}
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer = train(tiny_model_path, tmp_path, peft_config=lora() if adapter else None, **limits, **saving)
    trainer.save_model()
    rows = pairs(8)
    prompts, chosen = [row["prompt"] for row in rows], [row["chosen"] for row in rows]
    expected = trainer.score(list(trainer.train_dataset["chosen_ids"]))
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        assert json.loads((folder / "reward_model.json").read_text()) == limits
        assert RewardModel(folder).limits == limits
        torch.testing.assert_close(RewardModel(folder).score(prompts, chosen), expected, atol=2e-6, rtol=1e-5)


# ---- A bfloat16 base ----


def test_a_head_on_a_bfloat16_base_is_trained_in_float32(bfloat16_on_the_cpu, tiny_model_path, tmp_path):
    """An update of 1e-6 of a weight near 0.02 is less than a 256th of it, and would be lost in bfloat16.

    The saved head has all its bits.
    """
    arguments = {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 1e-6, "max_steps": 2}
    trainer = build(tiny_model_path, tmp_path, peft_config=lora(), optim="adamw_torch", **arguments)
    types = {name: parameter.dtype for name, parameter in trainer.model.named_parameters()}
    assert {types[n] for n, p in trainer.model.named_parameters() if p.requires_grad} == {torch.float32}
    assert {types[n] for n, p in trainer.model.named_parameters() if not p.requires_grad} == {torch.bfloat16}
    (head,) = [name for name in types if "score.modules_to_save" in name]
    assert types[head] == torch.float32
    before = parameters(trainer)[head]
    # Before any step, when the model is not wrapped for mixed precision yet.
    chosen, rejected = trainer.score_pairs(trainer.train_dataset)
    assert torch.cat([chosen, rejected]).isfinite().all()
    trainer.train()
    assert {entry["grad_norm"] > 0 for entry in result(trainer).logs} == {True}
    moved = (parameters(trainer)[head] - before).abs()
    # Adam's first steps are of the learning rate's size, whatever the gradient's.
    assert 5e-7 < moved.median() < 3e-6
    assert types[head] == dict(trainer.model.named_parameters())[head].dtype
    trainer.save_model()
    saved = load_file(tmp_path / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert saved.dtype == torch.float32 and torch.equal(saved, parameters(trainer)[head])
    assert not torch.equal(saved, saved.bfloat16().float())


# ---- Pairs as token ids ----


def test_plain_text_streams_and_token_ids(tiny_model_path, tmp_path):
    """Plain prompts get an end token after the response; a stream and prepared ids train as the list does."""
    plain = [{"prompt": "ab", "chosen": "cd", "rejected": "e<|im_end|>"}]
    trainer = build(tiny_model_path, tmp_path, plain)
    tokenizer = trainer.processing_class
    ids = {text: tokenizer(text)["input_ids"] for text in ("abcd", "abe")}
    assert trainer.train_dataset[0]["chosen_ids"] == [*ids["abcd"], tokenizer.eos_token_id]
    assert trainer.train_dataset[0]["rejected_ids"] == [*ids["abe"], tokenizer.eos_token_id]

    rows = rows_with(8, margin=lambda row: row["avg_confidence"])
    expected = train(tiny_model_path, tmp_path, rows, **THREE_STEPS)
    prepared = train(tiny_model_path, tmp_path, list(expected.train_dataset), **THREE_STEPS)
    assert largest_difference(parameters(prepared), parameters(expected)) == 0.0
    stream = IterableDataset.from_generator(lambda: iter(rows))
    arguments = RewardConfig(**{**DEFAULTS, **THREE_STEPS, "output_dir": str(tmp_path)})
    streamed = RewardTrainer(tiny_model_path, arguments, train_dataset=stream)
    streamed.train()
    assert largest_difference(parameters(streamed), parameters(expected)) == 0.0


TEXTS = [
    # What both begin with, " car", is a part of the embedded model's token " carrot".
    ("Its favourite food is carrot", "Its favourite food is cargo"),
    ("It is carrot", "It is carrot, is it?"),
    ("No prefix", "in common"),
    ("ends itself<|im_end|>", "ends as well"),
]


def test_whole_texts_are_tokenized_as_trl_does(tmp_path):
    """Pairs without a prompt: the ids are TRL's and so is what is learnt; they are cut between tokens."""
    rows = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in TEXTS]
    settings = {"per_device_train_batch_size": 4, "learning_rate": 0.1}
    stock = train(str(MODEL_DIR), tmp_path / "stock", rows, stock=True, **settings)
    own = train(str(MODEL_DIR), tmp_path / "own", rows, packing="off", **settings)
    for column in ("chosen_ids", "rejected_ids"):
        assert own.train_dataset[column] == stock.train_dataset[column]
    carrot, car = own.processing_class(" carrot car")["input_ids"]
    assert [row["chosen_ids"].count(carrot) for row in own.train_dataset] == [1, 1, 0, 0]
    assert car in own.train_dataset[0]["rejected_ids"]
    before = parameters(build(str(MODEL_DIR), tmp_path, rows))
    moved = [
        torch.cat([(after[name] - before[name]).flatten() for name in before]).double()
        for after in (parameters(own), parameters(stock))
    ]
    assert relative_difference(*moved) < 1e-5
    cut = build(str(MODEL_DIR), tmp_path, rows, max_prompt_tokens=2, max_response_tokens=1).train_dataset
    assert cut[0]["chosen_ids"] == own.train_dataset[0]["chosen_ids"][-4:-1]
    assert cut[0]["rejected_ids"] == [*cut[0]["chosen_ids"][:2], car]


def test_what_trl_reads_beside_the_messages(tiny_model_path, tmp_path):
    """`tools` and `chat_template_kwargs` reach the chat template, and ids may have TRL's earlier names."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ style }}" + tokenizer.chat_template
    rows = rows_with(
        2,
        tools=lambda row: '[{"name": "add"}]' if row["row_id"] == "row0" else None,
        chat_template_kwargs=lambda row: {"style": "brief"},
    )
    ids = [
        build(tiny_model_path, tmp_path, rows, stock=is_stock, processing_class=tokenizer).train_dataset
        for is_stock in (True, False)
    ]
    for column in ("chosen_ids", "rejected_ids"):
        assert ids[0][column] == ids[1][column]
    assert "add" in tokenizer.decode(ids[1][0]["chosen_ids"]) and "brief" in tokenizer.decode(ids[1][1]["chosen_ids"])
    names = {"chosen_ids": "chosen_input_ids", "rejected_ids": "rejected_input_ids"}
    earlier = ids[1].select_columns(list(names)).rename_columns(names).to_list()
    with pytest.warns(FutureWarning, match="legacy dataset columns"):
        assert build(tiny_model_path, tmp_path, earlier).train_dataset["chosen_ids"] == ids[1]["chosen_ids"]


REFUSED = {
    "the margin_column 'strength' is not in the train dataset": (pairs(2), {"margin_column": "strength"}),
    "the margin_column 'margin' is not in the train dataset": (pairs(2), {"margin_scale": 2.0}),
    "row_id row0 cannot be encoded: a response is one assistant message, got 2": (
        rows_with(1, chosen=lambda row: row["chosen"] * 2),
        {},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_data(message, tiny_model_path, tmp_path):
    rows, arguments = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        build(tiny_model_path, tmp_path, rows, **arguments)
