"""`--max_hours`: ends a run in time, with a checkpoint and its table, and lets it go on with more hours."""

from __future__ import annotations

from dataclasses import dataclass, field

from run_folder import TrainingRun

from trl_ext.trainers.callbacks import MetricsFileCallback, TimeBudgetCallback, read_metrics


@dataclass
class TimeBudgetArguments:
    """How long a run may take; to be named before the other arguments of a recipe."""

    max_hours: float | None = field(
        default=None, metadata={"help": "End training after so long, with a checkpoint and the final table."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_hours is not None and not self.max_hours > 0:
            raise ValueError(f"max_hours must be positive, got {self.max_hours}")


def check_time_left(run: TrainingRun) -> None:
    """Refuse to go on with a run whose hours are spent.

    Raises:
        ValueError: they are.
    """
    hours = run.arguments.max_hours
    if run.checkpoint is None or hours is None:
        return
    rows = read_metrics(run.folder / "metrics.jsonl")
    taken = max((row.get("seconds", 0.0) for row in rows), default=0.0) / 3600
    if taken >= hours:
        raise ValueError(f"the run has taken {taken:.2f} of its --max_hours {hours:g}: give more")


def time_budget(run: TrainingRun, trainer, metrics: MetricsFileCallback, *, period: int = 1):
    """What ends training when the hours are spent; None without `--max_hours`.

    Args:
        run: whose arguments have `max_hours`.
        trainer: of this run.
        metrics: keeps the time.
        period: steps between the places where the run may end.
    """
    hours = run.arguments.max_hours
    return None if hours is None else TimeBudgetCallback(hours, metrics, trainer.accelerator, period=period)


def say_stopped(run: TrainingRun, done: int, of: int, what: str = "steps") -> None:
    """One line on where the run was stopped, and how it goes on."""
    print(
        f"stopped by --max_hours {run.arguments.max_hours:g} after {done} of {of} {what}; with more hours, "
        "--resume_from_checkpoint goes on"
    )
