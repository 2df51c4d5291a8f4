"""Problems with known answers: loading them from the embedded additions or from files, their prompts and solutions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_ext.data.boxes import boxed_answer, last_boxed
from trl_ext.data.rows import SHOWN_CHARACTERS, Problem, RawSplit, first_few, read_jsonl
from trl_ext.data.templates import render
from trl_ext.files import brief, local_path

Row = dict[str, Any]
SPLITS_OF_TOY = ("train", "validation", "test")
VALIDATION_ROWS = 200
_UNKNOWN = "no problem with an answer"
_LAYOUTS = (
    "prompt_text and answer; question and answer (GSM8K); problem with answer or solution (MATH); "
    "nums and target (Countdown); or prompt and ground_truth"
)
# GSM8K's calculator notes, as in `48/2 = <<48/2=24>>24`.
_CALCULATION = re.compile(r"<<[^<>]*>>")
_FINAL_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def load_math(name_or_path: str | Path = "toy", split: str = "train") -> list[Row]:
    """Load problems with their answers, every row checked.

    Sources: `toy`, the embedded additions, with splits `train` (and worked traces to fine-tune on, a quarter of them
    wrong), `validation` and `test`; a folder of `{split}.jsonl` files; or one JSONL file, whatever the split.

    A row of a file is laid out as one of: `prompt_text` and `answer`; GSM8K's `question` and `answer` with `####`;
    MATH's `problem` with `answer`, or with a `solution` whose last `\\boxed{}` is the answer (or `\\boxed 5`, as
    some of MATH's write it); Countdown's `nums` (or
    `numbers`) and `target`; `prompt`, a whole prompt that no template is put around, and `ground_truth`. Beside these
    it may have a `row_id`, and a `response`: a demonstration, word for word what follows the prompt.

    Returns:
        Rows with `row_id`, `prompt_text` (the question) and `answer` (text), and where there are any: `response`,
        `solution` (worked, without the tags that a prompt asks for), `numbers` (of a countdown, whose answer is the
        target), `prompt` (a whole prompt).

    Raises:
        FileNotFoundError: no such file, folder or split.
        ValueError: a file has no rows or bad ones; the message gives file, line, row_id and field of up to five.
    """
    if name_or_path == "toy":
        return _load_toy(split)
    return _checked(read_jsonl(_path_of(local_path(name_or_path), split)))


def math_prompt(row: Mapping[str, Any], template: str | None) -> list[dict[str, str]] | str:
    """What the model is given: the question in its template, or as a message to the chat template without one.

    Args:
        row: of `load_math`; one with a whole `prompt` keeps it.
        template: the text of a prompt template; None for a conversation.
    """
    if "prompt" in row:
        return row["prompt"]
    if template is None:
        return [{"role": "user", "content": row["prompt_text"]}]
    return render(template, row["prompt_text"])


def demonstration(row: Mapping[str, Any], template: str | None, *, boxed: bool = False) -> str | None:
    """The response to fine-tune on: the row's own, or its solution and answer in the form that is asked for.

    Args:
        row: of `load_math`.
        template: of the prompt; thinking is opened by the response unless the template ends with `<think>`.
        boxed: state the answer in `\\boxed{}`, where the solution does not do so already, instead of in tags.

    Returns:
        The response; None for a row that has neither a response nor a solution.
    """
    if "response" in row:
        return row["response"]
    if "solution" not in row:
        return None
    if boxed:
        stated = "" if last_boxed(row["solution"]) is not None else f"\n\\boxed{{{row['answer']}}}"
        return f"{row['solution']}{stated}"
    opening = "" if template is not None and template.endswith("<think>") else "<think>"
    return f"{opening} {row['solution']} </think> <answer> {row['answer']} </answer>"


def _load_toy(split: str) -> list[Row]:
    from trl_ext.toy import DATA_DIR
    from trl_ext.toy.prompts import parse, prompt_pool
    from trl_ext.toy.traces import addition_trace

    split = split.removesuffix("_math")
    if split not in SPLITS_OF_TOY:
        raise FileNotFoundError(f"toy has no split {split!r} of additions: it has {', '.join(SPLITS_OF_TOY)}")
    if split == "validation":
        prompts = prompt_pool(split)["add"][:VALIDATION_ROWS]
        return [
            {"row_id": f"validation:{number}", "prompt_text": prompt, "answer": str(sum(parse(prompt).numbers))}
            for number, prompt in enumerate(prompts, start=1)
        ]
    rows = _checked(read_jsonl(DATA_DIR / f"{split}_math.jsonl"))
    return [{**row, "response": addition_trace(row["prompt_text"])} for row in rows] if split == "train" else rows


def _path_of(path: Path, split: str) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(
            f"no problems at {brief(path, 200)!r}: give toy, a folder of {{split}}.jsonl, or a .jsonl file"
        )
    file = path / f"{split}.jsonl"
    if not file.is_file():
        found = ", ".join(sorted(entry.name for entry in path.glob("*.jsonl"))) or "no .jsonl file"
        raise FileNotFoundError(f"no file {split}.jsonl for the split {split!r}; {path} holds {found}")
    return file


def _checked(split: RawSplit) -> list[Row]:
    rows, problems = [], list(split.problems)
    line_of_row_id: dict[str, int] = {}
    for line, raw in split.rows:
        row_id = None
        try:
            row_id = _row_id(raw, f"{split.stem}:{line}")
            if line_of_row_id.setdefault(row_id, line) != line:
                raise ValueError(f"row_id: already used on line {line_of_row_id[row_id]}")
            rows.append({"row_id": row_id, **_row(raw)})
        except ValueError as error:
            problems.append(Problem(line, row_id, "bad row", str(error)))
    if problems:
        problems.sort(key=lambda problem: problem.position)
        lines = [
            f"line {one.position}{f', row_id {brief(one.row_id)}' if one.row_id else ''}: {one.message}"
            for one in problems
        ]
        # What a row may hold is said once, in the room that problems leave.
        unknown = any(one.message.startswith(_UNKNOWN) for one in problems)
        shown = first_few(lines, SHOWN_CHARACTERS // 2 if unknown else SHOWN_CHARACTERS)
        advice = f"; a row holds {_LAYOUTS}" if unknown else ""
        raise ValueError(f"{split.source}: {len(problems)} bad row{'s' * (len(problems) > 1)}: {shown}{advice}")
    if not rows:
        raise ValueError(f"{split.source}: empty; expected at least one problem")
    return rows


def _row_id(raw: Mapping[str, Any], default: str) -> str:
    value = raw.get("row_id")
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"row_id: must be text or a whole number, got {brief(repr(value), 40)}")
    return str(value)


def _row(raw: Mapping[str, Any]) -> Row:
    """A row of a file in the library's fields; a ValueError names the field."""
    if "target" in raw:
        row = _countdown(raw)
    elif "question" in raw:
        row = _gsm8k(raw)
    elif "problem" in raw:
        row = _math(raw)
    elif "prompt" in raw and "ground_truth" in raw:
        prompt = _text(raw, "prompt")
        row = {"prompt_text": prompt, "answer": _answer(raw, "ground_truth"), "prompt": prompt}
    elif "prompt_text" in raw:
        row = {"prompt_text": _text(raw, "prompt_text"), "answer": _answer(raw, "answer")}
    else:
        raise ValueError(f"{_UNKNOWN}; this one has {brief(', '.join(raw) or 'nothing', 80)}")
    return row | ({"response": _text(raw, "response")} if raw.get("response") is not None else {})


