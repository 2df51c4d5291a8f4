"""`RewardTrainer` equals TRL's where both have a loss, divides batches exactly, and loses neither pairs nor head."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.tiny import pairs, token_ids
from tests.train_once import DEFAULTS, in_processes, largest_difference, parameters, relative_difference
from trl_ext import RewardConfig, RewardTrainer

REPOSITORY = Path(__file__).resolve().parent.parent
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
    arguments = {**DEFAULTS, **arguments, "output_dir": str(folder)}
    if stock:
        arguments["max_length"] = None
    config_class, trainer_class = (trl.RewardConfig, trl.RewardTrainer) if stock else (RewardConfig, RewardTrainer)
    return trainer_class(
        model,
        config_class(**arguments),
        train_dataset=Dataset.from_list(pairs(8) if rows is None else rows),
        eval_dataset=None if eval_rows is None else Dataset.from_list(eval_rows),
        processing_class=processing_class,
        peft_config=peft_config,
    )


def train(*arguments, **keywords):
    trainer = build(*arguments, **keywords)
    trainer.train()
    return trainer


def logs(trainer) -> list[dict]:
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{key: value for key, value in entry.items() if "_per_second" not in key} for entry in entries]


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

OBJECTIVES = {
    "bradley-terry": {},
    "margin": {"columns": {"margin": lambda row: row["avg_confidence"]}},
    "centering": {"center_rewards_coefficient": 0.01},
    "margin and centering": {
        "columns": {"margin": lambda row: row["avg_confidence"]},
        "center_rewards_coefficient": 0.01,
    },
}


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_trained_as_trl_trains_bit_by_bit(objective, adapter, tiny_model_path, tmp_path):
    options = dict(OBJECTIVES[objective])
    rows = rows_with(16, **options.pop("columns", {}))
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
    assert len(logs(own)) == 3
    for entry, expected in zip(logs(own), logs(stock), strict=True):
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
    one, again = (train(tiny_model_path, tmp_path / f"trained-{i}", seed=3, **THREE_STEPS) for i in range(2))
    assert largest_difference(parameters(one), parameters(again)) == 0.0


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
    assert logs(trainer)[0]["loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)


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


TWO_PROCESSES = """
import sys

sys.path.insert(0, sys.argv[3])
from safetensors.torch import save_file

from tests.test_reward_trainer import BATCHES_OF_FOUR, build_scored
from trl_ext.rollouts import end_processes

trainer, found = build_scored(sys.argv[1], sys.argv[2], per_device_train_batch_size=1, **BATCHES_OF_FOUR)
if trainer.accelerator.is_main_process:
    save_file(found, sys.argv[2] + "/found.safetensors")
