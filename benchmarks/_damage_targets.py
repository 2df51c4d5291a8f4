"""What damaged files are given to: each reader with valid rows to damage, and what came of reading them."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._damage import Rows, join, lines_of

WORDS = ("axe", "banana", "beach", "black", "blue", "captain")
METHODS = ("aot",)
YAML_TARGET = "recipes: YAML"
RECIPES = Path(__file__).resolve().parent.parent / "recipes"


@dataclass
class Outcome:
    """What reading gave.

    Attributes:
        errors: what was raised; nothing where the file was accepted.
        loaded, reported: rows that came back, and rows that are named as bad; None where the reader reads no rows.
        unreadable: the file as a whole was refused.
        notes: lines of the log and of the screen.
    """

    errors: list[BaseException] = field(default_factory=list)
    loaded: int | None = None
    reported: int = 0
    unreadable: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """The file to damage, its valid rows, and how it is read: `read(path, folder)`."""

    file: str
    rows: Callable[[random.Random], Rows]
    read: Callable[[Path, Path], Outcome]


def prompts() -> Rows:
    return [
        {"row_id": f"row-{word}", "prompt_messages": [{"role": "user", "content": f"Say {word} three times."}]}
        for word in WORDS
    ]


def pairs() -> Rows:
    shared = {"avg_confidence": 0.9, "kind": "say", "score": 1.5}
    return [
        {"row_id": f"pair-{i}", "prompt_text": "Say cat.", "chosen_text": "cat", "rejected_text": f"dog {i}", **shared}
        for i in range(5)
    ]


def responses(copies: int = 3) -> Rows:
    return [
        {
            "row_id": f"row-{word}",
            "prompt_text": f"Say {word} three times.",
            "response_text": ", ".join([word] * copies),
            "generated_num_tokens": 9,
        }
        for word in WORDS
    ]


def scores() -> Rows:
    return [{"row_id": f"pair-{i}", "chosen_score": i + 0.5, "rejected_score": 0.25} for i in range(5)]


def _benchmark_rows(generator: random.Random) -> Rows:
    conversation = [{"role": "user", "content": "p"}]
    plain = [{"row_id": str(i), "prompt": "p", "chosen": "c", "rejected": f"r{i}"} for i in range(4)]
    messages = [{"prompt": conversation, "chosen": [{"role": "assistant", "content": "c"}], "rejected": "r"}] * 3
    return copy.deepcopy(generator.choice((pairs(), prompts(), plain, messages)))


def _math_rows(generator: random.Random) -> Rows:
    layouts = [
        {"row_id": "a", "prompt_text": "1 + 1?", "answer": "2", "response": "It is 2."},
        {"question": "How many?", "answer": "1 + 2 = <<1+2=3>>3\n#### 3"},
        {"problem": "x?", "solution": "So \\boxed{4}."},
        {"nums": [1, 2, 3], "target": 6},
        {"prompt": "1 + 2 =", "ground_truth": 3},
    ]
    return copy.deepcopy(layouts if generator.random() < 0.5 else [generator.choice(layouts)] * 3)


def write_neighbours(folder: Path) -> None:
    """The undamaged files that the others are read with."""
    submission = folder / "submission"
    files = {
        folder / "prompts.jsonl": prompts(),
        folder / "base.jsonl": responses(2),
        folder / "prefs.jsonl": pairs(),
        folder / "candidate.jsonl": responses(),
        submission / "policy_generations" / "aot.jsonl": responses(),
        submission / "reward_model" / "public_test_pref_scores.jsonl": scores(),
        folder / "thresholds.json": [{"aot": 0.5, "reward_model": 0.5}],
    }
    for path, rows in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(join(lines_of(rows)))


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """The log's messages of warning and above within the block."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("trl_ext")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _bad_rows(error: BaseException | None) -> int | None:
    """How many rows an error counts; None where it refuses the file as a whole."""
    match = re.search(r": (\d+) bad rows?: |none of (\d+) remains", str(error))
    return None if match is None else int(match[1] or match[2])


def _read_benchmark(source: Path) -> Outcome:
    """Strictly, and with bad rows skipped, which must agree in how many there are."""
    from trl_ext.data import load_benchmark

    outcome = Outcome()
    with _logged() as outcome.notes:
        try:
            outcome.loaded = sum(map(len, load_benchmark(source).values()))
            return outcome
        except Exception as error:
            outcome.errors.append(error)
        strict = _bad_rows(outcome.errors[0])
        outcome.unreadable = strict is None
        try:
            outcome.loaded = sum(map(len, load_benchmark(source, skip_bad_rows=True).values()))
        except Exception as error:
            outcome.errors.append(error)
            outcome.loaded, outcome.reported = 0, _bad_rows(error) or 0
            return outcome
    dropped = [re.search(r"dropped (\d+) of (\d+) rows", note) for note in outcome.notes]
    counts = [(int(match[1]), int(match[2])) for match in dropped if match]
    # Where the two readings differ, the count cannot be right.
    agree = counts == [(strict, outcome.loaded + (strict or 0))]
    outcome.reported, outcome.unreadable = (strict or 0) if agree else -1, False
    return outcome


