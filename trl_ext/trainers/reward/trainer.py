"""`RewardTrainer`: TRL's, with this library's Bradley-Terry loss, separate truncation, and scores for evaluation.

TRL's `compute_loss` runs the model and logs its metrics; the loss is then computed from the scores in its output.
`get_batch_samples` sees a whole accumulation window first, so that the gradient is that of the mean over its pairs.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel, TaskType
from torch import Tensor
from transformers import AutoConfig
from trl import RewardTrainer as TRLRewardTrainer
from trl import maybe_extract_prompt

from trl_ext.data import encode_turn
from trl_ext.data.conversation import text_ids
from trl_ext.files import write_json
from trl_ext.losses.reward import bradley_terry
from trl_ext.models import score_sequences
from trl_ext.models.shared_backbone import LIMITS_FILE
from trl_ext.processes import warn_once_per_run
from trl_ext.resilience.training import ResilientTraining
from trl_ext.rollouts import map_over_ranks
from trl_ext.trainers.context import PAIRS, check_inputs, check_template, truncate_pairs
from trl_ext.trainers.defaults import configuration
from trl_ext.trainers.metrics import RewardMetrics
from trl_ext.trainers.model_card import WritesModelCard
from trl_ext.trainers.packing import pack_trainer
from trl_ext.trainers.policies import is_zero3, trained_policy
from trl_ext.trainers.preference.optimizer_batch import Window
from trl_ext.trainers.reward.config import RewardConfig

# Entries of a batch that the loss reads and the model must not see.
_OWN_KEYS = ("margin", "window")


class RewardTrainer(ResilientTraining, WritesModelCard, RewardMetrics, TRLRewardTrainer):
    """Trains a reward model on preference pairs: `trl_ext.losses.reward.bradley_terry` on the scores of both sides.

    Accepts the arguments of `trl.RewardTrainer`, with a `RewardConfig`, and keeps its features. It differs in six
    ways. Prompts are cut at the beginning and responses at the end, each to its own limit, where TRL drops long
    pairs. Margins may come from any column of numbers. Labels may be smoothed. An adapter is always trained and saved
    together with the score head. The gradient of an optimizer step is that of the mean over its pairs, however they
    are divided into micro-batches and ranks. Metrics cover all pairs of a step or an evaluation, instead of averaging
    over batches.

    The score head of a model that comes without one is initialised at random from `args.seed`.

    Raises:
        TypeError: `args` is not a `RewardConfig`.
        ValueError: a dataset is empty or lacks the margin column, or a row cannot be encoded; the model is an adapter
            without its base or has several labels; or a given adapter would not save its score head.
    """

    _tag_names = ["trl", "trl_ext", "reward-trainer"]

    def __init__(self, model, args: RewardConfig | None = None, **kwargs: Any):
        args = configuration(self, args, RewardConfig)
        model = check_inputs(model, kwargs, PAIRS, one_kind=True)
        if isinstance(model, str):
            model = _model_path(model, args)
        else:
            _check_model(model)
        if kwargs.get("peft_config") is not None:
            kwargs["peft_config"] = _with_score_head(kwargs["peft_config"])
        super().__init__(model, args, **kwargs)
        self._train_head_in_float32()
        self.packing = pack_trainer(self)
        if self.processing_class.pad_token_id == self.processing_class.eos_token_id:
            warn_once_per_run(
                "the padding token is the end-of-turn token, so scores are read before it: whether a response has "
                "ended does not show in its score; give the tokenizer a padding token of its own"
            )

    def _train_head_in_float32(self) -> None:
        """Use float32 for the score head of an adapter, as for the adapter: bfloat16 loses small updates."""
        autocast = self.args.bf16 or self.args.fp16
        # ZeRO-3 gathers parameters of one type only.
        if autocast and isinstance(self.model, PeftModel) and not is_zero3(self.accelerator):
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                    parameter.data = parameter.data.float()

    # ---- Pairs as token ids ----

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        check_template(processing_class, dataset)
        columns = dataset.column_names or list(next(iter(dataset)))
        self._check_columns(columns, dataset_name, args)
        has_length = isinstance(dataset, Dataset)
        options = {"num_proc": args.dataset_num_proc} if has_length else {}
        margin_column = args.margin_column or ("margin" if "margin" in columns else None)
        # TRL also accepts its earlier names, chosen_input_ids and rejected_input_ids.
        if not {"chosen_ids", "chosen_input_ids"} & {*columns}:
            described = {"desc": f"Tokenizing {dataset_name} dataset"} if has_length else {}
            dataset = dataset.map(_encode_pair, fn_kwargs={"tokenizer": processing_class}, **described, **options)
            dataset = truncate_pairs(dataset, dataset_name, args)
            dataset = dataset.map(_join_prompt, remove_columns=["prompt_ids"], **options)
        if margin_column is not None:
            described = {"desc": f"Reading margins of {dataset_name} dataset"} if has_length else {}
            dataset = dataset.map(_read_margin, fn_kwargs={"column": margin_column}, **described, **options)
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    @staticmethod
    def _check_columns(columns: Sequence[str], dataset_name: str, args: RewardConfig) -> None:
        has = f"the {dataset_name} dataset; it has {', '.join(columns)}"
        if args.margin_column is not None and args.margin_column not in columns:
            raise ValueError(f"margin_column {args.margin_column!r} is not in {has}")
        if args.margin_scale != 1 and args.margin_column is None and "margin" not in columns:
            raise ValueError(f"margin_scale {args.margin_scale} needs margins: name a margin_column of {has}")

    # ---- A whole accumulation window, before training on it ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            pairs = sum(len(batch["input_ids"]) // 2 for batch in batches)
            pairs = self.accelerator.reduce(torch.tensor(pairs, device=self.accelerator.device), reduction="sum")
            window = Window(len(batches), int(pairs), self.accelerator.num_processes, self.accelerator.process_index)
            batches = [{**batch, "window": window} for batch in batches]
        return batches, num_items_in_batch

    # ---- From scores to the loss ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        window, margin = inputs.get("window"), inputs.get("margin")
        inputs = {key: value for key, value in inputs.items() if key not in _OWN_KEYS}
        _, outputs = super().compute_loss(model, inputs, return_outputs=True)
        chosen, rejected = outputs.logits.squeeze(-1).float().chunk(2)
        if not self.model.training:
            self._log_pairs(chosen.detach(), rejected.detach())
        losses = bradley_terry(
            chosen,
            rejected,
            margin=None if margin is None else self.args.margin_scale * margin,
            label_smoothing=self.args.label_smoothing,
            centering=self.args.center_rewards_coefficient or 0.0,
        )
        loss = losses.mean() if window is None else losses.sum() * window.scale
        return (loss, outputs) if return_outputs else loss

    def _log_pairs(self, chosen: Tensor, rejected: Tensor) -> None:
        """Replace the batch means that TRL has just logged by the values of each pair, which TRL then averages."""
        margins = self.accelerator.gather_for_metrics(chosen - rejected)
        for name, values in (("accuracy", margins > 0), ("margin", margins)):
            logged = self._metrics["eval"][name]
            logged.pop()
            logged.extend(values.float().tolist())

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        limits = {name: getattr(self.args, name) for name in ("max_prompt_tokens", "max_response_tokens")}
        write_json(Path(output_dir or self.args.output_dir) / LIMITS_FILE, limits)

    # ---- Scores ----

    def score(self, sequences: Sequence[Sequence[int]], *, progress: str | None = None) -> Tensor:
        """Scores of token sequences under the current model, [N], float32 on the CPU.

        Batches of `per_device_eval_batch_size` are divided among the ranks: every process must call this, and each
        returns the same scores.
        """
        progress = progress if self.accelerator.is_main_process else None
        with trained_policy(self) as model:

            def score(own: list) -> list[float]:
                scores = score_sequences(
                    model,
                    own,
                    batch_size=self.args.per_device_eval_batch_size,
                    pad_token_id=self.processing_class.pad_token_id,
                    progress=progress,
                )
                return scores.tolist()

            return torch.tensor(map_over_ranks(score, sequences, self.accelerator))

    def score_pairs(self, dataset: Dataset, *, progress: str | None = None) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected side of pairs that this trainer has prepared, each [N]."""
        scores = self.score([*dataset["chosen_ids"], *dataset["rejected_ids"]], progress=progress)
        chosen, rejected = scores.chunk(2)
        return chosen, rejected


