"""Test cases of every function in the assignment. `pytest -k NAME` runs those of one function."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from checking.checks import call
from checking.verdicts import verdict

HERE = Path(__file__).resolve().parent
PLAN = json.loads((HERE / "plan.json").read_text(encoding="utf-8"))
CASES = [
    pytest.param(item, case, id=f"{item['name']}-{number}")
    for item in PLAN["functions"]
    for number, case in enumerate(json.loads((HERE / item["cases"]).read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("item, case", CASES)
def test_case(item, case):
    """Check the output, its gradients, and that no argument changes."""
    function = getattr(importlib.import_module(item["module"]), item["name"])
    problem = verdict(call(function, case, PLAN["classes"]), case)
    if problem is not None:
        texts = [f", {name}={text!r}" for name, text in case["arguments"].items() if isinstance(text, str)]
        pytest.fail(f"{item['name']}, {case['about']}{''.join(texts)}: {problem}", pytrace=False)
