"""Divide a list of independent work items among the processes of a run."""

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
    """Compute `function(items)` with the items divided among the ranks; every rank returns all results, in order.

    Under FSDP a forward pass is a collective operation, so every rank processes all items, in step with the others.
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

    Gloo's threads need Python's lock to release the tensors of the last collective operation. A process that destroys
    the group while a thread waits for the lock hangs forever. The pause lets the threads finish.
    """
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(0.5)
    # The group of a run that is not distributed is vLLM's, which leaves it itself.
    if accelerator.distributed_type != "NO":
        accelerator.end_training()
