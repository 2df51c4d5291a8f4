"""Faults, each planted in a trainer of TRL and of this library, by the name of the check that finds it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.doctor.runs import build, lora, mapped, random_llama, sorted_by_length, stand_in, toy, word_of_reference
from trl_ext.doctor import Report, cli, examine
from trl_ext.toy import MODEL_DIR


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of a trainer from its beginning, by the name of the check that finds it.

    `plant` changes the built trainer, `options` are its settings and arguments, and `rows` changes the training rows.
    It is examined, or watched for `steps`; `only` is `trl` or `trl_ext` for a fault that the other does not allow.
    """

    name: str
    kinds: str
    plant: Callable | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: Callable | None = None
    steps: int = 0
    only: str = ""

    def report(self, kind: str, own: bool, model: str) -> Report:
        trainer = build(kind, own, model=model, rows=self.rows, **self.options)
        if self.plant:
            self.plant(trainer)
        return cli.watch(trainer, self.steps) if self.steps else examine(trainer)


def _setting(name: str, value: Any) -> Callable:
    return lambda trainer: setattr(trainer.args, name, value)


def _columns(**edits: Callable) -> Callable:
    """Replace columns of the tokenized data: name -> function of the row."""

    def plant(trainer):
        rows = [row | {name: edit(row) for name, edit in edits.items()} for row in trainer.train_dataset]
        trainer.train_dataset = type(trainer.train_dataset).from_list(rows)

    return plant


def _template(template: str | None) -> Callable:
    def plant(trainer):
        trainer.processing_class.chat_template = template

    return plant


def _tokenizer(template: str | None = None):
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def _written(template: str) -> dict[str, Callable]:
    """Options with a tokenizer that has another template, which writes the training data too."""
    return {"processing_class": functools.partial(_tokenizer, template)}


_MESSAGES, _CONTENT = "{% for m in messages %}", "{{ m['content'] }}"
LLAMA = _MESSAGES + "<|start_header_id|>{{ m['role'] }}<|end_header_id|>" + _CONTENT + "<|eot_id|>{% endfor %}"
ZEPHYR = _MESSAGES + "<|{{ m['role'] }}|>\n" + _CONTENT + "{{ eos_token }}\n{% endfor %}"
ZEPHYR += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
_DOUBLED = "<|im_start|>" + _MESSAGES + "<|im_start|>{{ m['role'] }}\n" + _CONTENT + "<|im_end|>\n{% endfor %}"
_NO_SYSTEM = "{% for m in messages[1:] %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def _begin_token(trainer) -> None:
    trainer.processing_class.chat_template, trainer.processing_class.bos_token = _DOUBLED, "<|im_start|>"


def _system_lost(trainer) -> None:
    _columns(prompt=lambda row: [{"role": "system", "content": "Answer in one sentence."}, *row["prompt"]])(trainer)
    trainer.processing_class.chat_template = _NO_SYSTEM


def _said(row: dict, name: str) -> str:
    return row[name][-1]["content"]


def _text(row: dict) -> dict:
    """Plain text, with the space at the end of the prompt."""
    sides = [name for name in ("completion", "chosen", "rejected") if name in row]
    return {"prompt": f"Q: {_said(row, 'prompt')} A: ", **{name: _said(row, name) for name in sides}}


def _unlearned(which: Callable) -> Callable:
    """Take the loss on no token of each batch for which `which(ids)` holds."""

    def plant(trainer):
        collate = trainer.data_collator

        def collated(rows):
            batch = collate(rows)
            name, off = ("labels", -100) if "labels" in batch else ("completion_mask", 0)
            batch[name] = batch[name].masked_fill(which(batch["input_ids"]), off)
            return batch

        trainer.data_collator = collated

    return plant


# The token <|im_end|>.
_END = 1


def _without_end(name: str, ids: str | None = None) -> Callable:
    """Truncate a column before the last end of a turn in `ids`, which may be followed by a line break."""
    return lambda row: row[name][: max(index for index, token in enumerate(row[ids or name]) if token == _END)]


def _other_end(trainer) -> None:
    """The tokenizer's own end token is not that of the template, as with many base models."""
    tokenizer = trainer.processing_class
    trainer.model.generation_config.eos_token_id = tokenizer.pad_token_id
    tokenizer.eos_token = tokenizer.pad_token


def _truncated(trainer) -> None:
    """As if the limit was lower when the data was prepared."""
    own = hasattr(trainer.args, "max_response_tokens")
    setattr(trainer.args, "max_response_tokens" if own else "max_length", 3 if own else 12)
    if not own:
        trainer.data_collator.max_length = 12


