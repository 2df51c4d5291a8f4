"""Take finished runs into a published study: `python -m trl_ext.published.keep RUNS_FOLDER --study NAME`.

For maintainers, in a clone. The command may be repeated while the runs of a study come in: it skips those that are
kept already.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trl_ext import published
from trl_ext.evaluation.command_line import CommandParser, one_line_errors
from trl_ext.evaluation.methods.runs import (
    CREDITS,
    OF_REPORTING,
    PROMPTS_NAME,
    MethodRun,
    check_alike,
    read_method_run,
)
from trl_ext.evaluation.reporting.curves import HELD_OUT_TITLES, TRAINING_TITLES, is_of_held_out_prompts
from trl_ext.evaluation.reporting.results import RESULTS_NAME, Results
from trl_ext.files import existing_file, read_json, read_yaml, write_text

# Responses whose texts are kept, and how many of them are the run's worst.
TEXTS, WORST = 10, 3
# Rows of metrics.jsonl that are kept: those with figures of held-out rows, and those of training alone.
HELD_OUT_ROWS, TRAINING_ROWS = 20, 24
KEPT_METRICS = {"step", "seconds", "collapsed", "sampled_kl", *HELD_OUT_TITLES, *TRAINING_TITLES}
KEPT_OF_PROMPT = (
    *("row_id", "score", "base_score", "generated_num_tokens", "finished", "base_finished", "outcome"),
    *("greedy_category", "base_greedy_category"),
)
# The folders of an absolute path. The slashes of an address or of `and/or` are preceded by other characters.
FOLDERS = re.compile(r"(?<![\w./\\~-])(?:~|[A-Za-z]:)?[/\\](?![/\\])(?:[^\s/\\:]+[/\\])*")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. It exits with code 2 and one line if there is nothing to keep."""
    with one_line_errors():
        parser = CommandParser(prog="python -m trl_ext.published.keep", description=__doc__)
        parser.add_argument("runs", metavar="RUNS_FOLDER", help="folder of runs {method}-{seed}")
        parser.add_argument("--study", required=True, help="name of the study, such as smollm2-instructions")
        parser.add_argument("--processor", help="what the runs ran on; default: this machine's processor")
        parser.add_argument("--commit", help="commit of the library that made the runs")
        given = parser.parse_args(arguments)
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", given.study):
            raise ValueError(f"--study {given.study}: use lower-case letters, digits, - and _")
        for line in keep(given.runs, given.study, processor=given.processor, commit=given.commit):
            print(line)


def keep(runs: str | Path, study: str, *, processor: str | None = None, commit: str | None = None) -> list[str]:
    """Keep the finished runs `{method}-{seed}` of a folder; return a line on each run.

    Nothing is written unless all runs, those kept before included, can be compared.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: there is no finished run, or a run cannot be compared with the others of the study.
    """
    if not Path(runs).is_dir():
        raise FileNotFoundError(f"no folder {runs}; give the folder that holds the runs {{method}}-{{seed}}")
    named = {folder: published.method_and_seed(folder) for folder in sorted(Path(runs).iterdir()) if folder.is_dir()}
    found = {folder: name for folder, name in named.items() if name}
    finished = {folder: name for folder, name in found.items() if (folder / RESULTS_NAME).is_file()}
    lines = [
        f"{folder.name}: not finished (no {RESULTS_NAME}), not kept" for folder in found if folder not in finished
    ]
    if not finished:
        raise ValueError(f"no finished run in {runs}; {'; '.join(lines) or 'runs are named {method}-{seed}'}")
    target = published.DATA / study
    contents, alike = {}, {}
    for folder, name in finished.items():
        contents[folder.name] = _contents(folder)
        if (folder / "generations.jsonl").is_file():
            run = read_method_run(folder, *name)
            alike[folder.name] = replace(run, results=Results.model_validate(contents[folder.name][RESULTS_NAME]))
    _check_with_kept(target, alike)
    for name, files in contents.items():
        lines.append(_write(target / name, files, {"processor": processor, "commit": commit}))
    return lines


def _check_with_kept(target: Path, runs: Mapping[str, MethodRun]) -> None:
    kept = sorted(path.parent for path in target.glob(f"*/{PROMPTS_NAME}") if path.parent.name not in runs)
    together = [*(read_method_run(folder, *published.method_and_seed(folder)) for folder in kept), *runs.values()]
    if together:
        check_alike(together)


# ---- What is kept ----


