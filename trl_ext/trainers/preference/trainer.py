"""`PreferenceTrainer`: TRL's `DPOTrainer` with a named function from log-probabilities to losses.

It overrides two methods, its seams. `_compute_loss` lets TRL run its forward passes and log its metrics with an empty
list of losses, reads the log-probabilities from the model's output, and adds the loss. `get_batch_samples` sees a
whole accumulation window before training on it, which exact normalisation and batch-coupled losses require.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, load_from_disk
from torch import Tensor
from trl import DPOTrainer as TRLDPOTrainer

from trl_ext.losses import PreferenceScores
from trl_ext.models.batches import temporarily
from trl_ext.models.loading import check_vocabulary
from trl_ext.models.shared_backbone import preserved_random_state
from trl_ext.resilience.training import ResilientTraining
from trl_ext.trainers.context import PAIRS, check_inputs, check_template, quiet_about_length, truncate_pairs
from trl_ext.trainers.defaults import configuration
from trl_ext.trainers.metrics import PairMetrics
from trl_ext.trainers.model_card import WritesModelCard
from trl_ext.trainers.packing import pack_trainer
from trl_ext.trainers.policies import Tap, check_base_of_adapter, reference_in_memory
from trl_ext.trainers.preference.config import PreferenceConfig
from trl_ext.trainers.preference.optimizer_batch import Window, coupled_shares
from trl_ext.trainers.preference.reference import cache_key, precomputes_reference, reference_passes

# Entries that this trainer adds to a batch and that must not reach the model.
_OWN_KEYS = ("columns", "window", "window_index")
# TRL's names for the reference log-probabilities of chosen and rejected in a batch.
_REFERENCE_KEYS = ("ref_chosen_logps", "ref_rejected_logps")


class PreferenceTrainer(ResilientTraining, WritesModelCard, PairMetrics, TRLDPOTrainer):
    """Trains on pairs with any preference loss: `PreferenceConfig(loss=...)`.

    Accepts the arguments of `trl.DPOTrainer`, with a `PreferenceConfig`, and keeps its features: adapters that are
    switched off to give the reference, precomputed reference log-probabilities, checkpoints, metrics, distributed
    training. It differs in five ways. The loss is replaced. A reference-free loss uses no reference model and
    no reference pass. Prompts are cut at the beginning and responses at the end, each to its own limit. The loss can
    read dataset columns. The gradient of an optimizer step is that of the mean over its pairs, however they are
    divided into micro-batches and ranks.

    A batch-coupled loss (`aot`, `aot_paired`) with `aot_scope="global"` is evaluated on the whole optimizer batch.
    With accumulated micro-batches, that costs a second forward pass of the policy, without gradients. With one
    micro-batch per step, it costs only the exchange of a few numbers per pair. Extra memory is a few numbers per pair.
    Held-out losses of such a loss, or of a normalised weighting, treat all held-out pairs as one batch.

    The logged `rewards/*` are TRL's: beta times the log-ratio of summed log-probabilities to the reference (to zero,
    for a reference-free loss), whatever the loss itself compares.

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
        model = check_inputs(model, {**kwargs, "ref_model": ref_model}, PAIRS, one_kind=True)
        self.objective = args.build_objective()
        self.columns = self.objective.columns
        self.packing = None
        self._is_packed = False
        self._check_reference(ref_model, args)
        self._check_datasets(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        precomputes = precomputes_reference(self.objective, args, kwargs)
        setup = {
            # Only with this setting does TRL keep no reference model; `_precompute_ref_logps` then has nothing to do.
            "precompute_ref_log_probs": precomputes or not self.objective.needs_reference,
            # Makes the fused LM head return `log_sum_sq_probs`, from which WPO's weights are computed.
            "use_weighting": self.objective.needs_policy_weights,
            # Any type that its constructor accepts: the list is empty whenever TRL's loss is computed.
            "loss_type": ["sigmoid"],
        }
        with temporarily(args, **setup), reference_in_memory(TRLDPOTrainer, model):
            super().__init__(model, ref_model, args, **kwargs)
        if self.objective.needs_reference and self.ref_model is None:
            check_base_of_adapter(self.model)
        self._pack()
        self.use_weighting = False
        self.precompute_ref_logps = precomputes
        # Wrapped only now, so that the pass for reference log-probabilities sees no extra columns.
        self.data_collator = _CollatorWithColumns(self.data_collator, self.columns)

    # ---- Setup of TRL ----

    def _pack(self) -> None:
        if not self._is_packed:
            self._is_packed = True
            self.packing = pack_trainer(self)

    def _check_reference(self, ref_model, args: PreferenceConfig) -> None:
        if self.objective.needs_reference:
            return
        names = ("precompute_ref_log_probs", "sync_ref_model")
        given = ["ref_model"] * (ref_model is not None) + [name for name in names if getattr(args, name)]
        if given:
            raise ValueError(f"the loss {args.loss!r} uses no reference model: leave out {', '.join(given)}")

    def _check_datasets(self, train_dataset, eval_dataset) -> None:
        named = {"train_dataset": train_dataset}
        named.update(eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset})
        for name, dataset in named.items():
            have = getattr(dataset, "column_names", None)
            if have is None:
                continue
            missing = [column for column in self.columns if column not in have]
            if missing:
                raise ValueError(
                    f"the loss or its weighting reads the column {missing[0]!r}, which {name} does not have; "
                    f"it has {', '.join(have)}"
                )
            pair = dataset[0] if isinstance(dataset, Dataset) and {"chosen", "rejected"} <= {*have} else {}
            if pair and "prompt" not in pair and pair["chosen"][:1] != pair["rejected"][:1]:
                raise ValueError(
                    f"{name} has no column 'prompt', and its chosen and rejected do not begin alike; "
                    f"it has {', '.join(have)}"
                )

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, *self.columns]))

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        check_template(processing_class, dataset)
        quiet_about_length(processing_class)
        dataset = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        return truncate_pairs(dataset, dataset_name, args)

    def _precompute_ref_logps(self, dataset, name, batch_size):
        if not self.objective.needs_reference:
            return dataset
        # This runs within TRL's constructor, which has already put its head on the models.
        check_vocabulary(self.model, self.processing_class)
        self._pack()
        if self.packing is not None and self.packing.active and self.args.precompute_ref_batch_size is None:
            # Without gradients and padding, a pass of this size needs less memory than a training step.
            batch_size = 4 * batch_size

        in_memory = isinstance(dataset, Dataset) and not dataset.cache_files
        if self.accelerator.num_processes > 1 and in_memory:
            dataset = self._on_shared_disk(dataset, name)
        with reference_passes(self), temporarily(self, _precompute_model_hash=cache_key(self)):
            return super()._precompute_ref_logps(dataset, name, batch_size)

    def _on_shared_disk(self, dataset: Dataset, name: str) -> Dataset:
        """Move an in-memory dataset to disk; otherwise TRL's cache of it has another path on every process."""
        fingerprint = broadcast_object_list([dataset._fingerprint])[0]
        folder = Path(self.args.output_dir) / "reference_log_probs" / f"{name}-{fingerprint}"
        if self.accelerator.is_main_process and not folder.exists():
            dataset.save_to_disk(folder.with_suffix(".partial"))
            folder.with_suffix(".partial").rename(folder)
        self.accelerator.wait_for_everyone()
        return load_from_disk(folder)

    def compute_ref_log_probs(self, model, inputs):
        return super().compute_ref_log_probs(model, _without_own_keys(inputs))

    # ---- A whole accumulation window, before training on it ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            window = self._open_window(batches)
            batches = [{**batch, "window": window, "window_index": i} for i, batch in enumerate(batches)]
        return batches, num_items_in_batch

    def _open_window(self, batches: list[dict]) -> Window:
        normalizes = self.objective.normalizes
        pairs = sum(len(batch["input_ids"]) // 2 for batch in batches)
        raw_weight = sum(self._raw_weights(batch).sum().item() for batch in batches) if normalizes else 0.0
        totals = torch.tensor([pairs, raw_weight], dtype=torch.float32, device=self.accelerator.device)
        pairs, raw_weight = self.accelerator.reduce(totals, reduction="sum").unbind()
        return Window(
            size=len(batches),
            pairs=int(pairs),
            ranks=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            mean_raw_weight=raw_weight / pairs if normalizes else None,
            pending=batches if self._couples_batch and len(batches) > 1 else None,
        )

    @property
    def _couples_batch(self) -> bool:
        return self.objective.batch_coupled and self.args.aot_scope == "global"

    def _mean_loss(self, scores: PreferenceScores) -> Tensor:
        return self.objective(scores).mean()

    def _raw_weights(self, batch: dict) -> Tensor:
        """Weights to be normalised, which depend only on dataset columns. [n]."""
        blank = torch.zeros(len(batch["input_ids"]) // 2, device=batch["input_ids"].device)
        return self.objective.raw_weights(PreferenceScores(blank, blank, columns=batch.get("columns", {})))

    # ---- From log-probabilities to the loss ----

    def _compute_loss(self, model, inputs, return_outputs):
        window, index, columns = inputs.get("window"), inputs.get("window_index"), inputs.get("columns", {})
        inputs = _without_own_keys(inputs)
        if window is not None and window.pending is not None:
            self._score_window_ahead(model, window)
        if window is not None and window.reference is not None:
            inputs.update(zip(_REFERENCE_KEYS, window.reference[index], strict=True))
        else:
            inputs.update(zip(_REFERENCE_KEYS, self._reference(inputs), strict=True))

        tap = Tap(model)
        # TRL's loss step with an empty list of losses, and reference log-probabilities from the batch.
        with temporarily(self, precompute_ref_logps=True, loss_types=[], loss_weights=[]):
            base = super()._compute_loss(tap, inputs, return_outputs)
        auxiliary_loss, outputs = base if return_outputs else (base, None)
        scores = self._scores(tap.output, inputs, columns)

        if window is None:
            self._keep_held_out(scores)
            loss = self._mean_loss(scores)
        elif self._couples_batch:
            if window.coupled is None:
                window.coupled = coupled_shares(self._mean_loss, [scores], window.rank, self.accelerator.gather)
            loss = window.share(index, scores)
        else:
            loss = self.objective(scores, mean_raw_weight=window.mean_raw_weight).sum() * window.scale
        loss = loss + auxiliary_loss
        return (loss, outputs) if return_outputs else loss

    def _score_window_ahead(self, model, window: Window) -> None:
        """Score every micro-batch without gradients, for a loss that couples them; keeps a few numbers per pair.

        The policy's passes do not change the random state, so that the training passes, which follow in the same
        order, draw the same dropout masks.
        """
        batches = [self._prepare_inputs(batch) for batch in window.pending]
        window.pending = None
        window.reference = [self._reference(_without_own_keys(batch)) for batch in batches]
        parts = []
        with torch.no_grad(), preserved_random_state():
            for batch, reference in zip(batches, window.reference, strict=True):
                inputs = {**_without_own_keys(batch), **dict(zip(_REFERENCE_KEYS, reference, strict=True))}
                labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
                model_inputs = {k: v for k, v in inputs.items() if k not in ("completion_mask", *_REFERENCE_KEYS)}
                output = model(**model_inputs, labels=labels, use_cache=False, fused_lm_head=True)
                parts.append(self._scores(output, inputs, batch.get("columns", {})))
        window.coupled = coupled_shares(self._mean_loss, parts, window.rank, self.accelerator.gather)

    def _reference(self, inputs: dict) -> tuple[Tensor, Tensor]:
        """Reference log-probabilities of chosen and rejected [n]: precomputed, computed now, or zeros if unused."""
        if all(key in inputs for key in _REFERENCE_KEYS):
            return tuple(inputs[key] for key in _REFERENCE_KEYS)
        if self.objective.needs_reference:
            # Not `or`: a compiled model has no truth value.
            model = self.model if self.ref_model is None else self.ref_model
            return self.compute_ref_log_probs(model, inputs)
        zeros = torch.zeros(len(inputs["input_ids"]) // 2, device=inputs["input_ids"].device)
        return zeros, zeros

    def _scores(self, output, inputs: dict, columns: dict[str, Tensor]) -> PreferenceScores:
        """Sum token log-probabilities into the loss's inputs; a batch holds chosen rows, then rejected rows."""
        mask = inputs["completion_mask"][:, 1:]
        # Soft-prompt adapters put virtual tokens in front.
        log_probs = output.log_probs[:, -mask.size(1) :]
        chosen, rejected = log_probs.sum(dim=1).chunk(2)
        chosen_length, rejected_length = mask.sum(dim=1).chunk(2)
        weights = {}
        if self.objective.needs_policy_weights:
            excess = (log_probs.detach() - output.log_sum_sq_probs[:, -mask.size(1) :]) * mask
            weight = (excess.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).exp()
            weights = dict(zip(("chosen_policy_weight", "rejected_policy_weight"), weight.chunk(2), strict=True))
        reference = {}
        if self.objective.needs_reference:
            reference = {"ref_chosen": inputs[_REFERENCE_KEYS[0]], "ref_rejected": inputs[_REFERENCE_KEYS[1]]}
        return PreferenceScores(
            chosen=chosen,
            rejected=rejected,
            chosen_length=chosen_length,
            rejected_length=rejected_length,
            columns=columns,
            **reference,
            **weights,
        )


class _CollatorWithColumns:
    """Adds dataset columns to a collated batch, under one key that is removed before the model sees the batch."""

    def __init__(self, collator: Callable, columns: tuple[str, ...]):
        self.collator = collator
        self.columns = columns

    def __call__(self, rows: list[dict]) -> dict:
        batch = self.collator(rows)
        if self.columns:
            batch["columns"] = {
                name: torch.tensor([_number(row, name) for row in rows], dtype=torch.float32) for name in self.columns
            }
        return batch


def _number(row: dict, column: str) -> float:
    value = row.get(column)
    if not isinstance(value, (int, float)):
        found = f"holds {value!r}" if column in row else "is missing"
        raise ValueError(
            f"the loss reads numbers from the column {column!r}, which {found} in row {row.get('row_id', row)}"
        )
    return float(value)


def _without_own_keys(inputs: dict) -> dict:
    return {key: value for key, value in inputs.items() if key not in _OWN_KEYS}
