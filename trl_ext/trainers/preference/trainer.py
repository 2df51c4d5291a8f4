"""`PreferenceTrainer`: TRL's `DPOTrainer` with its own loss step, for any function from log-probabilities to losses.

`compute_loss` is the step: reference, forward pass, scores, loss, metrics. `open_window` sees a whole
accumulation window before training on it, which exact normalisation and batch-coupled losses require.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, load_from_disk
from torch import Tensor
from trl import DPOTrainer as TRLDPOTrainer
from trl.trainer.utils import hash_module

from trl_ext.losses import PreferenceScores
from trl_ext.models.batches import temporarily
from trl_ext.models.loading import check_vocabulary
from trl_ext.models.shared_backbone import preserved_random_state
from trl_ext.resilience.training import ResilientTraining
from trl_ext.trainers.context import (
    PAIRS,
    check_inputs,
    quiet_about_length,
    report_doubled_begin,
    report_plain_prompts,
    truncate_rows,
)
from trl_ext.trainers.defaults import configuration
from trl_ext.trainers.metrics import StepMetrics, pair_metrics
from trl_ext.trainers.model_card import WritesModelCard
from trl_ext.trainers.packing import pack_trainer
from trl_ext.trainers.passes import PairPasses, is_empty, no_loss
from trl_ext.trainers.policies import check_base_of_adapter, is_zero3, reference_in_memory
from trl_ext.trainers.preference.config import PreferenceConfig
from trl_ext.trainers.preference.whole_batch import (
    CoupledShare,
    Window,
    coupled_shares,
    join_scores,
    loss_scale,
    map_scores,
)
from trl_ext.trainers.token_budget import token_budget

# TRL's names for the reference log-probabilities of chosen and rejected in a batch.
_REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
# Entries that this trainer adds to a batch, and all that the model does not take.
_OWN = ("columns", "window", "window_index")
_NOT_OF_THE_MODEL = (*_OWN, "completion_mask", *_REFERENCE)


class PreferenceTrainer(ResilientTraining, WritesModelCard, StepMetrics, PairPasses, TRLDPOTrainer):
    """Trains on pairs with any preference loss: `PreferenceConfig(loss=...)`.

    Accepts the arguments of `trl.DPOTrainer`, with a `PreferenceConfig`, and keeps its features and the names of its
    metrics. It differs in five ways. The loss is replaced. A reference-free loss uses no reference model. Prompts are
    truncated at the beginning and responses at the end, each to its own limit. The loss can read dataset columns. The
    gradient of an optimizer step is that of the mean over its pairs, however they are divided into micro-batches and
    ranks.

    A batch-coupled loss (`aot`, `aot_paired`) with `aot_scope="global"` is evaluated on the whole optimizer batch.
    With accumulated micro-batches, that costs a second forward pass of the policy, without gradients. With one
    micro-batch per step, it costs only the exchange of a few numbers per pair. Extra memory is a few numbers per pair.
    Held-out losses of such a loss, or of a normalised weighting, treat all held-out pairs as one batch.

    Raises:
        TypeError: `args` is not a `PreferenceConfig`.
        ValueError: a dataset column that the loss needs is missing, or a reference is given to a reference-free loss.
    """

    _tag_names = [*TRLDPOTrainer._tag_names, "trl_ext", "preference-optimization"]
    _name = "Preference optimization"
    _paper: ClassVar[dict] = {}
    _config_class: ClassVar[type[PreferenceConfig]] = PreferenceConfig

    def __init__(self, model, ref_model=None, args: PreferenceConfig | None = None, **kwargs: Any):
        args = configuration(self, args, self._config_class)
        model = check_inputs(model, {**kwargs, "ref_model": ref_model}, PAIRS)
        self.objective = args.build_objective()
        self._held_out = []
        self._check_reference(ref_model, args)
        setup = {
            # Only with this setting does TRL keep no reference model; `_precompute_ref_logps` then has nothing to do.
            "precompute_ref_log_probs": bool(args.precompute_ref_log_probs) or not self.objective.needs_reference,
            # Makes the fused LM head return `log_sum_sq_probs`, from which WPO's weights are computed.
            "use_weighting": self.objective.needs_policy_weights,
            # Any type that the constructor accepts: TRL's loss is not computed.
            "loss_type": ["sigmoid"],
        }
        with temporarily(args, **setup), reference_in_memory(TRLDPOTrainer, model):
            super().__init__(model, ref_model, args, **kwargs)
        if self.objective.needs_reference and self.ref_model is None:
            check_base_of_adapter(self.model)
        self._pack()
        # Such a loss compares the pairs of a micro-batch, as TRL's does.
        apart = self.objective.batch_coupled and not self._couples_batch
        self.token_budget = token_budget(self, obstacle="aot_scope is device" if apart else None)
        # TRL's `evaluate` reads this: a dataset passed to it gets reference log-probabilities first.
        self.precompute_ref_logps = bool(args.precompute_ref_log_probs)
        if args.precompute_ref_log_probs is None and self._saves_reference_passes():
            self._precompute_reference()
        self._set_signature_columns_if_needed()
        self._signature_columns += self.objective.columns
        # Wrapped only now, so that the pass for reference log-probabilities sees no extra columns.
        if self.objective.columns:
            self.data_collator = partial(_collate, collator=self.data_collator, columns=self.objective.columns)

    # ---- Data ----

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        # A streamed dataset may not know its columns.
        if missing := {*self.objective.columns} - {*(dataset.column_names or self.objective.columns)}:
            raise ValueError(f"the loss reads the column {missing.pop()!r}, which the {dataset_name} dataset lacks")
        report_plain_prompts(processing_class, dataset)
        report_doubled_begin(processing_class, dataset)
        quiet_about_length(processing_class)
        dataset = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        return truncate_rows(dataset, dataset_name, args)

    # ---- The reference ----

    def _check_reference(self, ref_model, args: PreferenceConfig) -> None:
        if self.objective.needs_reference:
            return
        names = ("precompute_ref_log_probs", "sync_ref_model")
        given = ["ref_model"] * (ref_model is not None) + [name for name in names if getattr(args, name)]
        if given:
            raise ValueError(f"the loss {args.loss!r} uses no reference model: leave out {', '.join(given)}")

    def _saves_reference_passes(self) -> bool:
        """Whether training uses reference log-probabilities of the same pairs several times."""
        args, held_out = self.args, self.eval_dataset
        if not self.objective.needs_reference or args.sync_ref_model or self.is_fsdp_enabled:
            return False
        sets = [self.train_dataset, *(held_out.values() if isinstance(held_out, dict) else [held_out])]
        if self._is_vision_dataset or not all(isinstance(one, (Dataset, type(None))) for one in sets):
            return False
        if args.max_steps <= 0:
            return args.num_train_epochs > 1
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return args.max_steps * step > len(self.train_dataset)

    def _precompute_reference(self) -> None:
        """Compute reference log-probabilities as TRL's constructor does, and keep the reference model.

        A dataset passed to `evaluate` after training has none, and needs the model.
        """
        model = self.model if self.ref_model is None else self.ref_model
        self._precompute_model_hash = hash_module(self.accelerator.unwrap_model(model))
        size, held_out = self.args.precompute_ref_batch_size, self.eval_dataset
        of_training, of_evaluation = self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size
        self.train_dataset = self._precompute_ref_logps(self.train_dataset, "train", size or of_training)
        compute = partial(self._precompute_ref_logps, batch_size=size or of_evaluation)
        if isinstance(held_out, dict):
            self.eval_dataset = {name: compute(dataset, name) for name, dataset in held_out.items()}
        elif held_out is not None:
            self.eval_dataset = compute(held_out, "eval")

    def _precompute_ref_logps(self, dataset, name, batch_size):
        if not self.objective.needs_reference:
            return dataset
        # This runs within TRL's constructor, which has already put its head on the models.
        check_vocabulary(self.model, self.processing_class)
        self._pack()
        if self.packing is not None and self.packing.active and self.args.precompute_ref_batch_size is None:
            # Without gradients and padding, a pass of this size needs less memory than a training step.
            batch_size = 4 * batch_size
        if self.accelerator.num_processes > 1 and isinstance(dataset, Dataset) and not dataset.cache_files:
            dataset = self._on_shared_disk(dataset, name)
        # Training draws the same random numbers, such as those of dropout, whether these passes run or the
        # log-probabilities come from TRL's cache.
        with preserved_random_state(), temporarily(self, _precompute_model_hash=reference_key(self)):
            dataset = super()._precompute_ref_logps(dataset, name, batch_size)
        engine = self._precompute_engine
        if engine is not None and is_zero3(self.accelerator):
            # ZeRO-3 records the order of modules, by their numbers, in a first pass, and the engine of training
            # renumbers them. After a single pass, this engine would not find its numbers ("pop from an empty deque").
            coordinator = getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()
        return dataset

    def _on_shared_disk(self, dataset: Dataset, name: str) -> Dataset:
        """Move an in-memory dataset to disk; otherwise TRL's cache of it has another path on every process."""
        fingerprint = broadcast_object_list([dataset._fingerprint])[0]
        folder = Path(self.args.output_dir) / "reference_log_probs" / f"{name}-{fingerprint}"
        if self.accelerator.is_main_process and not folder.exists():
            dataset.save_to_disk(folder.with_suffix(".partial"))
            folder.with_suffix(".partial").rename(folder)
        self.accelerator.wait_for_everyone()
        return load_from_disk(folder)

    def _pack(self) -> None:
        if "packing" not in vars(self):
            self.packing = pack_trainer(self)

    def compute_ref_log_probs(self, model, inputs):
        return super().compute_ref_log_probs(model, {k: v for k, v in inputs.items() if k not in _OWN})

    # ---- A whole accumulation window, before training on it ----

    def open_window(self, passes: list[dict], micro_batches: int) -> list[dict]:
        normalizes = self.objective.normalizes
        pairs = sum(len(one["input_ids"]) // 2 for one in passes)
        raw_weight = sum(self._raw_weights(one).sum().item() for one in passes) if normalizes else 0.0
        totals = torch.tensor([pairs, raw_weight], dtype=torch.float32, device=self.accelerator.device)
        pairs, raw_weight = self.accelerator.reduce(totals, reduction="sum").unbind()
        window = Window(
            scale=loss_scale(micro_batches, self.accelerator.num_processes, int(pairs)),
            micro_batches=micro_batches,
            mean_raw_weight=raw_weight / pairs if normalizes else None,
            pending=passes if self._couples_batch and len(passes) > 1 else None,
        )
        return [{**one, "window": window, "window_index": index} for index, one in enumerate(passes)]

    def pieces_of(self, one: dict, parts: list[dict]) -> list[dict]:
        window, index = one.get("window"), one.get("window_index")
        if window is None or window.pending is not None:
            return [one]
        if self._couples_batch and window.coupled is None:
            again = replace(window, pending=parts)
            return [{**part, "window": again, "window_index": number} for number, part in enumerate(parts)]
        ends = [0, *accumulate(len(part["input_ids"]) // 2 for part in parts)]
        windows = [window.part(index, slice(*own)) for own in pairwise(ends)]
        return [{**part, "window": its, "window_index": 0} for part, its in zip(parts, windows, strict=True)]

    def _raw_weights(self, batch: dict) -> Tensor:
        """Weights to be normalised, which depend only on dataset columns. [n]."""
        blank = torch.zeros(len(batch["input_ids"]) // 2, device=batch["input_ids"].device)
        return self.objective.raw_weights(PreferenceScores(blank, blank, columns=batch.get("columns", {})))

    @property
    def _couples_batch(self) -> bool:
        return self.objective.batch_coupled and self.args.aot_scope == "global"

    # ---- The loss step ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if is_empty(inputs):
            return no_loss(self.accelerator.device)
        window, index = inputs.get("window"), inputs.get("window_index")
        if window is not None and window.pending is not None:
            self._score_window_ahead(model, window)
        self.begin_pass(inputs)
        ahead = window is not None and window.reference is not None
        reference = window.reference[index] if ahead else self._reference(inputs)
        output = self._forward(model, inputs)
        scores = self._scores(output, inputs, reference)

        if window is None:
            loss = self.objective(scores).mean()
            self._keep_held_out(scores)
        elif self._couples_batch:
            if window.coupled is None:
                window.coupled = self._coupled_shares(window, [scores])
            loss = window.coupled[index].of(scores)
        else:
            loss = self.objective(scores, mean_raw_weight=window.mean_raw_weight).sum() * window.scale

        self._log(scores, output, inputs)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * output.aux_loss
        if not return_outputs:
            return loss
        # The head has built no logits, which `compute_metrics` receives.
        with torch.no_grad():
            return loss, model(**_of_the_model(inputs), use_cache=False)

    def _reference(self, inputs: dict) -> Sequence[Tensor | None]:
        """Reference log-probabilities of chosen and rejected [n], precomputed or computed now; None if unused."""
        if not self.objective.needs_reference:
            return None, None
        if all(key in inputs for key in _REFERENCE):
            return [inputs[key] for key in _REFERENCE]
        # Not `or`: a compiled model has no truth value.
        model = self.model if self.ref_model is None else self.ref_model
        return self.compute_ref_log_probs(model, inputs)

    def _forward(self, model, inputs: dict):
        """Run the model with TRL's head, whose output has the log-probability of each token of the responses."""
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        router = {"output_router_logits": True} if self.aux_loss_enabled else {}
        return model(**_of_the_model(inputs), **router, labels=labels, use_cache=False, fused_lm_head=True)

    def _scores(self, output, inputs: dict, reference: Sequence[Tensor | None]) -> PreferenceScores:
        """Sum token log-probabilities into the loss's inputs; a batch holds chosen rows, then rejected rows."""
        mask = inputs["completion_mask"][:, 1:]
        lengths = mask.sum(dim=1)
        log_probs = _of_the_text(output.log_probs, mask)
        weights = (None, None)
        if self.objective.needs_policy_weights:
            excess = (log_probs.detach() - _of_the_text(output.log_sum_sq_probs, mask)) * mask
            weights = (excess.sum(dim=1) / lengths.clamp(min=1)).exp().chunk(2)
        columns = inputs.get("columns", {})
        return PreferenceScores(*log_probs.sum(dim=1).chunk(2), *reference, *lengths.chunk(2), columns, *weights)

    def _mean_loss(self, scores: PreferenceScores) -> Tensor:
        return self.objective(scores).mean()

    def _score_window_ahead(self, model, window: Window) -> None:
        """Score every micro-batch without gradients, for a loss that couples them; keeps a few numbers per pair.

        The policy's passes do not change the random state, so that the training passes, which follow in the same
        order, draw the same dropout masks.
        """
        batches = [self._prepare_inputs(batch) for batch in window.pending]
        window.reference = [self._reference(batch) for batch in batches]
        with torch.no_grad(), preserved_random_state():
            passes = zip(batches, window.reference, strict=True)
            parts = [self._scores(self._forward(model, batch), batch, reference) for batch, reference in passes]
        window.pending, window.coupled = None, self._coupled_shares(window, parts)

    def _coupled_shares(self, window: Window, parts: list[PreferenceScores]) -> list[CoupledShare]:
        return coupled_shares(self._mean_loss, parts, self.accelerator, micro_batches=window.micro_batches)

    # ---- Metrics ----

    def _log(self, scores: PreferenceScores, output, inputs: dict) -> None:
        """Log TRL's metrics of a micro-batch."""
        counted = self.counted(len(scores.chosen)).to(scores.chosen)
        mask = inputs["completion_mask"][:, 1:] * counted.repeat(2)[:, None].long()
        values = pair_metrics(scores, self.beta, counted)
        values["entropy"] = (_of_the_text(output.entropy, mask) * mask).sum(), mask.sum()
        for name, logits, own in zip(("chosen", "rejected"), output.mean_logits.chunk(2), mask.chunk(2), strict=True):
            values[f"logits/{name}"] = (_of_the_text(logits, own) * own).sum(), own.sum()
        top1, own = output.is_top1.chunk(2)[0], mask.chunk(2)[0]
        values["mean_token_accuracy"] = (_of_the_text(top1, own) * own).sum(), own.sum()
        if self.aux_loss_enabled:
            values["aux_loss"] = output.aux_loss, mask.new_ones(())
        if not (self.model.training or self._held_out):
            # transformers' mean loss of a batch counts the rows that accelerate repeats.
            losses = self.objective(scores).detach()
            if self.aux_loss_enabled:
                losses = losses + self.router_aux_loss_coef * output.aux_loss
            values["loss"] = (counted * losses).sum(), counted.sum()
        self.add_metrics(values, tokens=inputs["attention_mask"].sum())

    def _keep_held_out(self, scores: PreferenceScores) -> None:
        if self._couples_batch or self.objective.normalizes:
            scores = map_scores(Tensor.detach, scores)
            self._held_out.append(map_scores(self.accelerator.gather_for_metrics, scores))

    def held_out_loss(self) -> float | None:
        parts, self._held_out = self._held_out, []
        return self._mean_loss(join_scores(parts)).item() if parts else super().held_out_loss()


def reference_key(trainer: PreferenceTrainer) -> str:
    """Digest of everything except the pairs that a trainer's reference log-probabilities depend on.

    TRL names its cache by the weights alone, and with ZeRO-3 by those of a process, which are empty. Every process
    must call this.
    """
    model = trainer.accelerator.unwrap_model(trainer.model if trainer.ref_model is None else trainer.ref_model)
    passes = [trainer.accelerator.mixed_precision, model.config._attn_implementation, trainer.packing is not None]
    known = [trainer._precompute_model_hash, model.config.to_json_string(), getattr(model, "peft_config", None)]
    digest = hashlib.sha256(repr([*passes, *known]).encode())
    if is_zero3(trainer.accelerator):
        import deepspeed

        for parameter in model.parameters():
            # One parameter at a time, so that no process needs to hold the whole model.
            with deepspeed.zero.GatheredParameters([parameter]):
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _of_the_model(inputs: dict) -> dict:
    return {name: value for name, value in inputs.items() if name not in _NOT_OF_THE_MODEL}


def _of_the_text(values: Tensor, mask: Tensor) -> Tensor:
    """Values for the tokens of the text; soft-prompt adapters put virtual tokens in front."""
    return values[:, -mask.size(1) :]


def _collate(rows: list[dict], collator: Callable, columns: Sequence[str]) -> dict:
    """A collated batch with dataset columns, under one key that is removed before the model sees the batch."""
    try:
        values = {name: torch.tensor([row[name] for row in rows], dtype=torch.float32) for name in columns}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the loss reads numbers from the columns {[*columns]}: {error}") from error
    return {**collator(rows), "columns": values}
