"""The processes of a launch: which one this is, what it says, and its share of the work."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def is_main_process() -> bool:
    """Whether this is the first process, readable before any distributed state exists."""
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    """The number of processes, readable before any distributed state exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def warn_once_per_run(message: str) -> None:
    """Log a warning from the first process only, and not again before `begin_warnings`."""
    if is_main_process() and message not in _warned:
        _warned.add(message)
        logger.warning(message)


def begin_warnings() -> None:
    """Let each warning be logged again, as when another training begins in this process."""
    _warned.clear()


@contextmanager
def quiet_when_closed() -> Iterator[None]:
    """End without a traceback if the reader of the standard output, such as `head`, has closed it."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:
            # Otherwise the interpreter would flush once more, and complain, when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        # Another pipe or socket is broken.
        raise


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
