"""Worked additions to fine-tune on. A known share is wrong, to test filtering."""

from __future__ import annotations

import random

from trl_ext.toy.demonstrations import demonstrate_addition
from trl_ext.toy.prompts import parse
from trl_ext.toy.scoring import score

WRONG_SHARE = 0.25
# Probability that a step of a wrong trace is right.
STEP_CORRECTNESS = 0.65


def addition_trace(prompt: str, *, wrong_share: float = WRONG_SHARE) -> str:
    """A response to an addition: with probability `wrong_share` its answer is wrong, otherwise it has no mistake.

    A correct trace has correct steps. A wrong one slips or forgets the carry, as in pretraining, and sometimes omits
    its steps and tags. There is one trace for each prompt and share.

    Args:
        prompt: an addition of the embedded benchmark, such as `What is 47 + 38?`.
        wrong_share: in [0, 1].

    Raises:
        ValueError: the prompt is not an addition.
    """
    task = parse(prompt)
    if task.kind != "add":
        raise ValueError(f"{prompt!r} is no addition, but of the kind {task.kind!r}")
    generator = random.Random(f"trace 0 {prompt}")
    wrong = generator.random() < wrong_share
    while True:
        correctness = STEP_CORRECTNESS if wrong else 1.0
        trace = demonstrate_addition(*task.numbers, correctness=correctness, generator=generator)
        # Without slips, an answer is correct if and only if its carry was not forgotten.
        if (score(prompt, trace) < 1) == wrong:
            return trace
