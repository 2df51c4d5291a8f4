"""A trainer, or the folder of a run, as the checks see it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections import namedtuple
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from trl_ext.rollouts.generation import end_token_ids, prompt_tokens

# Rows that are read as tokens, rows that are only compared, and those whose order is.
_READ, _COMPARED, _ORDERED = 48, 4000, 1000
# The class in a trainer's ancestry -> the kind of the trainer. TRL's and this library's share these names.
_KINDS = {"SFTTrainer": "sft", "DPOTrainer": "preference", "RewardTrainer": "reward"}
_KINDS |= {"GRPOTrainer": "policy", "RLOOTrainer": "policy"}
# Columns that may hold a reference answer; the first that is there counts.
_ANSWERS = ("answer", "solution", "ground_truth", "target", "reference_response_text")


# A row, or one side of a pair, as the model will see it: its tokens, and whether the loss is taken on each.
Example = namedtuple("Example", "ids learned truncated row side", defaults=[""])
# A response sampled in a watched step, with its rewards by function; NaN or None where one gave none.
Sampled = namedtuple("Sampled", "step prompt text rewards")


class Patient:
    """A built trainer, of TRL or of this library, and what it logged in its first steps; or the folder of a run.

    `kind` is `sft`, `preference`, `reward`, `policy` or `other`; `logs` are rows of metrics with their `step`, none
    before training; `moved` has the largest change of the watched weights of `policy` and `reference`; `sampled` are
    the responses of the watched steps.
    """

    def __init__(self, trainer: Any = None, *, args: Any = None, kind: str | None = None, logs=(), loader: Any = None):
        self.trainer, self.loader = trainer, loader
        self.args = args if trainer is None else trainer.args
        names = [name.__name__ for name in type(trainer).__mro__]
        self.kind = kind or next((_KINDS[name] for name in names if name in _KINDS), "other")
        self.logs, self.moved, self.sampled = list(logs), {}, []
        self.model, self.reference = getattr(trainer, "model", None), getattr(trainer, "ref_model", None)
        processor = getattr(trainer, "processing_class", None)
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.is_adapter = bool(getattr(self.model, "peft_config", None))
        self.has_length = hasattr(dataset := getattr(trainer, "train_dataset", None), "__len__")
        columns = getattr(dataset, "features", None) or {}
        # Images, videos and sounds are decoded when a row is read.
        self.has_media = bool(re.search(r"\b(Image|Video|Audio)\(|'images?':", repr(columns)))
        # Whether one row of the dataset holds several documents, or one batch is one row.
        self.is_packed = bool(self.setting("packing") is True or self.setting("padding_free", False))

    def setting(self, name: str, default: Any = None) -> Any:
        value = getattr(self.args, name, None)
        return default if value is None else value

    trainable = cached_property(lambda self: [weight for weight in self.model.parameters() if weight.requires_grad])
    # Tokens that end a response in generation: the model's, and the tokenizer's, which training adds to them.
    stop_ids = cached_property(lambda self: end_token_ids(self.model, self.tokenizer))

    @cached_property
    def special_ids(self) -> set[int]:
        """Also those that have no role, such as the end of a turn beside another end token."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {*self.tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}

    def tokens(self, example: Example) -> list[tuple[str, bool]]:
        return [(self.tokenizer.decode([one]), on) for one, on in zip(example.ids, example.learned, strict=True)]

    def read(self, count: int, order: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Rows spread evenly over the training data; few of a stream, whose buffer may be large, or of images."""
        rows = self.trainer.train_dataset
        if self.has_length:
            order = range(len(rows)) if order is None else order
            count = min(count, len(order), _READ // 6 if self.has_media else count)
            rows = [rows[order[index * len(order) // count]] for index in range(count)]
        if not (rows := list(itertools.islice(rows, count))):
            raise ValueError("no training row can be read")
        return rows

    rows = cached_property(lambda self: self.read(_READ))

    @cached_property
    def many_rows(self) -> list[dict[str, Any]]:
        if self.has_media:
            raise ValueError("rows with images or videos are not compared")
        return self.read(_COMPARED) if self.has_length else self.rows

    @cached_property
    def rows_as_read(self) -> list[dict[str, Any]]:
        """Rows spread evenly over the first epoch, in the order in which training reads them."""
        if not self.has_length and self.kind == "policy" and self.setting("shuffle_dataset", True):
            raise ValueError("the trainer shuffles the stream")
        if self.has_media or not self.has_length:
            return self.rows
        batches = (self.loader or self.trainer.get_train_dataloader()).batch_sampler
        # accelerate shares the batches of one sampler among the processes.
        while hasattr(batches, "batch_sampler"):
            batches = batches.batch_sampler
        # A copy, because the order of the training must not change.
        sampler = copy.copy(getattr(batches, "sampler", batches))
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            sampler.generator = generator.clone_state()
        read = (one if isinstance(one, list) else [one] for one in itertools.islice(sampler, 200_000))
        # Online trainers read a prompt once for each of its responses.
        return self.read(_ORDERED, list(dict.fromkeys(itertools.chain.from_iterable(read))))

    @cached_property
    def answers(self) -> dict[str, str]:
        """The reference answer of each prompt, as text; empty if the rows have none."""
        name = next((name for name in _ANSWERS if name in self.many_rows[0]), "")
        rows = [row for row in self.many_rows if row.get("prompt") and row.get(name)]
        return {as_text(row["prompt"]): plain_text(row[name]) for row in rows}

    @cached_property
    def examples(self) -> list[Example]:
        """The sampled rows through the trainer's own collator; prompts as they are sampled from for a policy."""
        if self.kind == "policy":
            limit = self.setting("max_prompt_tokens", self.setting("max_prompt_length"))
            ids = [(prompt_tokens(self.tokenizer, row["prompt"], limit), row) for row in self.rows]
            return [Example(one, [False] * len(one), False, row) for one, row in ids]
        # In small batches, so that there is padding. A collator that joins rows gets one at a time.
        size = 1 if self.is_packed else 4
        batches = [self.rows[start : start + size] for start in range(0, len(self.rows), size)]
        if not (examples := [example for rows in batches for example in self._collated(rows)]):
            raise ValueError("the collator gives no row of tokens by itself")
        return examples

    def _collated(self, rows: list[dict[str, Any]]) -> Iterator[Example]:
        first = rows[0].items()
        texts = [n for n, v in first if isinstance(v[0] if isinstance(v, list) and v else v, str | dict)]
        plain = [{name: value for name, value in row.items() if name not in texts} for row in rows]
        batch = self.trainer.data_collator(plain if any(name.endswith("ids") for name in plain[0]) else rows)
        if "input_ids" not in batch:
            return
        if self.is_packed:
            yield from self._documents(batch, rows[0])
            return
        limit = self.setting("max_length", math.inf)
        learned = batch["labels"].ne(-100) if "labels" in batch else batch.get("completion_mask")
        for index, ids in enumerate(batch["input_ids"]):
            row = rows[index % len(rows)]
            attended = batch["attention_mask"][index].bool() if "attention_mask" in batch else torch.ones_like(ids) > 0
            side = "" if len(batch["input_ids"]) == len(rows) else "chosen" if index < len(rows) else "rejected"
            # Tokens of the row before the collator truncates it; 0 if unknown.
            name = f"{side or 'chosen'}_ids"
            whole = len([*row.get("prompt_ids", ()), *row[name]] if name in row else row.get("input_ids", ()))
            known = min(whole, len(ids)) if whole else int(attended.sum())
            at = slice(len(ids) - known, None) if not attended[0] else slice(0, known)
            on = attended[at] if learned is None else learned[index][at].bool() & attended[at]
            sides = [row.get(name, ()) for name in ("chosen_ids", "rejected_ids", "completion_ids")]
            truncated = whole > known or (known >= limit and self.kind != "reward")
            truncated |= "prompt_ids" in row and max(map(len, sides)) >= self.setting("max_response_tokens", math.inf)
            yield Example(ids[at].tolist(), on.tolist(), truncated, row, side)

    def _documents(self, batch: dict[str, Any], row: dict[str, Any]) -> Iterator[Example]:
        """The documents that were joined into one row; their positions begin at 0."""
        if self.kind != "sft" or "position_ids" not in batch or "labels" not in batch:
            raise ValueError("the batches do not show where a document ends")
        starts = batch["position_ids"][0].eq(0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            # The first token of a document has no label, because the one before it belongs to another.
            ids, learned = batch["input_ids"][0, start:end].tolist(), batch["labels"][0, start:end].ne(-100).tolist()
            yield Example(ids, learned, len(ids) >= (self.setting("max_length") or math.inf), row)

    def logged(self, name: str) -> list[float]:
        """The values of a metric, one per row that has it; null in a file stands for a number that is not finite."""
        values = [row[name] for row in self.logs if name in row]
        return [math.nan if value is None else float(value) for value in values]

    @property
    def first_step(self) -> dict[str, float]:
        """What the first step logged, before any update; empty if it is not among the logged ones."""
        row = self.logs[0] if self.logs and self.logs[0].get("step") == 1 else {}
        return {name: value for name, value in row.items() if isinstance(value, int | float)}

    @property
    def updates(self) -> list[float]:
        """The learning rates of the logged updates; in float16, steps without a finite gradient are skipped."""
        rows = [row for row in self.logs if row.get("learning_rate") and row.get("grad_norm", 0.0) is not None]
        return [row["learning_rate"] for row in rows if math.isfinite(row.get("grad_norm", 0.0))]


def as_text(value: Any) -> str:
    """A value of a row as text to compare, without the keys that `datasets` adds with None, in one order."""
    if not isinstance(value, list):
        return str(value)
    plain = [{k: v for k, v in one.items() if v is not None} if isinstance(one, dict) else one for one in value]
    return json.dumps(plain, sort_keys=True, default=str)


def plain_text(value: Any) -> str:
    """What messages or a text say."""
    if isinstance(value, list):
        return "\n".join(str(message.get("content") or "") for message in value if isinstance(message, dict))
    return str(value)
