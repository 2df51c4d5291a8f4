"""The commands of the public evaluation, run in this process, and the files that tests give them."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.evaluation.submissions.test_grading import write_assets

COMMANDS = ("generate", "score", "judge", "grade", "pack", "tournament")


def module_of(command: str) -> str:
    return "trl_ext.evaluation.stages" if command == "stages" else f"public_eval.{command}"


def run_command(capsys, command: str, *arguments) -> tuple[int, str, str]:
    """Run a command; returns its exit code, and what it wrote to standard output and error."""
    code = 0
    try:
        importlib.import_module(module_of(command)).main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def flags_of_course(folder: Path) -> dict[str, list]:
    """Flags that name ten prompts, their base responses, and four pairs."""
    flags = {name: [f"--{name}", path] for name, path in write_assets(folder / "assets").items()}
    flags["judging"] = flags["prompts_jsonl"] + flags["base_jsonl"]
    flags["all"] = flags["judging"] + flags["prefs_jsonl"]
    return flags


def one_line_error(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    lines = [line for line in err.replace("\r", "\n").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("verdicts:")]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]
