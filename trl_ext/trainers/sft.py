"""`SFTTrainer`: TRL's, with prompt and completion tokenized separately, as in generation, and packed passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers.hf_argparser import HfArg
from trl import SFTConfig as TRLSFTConfig
from trl import SFTTrainer as TRLSFTTrainer

from trl_ext.data import encode_turn
from trl_ext.models import packing_of
from trl_ext.processes import warn_once_per_run
from trl_ext.resilience.training import ResilientTraining
from trl_ext.trainers.context import check_inputs, encoding, map_rows, report_plain_prompts
from trl_ext.trainers.defaults import CommonFields, check_training, configuration, resolve_device_defaults
from trl_ext.trainers.metrics import StepMetrics
from trl_ext.trainers.model_card import WritesModelCard
from trl_ext.trainers.packing import pack_trainer


@dataclass
class SFTConfig(CommonFields, TRLSFTConfig):
    """Configuration of `SFTTrainer`: the fields of `trl.SFTConfig` and `CommonFields`, and those below.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    share_prefixes: bool = HfArg(
        default=True,
        help="Leave padding out of the forward passes and encode common prefixes once, where the model allows "
        "it and a check at the first batch agrees. Not with packing or padding_free, which are TRL's own ways.",
    )

    def __post_init__(self):
        check_training(self, max_length=2)
        resolve_device_defaults(self)
        super().__post_init__()


class SFTTrainer(ResilientTraining, WritesModelCard, StepMetrics, TRLSFTTrainer):
    """Fine-tunes on demonstrations; for a `prompt` with its `completion`, only the completion has a loss.

    Accepts the arguments of `trl.SFTTrainer`, with an `SFTConfig`, and keeps its features. It differs in three
    ways. A completion is tokenized separately from its prompt. TRL tokenizes both as one text, which can change the
    tokens where they meet, so that they differ from those in generation. Forward passes are packed if the model allows
    it; rows, losses and gradients stay the same up to rounding. Held-out losses average over tokens, not batches.

    Raises:
        TypeError: `args` is not an `SFTConfig`.
        ValueError: a dataset is empty, or a row cannot be encoded.
    """

    _tag_names = ["trl", "trl_ext", "sft"]

    def __init__(self, model, args: SFTConfig | None = None, **kwargs: Any):
        args = configuration(self, args, SFTConfig)
        texts = [("prompt", "completion"), ("messages",), ("conversations",), (args.dataset_text_field,)]
        as_they_are = kwargs.get("formatting_func") or (args.dataset_kwargs or {}).get("skip_prepare_dataset")
        model = check_inputs(model, kwargs, [] if as_they_are else texts)
        super().__init__(model, args, **kwargs)
        self.packing = None
        if args.share_prefixes and not self.padding_free and not args.packing:
            self.packing = pack_trainer(self)
        elif (earlier := packing_of(self.model)) is not None:
            earlier.remove()

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        report_plain_prompts(processing_class, dataset)
        columns = {*(dataset.column_names or next(iter(dataset)))}
        if formatting_func is None and {"prompt", "completion"} <= columns and "input_ids" not in columns:
            # TRL's tokenization reads these, and this one does not.
            if unused := {"tools", "chat_template_kwargs"} & columns:
                raise ValueError(f"the column {unused.pop()!r} of the {dataset_name} dataset is not used: remove it")
            tokenizer = {"tokenizer": processing_class}
            dataset = map_rows(dataset, _encode, f"Tokenizing {dataset_name} dataset", fn_kwargs=tokenizer)
            if isinstance(dataset, Dataset) and args.max_length is not None and not packing:
                # TRL truncates rows, and drops those without a completion that is left.
                count = sum(len(mask) > args.max_length for mask in dataset["completion_mask"])
                _report_truncated(count, dataset_name, dataset, f"exceed max_length {args.max_length}")
                if not any(any(mask[: args.max_length]) for mask in dataset["completion_mask"]):
                    raise ValueError(f"no completion of the {dataset_name} dataset is within max_length: raise it")
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        dataset = super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names and args.max_length and not packing:
            # TRL has truncated them without a word.
            count = sum(len(ids) == args.max_length for ids in dataset["input_ids"])
            _report_truncated(
                count, dataset_name, dataset, f"reach max_length {args.max_length}, and may be truncated"
            )
        return dataset

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not (self.model.training or self.padding_free or "shift_labels" in inputs):
            repeated = self.counted(len(inputs["labels"])) == 0
            inputs["labels"] = inputs["labels"].masked_fill(repeated[:, None], -100)
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][..., 1:]
        tokens = labels.ne(-100).sum().double()
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        logged = self._metrics["train" if self.model.training else "eval"]
        # TRL has just logged the means of this micro-batch. They weigh as much as it has tokens.
        means = {name: logged[name].pop() for name in ("entropy", "mean_token_accuracy") if logged.get(name)}
        if not self.model.training:
            means["loss"] = result[0] if return_outputs else result
        # A process may hold repeated rows alone, whose mean is NaN.
        self.add_metrics({name: (torch.where(tokens > 0, mean * tokens, 0.0), tokens) for name, mean in means.items()})
        return result


def _report_truncated(count: int, name: str, dataset: Dataset, what: str) -> None:
    if count:
        warn_once_per_run(f"{name}: {count} of {len(dataset)} rows {what}")


def _encode(row: dict, tokenizer) -> dict:
    """`input_ids` of a row and `completion_mask`, 1 for the tokens of the completion and its end."""
    with encoding(row):
        prompt_ids, completion_ids = encode_turn(tokenizer, row["prompt"], row["completion"], verbatim=True)
    mask = [0] * len(prompt_ids) + [1] * len(completion_ids)
    return {"input_ids": prompt_ids + completion_ids, "completion_mask": mask}
