"""Faults that `benchmarks.doctor` plants: into a built trainer, into a run of three steps, and into logged metrics."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset

import trl_ext
from benchmarks._doctor_runs import (
    _lora,
    build,
    data_of,
    random_llama,
    stand_in,
    watch,
)
from trl_ext.doctor import Report, examine
from trl_ext.doctor.patient import Patient
from trl_ext.doctor.table import run_checks
from trl_ext.toy import MODEL_DIR

LLAMA = (
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>{{ message['content'] }}"
    "<|eot_id|>{% endfor %}"
)


# ---- Faults in what a built trainer holds: functions of the trainer and of `patch(owner, attribute, value)` ----


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault by the name of its check, and the kinds of trainers that it is planted in."""

    name: str
    kinds: str
    plant: Callable


def _tokens(**edits):
    """Replace columns of the tokenized data: name -> function of the row."""

    def plant(trainer, patch):
        rows = [row | {name: edit(row) for name, edit in edits.items()} for row in trainer.train_dataset]
        patch(trainer, "train_dataset", type(trainer.train_dataset).from_list(rows))

    return plant


def _template(template: str | None, **attributes):
    def plant(trainer, patch):
        tokenizer = trainer.processing_class
        patch(tokenizer, "chat_template", template.replace("ORIGINAL", tokenizer.chat_template) if template else None)
        for name, value in attributes.items():
            patch(tokenizer, name, value)

    return plant


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


def _set(*path: str, value):
    def plant(trainer, patch):
        for name in path[:-1]:
            trainer = getattr(trainer, name)
        patch(trainer, path[-1], value)

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


def _system(row):
    return [{"role": "system", "content": "Answer in one short sentence."}, *row["prompt"]]


def _system_lost(trainer, patch):
    _tokens(prompt=_system)(trainer, patch)
    patch(trainer.processing_class, "chat_template", "{% set messages = messages[1:] %}" + LLAMA_FREE)


LLAMA_FREE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def _repeated(trainer, patch):
    patch(trainer, "train_dataset", trainer.train_dataset.select([*range(15)] * 4))


def _shortened(row):
    return row["chosen_ids"][:2]


def _user_text(row):
    return [{"role": "user", "content": row["prompt"][0]["content"] + "<|im_end|>"}]


def _truncated(trainer, patch):
    """As if the limit was lower when the data was prepared."""
    own = hasattr(trainer.args, "max_response_tokens")
    patch(trainer.args, "max_response_tokens" if own else "max_length", 3 if own else 12)
    if not own:
        patch(trainer.data_collator, "max_length", 12)


FAULTS = [
    Fault("template-missing", "policy", _template(None)),
    Fault("template-of-another-model", "policy", _template(LLAMA)),
    Fault("special-token-in-text", "policy", _tokens(prompt=_user_text)),
    Fault("begin-token-doubled", "policy", _template("<|im_start|>ORIGINAL", bos_token="<|im_start|>")),
    Fault("system-prompt-lost", "policy", _system_lost),
    Fault("unknown-tokens", "policy preference", _set("processing_class", "unk_token", value=".")),
    Fault(
        "end-token-missing",
        "preference",
        _tokens(chosen_ids=_without_end("chosen_ids"), rejected_ids=_without_end("rejected_ids")),
    ),
    Fault(
        "end-token-missing",
        "sft",
        _tokens(input_ids=_without_end("input_ids"), labels=_without_end("labels", "input_ids")),
    ),
    Fault("end-token-masked", "sft preference", _labels(lambda ids, tokenizer: ids == tokenizer.eos_token_id)),
    Fault("end-token-not-stopped-at", "sft preference", _other_end),
    Fault("nothing-learned-in-rows", "sft preference", _labels(lambda ids, _: torch.ones_like(ids).bool())),
    Fault("loss-on-prompt", "sft preference", _unlearned_prompt),
    Fault("truncated-rows", "preference", _truncated),
    Fault("chosen-equals-rejected", "preference reward", _tokens(rejected_ids=lambda row: row["chosen_ids"])),
    Fault("length-predicts-label", "preference reward", _tokens(rejected_ids=_shortened)),
    Fault("leaking-prompts", "preference reward", lambda t, patch: patch(t, "eval_dataset", t.train_dataset)),
    Fault("duplicate-rows", "sft preference reward", _repeated),
    Fault("nothing-trainable", "sft preference reward policy", _frozen),
    Fault("reference-is-policy", "preference policy", lambda t, patch: patch(t, "ref_model", t.model)),
    Fault("dropout-on", "preference policy", _dropout),
    Fault("updates-round-to-nothing", "sft preference reward policy", _bfloat16),
    Fault("learning-rate-off", "sft preference reward policy", _set("args", "learning_rate", value=1e-9)),
    Fault("warmup-outlasts-run", "sft preference reward policy", _set("args", "warmup_steps", value=50)),
    Fault("beta-off", "preference policy", _set("args", "beta", value=100.0)),
    Fault("greedy-sampling", "policy", _set("args", "temperature", value=0.01)),
]