def _read_math(path: Path, folder: Path) -> Outcome:
    from trl_ext.data.math import load_math

    try:
        return Outcome(loaded=len(load_math(path)))
    except Exception as error:
        return Outcome([error], unreadable=True)


def _read_instructions(path: Path, folder: Path) -> Outcome:
    from trl_ext.data.packed_sft import PackedSFTDataset

    class Tokenizer:
        eos_token_id, documents = 0, 0

        def __call__(self, texts, verbose):
            self.documents += len(texts)
            for text in texts:
                text.encode()
            return {"input_ids": [[1] * 9 for _ in texts]}

    tokenizer = Tokenizer()
    try:
        PackedSFTDataset(tokenizer, path, 4, shuffle=False)
    except Exception as error:
        return Outcome([error], unreadable=True)
    return Outcome(loaded=tokenizer.documents)


def _submitted(read: Callable[[], tuple[int, list]], path: Path) -> Outcome:
    """Rows that came back, and every other line by its problem; a missing row is no line of the file."""
    from trl_ext.evaluation.submissions.rows import EMPTY_FILE, refuse_fatal

    try:
        loaded, problems = read()
    except Exception as error:
        return Outcome([error], unreadable=True)
    fatal = [problem for problem in problems if problem.fatal]
    try:
        refuse_fatal(problems)
        errors = []
    except ValueError as error:
        errors = [error]
    own = {
        (problem.row_id, problem.message if problem.row_id is None or "line" in problem.message else "")
        for problem in fatal
        if problem.message not in ("missing", EMPTY_FILE)
    }
    return Outcome(errors, loaded=loaded, reported=len(own), notes=[str(problem) for problem in problems])


def _read_responses(path: Path, folder: Path) -> Outcome:
    from trl_ext.evaluation.submissions.rows import read_responses

    asked = [{**row, "prompt_text": row["prompt_messages"][0]["content"]} for row in prompts()]

    def read():
        found, problems = read_responses(path, asked, max_new_tokens=20, count_tokens=lambda text: len(text.split()))
        return len(found), problems

    return _submitted(read, path)


def _read_scores(path: Path, folder: Path) -> Outcome:
    from trl_ext.evaluation.submissions.rows import read_pair_scores

    def read():
        (chosen, _), problems = read_pair_scores(path, [row["row_id"] for row in scores()])
        bad = {problem.row_id for problem in problems if problem.message != "missing"}
        # Those with a bad score stand in the lists as well.
        listed = {row["row_id"] for row in scores()} & bad
        return len(chosen) - len({p.row_id for p in problems if "finite" in p.message} & listed), problems

    return _submitted(read, path)


def _continue_rows(path: Path, folder: Path) -> Outcome:
    from trl_ext.evaluation.submissions.row_files import RowFile

    settings = {"rows": "scores of pairs", "batch_size": 2}
    beside = path.with_name(f"{path.stem}.settings.json")
    beside.write_text(json.dumps(settings))
    try:
        file = RowFile(path, settings, [row["row_id"] for row in scores()])
        file.missing  # noqa: B018
        return Outcome(loaded=len(file.rows), unreadable=not path.exists())
    except Exception as error:
        return Outcome([error], unreadable=True)
    finally:
        beside.unlink(missing_ok=True)


def _continue_settings(path: Path, folder: Path) -> Outcome:
    from trl_ext.evaluation.submissions.row_files import RowFile

    rows = path.with_name("continued.jsonl")
    rows.write_bytes(join(lines_of(scores())))
    try:
        RowFile(rows, {"rows": "scores of pairs", "batch_size": 2}, [row["row_id"] for row in scores()])
        return Outcome()
    except Exception as error:
        return Outcome([error])


def _read_thresholds(path: Path, folder: Path) -> Outcome:
    from trl_ext.evaluation.submissions.assets import load_thresholds

    try:
        load_thresholds(path)
        return Outcome()
    except Exception as error:
        return Outcome([error])


def _command(command: str, *arguments: str) -> Callable[[Path, Path], Outcome]:
    """A command of `public_eval` in this process, `{}` standing for the folder."""

    def read(path: Path, folder: Path) -> Outcome:
        module = importlib.import_module(f"public_eval.{command}")
        given = [argument.replace("{}", str(folder)) for argument in arguments]
        printed, failed = io.StringIO(), io.StringIO()
        code: Any = 0
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(failed), _logged() as notes:
            try:
                module.main(given)
            except SystemExit as end:
                code = end.code
            except BaseException as error:
                return Outcome([error])
        lines = [
            line for line in re.split(r"[\n\r]", failed.getvalue()) if line.strip() and not line.startswith("verdicts")
        ]
        notes += printed.getvalue().split("\n") if "--json" not in arguments else []
        if code == 2 and lines:
            return Outcome([ValueError("\n".join(lines))], notes=notes)
        return Outcome([] if code in (0, 2) and not lines else [RuntimeError(f"code {code}: {lines}")], notes=notes)

    return read


