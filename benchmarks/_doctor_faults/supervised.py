"""Faults of trainers on given responses: SFT, preferences and reward models; built policies share some of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch
from datasets import Dataset

import trl_ext
from benchmarks._doctor_faults.planting import Fault, RunFault, change_columns, change_setting
from benchmarks._doctor_runs import _lora, mapped

# ---- In built trainers ----


def _labels(change: Callable):
    """Change what is learned in each batch: `change(ids, mask)` edits the mask in place."""

    def plant(trainer, patch):
        collate = trainer.data_collator

        def collated(rows):
            batch = collate(rows)
            name, off = ("labels", -100) if "labels" in batch else ("completion_mask", 0)
            batch[name] = batch[name].masked_fill(change(batch["input_ids"], trainer.processing_class), off)
            return batch

        patch(trainer, "data_collator", collated)

    return plant


def _frozen(trainer, patch):
    for weight in trainer.model.parameters():
        patch(weight, "requires_grad", False)


def _bfloat16(trainer, patch):
    patch(trainer.args, "learning_rate", 1e-6)
    for weight in trainer.model.parameters():
        patch(weight, "data", weight.data.bfloat16())


def _dropout(trainer, patch):
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            patch(module, "attention_dropout", 0.1)


def _unlearned_prompt(trainer, patch):
    collate = trainer.data_collator

    def collated(rows):
        batch = collate(rows)
        padding = batch["attention_mask"] == 0
        if "labels" in batch:
            batch["labels"] = batch["input_ids"].masked_fill(padding, -100)
        else:
            batch["completion_mask"] = batch["attention_mask"].clone()
        return batch

    patch(trainer, "data_collator", collated)


# The token <|im_end|>.
_END = 1


def _without_end(name: str, ids: str | None = None):
    """Cut a column before the last end of a turn in `ids`, which may be followed by a line break."""

    def edit(row):
        last = max(index for index, token in enumerate(row[ids or name]) if token == _END)
        return row[name][:last]

    return edit


def _other_end(trainer, patch):
    """The tokenizer's own end token is not that of the template, as with many base models."""
    tokenizer = trainer.processing_class
    patch(trainer.model.generation_config, "eos_token_id", tokenizer.pad_token_id)
    patch(tokenizer, "eos_token", tokenizer.pad_token)


def _repeated(trainer, patch):
    patch(trainer, "train_dataset", trainer.train_dataset.select([*range(15)] * 4))


def _shortened(row):
    return row["chosen_ids"][:2]


def _truncated(trainer, patch):
    """As if the limit was lower when the data was prepared."""
    own = hasattr(trainer.args, "max_response_tokens")
    patch(trainer.args, "max_response_tokens" if own else "max_length", 3 if own else 12)
    if not own:
        patch(trainer.data_collator, "max_length", 12)


BUILT = [
    Fault("unknown-tokens", "policy preference", change_setting("processing_class", "unk_token", value=".")),
    Fault(
        "end-token-missing",
        "preference",
        change_columns(chosen_ids=_without_end("chosen_ids"), rejected_ids=_without_end("rejected_ids")),
    ),
    Fault(
        "end-token-missing",
        "sft",
        change_columns(input_ids=_without_end("input_ids"), labels=_without_end("labels", "input_ids")),
    ),
    Fault("end-token-masked", "sft preference", _labels(lambda ids, tokenizer: ids == tokenizer.eos_token_id)),
    Fault("end-token-not-stopped-at", "sft preference", _other_end),
    Fault("nothing-learned-in-rows", "sft preference", _labels(lambda ids, _: torch.ones_like(ids).bool())),
    Fault("loss-on-prompt", "sft preference", _unlearned_prompt),
    Fault("truncated-rows", "preference", _truncated),
    Fault("chosen-equals-rejected", "preference reward", change_columns(rejected_ids=lambda row: row["chosen_ids"])),
    Fault("length-predicts-label", "preference reward", change_columns(rejected_ids=_shortened)),
    Fault("leaking-prompts", "preference reward", lambda t, patch: patch(t, "eval_dataset", t.train_dataset)),
    Fault("duplicate-rows", "sft preference reward", _repeated),
    Fault("nothing-trainable", "sft preference reward policy", _frozen),
    Fault("reference-is-policy", "preference policy", lambda t, patch: patch(t, "ref_model", t.model)),
    Fault("dropout-on", "preference policy", _dropout),
    Fault("updates-round-to-nothing", "sft preference reward policy", _bfloat16),
    Fault("learning-rate-off", "sft preference reward policy", change_setting("args", "learning_rate", value=1e-9)),
    Fault("warmup-outlasts-run", "sft preference reward policy", change_setting("args", "warmup_steps", value=50)),
    Fault("beta-off", "preference policy", change_setting("args", "beta", value=100.0)),
]