def _encode_pair(row: dict, tokenizer) -> dict:
    """Token ids of a row's prompt and of its two responses."""
    try:
        prompt, chosen, rejected = _token_ids(row, tokenizer)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{_name(row)} cannot be encoded: {error}") from error
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def _join_prompt(row: dict) -> dict:
    return {side: row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")}


def _token_ids(row: dict, tokenizer) -> tuple[list[int], list[int], list[int]]:
    if "prompt" not in row and isinstance(row["chosen"], str):
        # Tokenize each whole text, as TRL does: the common prefix of the texts may end inside a token.
        texts = (row[side].removesuffix(tokenizer.eos_token) + tokenizer.eos_token for side in ("chosen", "rejected"))
        chosen, rejected = (text_ids(tokenizer, text) for text in texts)
        shared = len(os.path.commonprefix([chosen, rejected]))
        return chosen[:shared], chosen[shared:], rejected[shared:]
    row = maybe_extract_prompt(row)
    tools = row.get("tools")
    template = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
    template |= row.get("chat_template_kwargs") or {}
    prompt, chosen = encode_turn(tokenizer, row["prompt"], row["chosen"], template_kwargs=template)
    _, rejected = encode_turn(tokenizer, row["prompt"], row["rejected"], template_kwargs=template)
    return prompt, chosen, rejected


def _read_margin(row: dict, column: str) -> dict:
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{_name(row)}: the margin column {column!r} must hold a number, got {value!r}")
    return {"margin": float(value)}


def _name(row: dict) -> str:
    return f"row_id {row['row_id']}" if "row_id" in row else f"the pair {str(row)[:100]}"


def _model_path(model: str, args: RewardConfig) -> str:
    """The model to load. A folder becomes an absolute path, which a saved adapter stores as the name of its base.

    Raises:
        ValueError: the model does not have exactly one label.
    """
    folder = Path(model)
    if folder.is_dir():
        model = str(folder.resolve())
    options = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    config = AutoConfig.from_pretrained(
        model, revision=options.get("revision"), trust_remote_code=args.trust_remote_code
    )
    # A language model's configuration defaults to two labels although it has no head for them.
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        _check_labels(config, model)
    return model


def _check_labels(config, name: str) -> None:
    if config.num_labels != 1:
        raise ValueError(
            f"the model {name} has {config.num_labels} labels, and a reward model has one: load it with num_labels=1, "
            "or start from a language model"
        )


def _check_model(model) -> None:
    _check_labels(model.config, getattr(model.config, "_name_or_path", "") or type(model).__name__)
    heads = {"score", "classifier"}
    if isinstance(model, PeftModel) and not heads & {*(model.active_peft_config.modules_to_save or ())}:
        raise ValueError(
            "the given adapter would leave the score head untrained and unsaved: build it with a configuration of "
            "task_type SEQ_CLS, or pass peft_config to the trainer, which sees to it"
        )


def _with_score_head(peft_config: PeftConfig) -> PeftConfig:
    """The configuration with the task type that makes PEFT train and save the score head with the adapter."""
    asked = peft_config.task_type
    if asked not in (None, TaskType.SEQ_CLS, TaskType.CAUSAL_LM):
        warn_once_per_run(f"task_type {asked} was asked for: a reward model's adapter is of type SEQ_CLS")
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type = TaskType.SEQ_CLS
    return peft_config