_NO_ENDS = {"chosen_ids": _without_end("chosen_ids"), "rejected_ids": _without_end("rejected_ids")}
_NO_END = {"input_ids": _without_end("input_ids"), "labels": _without_end("labels", "input_ids")}
TOKENS = [
    Fault("template-missing", "policy", _template(None)),
    Fault("template-missing", "policy", _columns(prompt=lambda row: _said(row, "prompt"))),
    Fault("template-of-another-model", "policy", _template(LLAMA)),
    Fault("template-of-another-model", "sft preference policy", options=_written(ZEPHYR)),
    Fault("begin-token-doubled", "policy", _begin_token),
    Fault("system-prompt-lost", "policy", _system_lost),
    Fault("prompt-tokens-differ", "sft preference", rows=mapped(_text), only="trl"),
    Fault("end-token", "preference", _columns(**_NO_ENDS)),
    Fault("end-token", "sft", _columns(**_NO_END)),
    Fault("end-token", "sft preference", _unlearned(lambda ids: ids == _END)),
    Fault("end-token", "sft preference", _other_end),
    Fault("end-token", "policy", _other_end),
    Fault("nothing-learned-in-rows", "sft preference", _unlearned(lambda ids: torch.ones_like(ids).bool())),
    Fault("truncated-rows", "preference", _truncated),
]


def swapped(row: dict) -> dict:
    return {"chosen": row["rejected"], "rejected": row["chosen"]}


def _scored(rows: Dataset) -> Dataset:
    """Every fifth label is against the scores."""
    high, low = {"score_chosen": 4.0, "score_rejected": 2.0}, {"score_chosen": 2.0, "score_rejected": 4.0}
    return Dataset.from_list([{**row, **(high if index % 5 else low)} for index, row in enumerate(rows)])


def _both_ways(rows: Dataset) -> Dataset:
    return Dataset.from_list([*rows, *({**row, **swapped(row)} for row in list(rows)[:10])])


_IN_ORDER = {"train_sampling_strategy": "sequential"}
ROWS = [
    Fault("pairs-contradict", "preference reward", rows=mapped(lambda row: {"rejected": row["chosen"]})),
    Fault("length-predicts-label", "preference reward", _columns(rejected_ids=lambda row: row["chosen_ids"][:2])),
    Fault("duplicate-rows", "sft preference reward", rows=lambda rows: rows.select([*range(15)] * 4)),
    Fault("labels-against-scores", "preference reward", rows=_scored),
    Fault("pairs-contradict", "preference reward", rows=_both_ways),
    Fault("rows-in-order", "sft preference reward", options=_IN_ORDER, rows=sorted_by_length),
    Fault("rows-in-order", "policy", options={"shuffle_dataset": False}, rows=sorted_by_length, only="trl"),
]


def _bfloat16(trainer) -> None:
    trainer.args.learning_rate = 1e-6
    for weight in trainer.model.parameters():
        weight.data = weight.data.bfloat16()


def _dropout(rate: float) -> Callable:
    def plant(trainer):
        for module in trainer.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = rate

    return plant


def noisy(model, scale: float) -> None:
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data += torch.randn_like(weight) * weight.std() * scale


def _permuted(trainer) -> None:
    weight = trainer.model.get_input_embeddings().weight
    weight.data = weight.data[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))]


def _classifier(folder: str):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.config.pad_token_id = 2
    return model


@functools.cache
def _reward_folder() -> str:
    folder = tempfile.mkdtemp()
    _classifier(stand_in()).save_pretrained(folder)
    return folder


def _other_checkpoint():
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    noisy(model, 0.3)
    return model


