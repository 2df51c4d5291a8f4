"""The best checkpoint of a reward model: each one is scored on a selection split when saved, and the best is kept.

The metrics of a checkpoint are logged as `selection/*`, so they are part of the trainer's state and survive a resume.
The best checkpoint so far is recorded there as the trainer's own, which `save_total_limit` never deletes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from trl_ext.evaluation.methods.reward_models import best_of_n, reward_metrics
from trl_ext.files import write_json
from trl_ext.held_out.table import log_held_out
from trl_ext.trainers.reward.trainer import RewardTrainer

# Criterion -> the metric that decides, and whether higher is better. Calibration uses the log-likelihood, a proper
# score. The binned ECE is noisy on a few hundred pairs, and is zero for a model that cannot distinguish any pair.
_DECIDING = {
    "accuracy": ("accuracy", True),
    "margin": ("margin", True),
    "calibration": ("nll", False),
    "best_of_n": ("best_of_n", True),
}
_PREFIX = "selection/"


@dataclass(frozen=True)
class ScoredSamples:
    """Samples of known quality, for the criterion `best_of_n`.

    Attributes:
        sequences: token ids of each prompt's samples, prompt included.
        gold: quality of each prompt's samples.
        n: number of samples from which the model picks.
    """

    sequences: Sequence[Sequence[Sequence[int]]]
    gold: Sequence[Sequence[float]]
    n: int


class CheckpointSelection(TrainerCallback):
    """Scores each checkpoint on held-out pairs as it is saved; `load_best` then loads the best into the trainer.

    Ties go to the earlier checkpoint. Add it with `trainer.add_callback(CheckpointSelection(trainer, pairs))`.

    Args:
        trainer: a `RewardTrainer`; its `args.select_best` names the criterion: `accuracy`, `margin`, `calibration`
            (negative log-likelihood) or `best_of_n`, the mean quality of the sample that the model ranks first.
        pairs: held-out pairs, in the format of the trainer's datasets.
        samples: required for `best_of_n`.

    Raises:
        ValueError: no criterion, no checkpoints to choose from, or `best_of_n` without samples.
    """

    def __init__(self, trainer: RewardTrainer, pairs: Dataset, *, samples: ScoredSamples | None = None):
        self.criterion = trainer.args.select_best
        if self.criterion is None:
            raise ValueError("select_best is none: there is nothing to select a checkpoint by")
        if trainer.args.save_strategy == "no":
            raise ValueError("select_best needs checkpoints: set save_strategy to steps or epoch, or select_best none")
        if self.criterion == "best_of_n" and samples is None:
            raise ValueError(
                "select_best best_of_n needs samples of known quality: give samples, or another criterion"
            )
        self.trainer = trainer
        self.pairs = trainer._prepare_dataset(pairs, trainer.processing_class, trainer.args, "selection")
        self.samples = samples

    def on_train_begin(self, args, state, control, **kwargs):
        # The state saved with a checkpoint does not contain its own metrics.
        if state.global_step and state.global_step not in self._scored_steps:
            self.on_save(args, state, control)

    def on_save(self, args, state, control, **kwargs):
        if _is_due(args, state):
            self._score_checkpoint(log=True)

    def _score_checkpoint(self, *, log: bool) -> None:
        state = self.trainer.state
        figures = {f"{_PREFIX}{name}": value for name, value in self._measure().items()}
        if log:
            log_held_out(self.trainer, figures)
        else:
            state.log_history.append({**figures, "step": state.global_step})
        best = self._best()
        state.best_global_step, state.best_metric = best["step"], best[self._deciding]
        state.best_model_checkpoint = str(self._folder(best["step"]))

    def _measure(self) -> dict[str, float]:
        metrics = reward_metrics(*self.trainer.score_pairs(self.pairs))
        figures = {name: metrics[name] for name in ("accuracy", "margin", "nll", "ece")}
        if self.samples is not None:
            flat = [sequence for samples in self.samples.sequences for sequence in samples]
            scores = iter(self.trainer.score(flat).tolist())
            proxy = [[next(scores) for _ in samples] for samples in self.samples.sequences]
            figures["best_of_n"] = best_of_n(proxy, self.samples.gold, self.samples.n)["gold"]
        return figures

    @property
    def _deciding(self) -> str:
        return _DECIDING[self.criterion][0]

    def _folder(self, step: int) -> Path:
        return Path(self.trainer.args.output_dir) / f"checkpoint-{step}"

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """The metrics of each scored checkpoint, with its `step`, in order."""
        logged = [entry for entry in self.trainer.state.log_history if f"{_PREFIX}accuracy" in entry]
        return [
            {name.removeprefix(_PREFIX): value for name, value in entry.items() if name != "epoch"} for entry in logged
        ]

    @property
    def _scored_steps(self) -> set[int]:
        return {entry["step"] for entry in self.candidates}

    def _best(self) -> dict[str, Any]:
        """The best existing checkpoint; after resuming from an early one, better ones may be gone."""
        now = self.trainer.state.global_step
        there = [entry for entry in self.candidates if entry["step"] == now or self._folder(entry["step"]).is_dir()]
        higher = _DECIDING[self.criterion][1]
        return max(there, key=lambda entry: entry[self._deciding] if higher else -entry[self._deciding])

    def load_best(self, *, split: str) -> dict[str, Any]:
        """Load the best checkpoint's weights into the trainer, and write them to `{output_dir}/best`.

        Call it after training, in every process. The returned mapping is also written to `best/selection.json`.

        Args:
            split: name of the selection split, for the record.

        Returns:
            `step`; `criterion`; `figure`, the name of the deciding metric; `split`; `n`, the number of pairs; and
            `checkpoints`, the metrics of each.

        Raises:
            ValueError: no checkpoint was saved.
        """
        trainer, state = self.trainer, self.trainer.state
        if state.global_step not in self._scored_steps and self._folder(state.global_step).is_dir():
            self._score_checkpoint(log=False)
        if not self.candidates:
            raise ValueError("no checkpoint was saved to choose from: lower save_steps, or set select_best none")
        best = self._best()
        state.best_model_checkpoint = str(self._folder(best["step"]))
        trainer._load_best_model()
        selection = {
            "step": best["step"],
            "criterion": self.criterion,
            "figure": self._deciding,
            "split": split,
            "n": len(self.pairs),
            "checkpoints": self.candidates,
        }
        # The folder `best` is written as a whole.
        folder, partial = (Path(trainer.args.output_dir) / name for name in ("best", "best.partial"))
        if trainer.accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        trainer.save_model(str(partial))
        if trainer.accelerator.is_main_process:
            write_json(partial / "selection.json", selection)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        trainer.accelerator.wait_for_everyone()
        return selection


def _is_due(args, state) -> bool:
    """Whether a checkpoint was scheduled; one saved because of an interruption is not a candidate."""
    if state.global_step >= state.max_steps:
        return True
    if args.save_strategy == IntervalStrategy.STEPS:
        return state.global_step % state.save_steps == 0
    return args.save_strategy != IntervalStrategy.EPOCH or state.epoch == int(state.epoch)