def _contents(folder: Path) -> dict[str, Any]:
    """The files to keep of a finished run by name: JSON values, and lists of rows."""
    results = clean(read_json(folder / RESULTS_NAME), digits=6)
    contents: dict[str, Any] = {RESULTS_NAME: results}
    if (folder / "config.yaml").is_file():
        settings = read_yaml(folder / "config.yaml") or {}
        contents["config.yaml"] = clean({k: v for k, v in settings.items() if not k.startswith(OF_REPORTING)})
    if (folder / "metrics.jsonl").is_file():
        contents["metrics.jsonl"] = thin_metrics(_rows(folder / "metrics.jsonl"))
    # Runs of reward models answer no prompts.
    if (folder / "generations.jsonl").is_file():
        rows = _rows(folder / "generations.jsonl")
        contents[PROMPTS_NAME] = [_rounded({k: row[k] for k in KEPT_OF_PROMPT if k in row}) for row in rows]
        contents["generations.jsonl"] = [_rounded(row) for row in choose_texts(rows)]
    elif "pairs" not in results:
        raise FileNotFoundError(
            f"no file {folder / 'generations.jsonl'}: the run was not evaluated on held-out prompts"
        )
    return contents


def choose_texts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ten rows of generations.jsonl: the first by row_id, and the run's worst three, numbered in the field `worst`.

    A row_id is a digest of its prompt, so that the first ones are arbitrary and the same for all runs. The worst have
    the lowest gain in score over the base; of equal gains, the lowest score comes first. Without scores, lost
    comparisons are the worst.
    """
    ordered = sorted(rows, key=lambda row: row["row_id"])
    worst = sorted(ordered, key=_worth)[:WORST]
    others = [dict(row) for row in ordered if row not in worst][: TEXTS - WORST]
    return [*others, *({**row, "worst": number} for number, row in enumerate(worst, start=1))]


def _worth(row: Mapping[str, Any]) -> tuple[float, float]:
    score, base = row.get("score"), row.get("base_score")
    if score is None:
        return CREDITS.get(str(row.get("outcome")), 1.0), 0.0
    return score - (base or 0.0), score


def thin_metrics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The metrics that the report draws, of evenly spaced rows, the first and the last among them."""

    def is_drawn(name: str) -> bool:
        name = name.removeprefix("eval_")
        return name in KEPT_METRICS or name.startswith("rewards/") and name.endswith("/mean")

    short = [{name: value for name, value in row.items() if is_drawn(name)} for row in rows]
    short = [row for row in short if row.keys() - {"step", "seconds"}]
    kinds: dict[bool, list[int]] = {True: [], False: []}
    for index, row in enumerate(short):
        kinds[is_of_held_out_prompts(row) or any(name.startswith("eval_") for name in row)].append(index)
    kept = [*_spaced(kinds[True], HELD_OUT_ROWS), *_spaced(kinds[False], TRAINING_ROWS)]
    return [_rounded(short[index]) for index in sorted(kept)]


def _spaced(indices: Sequence[int], most: int) -> list[int]:
    if len(indices) <= most:
        return list(indices)
    return [indices[round(place * (len(indices) - 1) / (most - 1))] for place in range(most)]


def clean(value: Any, digits: int = 15) -> Any:
    """A value without the folders of absolute paths, which name people and machines, and with rounded numbers."""
    if isinstance(value, dict):
        return {name: clean(inner, digits) for name, inner in value.items()}
    if isinstance(value, list):
        return [clean(inner, digits) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return FOLDERS.sub("", value) if isinstance(value, str) else value


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in existing_file(path).read_text(encoding="utf-8").split("\n") if line]


# ---- Writing ----


def _write(folder: Path, contents: Mapping[str, Any], told: Mapping[str, str | None]) -> str:
    """Write a run's files, results.json last; return a line on it."""
    results = contents[RESULTS_NAME]
    seconds = results["run"].get("total_seconds")
    record = {"processor": processor_name(), "hours": None if seconds is None else round(seconds / 3600, 2)}
    if (folder / RESULTS_NAME).is_file():
        earlier = read_json(folder / RESULTS_NAME)
        known = earlier.pop("kept", {})
        # The same run, kept again: it ran where the earlier record says.
        if earlier == results:
            record = known
    record |= {name: value for name, value in told.items() if value is not None}
    texts = {name: _text(name, value) for name, value in contents.items() if name != RESULTS_NAME}
    texts[RESULTS_NAME] = _text(RESULTS_NAME, {**results, "kept": record})
    size = f"{sum(len(text.encode()) for text in texts.values()) / 1000:.0f} kB"
    if all((folder / name).is_file() and (folder / name).read_text() == text for name, text in texts.items()):
        return f"{folder.name}: unchanged, {size}"
    for name, text in texts.items():
        write_text(folder / name, text)
    return f"{folder.name}: kept, {size}"


def _text(name: str, value: Any) -> str:
    if name.endswith(".yaml"):
        return yaml.safe_dump(value, sort_keys=True, allow_unicode=True)
    rows = value if name.endswith(".jsonl") else [value]
    compact = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return "".join(json.dumps(row, **compact) + "\n" for row in rows)


def processor_name() -> str:
    """The name of this machine's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    named = re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE)
    return named[1].strip() if named else platform.machine()


if __name__ == "__main__":
    main()
