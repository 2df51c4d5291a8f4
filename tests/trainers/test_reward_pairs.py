"""Pairs that `RewardTrainer` reads: messages, plain text, streams and token ids, and rows that it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import IterableDataset
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.support.reward_once import THREE_STEPS, build, rows_with, train
from tests.support.tiny import pairs, token_ids
from tests.support.train_once import DEFAULTS, largest_difference, parameters, relative_difference
from trl_ext import RewardConfig, RewardTrainer

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


REFUSED = {
    "margin_column 'strength' is not in the train dataset; it has row_id": (pairs(2), {"margin_column": "strength"}),
    r"margin_scale 2\.0 needs margins: name a margin_column": (pairs(2), {"margin_scale": 2.0}),
    "row_id row0: the margin column 'strength' must hold a number, got None": (
        rows_with(2, strength=lambda row: None),
        {"margin_column": "strength"},
    ),
    "row_id row0: the margin column 'margin' must hold a number": (rows_with(2, margin=lambda row: "high"), {}),
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
