"""A trainer, or the folder of a run, as the checks see it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from trl_ext.doctor.rows import (
    COMPARED_ROWS,
    SAMPLED_ROWS,
    as_text,
    is_text,
    length_of,
    media_columns,
    plain_text,
    read_rows,
)
from trl_ext.rollouts.generation import end_token_ids, prompt_tokens

# The class in a trainer's ancestry -> the kind of the trainer. TRL's and this library's share these names.
_KINDS = {
    "SFTTrainer": "sft",
    "DPOTrainer": "preference",
    "RewardTrainer": "reward",
    "GRPOTrainer": "policy",
    "RLOOTrainer": "policy",
}


@dataclasses.dataclass
class Example:
    """A sequence as the model will see it.

    Attributes:
        ids: its tokens, without padding.
        learned: for each token, whether the loss is taken on it.
        cut: whether it was cut at a limit.
        row: the row of the dataset that it comes from.
        side: `chosen` or `rejected` for a response of a pair.
    """

    ids: list[int]
    learned: list[bool]
    cut: bool
    row: dict[str, Any]
    side: str = ""


@dataclasses.dataclass
class Sampled:
    """A response that the trainer sampled in a watched step.

    Attributes:
        step: the step after which it was read.
        prompt: the prompt as the dataset has it.
        text: the response.
        rewards: its rewards, by the name of the reward function; NaN where one gave none.
        reward: their weighted sum.
    """

    step: int
    prompt: Any
    text: str
    rewards: dict[str, float]
    reward: float

    @property
    def key(self) -> str:
        """Tells prompts apart, and finds their rows."""
        return as_text(self.prompt)


class Patient:
    """A built trainer, of TRL or of this library, and what it logged in its first steps.

    Attributes:
        trainer: the trainer; None for the folder of a run.
        args: its configuration.
        kind: `sft`, `preference`, `reward`, `policy` or `other`.
        logs: rows of metrics of training steps, in order, each with its `step`.
        moved: largest change of the watched weights of `policy` and `reference` over the watched steps.
        max_steps: the length of the run in steps, if the trainer has computed it.
        responses: the responses to held-out prompts that a run wrote.
        sampled: the responses that were sampled in the watched steps.
    """

    # Columns that may hold a reference answer; the first that is there counts.
    answer_columns = ("answer", "solution", "ground_truth", "target", "reference_response_text")

    def __init__(self, trainer: Any = None, *, args: Any = None, kind: str | None = None, logs=()):
        self.trainer = trainer
        self.args = args if trainer is None else trainer.args
        names = [name.__name__ for name in type(trainer).__mro__]
        self.kind = kind or next((_KINDS[name] for name in names if name in _KINDS), "other")
        self.logs: list[dict[str, Any]] = list(logs)
        self.moved: dict[str, float] = {}
        self.max_steps: int | None = None
        self.responses: list[str] = []
        self.sampled: list[Sampled] = []

    def setting(self, name: str, default: Any = None) -> Any:
        value = getattr(self.args, name, None)
        return default if value is None else value

    # ---- Model ----

    @property
    def model(self):
        return self.trainer.model

    @property
    def reference(self):
        return getattr(self.trainer, "ref_model", None)

    @property
    def is_adapter(self) -> bool:
        return bool(getattr(self.model, "peft_config", None))

    @cached_property
    def trainable(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    @property
    def batch_size(self) -> int:
        return min(self.setting("per_device_train_batch_size", 4), 8)

    def require_whole_model(self) -> None:
        """Raise ValueError if this process has only a part of the model."""
        accelerator = self.trainer.accelerator
        if str(accelerator.distributed_type).rpartition(".")[2] in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            raise ValueError("each process has only a part of the model")

    # ---- Tokens ----

    @cached_property
    def tokenizer(self):
        processor = self.trainer.processing_class
        return getattr(processor, "tokenizer", processor)

    @cached_property
    def stop_ids(self) -> set[int]:
        """Tokens that end a response in generation: the model's, and the tokenizer's, which training adds to them."""
        return end_token_ids(self.model, self.tokenizer)

    @cached_property
    def special_ids(self) -> set[int]:
        """Also those that have no role, such as the end of a turn beside another end token."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {*self.tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}

    def tokens(self, example: Example) -> list[tuple[str, bool]]:
        texts = [self.tokenizer.decode([token]) for token in example.ids]
        return list(zip(texts, example.learned, strict=True))

    def decode(self, example: Example) -> str:
        return self.tokenizer.decode(example.ids, skip_special_tokens=False)

    # ---- Data ----

    @property
    def dataset(self):
        return self.trainer.train_dataset

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows spread evenly over the training data; the first ones of a stream.

        Raises:
            ValueError: there is none.
        """
        # Images and videos are decoded when a row is read.
        rows = read_rows(self.dataset, SAMPLED_ROWS if not media_columns(self.dataset) else SAMPLED_ROWS // 6)
        if not rows:
            raise ValueError("no training row can be read")
        return rows

    @cached_property
    def many_rows(self) -> list[dict[str, Any]]:
        """More rows, without those of images and videos. A stream is read once, because its buffer may be large.

        Raises:
            ValueError: the rows differ in more than their texts.
        """
        if media_columns(self.dataset):
            raise ValueError("rows with images or videos are not compared")
        return read_rows(self.dataset, COMPARED_ROWS) if hasattr(self.dataset, "__len__") else self.rows

    @cached_property
    def held_out_rows(self) -> list[dict[str, Any]]:
        held_out = self.trainer.eval_dataset
        parts = held_out.values() if isinstance(held_out, dict) else [held_out]
        return [
            row
            for part in parts
            if part is not None and not media_columns(part)
            for row in read_rows(part, COMPARED_ROWS)
        ]

    @property
    def is_packed(self) -> bool:
        """Whether one row of the dataset holds several documents, or one batch is one row."""
        return bool(self.setting("packing") is True or self.setting("padding_free", False))

    @cached_property
    def answers(self) -> dict[str, str]:
        """The reference answer of each prompt, as text; empty if the rows have none."""
        name = next((name for name in self.answer_columns if name in self.many_rows[0]), None)
        rows = [row for row in self.many_rows if name and row.get("prompt") and row[name]]
        return {as_text(row["prompt"]): plain_text(row[name]) for row in rows}

    @cached_property
    def examples(self) -> list[Example]:
        """The sampled rows through the trainer's own collator; prompts as they are sampled from for a policy.

        Raises:
            ValueError: the collator joins rows, or names their tokens in its own way.
        """
        if self.kind == "policy":
            limit = self.setting("max_prompt_tokens", self.setting("max_prompt_length"))
            ids = [prompt_tokens(self.tokenizer, row["prompt"], limit) for row in self.rows]
            return [Example(one, [False] * len(one), False, row) for one, row in zip(ids, self.rows, strict=True)]
        # In small batches, so that there is padding. A collator that joins rows gets one at a time.
        size = 1 if self.is_packed else 4
        batches = [self.rows[start : start + size] for start in range(0, len(self.rows), size)]
        examples = [example for rows in batches for example in self._collated(rows)]
        if self.rows and not examples:
            raise ValueError("the collator gives no row of tokens by itself")
        return examples

    def _collated(self, rows: list[dict[str, Any]]) -> Iterator[Example]:
        plain = [{name: value for name, value in row.items() if not is_text(value)} for row in rows]
        batch = self.trainer.data_collator(plain if any(name.endswith("ids") for name in plain[0]) else rows)
        if "input_ids" not in batch:
            return
        if self.is_packed:
            yield from self._documents(batch, rows[0])
            return
        mask = batch.get("completion_mask")
        learned = batch["labels"].ne(-100) if "labels" in batch else mask
        for index, ids in enumerate(batch["input_ids"]):
            row = rows[index % len(rows)]
            attended = batch["attention_mask"][index].bool() if "attention_mask" in batch else torch.ones_like(ids) > 0
            side = "" if len(batch["input_ids"]) == len(rows) else "chosen" if index < len(rows) else "rejected"
            length = length_of(row, f"{side or 'chosen'}_ids")
            known = min(length, len(ids)) if length else int(attended.sum())
            at = slice(len(ids) - known, None) if not attended[0] else slice(0, known)
            on = attended[at] if learned is None else learned[index][at].bool() & attended[at]
            yield Example(ids[at].tolist(), on.tolist(), self._is_cut(row, length, known), row, side)

    def _documents(self, batch: dict[str, Any], row: dict[str, Any]) -> Iterator[Example]:
        """The documents that were joined into one row; their positions begin at 0."""
        if self.kind != "sft" or "position_ids" not in batch or "labels" not in batch:
            raise ValueError("the batches do not show where a document ends")
        starts = batch["position_ids"][0].eq(0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            ids, labels = batch["input_ids"][0, start:end].tolist(), batch["labels"][0, start:end].tolist()
            # The first token of a document has no label, because the one before it belongs to another.
            learned = [label != -100 for label in labels]
            yield Example(ids, learned, len(ids) >= (self.setting("max_length") or math.inf), row)

    def _is_cut(self, row: dict[str, Any], length: int, known: int) -> bool:
        limit = self.setting("max_response_tokens")
        sides = [row[name] for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]
        if limit and "prompt_ids" in row and any(len(side) >= limit for side in sides):
            return True
        limit = self.setting("max_length")
        return length > known or bool(limit and known >= limit and self.kind != "reward")

    # ---- Steps ----

    @property
    def planned_steps(self) -> int | None:
        """The length of the run; None if it cannot be computed from the settings."""
        if self.max_steps or self.setting("max_steps", -1) > 0:
            return self.max_steps or self.args.max_steps
        if self.trainer is None or self.kind == "policy" or not hasattr(self.dataset, "__len__"):
            return None
        processes = self.trainer.accelerator.num_processes
        batches = math.ceil(len(self.dataset) / (self.setting("per_device_train_batch_size", 8) * processes))
        per_epoch = max(math.ceil(batches / self.setting("gradient_accumulation_steps", 1)), 1)
        return math.ceil(per_epoch * self.setting("num_train_epochs", 3))

    def logged(self, name: str) -> list[float]:
        """The values of a metric, one per row that has it; null in a file stands for a number that is not finite."""
        values = [row[name] for row in self.logs if name in row]
        return [math.nan if value is None else float(value) for value in values]

    @property
    def updates(self) -> list[float]:
        """The learning rates of the logged updates; in float16, steps without a finite gradient are skipped."""
        rows = [row for row in self.logs if row.get("learning_rate") and row.get("grad_norm", 0.0) is not None]
        return [row["learning_rate"] for row in rows if math.isfinite(row.get("grad_norm", 0.0))]
