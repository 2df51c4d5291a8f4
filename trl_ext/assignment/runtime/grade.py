"""Grade a submission: hidden cases of every function, thresholds of trained runs, a table and Gradescope's JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from checking.running import Runner, WorkerProblem
from checking.verdicts import OF_THE_RUN, verdict

HERE = Path(__file__).resolve().parent
VISIBILITIES = ("visible", "hidden", "after_due_date", "after_published")


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments, grade, print and write. Return 0 whatever the grades, 2 if nothing can be graded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("submission", type=Path, help="the student's folder, which holds the package")
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="where Gradescope's JSON goes")
    parser.add_argument("--visibility", choices=VISIBILITIES, default="visible", help="of the tests")
    parser.add_argument("--show_values", action="store_true", help="say what hidden cases expect; default: only why")
    parser.add_argument("--user", help="run the student's code as this user, which takes root; default: as you")
    options = parser.parse_args(arguments)
    # A student's text may contain characters that the terminal cannot encode.
    sys.stdout.reconfigure(errors="backslashreplace")
    plan = json.loads((HERE / "grading.json").read_text(encoding="utf-8"))
    try:
        rows = _graded(options, plan)
        write_gradescope(options.out, rows, options.visibility)
    except (WorkerProblem, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(plan["title"], rows)
    return 0


def _graded(options: argparse.Namespace, plan: dict[str, Any]) -> list[dict[str, Any]]:
    if not options.submission.is_dir():
        raise FileNotFoundError(f"no folder {options.submission}")
    if options.user and HERE.stat().st_mode & 0o007:
        raise PermissionError(f"{HERE} can be read by all users: chmod 700 it, so that {options.user} cannot")
    # Check this before running the cases, which is slow.
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.is_dir():
        raise IsADirectoryError(f"{options.out} is a folder: name a file for --out")
    submission, package = options.submission.resolve(), plan["package"]
    if (submission / package).is_dir():
        rows = grade_functions(submission, plan, options)
    else:
        note = f"no folder {package} in {submission}: hand in the folder that holds it"
        rows = [_row(item, 0.0, [note]) for item in plan["functions"]]
    rows += [grade_threshold(options.submission, each) for each in plan["thresholds"]]
    return rows + (grade_responses(options.submission, plan) if plan["submission"] else [])


def grade_functions(submission: Path, plan: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each function."""
    allowed = plan["allowed_imports"] if plan["imports"] == "zero" else None
    runner = Runner(submission, HERE / "checking", plan["seconds"], allowed, options.user)
    with contextlib.closing(runner):
        return [_grade_function(runner, plan, item, options.show_values) for item in plan["functions"]]


def _grade_function(runner: Runner, plan: dict[str, Any], item: dict[str, Any], values: bool) -> dict[str, Any]:
    cases = json.loads((HERE / item["cases"]).read_text(encoding="utf-8"))
    failures = []
    for number, case in enumerate(cases):
        outcome = runner.run(item["module"], item["name"], case, plan["classes"])
        try:
            problem = verdict(outcome, case, values=values)
        # The student's code can write malformed answers.
        except Exception as error:
            problem = f"its outcome cannot be read ({type(error).__name__})"
        if problem is not None:
            failures.append(f"case {number} ({case['about']}): {problem}")
            if outcome.get("error", {}).get("kind") in (*OF_THE_RUN, "NotImplementedError"):
                # The other cases would fail the same way and take as long.
                failures += [f"case {left}: not run" for left in range(number + 1, len(cases))]
                break
    share = 1 - len(failures) / len(cases)
    score = item["points"] * (share if plan["partial_credit"] else float(share == 1))
    notes = failures[:1] + ([f"{len(failures)} of {len(cases)} cases fail"] if len(failures) > 1 else [])
    return _row(item, round(score, 4), notes)