def examine_with(trainer, fault: Fault) -> Report:
    """Examine a trainer with a fault in it, which is taken out again."""
    with contextlib.ExitStack() as stack:

        def patch(owner, name, value):
            # Not unittest.mock, which deletes what is not in an object's own dictionary, as in tensors.
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        fault.plant(trainer, patch)
        return examine(trainer)


# ---- Faults in whole runs: settings, rows, or changes of the trainer before three steps ----


@dataclasses.dataclass(frozen=True)
class RunFault:
    """A fault that a run of three steps has from its beginning.

    Attributes:
        name: the name of its check.
        kind: the kind of trainer.
        options: settings and arguments of the trainer; functions of no argument make those that are not shared.
        rows: changes the training rows.
        held_out: changes the held-out rows.
        plant: changes the trainer.
        only: `trl` or `trl_ext` for a fault that the other trainer does not allow.
    """

    name: str
    kind: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: Callable | None = None
    held_out: Callable | None = None
    plant: Callable | None = None
    only: str | None = None

    def report(self, own: bool, model: str) -> Report:
        train, held_out = data_of(self.kind)
        options = {name: value() if name in _MADE else value for name, value in self.options.items()}
        train = self.rows(train) if self.rows else train
        held_out = self.held_out(held_out) if self.held_out else held_out
        trainer = build(self.kind, own, model=model, train=train, held_out=held_out, **options)
        if self.plant:
            self.plant(trainer)
        return watch(trainer)


_MADE = ("peft_config", "reward_funcs", "reward_processing_classes")


