"""Dividing a list of independent pieces of work among the processes of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from accelerate import Accelerator

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_over_ranks(
    function: Callable[[list[Item]], list[Result]], items: Sequence[Item], accelerator: Accelerator | None = None
) -> list[Result]:
    """`function(items)` with the items divided among the ranks; every rank returns all results, in order.

    Under FSDP a forward pass is itself a collective, so there every rank does all of the work, in step.
    """
    if accelerator is None or accelerator.num_processes == 1:
        return function(list(items))
    from accelerate.utils import DistributedType, gather_object

    if accelerator.distributed_type == DistributedType.FSDP:
        return function(list(items))
    own = list(range(accelerator.process_index, len(items), accelerator.num_processes))
    results = function([items[i] for i in own]) if own else []
    by_index = dict(gather_object(list(zip(own, results, strict=True))))
    return [by_index[i] for i in range(len(items))]


def end_processes(accelerator: Accelerator) -> None:
    """Leave the process group once every rank is done.

    Gloo's threads drop the tensors of the last collective under Python's lock; a process that tears the group down
    while one of them waits for it hangs for good. The pause lets them finish.
    """
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(0.5)
    accelerator.end_training()