def prepare() -> None:
    """Import what takes seconds, before anything is timed."""
    if str(RECIPES) not in sys.path:
        sys.path.insert(0, str(RECIPES))
    for name in ("torch", "datasets", "openai", "common", "offline", "training", "public_eval.grade"):
        importlib.import_module(name)


def read_yaml(path: Path, folder: Path) -> Outcome:
    """The arguments of a recipe from a YAML file."""
    common, offline, training = (importlib.import_module(name) for name in ("common", "offline", "training"))
    from trl_ext import PreferenceConfig

    kept, sys.argv = sys.argv, ["recipe", "--config", str(path), "--output_dir", str(folder / "run")]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            common.parse_arguments((offline.RecipeArguments, training.ModelArguments, PreferenceConfig))
        return Outcome()
    except BaseException as error:
        return Outcome([error])
    finally:
        sys.argv = kept


def _fixed(rows: Callable[[], Rows]) -> Callable[[random.Random], Rows]:
    return lambda generator: rows()


POLICY = "submission/policy_generations/aot.jsonl"
SCORES = "submission/reward_model/public_test_pref_scores.jsonl"
PROMPTS = ("--prompts_jsonl", "{}/prompts.jsonl")
BASE = (*PROMPTS, "--base_jsonl", "{}/base.jsonl")
PREFS = ("--prefs_jsonl", "{}/prefs.jsonl")
GRADE = ("grade", "{}/submission", *BASE, *PREFS, "--thresholds", "{}/thresholds.json", "--cache", "{}/cache.jsonl")
OPENAI = ("--judge", "openai", "--model", "gpt-5.4", "--estimate")

READERS: dict[str, Target] = {
    "load_benchmark, file": Target("rows.jsonl", _benchmark_rows, lambda path, folder: _read_benchmark(path)),
    "load_benchmark, folder": Target(
        "benchmark/train_prefs.jsonl", _fixed(pairs), lambda path, folder: _read_benchmark(path.parent)
    ),
    "load_math": Target("math.jsonl", _math_rows, _read_math),
    "instruction examples": Target(
        "examples.jsonl",
        lambda generator: [{"prompt": f"p{i}", "response": "r"} for i in range(4)],
        _read_instructions,
    ),
    "responses": Target("responses.jsonl", _fixed(responses), _read_responses),
    "scores of pairs": Target("scores.jsonl", _fixed(scores), _read_scores),
    "rows to go on from": Target("going_on.jsonl", _fixed(scores), _continue_rows),
    "settings to go on from": Target(
        "continued.settings.json", lambda generator: [{"rows": "scores of pairs", "batch_size": 2}], _continue_settings
    ),
    "thresholds": Target("bars.json", lambda generator: [{"aot": 0.5, "reward_model": 0.5}], _read_thresholds),
}
COMMANDS: dict[str, Target] = {
    "grade: policy": Target(POLICY, _fixed(responses), _command(*GRADE)),
    "grade: scores": Target(SCORES, _fixed(scores), _command(*GRADE, "--json")),
    "grade: prompts": Target("prompts.jsonl", _fixed(prompts), _command(*GRADE)),
    "grade: base": Target("base.jsonl", _fixed(responses), _command(*GRADE)),
    "grade: pairs": Target("prefs.jsonl", _fixed(pairs), _command(*GRADE)),
    "grade: thresholds": Target(
        "thresholds.json", lambda generator: [{"aot": 0.5, "reward_model": 0.5}], _command(*GRADE)
    ),
    "judge: candidate": Target(
        "candidate.jsonl", _fixed(responses), _command("judge", "--candidate", "{}/candidate.jsonl", *BASE)
    ),
    "judge: prices": Target(
        "prices.json",
        lambda generator: [{"gpt-5.4": {"input": 1.0, "output": 2.0}}],
        _command("judge", "--candidate", "{}/candidate.jsonl", *BASE, *OPENAI, "--prices", "{}/prices.json"),
    ),
    "judge: cache": Target(
        "verdicts.jsonl",
        lambda generator: [{"key": "0" * 64, "verdict": "A", "settings": "x"}],
        _command("judge", "--candidate", "{}/candidate.jsonl", *BASE, *OPENAI, "--cache", "{}/verdicts.jsonl"),
    ),
    "pack: policy": Target(
        POLICY,
        _fixed(responses),
        _command("pack", "{}/submission", *PROMPTS, *PREFS, "--out", "{}/submission.zip", "--overwrite"),
    ),
    "tournament: candidate": Target(
        "candidate.jsonl",
        _fixed(responses),
        _command("tournament", "{}/candidate.jsonl", *BASE, *OPENAI),
    ),
}