# ---- In whole runs ----


def _other_optimizer(trainer) -> None:
    trainer.optimizer = torch.optim.AdamW(copy.deepcopy(trainer.model).parameters(), lr=1e-3)


def _zero_head(trainer) -> None:
    trainer.model.score.weight.data.zero_()
    trainer.model.score.weight.requires_grad_(False)


def _reference_is_policy(trainer) -> None:
    trainer.ref_model = trainer.model


def said(row, name: str) -> str:
    return row[name][-1]["content"]


def _garbage(row):
    letters = random.Random(said(row, "chosen")).choices("qxzjkvw", k=30)
    return {"rejected": [{"role": "assistant", "content": " ".join(letters)}]}


def _rendered(row):
    return {"prompt": [{"role": "user", "content": f"<|im_start|>user\n{said(row, 'prompt')}"}]}


def _text(row):
    """Plain text, with the space at the end of the prompt."""
    sides = [name for name in ("completion", "chosen", "rejected") if name in row]
    return {"prompt": f"Q: {said(row, 'prompt')} A: ", **{name: said(row, name) for name in sides}}


def _with_system(row):
    return {"prompt": [{"role": "system", "content": "Be brief."}, *row["prompt"]]}


def swapped(row):
    return {"chosen": row["rejected"], "rejected": row["chosen"]}


def _scored(rows):
    """Every fifth label is swapped, and the scores are not."""
    scored = [{**row, "score_chosen": 4.0, "score_rejected": 2.0} for row in rows]
    turned = {"score_chosen": 2.0, "score_rejected": 4.0}
    return Dataset.from_list(
        [{**row, **swapped(row), **turned} if i % 5 == 0 else row for i, row in enumerate(scored)]
    )


def _both_ways(rows):
    return Dataset.from_list([*rows, *({**row, **swapped(row)} for row in list(rows)[:10])])


def part_swapped(count: int, share: float, seed: int = 0) -> Dataset:
    """Pairs of the embedded benchmark, of which one part in a row has its labels swapped."""
    rows = list(trl_ext.load_benchmark("toy")["train_prefs"])
    random.Random(seed).shuffle(rows)
    first = random.Random(seed + 1).randrange(count - int(share * count) + 1)
    turned = range(first, first + int(share * count))
    marked = [{**row, "swapped": index in turned} for index, row in enumerate(rows[:count])]
    return Dataset.from_list([{**row, **swapped(row)} if row["swapped"] else row for row in marked])


RUNS = [
    RunFault("policy-equals-reference", "preference", plant=_reference_is_policy, only="trl"),
    RunFault("policy-equals-reference", "preference", {"learning_rate": 1e-13}),
    RunFault("preferences-satisfied", "preference", rows=mapped(_garbage)),
    RunFault("ipo-target-unreachable", "preference", {"loss_type": ["ipo"], "beta": 0.01}),
    RunFault(
        "adapter-misses-layers", "preference", {"peft_config": lambda: _lora("CAUSAL_LM", layers_to_transform=[0])}
    ),
    RunFault("adapter-without-effect", "preference", {"peft_config": lambda: _lora("CAUSAL_LM", lora_alpha=0)}),
    RunFault("template-doubled", "preference", rows=mapped(_rendered)),
    RunFault("prompt-tokens-differ", "preference", rows=mapped(_text), held_out=mapped(_text), only="trl"),
    RunFault("held-out-rows-differ", "preference", held_out=mapped(_with_system)),
    RunFault("labels-against-scores", "preference", rows=_scored),
    RunFault("labels-against-scores", "reward", rows=_scored),
    RunFault("pairs-contradict", "preference", rows=_both_ways),
    RunFault("labels-swapped-in-part", "reward", rows=lambda rows: part_swapped(2000, 0.2)),
    RunFault("reward-head-frozen", "reward", {"peft_config": _lora}, only="trl"),
    RunFault("scores-all-equal", "reward", plant=_zero_head),
    RunFault("gradient-always-clipped", "sft", {"max_grad_norm": 1e-4}),
    RunFault("weights-do-not-move", "sft", plant=_other_optimizer),
    RunFault("prompt-tokens-differ", "sft", rows=mapped(_text), only="trl"),
]
