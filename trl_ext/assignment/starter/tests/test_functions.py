"""Test cases of every function in the assignment. `pytest -k NAME` runs those of one function."""

import importlib
from pathlib import Path

import pytest
import torch
from checking import call, verdict

FUNCTIONS = torch.load(Path(__file__).parent / "cases.pt", weights_only=True)
CASES = [(item, number) for item in FUNCTIONS for number in range(len(item["cases"]))]


@pytest.mark.parametrize("item, number", CASES, ids=[f"{item['name']}-{number}" for item, number in CASES])
def test_case(item, number):
    """Check the result, its gradients, and that no argument changes."""
    function, case = getattr(importlib.import_module(item["module"]), item["name"]), item["cases"][number]
    problem = verdict(call(function, case), case)
    if problem is not None:
        texts = [f", {name}={text!r}" for name, text in case["arguments"].items() if isinstance(text, str)]
        pytest.fail(f"{item['name']}, {case['about']}{''.join(texts)}: {problem}", pytrace=False)