def _gsm8k(raw: Mapping[str, Any]) -> Row:
    answer = _answer(raw, "answer")
    solution, marker, final = answer.rpartition("####")
    row = {"prompt_text": _text(raw, "question")}
    if not marker:
        return {**row, "answer": answer}
    number = final.strip().removeprefix("$").replace(",", "")
    if not _FINAL_NUMBER.fullmatch(number):
        raise ValueError(f"answer: no number after ####, but {brief(final.strip(), 40)!r}")
    return {**row, "answer": number, "solution": _CALCULATION.sub("", solution).strip()}


def _math(raw: Mapping[str, Any]) -> Row:
    row = {"prompt_text": _text(raw, "problem")}
    solution = {} if raw.get("solution") is None else {"solution": _text(raw, "solution")}
    if raw.get("answer") is not None:
        return {**row, "answer": _answer(raw, "answer"), **solution}
    boxed = boxed_answer(solution.get("solution", ""))
    if boxed is None:
        raise ValueError("answer: missing, and there is no solution with a closed \\boxed{} to take it from")
    return {**row, "answer": boxed, **solution}


def _countdown(raw: Mapping[str, Any]) -> Row:
    field = "nums" if "nums" in raw else "numbers"
    numbers, target = raw.get(field), raw["target"]
    if not isinstance(numbers, list) or not numbers or not all(map(_is_whole, [target, *numbers])):
        got = f"{brief(repr(numbers), 60)} and {brief(repr(target), 40)}"
        raise ValueError(f"{field}, target: must be a list of whole numbers and one, got {got}")
    question = (
        f"Make {target} from the numbers {', '.join(map(str, numbers))}: write one expression with +, -, *, / and "
        "brackets that uses each of the numbers exactly once."
    )
    return {"prompt_text": question, "answer": str(target), "numbers": numbers}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(raw: Mapping[str, Any], field: str) -> str:
    value = raw.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{field}: must be text, got {'an empty one' if isinstance(value, str) else brief(repr(value))}"
        )
    return value


def _answer(raw: Mapping[str, Any], field: str) -> str:
    value = raw.get(field)
    # Whole numbers may be too large for a float, and none is infinite.
    if _is_whole(value) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    return _text(raw, field)