end_processes(trainer.accelerator)
"""
BATCHES_OF_FOUR = {"gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 0.1}


def build_scored(model, folder, **arguments):
    """A trainer after training, with its parameters, its scores of its pairs and its held-out accuracy."""
    rows = rows_with(8, margin=lambda row: row["avg_confidence"])
    trainer = train(model, folder, rows, eval_rows=rows[:5], per_device_eval_batch_size=2, **arguments)
    chosen, rejected = trainer.score_pairs(trainer.train_dataset)
    accuracy = torch.tensor(trainer.evaluate()["eval_accuracy"])
    found = {**parameters(trainer), "chosen": chosen.clone(), "rejected": rejected.clone(), "accuracy": accuracy}
    return trainer, found


@pytest.mark.slow
def test_two_processes_train_and_score_as_one_does(tiny_model_path, tmp_path):
    """2 ranks x 1 pair x accumulation 2 against 1 rank x 2 pairs x accumulation 2: the same batches of 4 pairs."""
    script, run = tmp_path / "two.py", tmp_path / "two"
    script.write_text(TWO_PROCESSES)
    in_processes(2, str(script), tiny_model_path, str(run), str(REPOSITORY), cwd=tmp_path)
    _, one = build_scored(tiny_model_path, tmp_path / "one", **BATCHES_OF_FOUR)
    two = load_file(run / "found.safetensors")
    assert two["accuracy"].item() == pytest.approx(one["accuracy"].item(), abs=1e-6)
    assert largest_difference(two, one) < 1e-5


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


def test_scores_are_those_of_each_sequence_alone(tiny_model_path, tmp_path):
    trainer = build(tiny_model_path, tmp_path, per_device_eval_batch_size=3)
    chosen, rejected = trainer.score_pairs(trainer.train_dataset)
    expected = torch.tensor(scores_one_by_one(trainer.model, trainer.processing_class, pairs(8)))
    torch.testing.assert_close(torch.stack([chosen, rejected], dim=1), expected, atol=1e-5, rtol=1e-5)


# ---- Pairs as token ids ----


def test_long_pairs_are_cut_and_none_is_dropped(tiny_model_path, tmp_path, caplog):
    long = {
        "row_id": "long",
        "prompt": [{"role": "user", "content": "".join(chr(97 + i % 26) for i in range(700))}],
        "chosen": [{"role": "assistant", "content": "".join(chr(97 + i % 25) for i in range(600))}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    short = {key: pairs(1)[0][key] for key in long}
    trainer = build(tiny_model_path, tmp_path, [short, long])
    prompt, chosen, rejected = token_ids(trainer.processing_class, long)
    assert (len(prompt), len(chosen)) > (700, 600)
    assert len(trainer.train_dataset) == 2
    assert trainer.train_dataset[1]["chosen_ids"] == prompt[-512:] + chosen[:512]
    assert trainer.train_dataset[1]["rejected_ids"] == prompt[-512:] + rejected
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("trl_ext")]
    assert "train: 1 of 2 prompts are longer than max_prompt_tokens 512 and are cut" in messages
    assert "train: 1 of 4 responses are longer than max_response_tokens 512 and are cut" in messages
    whole = build(tiny_model_path, tmp_path, [long], max_prompt_tokens=None, max_response_tokens=None)
    assert whole.train_dataset[0]["chosen_ids"] == prompt + chosen


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


@pytest.fixture(scope="module")
def merging_path(tiny_model_path, tmp_path_factory) -> str:
    """The tiny model with a tokenizer in which " Par" and " Paris" are tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for merge in (("Ġ", "P"), ("ĠP", "a"), ("ĠPa", "r"), ("i", "s"), ("ĠPar", "is")):
        state["model"]["merges"].append(list(merge))
        state["model"]["vocab"]["".join(merge)] = len(state["model"]["vocab"])
    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )
    torch.manual_seed(0)
    model.resize_token_embeddings(len(merging), mean_resizing=False)
    path = tmp_path_factory.mktemp("merging")
    model.save_pretrained(path)
    merging.save_pretrained(path)
    return str(path)


TEXTS = [
    # What both begin with, " Par", is a part of the token " Paris".
    ("The capital of France is Paris", "The capital of France is Parma"),
    ("It is Paris", "It is Paris, is it?"),
    ("No prefix", "in common"),
    ("ends itself<|im_end|>", "ends as well"),
]