def _row(item: dict[str, Any], score: float, notes: list[str]) -> dict[str, Any]:
    name = item.get("label", item["name"])
    return {"name": name, "score": score, "max_score": item["points"], "notes": notes}


def grade_threshold(submission: Path, threshold: dict[str, Any]) -> dict[str, Any]:
    """One row for a threshold: a figure in results.json from the student's own run."""
    name = f"{threshold['recipe']}: {threshold['measure']} >= {threshold['at_least']:g}"
    path = submission / "runs" / threshold["recipe"] / "results.json"
    row = {"name": name, "score": 0.0, "max_score": threshold["points"]}
    try:
        results = value = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in threshold["uses"] if name not in results.get("yours", [])]
        if missing:
            return {**row, "notes": [f"the run was not on the student's own {', '.join(missing)}"]}
        for key in threshold["measure"].split("."):
            value = value[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{threshold['measure']} is no finite number")
    except FileNotFoundError:
        return {**row, "notes": [f"no file runs/{threshold['recipe']}/results.json"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        return {**row, "notes": [f"runs/{threshold['recipe']}/results.json: {type(error).__name__}: {error}"]}
    score = credit(value, threshold["at_least"], threshold["zero_at"], threshold["points"])
    return {**row, "score": score, "notes": [f"reached {value:.3f}"]}


def credit(value: float, at_least: float, zero_at: float | None, points: float) -> float:
    """All points from `at_least` on; below it none, or a linear share from `zero_at` on."""
    share = float(value >= at_least) if zero_at is None else (value - zero_at) / (at_least - zero_at)
    return round(points * min(max(share, 0.0), 1.0), 4)


def grade_responses(submission: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each method: its responses in submission/, judged as in the public evaluation."""
    points, names = plan["submission_points"], plan["submission"]
    rows = [{"name": f"{name}: responses", "score": 0.0, "max_score": points, "notes": []} for name in names]
    try:
        from trl_ext.evaluation.submissions.grading import grade_submission

        grades = {grade.method: grade for grade in grade_submission(submission / "submission", names).grades}
    except Exception as error:
        return [{**row, "notes": [f"{type(error).__name__}: {error}"]} for row in rows]
    for row, name in zip(rows, names, strict=True):
        grade = grades[name]
        figure = grade.reason if grade.figure is None else f"{grade.measure} {grade.figure:.3f}"
        row["notes"] = [f"{figure}, needed {grade.threshold:g}"]
        if grade.figure is not None:
            row["score"] = credit(grade.figure, grade.threshold, plan["submission_zero_at"], points)
    return rows


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print the table of points, followed by the faults."""
    width = max(len(row["name"]) for row in rows)
    print(f"{title}\n\n{'function':{width}}  points")
    print("-" * (width + 16))
    for row in rows:
        print(f"{row['name']:{width}}  {row['score']:5g} of {row['max_score']:g}")
    total, most = (sum(row[key] for row in rows) for key in ("score", "max_score"))
    print("-" * (width + 16))
    print(f"{'total':{width}}  {total:5g} of {most:g}")
    said: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["score"] < row["max_score"]:
            said.setdefault(tuple(row["notes"]), []).append(row["name"])
    for notes, names in said.items():
        print(f"\n{', '.join(names)}: " + "\n  ".join(notes))


def write_gradescope(path: Path, rows: list[dict[str, Any]], visibility: str) -> None:
    """Write Gradescope's results.json."""
    tests = [
        {
            "name": row["name"],
            "score": row["score"],
            "max_score": row["max_score"],
            "status": "passed" if row["score"] == row["max_score"] else "failed",
            "output": "\n".join(row["notes"]) or "all cases pass",
            "visibility": visibility,
        }
        for row in rows
    ]
    total = round(sum(row["score"] for row in rows), 4)
    result = {
        "score": total,
        "output": f"{total:g} of {sum(row['max_score'] for row in rows):g} points",
        "stdout_visibility": "hidden",
        "tests": tests,
    }
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    raise SystemExit(main())
