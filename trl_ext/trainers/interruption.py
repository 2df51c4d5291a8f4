"""What callbacks do that end a run which another one is to go on from."""

from __future__ import annotations


def leave_epoch(state, control, *, saves: bool) -> None:
    """On the end of an epoch in which the run stops: put off what belongs to whole epochs, or save it.

    transformers lets an epoch that was broken off end as a whole one does. Where it is whole, what is logged and
    evaluated at its end comes after the step's own checkpoint, and a run that is resumed does not come by it again.

    Args:
        state: of the trainer.
        control: what is due.
        saves: whether the run writes a checkpoint as it stops.
    """
    if state.global_step >= state.max_steps:
        return
    if state.epoch % 1:
        control.should_log = control.should_evaluate = control.should_save = False
    elif control.should_log or control.should_evaluate:
        control.should_save = saves
