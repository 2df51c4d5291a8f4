"""The commands of the public evaluation, run in this process, and the files that tests give them."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.support.files import write_rows

COMMANDS = ("generate", "score", "judge", "grade", "pack", "tournament")
WORDS = ["axe", "banana", "beach", "black", "blue", "captain", "car", "carrot", "castle", "cat"]
# To "Say axe three times.": right, the base's own, and wrong.
ANSWERS = {"win": "{0}, {0}, {0}.", "tie": "{0}, {0}.", "loss": "wrong", "empty": " "}


def run_command(capsys, command: str, *arguments) -> tuple[int, str, str]:
    """Run a command; returns its exit code, and what it wrote to standard output and error."""
    code = 0
    try:
        importlib.import_module(f"public_eval.{command}").main([str(argument) for argument in arguments])
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


def response(row_id, text="fine", tokens=3, prompt_text=None):
    prompt_text = prompt_text or f"Say {row_id} twice."
    shown = {"row_id": row_id, "prompt_text": prompt_text}
    return {**shown, "response_text": text, "generated_num_tokens": tokens}


def response_rows(plan):
    """A row for each word, by what the planned answer should bring against the base."""
    return [
        response(f"row-{word}", ANSWERS[kind].format(word), 9, f"Say {word} three times.")
        for word, kind in zip(WORDS, plan, strict=True)
    ]


def plan(win=0, tie=0, loss=0, empty=0):
    return ["win"] * win + ["tie"] * tie + ["loss"] * loss + ["empty"] * empty


def write_assets(folder):
    """Ten prompts, the base's answers (two of three words), and four pairs; returns the keywords that name them."""
    prompts = {f"row-{word}": f"Say {word} three times." for word in WORDS}
    pairs = [
        {"row_id": f"pair-{i}", "prompt_text": "Say cat.", "chosen_text": "cat", "rejected_text": f"dog {i}"}
        for i in range(4)
    ]
    return {
        "prompts_jsonl": str(write_prompts(folder / "prompts.jsonl", prompts)),
        "base_jsonl": str(write_rows(folder / "base.jsonl", response_rows(plan(tie=10)))),
        "prefs_jsonl": str(write_rows(folder / "prefs.jsonl", pairs)),
    }


def write_scores(folder, margins):
    rows = [{"row_id": f"pair-{i}", "chosen_score": m, "rejected_score": 0.0} for i, m in enumerate(margins)]
    return write_rows(folder / "reward_model" / "public_test_pref_scores.jsonl", rows)


def write_policy(folder, name, rows):
    return write_rows(folder / "policy_generations" / f"{name}.jsonl", rows)


def write_prompts(path, texts):
    """Prompts by row_id; those of a list are called p0, p1 and so on."""
    named = texts if isinstance(texts, dict) else {f"p{number}": text for number, text in enumerate(texts)}
    rows = [{"row_id": name, "prompt_messages": [{"role": "user", "content": text}]} for name, text in named.items()]
    return write_rows(path, rows)