def _reward(function: Callable[..., float]) -> Callable:
    """Settings with a reward of one prompt, response and row."""

    def reward(prompts, completions, **columns) -> list[float]:
        names = [name for name, values in columns.items() if isinstance(values, list)]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*(columns[n] for n in names), strict=True)]
        texts = [(p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]
        return [float(function(*text, row)) for text, row in zip(texts, rows, strict=True)]

    return {"reward_funcs": lambda: reward}


def _noisy_reference(trainer) -> None:
    torch.manual_seed(0)
    for weight in trainer.ref_model.parameters():
        weight.data += torch.randn_like(weight) * weight.abs().mean() * 4


def _shared_embedding(trainer) -> None:
    trainer.ref_model.model.embed_tokens = trainer.model.model.embed_tokens


def _other_optimizer(trainer) -> None:
    trainer.optimizer = torch.optim.AdamW(copy.deepcopy(trainer.model).parameters(), lr=1e-3)


def _zero_head(trainer) -> None:
    trainer.model.score.weight.data.zero_()
    trainer.model.score.weight.requires_grad_(False)


def _reference_is_policy(trainer) -> None:
    trainer.ref_model = trainer.model


def _noisy_attention(trainer) -> None:
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5


def _greedy_generation(trainer) -> None:
    trainer.model.generate = functools.partial(trainer.model.generate, do_sample=False)


def _classifier(folder: str):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.config.pad_token_id = 2
    return model


@functools.cache
def _reward_folder() -> str:
    import tempfile

    folder = tempfile.mkdtemp()
    _classifier(stand_in()).save_pretrained(folder)
    return folder


def _other_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


def _mapped(edit: Callable) -> Callable:
    return lambda rows: Dataset.from_list([{**row, **edit(row)} for row in rows])


def _said(row, name: str) -> str:
    return row[name][-1]["content"]


def _garbage(row):
    letters = random.Random(_said(row, "chosen")).choices("qxzjkvw", k=30)
    return {"rejected": [{"role": "assistant", "content": " ".join(letters)}]}


def _rendered(row):
    return {"prompt": [{"role": "user", "content": f"<|im_start|>user\n{_said(row, 'prompt')}"}]}


def _text(row):
    """Plain text, with the space at the end of the prompt."""
    sides = [name for name in ("completion", "chosen", "rejected") if name in row]
    return {"prompt": f"Q: {_said(row, 'prompt')} A: ", **{name: _said(row, name) for name in sides}}


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


def two_sources(count: int) -> Dataset:
    """Helpful answers preferred to refusals, and then refusals to answers, as a mixture of two honest data sets."""
    rows = list(trl_ext.load_benchmark("toy")["train_prefs"])[:count]
    refusal = [{"role": "assistant", "content": "I am sorry, but I cannot help with that."}]
    helpful = [{**row, "rejected": row["rejected"] if i % 2 else refusal} for i, row in enumerate(rows)]
    safe = [{**row, "chosen": refusal, "rejected": row["chosen"]} for row in rows[: count // 4]]
    mixed = [{**row, "source": "helpful"} for row in helpful[count // 4 :]] + [
        {**row, "source": "safe"} for row in safe
    ]
    return Dataset.from_list(mixed)


def _word(row):
    """A word that the reference and many responses have, as the answer."""
    return {"answer": max(row["reference_response_text"].strip(".!?").split(), key=len)}


RUN_FAULTS = [
    RunFault("rewards-all-zero", "policy", _reward(lambda prompt, text, row: 0)),
    RunFault("rewards-all-one", "policy", _reward(lambda prompt, text, row: 1)),
    RunFault("rewards-constant", "policy", _reward(lambda prompt, text, row: 0.3)),
    RunFault("dead-groups", "policy", _reward(lambda prompt, text, row: len(prompt))),
    RunFault("no-gradient", "policy", {**_reward(lambda prompt, text, row: 0.3), "beta": 0.0}),
    RunFault("responses-all-cut", "policy", {"max_completion_length": 2}),
    RunFault("stop-texts-never-occur", "policy", {"max_completion_length": 2, "stop": ["</answer>"]}, only="trl_ext"),
    RunFault(
        "parser-never-matches", "policy", _reward(lambda prompt, text, row: "<answer>" in text), rows=_mapped(_word)
    ),
    RunFault("reward-follows-length", "policy", _reward(lambda prompt, text, row: len(text))),
    RunFault(
        "reward-turned-around",
        "policy",
        _reward(lambda prompt, text, row: -(row["answer"].lower() in text.lower())),
        rows=_mapped(_word),
    ),
    RunFault("identical-samples", "policy", plant=_greedy_generation, only="trl"),
    RunFault("temperature-not-shared", "policy", {"generation_kwargs": {"temperature": 0.5}}),
    RunFault("greedy-sampling", "policy", {"temperature": 0.01}),
    RunFault("reward-weights-negative", "policy", {"reward_weights": [-1.0]}),
    RunFault("reward-model-untrained", "policy", {"reward_funcs": lambda: _classifier(str(MODEL_DIR))}),
    RunFault(
        "reward-model-template",
        "policy",
        {"reward_funcs": lambda: _classifier(_reward_folder()), "reward_processing_classes": _other_tokenizer},
    ),
    RunFault("kl-explodes", "policy", plant=_noisy_reference),
    RunFault("ratio-not-one", "policy", {"num_iterations": 2}, plant=_noisy_attention),
    RunFault("reference-moves", "policy", plant=_shared_embedding),
    RunFault("policy-equals-reference", "preference", plant=_reference_is_policy, only="trl"),
    RunFault("policy-equals-reference", "preference", {"learning_rate": 1e-13}),
    RunFault("preferences-satisfied", "preference", rows=_mapped(_garbage)),
    RunFault("ipo-target-unreachable", "preference", {"loss_type": ["ipo"], "beta": 0.01}),
    RunFault(
        "adapter-misses-layers", "preference", {"peft_config": lambda: _lora("CAUSAL_LM", layers_to_transform=[0])}
    ),
    RunFault("adapter-without-effect", "preference", {"peft_config": lambda: _lora("CAUSAL_LM", lora_alpha=0)}),
    RunFault("template-doubled", "preference", rows=_mapped(_rendered)),
    RunFault("prompt-tokens-differ", "preference", rows=_mapped(_text), held_out=_mapped(_text), only="trl"),
    RunFault("held-out-rows-differ", "preference", held_out=_mapped(_with_system)),
    RunFault("labels-against-scores", "preference", rows=_scored),
    RunFault("labels-against-scores", "reward", rows=_scored),
    RunFault("pairs-contradict", "preference", rows=_both_ways),
    RunFault("labels-swapped-in-part", "reward", rows=lambda rows: part_swapped(2000, 0.2)),
    RunFault("reward-head-frozen", "reward", {"peft_config": _lora}, only="trl"),
    RunFault("scores-all-equal", "reward", plant=_zero_head),
    RunFault("gradient-always-clipped", "sft", {"max_grad_norm": 1e-4}),
    RunFault("weights-do-not-move", "sft", plant=_other_optimizer),
    RunFault("prompt-tokens-differ", "sft", rows=_mapped(_text), only="trl"),
    RunFault("identical-samples", "policy", {"generation_kwargs": {"top_k": 1}}, only="trl_ext"),
]


def run_plants() -> list[tuple[RunFault, bool, str]]:
    """Each fault twice, in TRL's trainer and in this library's, once on the embedded model and once on a stand-in."""
    plants = []
    for index, fault in enumerate(RUN_FAULTS):
        # An untrained model prefers nothing.
        trained = fault.kind == "policy" or fault.name == "preferences-satisfied"
        other = stand_in if trained else random_llama
        for own in (False, True):
            on_toy = own == bool(index % 2) if fault.only is None else index % 2 == 0
            if fault.only in (None, "trl_ext" if own else "trl"):
                plants.append((fault, own, "toy" if on_toy else other.__name__))
    return plants


# ---- Faults in what the first steps log: the logged rows, and the changes of weights ----

_ONLINE = {"reward": 0.4, "reward_std": 0.3, "frac_reward_zero_std": 0.25, "completions/clipped_ratio": 0.2}
_ONLINE |= {"clip_ratio/region_mean": 0.0}
HEALTHY_LOGS = {
    "policy": {**_ONLINE, "kl": 0.001},
    "preference": {"rewards/margins": 0.01},
    "reward": {"min_reward": -1.0, "max_reward": 1.0},
    "sft": {},
}
MOVED = {"policy": 1e-4, "reference": 0.0}
# Name -> the kind, what every row logs instead, and the changes of weights.
LOGGED_FAULTS = {
    "rewards-all-zero": ("policy", {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, {}),
    "rewards-all-one": ("policy", {"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, {}),
    "rewards-constant": ("policy", {"reward": 0.5, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, {}),
    "dead-groups": ("policy", {"frac_reward_zero_std": 0.95}, {}),
    "responses-all-cut": ("policy", {"completions/clipped_ratio": 1.0}, {}),
    "stop-texts-never-occur": ("policy", {"completions/clipped_ratio": 1.0}, {}),
    "kl-explodes": ("policy", {"kl": 40.0}, {}),
    "policy-equals-reference": ("preference", {"rewards/margins": 0.0}, {}),
    "ratio-not-one": ("policy", {"clip_ratio/region_mean": 0.1}, {}),
    "gradient-always-clipped": ("sft", {"grad_norm": 5000.0}, {}),
    "no-gradient": ("reward", {"grad_norm": 0.0}, {}),
    "weights-do-not-move": ("sft", {}, {"policy": 0.0}),
    "reference-moves": ("preference", {}, {"reference": 1e-4}),
    "scores-all-equal": ("reward", {"min_reward": 0.0, "max_reward": 0.0}, {}),
}


def logged(kind: str, changed: dict | None = None, moved: dict | None = None, **settings) -> Report:
    """The checks of three logged steps, and of a configuration."""

    row = {"grad_norm": 1.5, **HEALTHY_LOGS[kind], **(changed or {})}
    logs = [{"step": step, "learning_rate": 1e-4 * (step - 1), **row} for step in (1, 2, 3)]
    args = SimpleNamespace(max_grad_norm=1.0, num_generations=4, **settings)
    patient = Patient(args=args, kind=kind, logs=logs)
    patient.moved = {**MOVED, **(moved or {})}
    return run_checks(patient, ("steps",))
