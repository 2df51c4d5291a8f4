"""Measure the grader's speed and its agreement with math-verify alone on GSM8K's answers.

`python -m benchmarks.grader --data FOLDER` reads `FOLDER/gsm8k/test.jsonl`; without the flag, the variable
TRL_EXT_BENCHMARK_DATA names the folder. Each truth is turned into several answers, correct ones in other notation and
wrong ones. Each answer is graded with `fast=True`, with `fast=False`, and by math-verify alone in this process without
its time limit. The correct verdict follows from how the answer was built. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_ext.rewards import gsm8k_truth, is_correct
from trl_ext.rewards.math_worker import verify_in_worker

# How to build an answer from a truth, and whether it is correct.
FORMS: dict[str, tuple[Callable[[int], str], bool]] = {
    "as it is": (str, True),
    "separators": (lambda n: f"{n:,}", True),
    "decimals": (lambda n: f"{n}.00", True),
    "dollars": (lambda n: rf"\${n}", True),
    "fraction": (lambda n: rf"\frac{{{2 * n}}}{{2}}", True),
    "equation": (lambda n: f"x = {n}", True),
    "unit": (lambda n: rf"{n} \text{{ cm}}", True),
    "one more": (lambda n: str(n + 1), False),
    "negative": (lambda n: str(-n - 1), False),
    "a list": (lambda n: f"{n}, {n + 1}", False),
    "a tenth": (lambda n: f"{n}.1", False),
    "words": (lambda n: f"the answer is {n}", False),
}


def read_truths(path: Path) -> list[int]:
    """The integers among the final answers of a GSM8K file."""
    if not path.is_file():
        raise SystemExit(
            f"{path}: no such file; give the folder that holds gsm8k/ as --data or TRL_EXT_BENCHMARK_DATA"
        )
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    truths = [gsm8k_truth(row["answer"]) for row in rows]
    return [int(truth) for truth in truths if "." not in truth]


def math_verify_alone(answer: str, truth: str) -> bool:
    """math-verify's verdict with its own settings for a boxed answer."""
    from math_verify import parse, verify

    parsed = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer)]
    return verify(*parsed, timeout_seconds=None)


def measure(truths: list[int]) -> dict[str, Any]:
    """Verdicts and seconds of each grader, over all truths in all forms."""
    graders = {
        "fast=True": is_correct,
        "fast=False": lambda answer, truth: is_correct(answer, truth, fast=False),
        "math-verify alone": math_verify_alone,
    }
    # Warm up: late imports must not count toward the first answer.
    for grade in graders.values():
        grade(r"\frac{4}{2}", "3")
    verify_in_worker("1", "1")
    cases = [(form, make(truth), str(truth)) for form, (make, _) in FORMS.items() for truth in truths]
    verdicts: dict[str, list[bool]] = {}
    seconds: dict[str, float] = {}
    for name, grade in graders.items():
        start = time.perf_counter()
        verdicts[name] = [grade(answer, truth) for _, answer, truth in cases]
        seconds[name] = time.perf_counter() - start
    return {
        "answers": len(cases),
        "truths": len(truths),
        "graders": {name: _summary(name, cases, verdicts, seconds[name]) for name in graders},
    }


def _summary(name: str, cases: list, verdicts: dict[str, list[bool]], seconds: float) -> dict[str, Any]:
    own, alone = verdicts[name], verdicts["math-verify alone"]
    expected = [FORMS[form][1] for form, _, _ in cases]
    by_form = {
        form: sum(verdict for verdict, (other, _, _) in zip(own, cases, strict=True) if other == form)
        for form in FORMS
    }
    return {
        "answers_per_second": len(cases) / seconds,
        "agreement_with_math_verify": sum(map(bool.__eq__, own, alone)) / len(cases),
        "right_verdicts": sum(map(bool.__eq__, own, expected)) / len(cases),
        "accepted_by_form": by_form,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", "data")))
    parser.add_argument("--limit", type=int, help="how many truths; all by default")
    arguments = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    figures = measure(read_truths(arguments.data / "gsm8k" / "test.jsonl")[: arguments.limit])
    graders = figures["graders"]
    print(f"{figures['answers']:,} answers: {figures['truths']:,} truths in {len(FORMS)} forms\n")
    print(f"{'':<26}" + "".join(f"{name:>19}" for name in graders))
    for key in ("answers_per_second", "agreement_with_math_verify", "right_verdicts"):
        digits = ",.0f" if key == "answers_per_second" else ".4f"
        print(f"{key:<26}" + "".join(f"{row[key]:>19{digits}}" for row in graders.values()))
    print("accepted, of each form")
    for form, (_, right) in FORMS.items():
        label = f"  {form} ({'right' if right else 'wrong'})"
        print(f"{label:<26}" + "".join(f"{row['accepted_by_form'][form]:>19,}" for row in graders.values()))


if __name__ == "__main__":
    main()
