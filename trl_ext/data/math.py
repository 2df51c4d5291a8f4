"""Math problems with known answers, embedded or from files, their prompts and solutions, and prompt templates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from trl_ext.data.rows import read_jsonl, split_file, text_field
from trl_ext.files import brief
from trl_ext.names import nearest

Row = dict[str, Any]
# The problems that come with the library, each a package with a `DATA_DIR`, and the file and the source of each split.
EMBEDDED_PROBLEMS = {
    "toy": {split: (f"{split}_math", "") for split in ("train", "validation", "test")},
    "word_problems": {split: (split, "") for split in ("train", "validation", "test")}
    | {f"train_{source}": ("train", source) for source in ("mawps", "svamp")},
}
# GSM8K's calculator notes, as in `48/2 = <<48/2=24>>24`.
_CALCULATION = re.compile(r"<<[^<>]*>>")
_ESCAPE_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SPACED_BOX = re.compile(r"\\boxed\s+\{")
# Without braces, TeX boxes a single token, but authors mean the whole formula that follows.
_BARE_BOX = re.compile(r"\\boxed(?![A-Za-z{])\s*([^\s$]+)")
# Templates are text files with a placeholder for the question.
TEMPLATES = Path(__file__).parent / "prompt_templates"
PLACEHOLDER = "{question}"


def load_math(name_or_path: str | Path = "toy", split: str = "train") -> list[Row]:
    """Load problems with their answers, and check every row.

    Sources: `toy`, the embedded additions, with splits `train` (and worked traces to fine-tune on, a quarter of them
    wrong), `validation` and `test`; `word_problems`, embedded too, with the same splits, all with solutions, and the
    parts of `train` by source, `train_mawps` and `train_svamp`; a folder of `{split}.jsonl` files; or one JSONL file,
    whatever the split.

    A row of a file has one of these layouts: `prompt_text`, `answer` and perhaps a `solution`; GSM8K's `question` and
    `answer` with `####`; MATH's `problem` with `answer`, or with a `solution` whose last `\\boxed{}` (or `\\boxed 5`,
    as in some of MATH's solutions) is the answer; Countdown's `nums` (or `numbers`) and `target`; `prompt`, a whole
    prompt that is used without a template, and `ground_truth`. A row may also have a `row_id` and a `response`, a
    demonstration that is used verbatim after the prompt.

    Returns:
        Rows with `row_id`, `prompt_text` (the question), `answer` (text), and, if present, `response`, `solution`,
        `numbers` (for Countdown, whose answer is the target) and `prompt` (a whole prompt).

    Raises:
        FileNotFoundError: the file, folder or split does not exist.
        ValueError: a file has no rows or bad ones; the message gives file, line, row_id and field of up to five.
    """
    path, source = Path(name_or_path).expanduser(), ""
    if name_or_path in EMBEDDED_PROBLEMS:
        splits = EMBEDDED_PROBLEMS[name_or_path]
        if split not in splits:
            raise FileNotFoundError(f"{name_or_path} has no split {split!r} of problems: it has {', '.join(splits)}")
        file, source = splits[split]
        path = import_module(f"trl_ext.{name_or_path}").DATA_DIR / f"{file}.jsonl"
    elif path.is_dir():
        path = split_file(path, split)
    elif not path.is_file():
        raise FileNotFoundError(
            f"no problems at {brief(path, 200)!r}: give {', '.join(EMBEDDED_PROBLEMS)}, a folder of {{split}}.jsonl, "
            "or a .jsonl file"
        )
    found = read_jsonl(path)
    rows = found.check(_row)
    if found.problems or not rows:
        raise ValueError(found.describe() if found.problems else f"{path}: empty")
    return [row for row in rows if row["row_id"].startswith(source)]


def math_prompt(row: Mapping[str, Any], template: str | None) -> list[dict[str, str]] | str:
    """The model's input: the question in a prompt template, or as a message for the chat template.

    Args:
        row: a row of `load_math`; a whole `prompt` in it is returned unchanged.
        template: the text of a prompt template; None for a conversation.
    """
    if "prompt" in row:
        return row["prompt"]
    if template is None:
        return [{"role": "user", "content": row["prompt_text"]}]
    return render(template, row["prompt_text"])


def demonstration(row: Mapping[str, Any], template: str | None, *, boxed: bool = False) -> str | None:
    """The response to fine-tune on: the row's own, or its solution and answer in the required form.

    Args:
        row: a row of `load_math`.
        template: the prompt template; the response opens the thinking unless the template ends with `<think>`.
        boxed: state the answer in `\\boxed{}` instead of tags, unless the solution already does.

    Returns:
        The response; None if the row has neither a response nor a solution.
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


