"""Worked additions to fine-tune on, a known share of which is wrong, so that filtering them has something to find."""

from __future__ import annotations

import random

from trl_ext.toy.demonstrations import demonstrate_addition
from trl_ext.toy.prompts import parse
from trl_ext.toy.task import score

WRONG_SHARE = 0.25
# How often a single step of a wrong trace is right.
STEP_CORRECTNESS = 0.65


def addition_trace(prompt: str, *, wrong_share: float = WRONG_SHARE, seed: int = 0) -> str:
    """A response to an addition: with probability `wrong_share` one with a wrong answer, else one without a mistake.

    A right trace has right steps. A wrong one slips or forgets the carry, as in pretraining, and at times comes
    without its steps and tags. One seed, one trace for each prompt.

    Args:
        prompt: an addition of the embedded benchmark, such as `What is 47 + 38?`.
        wrong_share: in [0, 1].
        seed: of what is drawn.

    Raises:
        ValueError: the prompt is no addition, or the share is no probability.
    """
    if not 0 <= wrong_share <= 1:
        raise ValueError(f"wrong_share must lie between 0 and 1, got {wrong_share}")
    task = parse(prompt)
    if task.kind != "add":
        raise ValueError(f"{prompt!r} is no addition, but of the kind {task.kind!r}")
    generator = random.Random(f"trace {seed} {prompt}")
    wrong = generator.random() < wrong_share
    while True:
        correctness = STEP_CORRECTNESS if wrong else 1.0
        trace = demonstrate_addition(*task.numbers, correctness=correctness, generator=generator)
        # Without slips, an answer is right if and only if its carry was not forgotten.
        if (score(prompt, trace) < 1) == wrong:
            return trace
