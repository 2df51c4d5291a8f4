"""`RewardTrainer`: TRL's, with this library's Bradley-Terry loss, margins of any column, and separate truncation."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel, TaskType
from torch import Tensor
from transformers.hf_argparser import HfArg
from trl import RewardConfig as TRLRewardConfig
from trl import RewardTrainer as TRLRewardTrainer
from trl import maybe_extract_prompt

from trl_ext.data import encode_turn
from trl_ext.data.conversation import text_ids
from trl_ext.files import write_json
from trl_ext.losses.reward import bradley_terry
from trl_ext.models import score_sequences
from trl_ext.models.shared_backbone import LIMITS_FILE
from trl_ext.processes import map_over_ranks, warn_once_per_run
from trl_ext.resilience.training import ResilientTraining
from trl_ext.trainers.context import PAIRS, check_inputs, encoding, map_rows, report_plain_prompts, truncate_rows
from trl_ext.trainers.defaults import TruncatedFields, check_training, configuration, resolve_device_defaults
from trl_ext.trainers.metrics import StepMetrics
from trl_ext.trainers.model_card import WritesModelCard
from trl_ext.trainers.packing import pack_trainer
from trl_ext.trainers.passes import PairPasses, is_empty, no_loss
from trl_ext.trainers.policies import is_zero3, trained_policy
from trl_ext.trainers.preference.whole_batch import loss_scale
from trl_ext.trainers.token_budget import token_budget
from trl_ext.trainers.trl_settings import refuse_given


@dataclass
class RewardConfig(TruncatedFields, TRLRewardConfig):
    """Configuration of `RewardTrainer`: the fields of `trl.RewardConfig` and `TruncatedFields`, and those below.

    Raises:
        ValueError: a value is out of range, or `max_length` is set; the message names the field and what to do.
    """

    margin_column: str | None = HfArg(
        default=None,
        help="Column of numbers by how much a chosen response should win, such as avg_preference_strength. "
        "Default: the column margin where the data has one.",
    )
    margin_scale: float = HfArg(default=1.0, help="Factor on the margins.")
    label_smoothing: float = HfArg(
        default=0.0, help="Probability that a label is wrong, in [0, 0.5); 0 trusts every label."
    )

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}")
        refuse_given(self, {"label_smoothing_factor": "use label_smoothing"})
        check_training(self, center_rewards_coefficient=0)
        resolve_device_defaults(self)
        super().__post_init__()


class RewardTrainer(ResilientTraining, WritesModelCard, StepMetrics, PairPasses, TRLRewardTrainer):
    """Trains a reward model on preference pairs: `trl_ext.losses.reward.bradley_terry` on the scores of both sides.

    Accepts the arguments of `trl.RewardTrainer`, with a `RewardConfig`, and keeps its features. It differs in six
    ways. Prompts are truncated at the beginning and responses at the end, each to its own limit, where TRL drops long
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
        model = _reward_model(check_inputs(model, kwargs, PAIRS))
        if kwargs.get("peft_config") is not None:
            kwargs["peft_config"] = _with_score_head(kwargs["peft_config"])
        super().__init__(model, args, **kwargs)
        self._train_head_in_float32()
        self.packing = pack_trainer(self)
        self.token_budget = token_budget(self)
        if self.processing_class.pad_token_id == self.processing_class.eos_token_id:
            warn_once_per_run(
                "the padding token is the end-of-turn token, so scores are read before it and do not show whether a "
                "response has ended: give the tokenizer a padding token of its own"
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
        report_plain_prompts(processing_class, dataset)
        columns = dataset.column_names or list(next(iter(dataset)))
        margins = args.margin_column or "margin"
        if margins not in columns and (args.margin_column is not None or args.margin_scale != 1):
            raise ValueError(f"the margin_column {margins!r} is not in the {dataset_name} dataset, but {columns} are")
        workers = args.dataset_num_proc
        # TRL also accepts its earlier names, chosen_input_ids and rejected_input_ids.
        if not {"chosen_ids", "chosen_input_ids"} & {*columns}:
            options = {"fn_kwargs": {"tokenizer": processing_class}, "num_proc": workers}
            dataset = map_rows(dataset, _encode_pair, f"Tokenizing {dataset_name} dataset", **options)
            dataset = truncate_rows(dataset, dataset_name, args)
            dataset = map_rows(dataset, _join_prompt, None, num_proc=workers, remove_columns=["prompt_ids"])
        if margins in columns:
            options = {"fn_kwargs": {"column": margins}, "num_proc": workers}
            dataset = map_rows(dataset, _read_margin, f"Reading margins of {dataset_name} dataset", **options)
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    # ---- The step: a whole accumulation window, scores, loss, metrics ----

    def open_window(self, passes: list[dict], micro_batches: int) -> list[dict]:
        pairs = torch.tensor(sum(len(one["input_ids"]) // 2 for one in passes), device=self.accelerator.device)
        pairs = self.accelerator.reduce(pairs, reduction="sum").item()
        scale = loss_scale(micro_batches, self.accelerator.num_processes, pairs)
        return [{**one, "loss_scale": scale} for one in passes]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if is_empty(inputs):
            return no_loss(self.accelerator.device)
        self.begin_pass(inputs)
        margin, scale = inputs.pop("margin", None), inputs.pop("loss_scale", None)
        outputs = model(**inputs, use_cache=False)
        chosen, rejected = outputs.logits.squeeze(-1).float().chunk(2)
        losses = bradley_terry(
            chosen,
            rejected,
            margin=None if margin is None else self.args.margin_scale * margin,
            label_smoothing=self.args.label_smoothing,
            centering=self.args.center_rewards_coefficient or 0.0,
        )
        loss = losses.mean() if scale is None else losses.sum() * scale

        scores = self.widened(torch.stack([chosen, rejected, losses], dim=1))
        if not self.model.training:
            # Without the pairs that accelerate repeats.
            scores = self.accelerator.gather_for_metrics(scores)
        margins, pairs = scores[:, 0] - scores[:, 1], torch.tensor(len(scores))
        metrics = {"mean_reward": (scores[:, :2].sum() / 2, pairs), "margin": (margins.sum(), pairs)}
        metrics["accuracy"] = (margins > 0).sum(), pairs
        if not self.model.training:
            metrics["loss"] = scores[:, 2].sum(), pairs
        extremes = {"min_reward": scores[:, :2].min(), "max_reward": scores[:, :2].max()}
        self.add_metrics(metrics, extremes=extremes, tokens=inputs["attention_mask"].sum())
        return (loss, outputs) if return_outputs else loss

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
        options = {"batch_size": self.args.per_device_eval_batch_size}
        options |= {"pad_token_id": self.processing_class.pad_token_id}
        options |= {"progress": progress if self.accelerator.is_main_process else None}
        with trained_policy(self) as model:
            score = lambda own: score_sequences(model, own, **options).tolist()  # noqa: E731
            return torch.tensor(map_over_ranks(score, sequences, self.accelerator))

    def score_pairs(self, dataset: Dataset, *, progress: str | None = None) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected side of pairs that this trainer has prepared, each [N]."""
        scores = self.score([*dataset["chosen_ids"], *dataset["rejected_ids"]], progress=progress)
        chosen, rejected = scores.chunk(2)
        return chosen, rejected


# ---- Rows ----


def _encode_pair(row: dict, tokenizer) -> dict:
    """Token ids of a row's prompt and of its two responses."""
    with encoding(row):
        if "prompt" in row or not isinstance(row["chosen"], str):
            row = maybe_extract_prompt(row)
            tools = row.get("tools")
            template = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
            template |= row.get("chat_template_kwargs") or {}
            prompt, chosen = encode_turn(tokenizer, row["prompt"], row["chosen"], template_kwargs=template)
            _, rejected = encode_turn(tokenizer, row["prompt"], row["rejected"], template_kwargs=template)
        else:
            # Tokenize each whole text, as TRL does: the common prefix of the texts may end inside a token.
            end = tokenizer.eos_token
            chosen, rejected = (
                text_ids(tokenizer, row[side].removesuffix(end) + end) for side in ("chosen", "rejected")
            )
            prompt = os.path.commonprefix([chosen, rejected])
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def _join_prompt(row: dict) -> dict:
    return {side: row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")}


def _read_margin(row: dict, column: str) -> dict:
    return {"margin": float(row[column])}


# ---- Models ----


def _reward_model(model: Any) -> Any:
    """The model, or its path: of a folder the absolute path, which a saved adapter stores as the name of its base.

    TRL loads a path with one label.
    """
    if isinstance(model, str):
        return str(Path(model).resolve()) if Path(model).is_dir() else model
    if model.config.num_labels != 1:
        raise ValueError(
            f"a reward model has one label, and the model has {model.config.num_labels}: set num_labels=1"
        )
    saved = model.active_peft_config.modules_to_save if isinstance(model, PeftModel) else ["score"]
    if not {"score", "classifier"} & {*(saved or ())}:
        raise ValueError(
            "the given adapter leaves the score head untrained and unsaved: give it the task_type SEQ_CLS"
        )
    return model


def _with_score_head(peft_config: PeftConfig) -> PeftConfig:
    """The configuration with the task type that makes PEFT train and save the score head with the adapter."""
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type = TaskType.SEQ_CLS
    return peft_config