_EVERY = "sft preference reward policy"
_OTHER_READER = {"reward_funcs": lambda: _classifier(_reward_folder()), "reward_processing_classes": _tokenizer}
MODELS = [
    Fault("weights-do-not-move", _EVERY, lambda trainer: trainer.model.requires_grad_(False)),
    Fault("adapter-layers", "preference", options={"peft_config": lambda: lora("CAUSAL_LM", lora_alpha=0)}),
    Fault("adapter-layers", "preference", options={"peft_config": lambda: lora("CAUSAL_LM", layers_to_transform=[0])}),
    Fault("reward-model", "reward", options={"peft_config": lora}, only="trl"),
    Fault("reward-model", "policy", options={"reward_funcs": lambda: _classifier(str(MODEL_DIR))}),
    Fault("reward-model", "policy", options=_OTHER_READER),
    Fault("text-unknown", "sft preference policy", _permuted),
    Fault("text-unknown", "sft preference policy", lambda trainer: noisy(trainer.model, 1.0)),
    Fault("start-off-reference", "policy", lambda trainer: noisy(trainer.ref_model, 0.3)),
    Fault("start-off-reference", "preference", options={"ref_model": _other_checkpoint}, only="trl"),
    Fault("start-off-reference", "preference", options={"ref_model": _other_checkpoint}, steps=3),
    Fault("reference-moves", "preference policy", lambda trainer: setattr(trainer, "ref_model", trainer.model)),
    Fault("dropout-on", "preference policy", _dropout(0.1)),
    Fault("weights-do-not-move", _EVERY, _bfloat16),
    Fault("learning-rate-off", _EVERY, _setting("learning_rate", 1e-9)),
    Fault("beta-off", "preference policy", _setting("beta", 100.0)),
    Fault("identical-samples", "policy", _setting("temperature", 0.01)),
    Fault("sampling-differs", "policy", options={"generation_kwargs": {"temperature": 0.5}}),
]


def _reward(function: Callable[..., float]) -> dict[str, Callable]:
    """Settings with a reward of one prompt, response and row."""

    def reward(prompts, completions, **columns) -> list[float]:
        names = [name for name, values in columns.items() if isinstance(values, list)]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*(columns[n] for n in names), strict=True)]
        texts = [(p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]
        return [float(function(*text, row)) for text, row in zip(texts, rows, strict=True)]

    return {"reward_funcs": lambda: reward}


def _other_optimizer(trainer) -> None:
    trainer.optimizer = torch.optim.AdamW(copy.deepcopy(trainer.model).parameters(), lr=1e-3)


def _greedy(trainer) -> None:
    trainer.model.generate = functools.partial(trainer.model.generate, do_sample=False)


def _shared_embedding(trainer) -> None:
    trainer.ref_model.model.embed_tokens = trainer.model.model.embed_tokens


_IN_TAGS = _reward(lambda prompt, text, row: "<answer>" in text)
STEPS = [
    *(Fault("rewards-equal", "policy", options=_reward(lambda p, t, r, v=value: v), steps=3) for value in (0, 1, 0.3)),
    Fault("rewards-equal", "policy", options=_reward(lambda prompt, text, row: len(prompt)), steps=3),
    Fault("parser-never-matches", "policy", options=_IN_TAGS, rows=mapped(word_of_reference), steps=3),
    Fault("identical-samples", "policy", _greedy, steps=3, only="trl"),
    Fault("identical-samples", "policy", options={"generation_kwargs": {"top_k": 1}}, steps=3, only="trl_ext"),
    Fault("responses-truncated", "policy", options={"max_completion_length": 2}, steps=3),
    Fault("loss-is-zero", "policy", steps=3, only="trl_ext"),
    Fault("start-off-reference", "policy", lambda trainer: noisy(trainer.ref_model, 4.0), steps=3),
    Fault("ratio-not-one", "policy", _dropout(0.5), options={"num_iterations": 2}, steps=3),
    Fault("reference-moves", "policy", _shared_embedding, steps=3),
    Fault("reference-moves", "preference", options={"learning_rate": 1e-13}, steps=3),
    Fault("weights-do-not-move", "policy", options={**_reward(lambda p, t, r: 0.3), "beta": 0.0}, steps=3),
    Fault("weights-do-not-move", "sft", _other_optimizer, steps=3),
]
FAULTS = [*TOKENS, *ROWS, *MODELS, *STEPS]
# An untrained model is no judge of what a text or another checkpoint is, and few of its responses are right.
ON_TOY = {"text-unknown", "template-of-another-model", "start-off-reference", "parser-never-matches"}


def plants() -> list[tuple[str, Fault, str, bool, Callable[[], str]]]:
    """Each fault in each kind of trainer, of TRL and of this library, on alternating models."""
    found = []
    for index, fault in enumerate(FAULTS):
        for kind in fault.kinds.split():
            other = stand_in if kind == "policy" else random_llama
            for own in (False, True):
                if fault.only != ("trl" if own else "trl_ext"):
                    model = toy if own == bool(index % 2) or fault.name in ON_TOY else other
                    name = f"{index}-{fault.name}-{kind}-{'trl_ext' if own else 'trl'}-{model.__name__}"
                    found.append((name, fault, kind, own, model))
    return found
