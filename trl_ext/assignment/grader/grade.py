"""Grade a submission: hidden cases of every function, thresholds of trained runs, a table and Gradescope's JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from checking import verdict

HERE = Path(__file__).resolve().parent
# To start Python and import torch on a busy machine.
START_SECONDS = 300
# The environment variables that the student's code gets, in addition to Python's: no secrets.
VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


def main() -> None:
    """Read the arguments, grade, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("submission", type=Path, help="the student's folder, which holds the package")
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="where Gradescope's JSON goes")
    options = parser.parse_args()
    if not options.submission.is_dir() or options.out.is_dir():
        parser.error(f"needs a submission's folder, and a file for --out: {options.submission}, {options.out}")
    # A student's text may contain characters that the terminal cannot encode.
    sys.stdout.reconfigure(errors="backslashreplace")
    plan = json.loads((HERE / "grading.json").read_text(encoding="utf-8"))
    submission, functions = options.submission.resolve(), torch.load(HERE / "cases.pt", weights_only=True)
    outcomes = run_functions(submission, functions, plan["seconds"])
    graded = zip(functions, outcomes, strict=True)
    rows = [grade_function(item, own) for item, own in graded]
    rows += [grade_threshold(submission, each) for each in plan["thresholds"]]
    print(plan["title"])
    for row in rows:
        full = row["score"] == row["max_score"]
        row |= {"status": "passed" if full else "failed", "visibility": "visible"}
        print(f"{row['score']:6g} of {row['max_score']:g}  {row['name']}" + ("" if full else f": {row['output']}"))
    total, most = (round(sum(row[key] for row in rows), 4) for key in ("score", "max_score"))
    print(f"{total:6g} of {most:g}  total")
    result = {"score": total, "output": f"{total:g} of {most:g} points", "stdout_visibility": "hidden", "tests": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _row(name: str, points: float, passed: bool, output: str) -> dict[str, Any]:
    return {"name": name, "score": points if passed else 0, "max_score": points, "output": output}


def grade_function(item: dict[str, Any], outcomes: list) -> dict[str, Any]:
    """All points if every hidden case passes, and otherwise none."""
    problems = []
    for number, (case, outcome) in enumerate(zip(item["cases"], outcomes, strict=True)):
        try:
            problem = verdict(outcome, case, values=False)
        # The student's code can write malformed outcomes.
        except Exception as error:
            problem = f"its outcome cannot be read ({type(error).__name__})"
        problems += [f"case {number} ({case['about']}): {problem}"] if problem is not None else []
    output = f"{problems[0]}\n{len(problems)} of {len(outcomes)} cases fail" if problems else "all cases pass"
    return _row(item["name"], item["points"], not problems, output)


def run_functions(submission: Path, functions: list[dict[str, Any]], seconds: float) -> list[list[dict[str, Any]]]:
    """The outcomes of each function on its cases. What ends the process costs one function its points."""
    outcomes: list[list[dict[str, Any]]] = []
    while len(outcomes) < len(functions):
        asked = functions[len(outcomes) :]
        found, error = run_worker(submission, asked, seconds)
        ended = next((n for n, item in enumerate(asked) if len(found[n]) < len(item["cases"])), len(asked) - 1)
        outcomes += found[: ended + 1]
        outcomes[-1] += [error] * (len(asked[ended]["cases"]) - len(outcomes[-1]))
    return outcomes


def run_worker(submission: Path, functions: list[dict[str, Any]], seconds: float) -> tuple[list[list], dict[str, str]]:
    """Outcomes from a process that gets the arguments of the cases and never the expected values, and why it ended."""
    known = [[{key: case[key] for key in ("arguments", "kind")} for case in item["cases"]] for item in functions]
    variables = {key: value for key, value in os.environ.items() if key in VARIABLES or key.startswith("PYTHON")}
    with tempfile.TemporaryDirectory(prefix="grading-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        for file in ("checking.py", "worker.py"):
            shutil.copy(HERE / file, home)
        torch.save([item | {"cases": own} for item, own in zip(functions, known, strict=True)], home / "functions.pt")
        variables |= {"HOME": folder, "TMPDIR": folder, "PYTHONUSERBASE": site.getuserbase(), "OMP_NUM_THREADS": "1"}
        with open(home / "errors", "w", encoding="utf-8") as errors:
            files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
            command = [sys.executable, "worker.py", str(submission), str(seconds)]
            process = subprocess.Popen(command, cwd=home, env=variables, start_new_session=True, **files)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(START_SECONDS + seconds * sum(map(len, known)))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = (home / "errors").read_text(encoding="utf-8", errors="replace")
        if not (home / "ready").exists():
            sys.exit(f"error: the process for the student's code does not start, and nothing is graded:\n{said}")
        found = [_read(home / f"{number}.pt", len(own)) for number, own in enumerate(known)]
    late = f"it took more than {seconds:g} s: is there a loop without end?"
    return found, {"error": "", "message": late if "Timeout (" in said else "it ended the process in which it ran"}


def _read(file: Path, count: int) -> list[dict[str, Any]]:
    try:
        return list(torch.load(file, weights_only=True))[:count]
    # The student's code can end before its first outcome, and overwrite the file.
    except Exception:
        return []


def grade_threshold(submission: Path, threshold: dict[str, Any]) -> dict[str, Any]:
    """The points for a figure in results.json from the student's own run."""
    recipe, measure, at_least = (threshold[name] for name in ("recipe", "measure", "at_least"))
    file, passed = f"runs/{recipe}/results.json", False
    try:
        value = json.loads((submission / file).read_text(encoding="utf-8"))
        if not set(threshold["uses"]) <= set(value["yours"]):
            raise ValueError(f"the run was not on the student's own {', '.join(threshold['uses'])}")
        for key in measure.split("."):
            value = value[key]
        if not math.isfinite(value):
            raise ValueError(f"{measure} is no finite number")
        passed = value >= at_least
        output = f"reached {value:.3f}"
    except FileNotFoundError:
        output = f"no file {file}"
    # The student's run, or the student, has written the file.
    except Exception as error:
        output = f"{file}: {type(error).__name__}: {error}"
    return _row(f"{recipe}: {measure} >= {at_least:g}", threshold["points"], passed, output)


if __name__ == "__main__":
    main()
