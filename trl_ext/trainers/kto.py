"""`KTOTrainer` and `KTOConfig`: TRL's, with separate truncation of prompts, packing, and device defaults.

The loss step and its metrics are TRL's. The loss equals `trl_ext.losses.kto` on a micro-batch, with the divergence
averaged over all processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset
from transformers.hf_argparser import HfArg
from trl import KTOConfig as TRLKTOConfig
from trl import KTOTrainer as TRLKTOTrainer

from trl_ext.data.unpaired import pairs_to_unpaired
from trl_ext.names import check_choice
from trl_ext.processes import warn_once_per_run
from trl_ext.resilience.training import ResilientTraining
from trl_ext.trainers import context
from trl_ext.trainers.defaults import (
    TruncatedFields,
    check_at_least,
    check_training,
    configuration,
    resolve_device_defaults,
)
from trl_ext.trainers.model_card import WritesModelCard
from trl_ext.trainers.packing import pack_trainer
from trl_ext.trainers.policies import check_base_of_adapter, reference_in_memory
from trl_ext.trainers.token_budget import token_budget

LOSSES = ("kto", "apo_zero_unpaired")


@dataclass
class KTOConfig(TruncatedFields, TRLKTOConfig):
    """Configuration of `KTOTrainer`: the fields of `trl.KTOConfig` and `TruncatedFields`.

    Raises:
        ValueError: a value is out of range, or `max_length` is set; the message names the field and what to do.
    """

    _method: ClassVar[str] = "kto"

    loss_type: str = HfArg(default="kto", help="kto or apo_zero_unpaired.", metadata={"choices": LOSSES})

    def __post_init__(self):
        check_at_least(self, {}, positive=("beta", "desirable_weight", "undesirable_weight"))
        check_choice("loss_type", self.loss_type, LOSSES)
        check_training(self, per_device_train_batch_size=2, per_device_eval_batch_size=2)
        resolve_device_defaults(self)
        super().__post_init__()


class KTOTrainer(ResilientTraining, WritesModelCard, TRLKTOTrainer):
    """Trains on single responses labelled desirable or undesirable: rows of `prompt`, `completion` and `label`.

    Accepts the arguments of `trl.KTOTrainer`, with a `KTOConfig`. It differs in two ways. Pairs (`prompt`, `chosen`,
    `rejected`) are split by `trl_ext.data.unpaired.pairs_to_unpaired`, so that every batch holds both labels. Prompts
    are truncated at the beginning and responses at the end, each to its own limit.

    Training follows the order of the rows, since the divergence for a row is estimated with its neighbour's response:
    shuffle your own data, and let neighbours answer different prompts. Neighbours are rows of one batch of
    `per_device_train_batch_size`, in held-out sets too. A last row that is alone in its batch is dropped with a
    warning.

    Raises:
        TypeError: `args` is not a `KTOConfig`.
        ValueError: a column is missing, the labels to train on are not both true and false, or there is only one row.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "trl_ext", "kto"]
    _config_class: ClassVar[type[KTOConfig]] = KTOConfig

    def __init__(self, model, ref_model=None, args: KTOConfig | None = None, **kwargs: Any):
        args = configuration(self, args, self._config_class)
        model = context.check_inputs(model, {**kwargs, "ref_model": ref_model}, context.LABELLED)
        with reference_in_memory(TRLKTOTrainer, model):
            super().__init__(model, ref_model, args, **kwargs)
        if self.ref_model is None:
            check_base_of_adapter(self.model)
        self.packing = pack_trainer(self)
        token_budget(self, obstacle="KTO pairs the rows of a micro-batch, in TRL's own step")

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        if isinstance(dataset, Dataset):
            # Of what is passed to `evaluate`, too.
            context.check_dataset(f"{dataset_name}_dataset", dataset, context.LABELLED)
            dataset = _with_neighbours(dataset, f"{dataset_name}_dataset", args)
            if dataset_name == "train" and (labels := {*dataset["label"]}) != {True, False}:
                raise ValueError(f"KTO needs responses of both labels, true and false: train_dataset has {labels}")
        context.report_plain_prompts(processing_class, dataset)
        context.report_doubled_begin(processing_class, dataset)
        context.quiet_about_length(processing_class)
        dataset = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if self.calculate_KL and isinstance(dataset, Dataset) and (args.dataset_num_proc or 1) > 1:
            # Each of TRL's processes batches its own shard, where rows have other neighbours than in training.
            dataset = dataset.map(_with_mismatched, batched=True, batch_size=args.per_device_train_batch_size)
        return context.truncate_rows(dataset, dataset_name, args, ("completion_ids", "KL_completion_ids"))


def _with_neighbours(dataset: Dataset, name: str, args: KTOConfig) -> Dataset:
    """Labelled rows, each with another row in its batch to take a response from.

    TRL pairs the prompts of a batch with the responses of the preceding rows. It would pair a row that is alone with
    itself. Its divergence would then be its own log-ratio, and a desirable response would keep its loss of one half
    and its gradient however likely it becomes.
    """
    if "chosen" in dataset.column_names and "rejected" in dataset.column_names:
        dataset = pairs_to_unpaired(dataset, seed=args.seed)
    count = len(dataset)
    if args.loss_type != "kto" or count % args.per_device_train_batch_size != 1:
        return dataset
    if count == 1:
        raise ValueError(f"{name} has one row, and KTO pairs each prompt with the response to another: give more")
    warn_once_per_run(f"{name}: the last of {count} rows is left out, as it is alone in its batch")
    return dataset.select(range(count - 1))


def _with_mismatched(rows: dict[str, list]) -> dict[str, list]:
    """Pair each prompt of a batch with the response to the prompt before it."""
    responses = rows["completion_ids"]
    return {"KL_completion_ids": [*responses[-1:], *responses[:-1]]}