def test_whole_texts_are_tokenized_as_trl_does(merging_path, tmp_path):
    """Pairs without a prompt: the ids are TRL's and so is what is learnt; they are cut between tokens."""
    rows = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in TEXTS]
    settings = {"per_device_train_batch_size": 4, "learning_rate": 0.1}
    stock = train(merging_path, tmp_path / "stock", rows, stock=True, **settings)
    own = train(merging_path, tmp_path / "own", rows, packing="off", **settings)
    for column in ("chosen_ids", "rejected_ids"):
        assert own.train_dataset[column] == stock.train_dataset[column]
    paris, parma = own.processing_class(" Paris Par")["input_ids"]
    assert [row["chosen_ids"].count(paris) for row in own.train_dataset] == [1, 1, 0, 0]
    assert parma in own.train_dataset[0]["rejected_ids"]
    before = parameters(build(merging_path, tmp_path, rows))
    moved = [
        torch.cat([(after[name] - before[name]).flatten() for name in before]).double()
        for after in (parameters(own), parameters(stock))
    ]
    assert relative_difference(*moved) < 1e-5
    cut = build(merging_path, tmp_path, rows, max_prompt_tokens=2, max_response_tokens=1).train_dataset
    assert cut[0]["chosen_ids"] == own.train_dataset[0]["chosen_ids"][-4:-1]
    assert cut[0]["rejected_ids"] == [*cut[0]["chosen_ids"][:2], parma]


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
    with pytest.raises(ValueError, match="leave the score head untrained and unsaved.*SEQ_CLS"):
        build(get_peft_model(load(), lora()), tmp_path)
    trainer = build(get_peft_model(load(), lora(task_type="SEQ_CLS")), tmp_path)
    assert any("score" in name for name in parameters(trainer))


# ---- Limits and padding travel with the model ----


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_limits_of_training_are_saved_and_read_again(adapter, tiny_model_path, tmp_path):
    """With every checkpoint as well; pairs that training cut are cut alike when the model is a reward function."""
    from trl_ext.rewards import RewardModel

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
    whole = RewardModel(tmp_path, max_prompt_tokens=512).score(prompts, chosen)
    assert (whole - expected).abs().max() > 1e-3, "the limit must matter, or this would prove nothing"


def test_that_ends_do_not_show_in_scores_is_said(tiny_model_path, tmp_path, caplog):
    """Where padding is the end-of-turn token; a tokenizer with padding of its own has nothing said of it."""

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if "padding token is the end-of-turn token" in r.getMessage()]

    build(tiny_model_path, tmp_path)
    assert not lines()
    padded = tmp_path / "padded"
    AutoModelForSequenceClassification.from_pretrained(tiny_model_path, num_labels=1).save_pretrained(padded)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(padded)
    build(str(padded), tmp_path)
    (line,) = lines()
    assert "give the tokenizer a padding token of its own" in line and "\n" not in line


# ---- A bfloat16 base ----