def _row(raw: Mapping[str, Any]) -> Row:
    """Convert a row of a file to the library's fields; a ValueError names the bad field."""
    if "target" in raw:
        row = _countdown(raw)
    elif "question" in raw:
        row = _gsm8k(raw)
    elif "problem" in raw:
        row = _math(raw)
    elif "prompt" in raw and "ground_truth" in raw:
        prompt = text_field(raw, "prompt")
        row = {"prompt_text": prompt, "answer": _answer(raw, "ground_truth"), "prompt": prompt}
    elif "prompt_text" in raw:
        row = {"prompt_text": text_field(raw, "prompt_text"), "answer": _answer(raw, "answer"), **_solution(raw)}
    else:
        raise ValueError(f"no problem with an answer; the row has {brief(', '.join(raw), 80)}")
    return row | ({"response": text_field(raw, "response")} if raw.get("response") is not None else {})


def _gsm8k(raw: Mapping[str, Any]) -> Row:
    answer = _answer(raw, "answer")
    solution, marker, final = answer.rpartition("####")
    row = {"prompt_text": text_field(raw, "question")}
    if not marker:
        return {**row, "answer": answer}
    number = text_field({"answer": final.strip().removeprefix("$").replace(",", "")}, "answer")
    return {**row, "answer": number, "solution": _CALCULATION.sub("", solution).strip()}


def _math(raw: Mapping[str, Any]) -> Row:
    row = {"prompt_text": text_field(raw, "problem")}
    solution = _solution(raw)
    if raw.get("answer") is not None:
        return {**row, "answer": _answer(raw, "answer"), **solution}
    boxed = boxed_answer(solution.get("solution", ""))
    if boxed is None:
        raise ValueError("answer: missing, and the solution has no closed \\boxed{}")
    return {**row, "answer": boxed, **solution}


def _solution(raw: Mapping[str, Any]) -> Row:
    return {} if raw.get("solution") is None else {"solution": text_field(raw, "solution")}


def _countdown(raw: Mapping[str, Any]) -> Row:
    numbers, target = raw.get("nums", raw.get("numbers")), raw["target"]
    if not isinstance(numbers, list) or not numbers or not all(type(one) is int for one in [target, *numbers]):
        raise ValueError("nums, target: must be a list of whole numbers and one")
    question = (
        f"Make {target} from the numbers {', '.join(map(str, numbers))}: write one expression with +, -, *, / and "
        "brackets that uses each of the numbers exactly once."
    )
    return {"prompt_text": question, "answer": str(target), "numbers": numbers}


def _answer(raw: Mapping[str, Any], field: str) -> str:
    value = raw.get(field)
    # Integers may be too large for a float.
    is_number = type(value) is int or (isinstance(value, float) and math.isfinite(value))
    return str(value) if is_number else text_field(raw, field)


# ---- Prompt templates and boxes ----


def load_prompt_template(name_or_path: str | Path) -> str:
    """A template's text, without the newline that ends its file.

    Args:
        name_or_path: the name of one of the library's templates, or a text file that contains `{question}`.

    Raises:
        FileNotFoundError: it is neither a known name nor a file.
        ValueError: the file has no `{question}`.
    """
    names = sorted(path.stem for path in TEMPLATES.glob("*.txt"))
    path = TEMPLATES / f"{name_or_path}.txt" if str(name_or_path) in names else Path(name_or_path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no prompt template {str(name_or_path)!r}: there is no such file, and the library has "
            f"{', '.join(names)}{nearest(str(name_or_path), names)}"
        )
    template = path.read_text(encoding="utf-8").removesuffix("\n")
    if PLACEHOLDER not in template:
        raise ValueError(f"{path}: no {PLACEHOLDER} in this prompt template; write it where the question goes")
    return template


def render(template: str, question: str) -> str:
    """Insert the question into the template; other braces in the template or the question are unchanged."""
    return template.replace(PLACEHOLDER, question)


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`; None if there is no box, or the last has no brace or is not closed."""
    start = text.rfind("\\boxed")
    if start < 0 or not text.startswith("{", start + len("\\boxed")):
        return None
    first, depth = start + len("\\boxed{"), 1
    for match in _ESCAPE_OR_BRACE.finditer(text, first):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[first : match.start()]
    return None


def boxed_answer(solution: str) -> str | None:
    """The boxed answer of a written solution: `last_boxed`, or for `\\boxed 5$` the text before `$` or a space.

    None if there is no box or it is empty.
    """
    solution = _SPACED_BOX.sub(r"\\boxed{", solution)
    bare = _BARE_BOX.match(solution, max(solution.rfind("\\boxed"), 0))
    answer = bare[1].rstrip(".,;") if bare else last_boxed(solution)
    return answer.strip() or None if answer else None
