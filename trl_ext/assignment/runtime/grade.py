"""Grade a submission: hidden cases of every function, thresholds of trained runs, a table and Gradescope's JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
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
        print_table(plan["title"], rows)
        options.out.write_text(json.dumps(gradescope(rows, options.visibility), indent=2) + "\n", encoding="utf-8")
    except (WorkerProblem, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
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
        rows = [_row(item["name"], item["points"], 0.0, note) for item in plan["functions"]]
    rows += [grade_threshold(submission, each) for each in plan["thresholds"]]
    return rows + (grade_responses(submission, plan) if plan["submission"] else [])


def _row(name: str, points: float, score: float, *notes: str) -> dict[str, Any]:
    return {"name": name, "score": round(score, 4), "max_score": points, "notes": list(notes)}


def grade_functions(submission: Path, plan: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each function."""
    allowed = plan["allowed_imports"] if plan["imports"] == "zero" else None
    runner = Runner(submission, HERE / "checking", plan["seconds"], allowed, options.user)
    with contextlib.closing(runner):
        return [_grade_function(runner, plan, item, options.show_values) for item in plan["functions"]]


def _grade_function(runner: Runner, plan: dict[str, Any], item: dict[str, Any], values: bool) -> dict[str, Any]:
    cases = json.loads((HERE / item["cases"]).read_text(encoding="utf-8"))
    first, failed = [], 0
    for number, case in enumerate(cases):
        outcome = runner.run(item["module"], item["name"], case, plan["classes"])
        try:
            problem = verdict(outcome, case, values=values)
            kind = outcome.get("error", {}).get("kind")
        # The student's code can write malformed answers.
        except Exception as error:
            problem, kind = f"its outcome cannot be read ({type(error).__name__})", None
        if problem is not None:
            first = first or [f"case {number} ({case['about']}): {problem}"]
            if kind in (*OF_THE_RUN, "NotImplementedError"):
                # The other cases would fail the same way and take as long.
                failed += len(cases) - number
                break
            failed += 1
    share = 1 - failed / len(cases)
    score = item["points"] * (share if plan["partial_credit"] else float(not failed))
    notes = first + ([f"{failed} of {len(cases)} cases fail"] if failed > 1 else [])
    return _row(item["name"], item["points"], score, *notes)


def grade_threshold(submission: Path, threshold: dict[str, Any]) -> dict[str, Any]:
    """One row for a threshold: a figure in results.json from the student's own run."""
    recipe, measure, points = threshold["recipe"], threshold["measure"], threshold["points"]
    name, file = f"{recipe}: {measure} >= {threshold['at_least']:g}", f"runs/{recipe}/results.json"
    try:
        results = value = json.loads((submission / file).read_text(encoding="utf-8"))
        missing = [function for function in threshold["uses"] if function not in results["yours"]]
        if missing:
            return _row(name, points, 0.0, f"the run was not on the student's own {', '.join(missing)}")
        for key in measure.split("."):
            value = value[key]
        if not math.isfinite(value):
            raise ValueError(f"{measure} is no finite number")
    except FileNotFoundError:
        return _row(name, points, 0.0, f"no file {file}")
    # The student's run, or the student, has written the file.
    except Exception as error:
        return _row(name, points, 0.0, f"{file}: {type(error).__name__}: {error}")
    return _row(
        name, points, points * earned(value, threshold["at_least"], threshold["zero_at"]), f"reached {value:.3f}"
    )


def earned(value: float, at_least: float, zero_at: float | None) -> float:
    """The share of the points: 1 from `at_least` on; below it 0, or linear from `zero_at` on."""
    if zero_at is None:
        return float(value >= at_least)
    return min(max((value - zero_at) / (at_least - zero_at), 0.0), 1.0)


def grade_responses(submission: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each method: its responses in submission/, judged as in the public evaluation."""
    points, names = plan["submission_points"], plan["submission"]
    try:
        from trl_ext.evaluation.submissions.grading import grade_submission

        grades = {grade.method: grade for grade in grade_submission(submission / "submission", names).grades}
    except Exception as error:
        return [_row(f"{name}: responses", points, 0.0, f"{type(error).__name__}: {error}") for name in names]
    rows = []
    for name in names:
        grade, score = grades[name], 0.0
        figure = grade.reason
        if grade.figure is not None:
            figure = f"{grade.measure} {grade.figure:.3f}"
            score = points * earned(grade.figure, grade.threshold, plan["submission_zero_at"])
        rows.append(_row(f"{name}: responses", points, score, f"{figure}, needed {grade.threshold:g}"))
    return rows


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print the table of points, followed by the faults."""
    total, most = (sum(row[key] for row in rows) for key in ("score", "max_score"))
    width = max(len(row["name"]) for row in rows)
    line = "-" * (width + 16)
    print(f"{title}\n\n{'function':{width}}  points\n{line}")
    for row in rows:
        print(f"{row['name']:{width}}  {row['score']:5g} of {row['max_score']:g}")
    print(f"{line}\n{'total':{width}}  {total:5g} of {most:g}")
    said: dict[str, list[str]] = {}
    for row in rows:
        if row["score"] < row["max_score"]:
            said.setdefault("\n  ".join(row["notes"]), []).append(row["name"])
    for notes, names in said.items():
        print(f"\n{', '.join(names)}: {notes}")


def gradescope(rows: list[dict[str, Any]], visibility: str) -> dict[str, Any]:
    """The contents of Gradescope's results.json."""
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
    output = f"{total:g} of {sum(row['max_score'] for row in rows):g} points"
    return {"score": total, "output": output, "stdout_visibility": "hidden", "tests": tests}


if __name__ == "__main__":
    raise SystemExit(main())