def test_a_head_on_a_bfloat16_base_is_trained_in_float32(bfloat16_on_the_cpu, tiny_model_path, tmp_path):
    """An update of 1e-6 of a weight near 0.02 is less than a 256th of it, and would be lost in bfloat16.

    The saved head has all its bits, and what is loaded again, base in bfloat16, scores as the trained model does.
    """
    from trl_ext.rewards import RewardModel

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
    assert {entry["grad_norm"] > 0 for entry in logs(trainer)} == {True}
    moved = (parameters(trainer)[head] - before).abs()
    # Adam's first steps are of the learning rate's size, whatever the gradient's.
    assert 5e-7 < moved.median() < 3e-6
    assert types[head] == dict(trainer.model.named_parameters())[head].dtype
    trainer.save_model()
    saved = load_file(tmp_path / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert saved.dtype == torch.float32 and torch.equal(saved, parameters(trainer)[head])
    assert not torch.equal(saved, saved.bfloat16().float())

    rows = pairs(8)
    expected = trainer.score(list(trainer.train_dataset["chosen_ids"]))
    loaded = RewardModel(tmp_path, dtype="bfloat16")
    again = loaded.score([row["prompt"] for row in rows], [row["chosen"] for row in rows])
    # bfloat16 keeps 8 bits: 0.4 % of activations whose sums make scores of about this size.
    assert (again - expected).abs().max() < 0.03 * expected.abs().max()
    assert expected.std() > 0.1 * expected.abs().max(), "scores that are all alike would prove nothing"


def test_other_heads_keep_their_type(bfloat16_on_the_cpu, tiny_model_path, tmp_path):
    """A full model is trained in the type it was loaded in, and so is an adapter without mixed precision."""
    half = {"model_init_kwargs": {"dtype": "bfloat16"}}
    full = build(tiny_model_path, tmp_path, bf16=True, **half)
    assert {parameter.dtype for parameter in full.model.parameters()} == {torch.bfloat16}
    plain = build(tiny_model_path, tmp_path, peft_config=lora(), **half)
    (head,) = [p for name, p in plain.model.named_parameters() if "score.modules_to_save" in name]
    assert head.dtype == torch.bfloat16


# ---- Saved and loaded again ----

LOAD_AND_SCORE = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder, base, sequences = sys.argv[1], sys.argv[2], json.loads(open(sys.argv[3]).read())
model = AutoModelForSequenceClassification.from_pretrained(base or folder, num_labels=1, dtype=torch.float32)
if base:
    model = PeftModel.from_pretrained(model, folder)
model.eval()
with torch.no_grad():
    print(json.dumps([model(torch.tensor([ids])).logits.item() for ids in sequences]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_fresh_process_loads_what_was_trained(adapter, tiny_model_path, tmp_path):
    """Loaded by transformers and PEFT alone, and by this library's `RewardModel`: the same scores to 1e-6."""
    from trl_ext.rewards import RewardModel

    run = tmp_path / "run"
    trainer = train(tiny_model_path, run, peft_config=lora() if adapter else None, **THREE_STEPS)
    trainer.save_model()
    sequences = list(trainer.train_dataset["chosen_ids"])
    expected = trainer.score(sequences)
    assert expected.std() > 1e-2
    base = ""
    if adapter:
        base = json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert base == str(Path(tiny_model_path).resolve())
    else:
        assert json.loads((run / "config.json").read_text())["architectures"] == ["Qwen2ForSequenceClassification"]
    (tmp_path / "load.py").write_text(LOAD_AND_SCORE)
    (tmp_path / "sequences.json").write_text(json.dumps(sequences))
    command = [sys.executable, str(tmp_path / "load.py"), str(run), base, str(tmp_path / "sequences.json")]
    # Elsewhere: a base by a relative path would not be found.
    printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    loaded = torch.tensor(json.loads(printed.strip().splitlines()[-1]))
    torch.testing.assert_close(loaded, expected, atol=1e-6, rtol=1e-6)

    rows = pairs(8)
    again = RewardModel(str(run)).score([row["prompt"] for row in rows], [row["chosen"] for row in rows])
    torch.testing.assert_close(torch.as_tensor(again), expected, atol=1e-6, rtol=1e-6)


def test_resuming_equals_the_straight_run(tiny_model_path, tmp_path):
    arguments = {**THREE_STEPS, "max_steps": 4, "learning_rate": 0.01, "optim": "adamw_torch"}
    arguments |= {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
    straight = train(tiny_model_path, tmp_path, pairs(16), **arguments)
    resumed = build(tiny_model_path, tmp_path, pairs(16), **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert largest_difference(parameters(resumed), parameters(straight)) == 0.0


# ---- Refusals ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 1024}, r"max_length is not used by RewardConfig.*max_prompt_tokens and max_response_tokens"),
        ({"label_smoothing": 0.5}, r"label_smoothing must lie in \[0, 0\.5\), got 0\.5"),
        ({"label_smoothing": -0.1}, r"label_smoothing must lie in \[0, 0\.5\), got -0\.1"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor is not used by RewardConfig: use label_smoothing"),
        ({"margin_scale": float("nan")}, r"margin_scale must be a number, got nan"),
        ({"select_best": "acuracy"}, r"unknown select_best 'acuracy'; did you mean 'accuracy'\? .*best_of_n, or none"),
        ({"load_best_model_at_end": True}, r"select_best and load_best_model_at_end both choose a checkpoint"),
        ({"max_prompt_tokens": 0}, r"max_prompt_tokens must be at least 1, got 0"),
        ({"max_response_tokens": -2}, r"max_response_tokens must be at least 1, got -2"),
        ({"center_rewards_coefficient": -0.01}, r"center_rewards_coefficient must be a number from 0 up, got -0\.01"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps must be at least 1, got 0"),
        ({"learning_rate": float("inf")}, r"learning_rate must be a number from 0 up, got inf"),
        ({"max_steps": 0}, r"max_steps must be at least 1, got 0"),
    ],
)
def test_refused_settings(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message) as raised:
        RewardConfig(output_dir=str(tmp_path), **arguments)
    assert "\n" not in str(raised.value)


def test_selection_can_be_switched_off(tmp_path):
    assert RewardConfig(output_dir=str(tmp_path), select_best="none", load_best_model_at_end=False).select_best is None
    assert RewardConfig(output_dir=str(tmp_path)).select_best == "accuracy"


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (
            pairs(2),
            {"margin_column": "strength"},
            r"margin_column 'strength' is not in the train dataset; it has row_id",
        ),
        (pairs(2), {"margin_scale": 2.0}, r"margin_scale 2\.0 needs margins: name a margin_column"),
        (
            rows_with(2, strength=lambda row: None),
            {"margin_column": "strength"},
            r"row_id row0: the margin column 'strength' must hold a number, got None",
        ),
        (rows_with(2, margin=lambda row: "high"), {}, r"row_id row0: the margin column 'margin' must hold a number"),
        ([{"prompt": "a"}], {}, r"no column 'chosen' of a preference pair in the train dataset; it has prompt"),
        (
            rows_with(1, chosen=lambda row: row["chosen"] * 2),
            {},
            r"row_id row0 cannot be encoded: a response is one assistant message, got 2",
        ),
    ],
)
def test_refused_data(rows, arguments, message, tiny_model_path, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(tiny_model_path, tmp_path, rows, **arguments)


def test_no_pairs(tiny_model_path, tmp_path):
    arguments = RewardConfig(**{**DEFAULTS, "output_dir": str(tmp_path)})
    empty = Dataset.from_list(pairs(2)).select([])
    with pytest.raises(ValueError, match="the train dataset has no pairs"):
        RewardTrainer(tiny_model_path, arguments, train_dataset=empty)


def test_models_that_are_no_reward_models(tiny_model_path, tmp_path):
    two = AutoModelForSequenceClassification.from_pretrained(tiny_model_path, num_labels=2)
    with pytest.raises(ValueError, match="has 2 labels, and a reward model has one"):
        build(two, tmp_path)
    two.save_pretrained(tmp_path / "two")
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match="two has 2 labels, and a reward model has one"):
        build(str(tmp_path / "two"), tmp_path)
    get_peft_model(two, lora(task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter is an adapter.*merge it into its base"):
        build(str(tmp_path / "adapter"), tmp_path)
    assert not isinstance(build(tiny_model_path, tmp_path).model, PeftModel)


def test_stock_configuration_is_refused(tiny_model_path, tmp_path):
    stock = trl.RewardConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="RewardTrainer takes a RewardConfig, got RewardConfig of trl"):
        RewardTrainer(tiny_model_path, stock, train_dataset=Dataset.from_list(pairs(2)))


# ---- The best checkpoint ----


def select(model, folder, criterion: str, limit: int | None, **arguments):
    """Four steps with a checkpoint after each, chosen by the criterion on six other pairs."""
    from trl_ext.trainers.reward_selection import CheckpointSelection, ScoredSamples

    rows = pairs(6, seed=8)
    arguments = {"max_steps": 4, "learning_rate": 0.3, "per_device_train_batch_size": 4, **arguments}
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": limit, "select_best": criterion}
    trainer = build(model, folder, **saving, **arguments)
    prompts = [token_ids(trainer.processing_class, row) for row in rows]
    sequences = [[prompt + chosen, prompt + rejected] for prompt, chosen, rejected in prompts]
    samples = ScoredSamples(sequences, gold=[[0.1 * i, 1 - 0.2 * i] for i in range(6)], n=2)
    selection = CheckpointSelection(trainer, Dataset.from_list(rows), samples=samples)
    trainer.add_callback(selection)
    trainer.train()
    return trainer, selection.load_best(split="six")


FIGURES = {
    "accuracy": (lambda margins: sum(m > 0 for m in margins) / 6, 1),
    "margin": (lambda margins: sum(margins) / 6, 1),
    "calibration": (lambda margins: -sum(math.log1p(math.exp(-m)) for m in margins) / 6, -1),
    # Of two samples, the chosen response (.1 i) is picked where its score is higher, else the rejected (1 - .2 i).
    "best_of_n": (lambda margins: sum(0.1 * i if m > 0 else 1 - 0.2 * i for i, m in enumerate(margins)) / 6, 1),
}


@pytest.mark.parametrize("criterion", FIGURES)
def test_the_best_checkpoint_by_scores_taken_singly(criterion, tiny_model_path, tmp_path):
    """Figures of every checkpoint from its files alone; the first best one is what is loaded, and lies in best/."""
    trainer, selection = select(tiny_model_path, tmp_path, criterion, None)
    figure, sign = FIGURES[criterion]
    tokenizer, rows = trainer.processing_class, pairs(6, seed=8)
    expected = []
    for step in (1, 2, 3, 4):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{step}")
        expected.append(figure([c - r for c, r in scores_one_by_one(model, tokenizer, rows)]))
    assert len(set(expected)) > 1, "checkpoints that are all alike show nothing"
    assert [entry["step"] for entry in selection["checkpoints"]] == [1, 2, 3, 4]
    assert [sign * entry[selection["figure"]] for entry in selection["checkpoints"]] == pytest.approx(
        expected, rel=1e-4
    )
    assert selection["step"] == 1 + expected.index(max(expected))
    assert json.loads((tmp_path / "best" / "selection.json").read_text()) == selection
    best, checkpoint = (
        load_file(tmp_path / n / "model.safetensors") for n in ("best", f"checkpoint-{selection['step']}")
    )
    assert largest_difference(best, checkpoint) == 0.0
    assert largest_difference(parameters(trainer), checkpoint) == 0.0


def test_a_limit_on_checkpoints_deletes_no_best_one(tiny_model_path, tmp_path):
    _, free = select(tiny_model_path, tmp_path / "free", "margin", None, seed=5)
    _, limited = select(tiny_model_path, tmp_path / "limited", "margin", 1, seed=5)
    assert limited == free
    assert (tmp_path / "limited" / f"checkpoint-{free['step']}").is_dir()
    assert len(list((tmp_path / "limited").glob("checkpoint-*"))) <= 2
    one, other = (load_file(tmp_path / name / "best" / "model.safetensors") for name in ("free", "limited"))
    assert largest_difference(one, other) == 0.0


def test_selection_that_cannot_be(tiny_model_path, tmp_path):
    from trl_ext.trainers.reward_selection import CheckpointSelection

    rows = Dataset.from_list(pairs(2))
    for arguments, message in (
        ({"select_best": None}, "select_best is none"),
        ({"save_strategy": "no"}, "select_best needs checkpoints: set save_strategy"),
        ({"save_strategy": "steps", "select_best": "best_of_n"}, "best_of_n needs samples of known quality"),
    ):
        with pytest.raises(ValueError, match=message):
            CheckpointSelection(build(tiny_model_path, tmp_path, **arguments), rows)
    trainer = build(tiny_model_path, tmp_path, save_strategy="steps", save_steps=9)
    with pytest.raises(ValueError, match="no checkpoint was saved to choose from: lower save_steps"):
        CheckpointSelection(trainer, rows).load_best(split="two")
