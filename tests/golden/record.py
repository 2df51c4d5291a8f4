"""Golden values: what every loss, advantage and algorithm returns for fixed inputs, with its gradient.

`python -m tests.golden.record` prints what differs from `values.jsonl` and writes that file again. A recorded value
changes only if it was wrong. If names in the library change, the functions in `objectives` and `functions` that call
it change, and the names of the rows do not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.golden.functions import course_rows, pair_rows
from tests.golden.objectives import Row, advantage_rows, algorithm_rows, preference_rows

FILE = Path(__file__).with_name("values.jsonl")
# Computed in float32, whose last digits depend on the processor.
FLOAT32 = "course/compute_group_normalized_rewards"

Values = dict[str, dict[str, list[float]]]


def rows() -> Iterator[Row]:
    """Every row of the file, in its order."""
    for of_kind in (preference_rows, algorithm_rows, advantage_rows, pair_rows, course_rows):
        yield from of_kind()


def compute(row: Row) -> dict[str, list[float]]:
    """What a row returns, and the gradient of the sum of its first value with respect to each input, as flat lists."""
    _, function, tensors = row
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    found = function(**leaves)
    found = found if isinstance(found, dict) else {"value": found}
    values = {name: _numbers(value) for name, value in found.items()}
    first = next(iter(found.values()))
    if leaves and first.requires_grad:
        first.sum().backward()
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return values | {f"gradient of {name}": _numbers(gradient) for name, gradient in gradients.items()}


def computed() -> Values:
    return {row[0]: compute(row) for row in rows()}


def recorded() -> Values:
    return {row.pop("row"): row for row in map(json.loads, FILE.read_text().splitlines())}


def differences(old: Values, new: Values) -> Iterator[str]:
    """A line for each row or quantity that differs. A recorded 0 stays exactly 0."""
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new or name not in old:
            yield f"{name}: {'not computed any more' if name in old else 'not recorded'}"
            continue
        for quantity in [*old[name], *(quantity for quantity in new[name] if quantity not in old[name])]:
            was, now = (values[name].get(quantity, []) for values in (old, new))
            relative = 1e-6 if name.startswith(FLOAT32) else 1e-12
            at = [i for i, pair in enumerate(zip(was, now, strict=False)) if not _close(*pair, relative)]
            if len(was) != len(now):
                yield f"{name}, {quantity}: {len(was)} values recorded, {len(now)} computed"
            elif at:
                yield f"{name}, {quantity}[{at[0]}]: {was[at[0]]!r} recorded, {now[at[0]]!r} computed"


def _close(was: float, now: float, relative: float) -> bool:
    if math.isnan(was) or math.isnan(now):
        return math.isnan(was) and math.isnan(now)
    return math.isclose(was, now, rel_tol=relative, abs_tol=relative / 100 if was else 0)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in _numbers(item)]
    if isinstance(value, Tensor):
        return value.detach().double().flatten().tolist()
    return [math.nan if value is None else float(value)]


def main() -> None:
    old, new = recorded(), computed()
    for difference in differences(old, new):
        print(difference)
    with FILE.open("w") as file:
        for name, values in new.items():
            # A row that agrees stays as it is, so that another processor's last digits do not change the file.
            agrees = name in old and not any(differences({name: old[name]}, {name: values}))
            row = {
                quantity: [int(number) if number.is_integer() else number for number in map(float, numbers)]
                for quantity, numbers in (old[name] if agrees else values).items()
            }
            file.write(json.dumps({"row": name, **row}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
