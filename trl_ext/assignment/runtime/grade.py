"""Grade a submission: hidden cases of every function, thresholds of trained runs, a table and Gradescope's JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from checking.imports import imports_by_module
from checking.running import Runner, WorkerProblem
from checking.verdicts import OF_THE_RUN, verdict

HERE = Path(__file__).resolve().parent
VISIBILITIES = ("visible", "hidden", "after_due_date", "after_published")
UNUSED = "no points lost, as no function's file imports it"


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments, grade, print and write; 0 whatever the grades, 2 if nothing can be graded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("submission", type=Path, help="the student's folder, which holds the package")
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="where Gradescope's JSON goes")
    parser.add_argument("--visibility", choices=VISIBILITIES, default="visible", help="of the tests")
    parser.add_argument("--show_values", action="store_true", help="say what hidden cases expect; default: only why")
    parser.add_argument("--user", help="run the student's code as this user, which takes root; default: as you")
    options = parser.parse_args(arguments)
    # A student's text may hold what the terminal's encoding does not.
    sys.stdout.reconfigure(errors="backslashreplace")
    plan = json.loads((HERE / "grading.json").read_text(encoding="utf-8"))
    try:
        rows, beside = _graded(options, plan)
        write_gradescope(options.out, rows, options.visibility, beside)
    except (WorkerProblem, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(plan["title"], rows, beside)
    return 0


def _graded(options: argparse.Namespace, plan: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """All rows, and what files import that no function's file does."""
    if not options.submission.is_dir():
        raise FileNotFoundError(f"no folder {options.submission}")
    if options.user and HERE.stat().st_mode & 0o007:
        raise PermissionError(f"{HERE} can be read by all users: chmod 700 it, so that {options.user} cannot")
    # Before the cases are run, which takes its time.
    _check_out(options.out)
    submission, package = options.submission.resolve(), plan["package"]
    notes, beside = imports_by_module(submission, plan)
    if (submission / package).is_dir():
        rows = grade_functions(submission, plan, notes, options)
    else:
        note = f"no folder {package} in {submission}: hand in the folder that holds it"
        rows = [_row(item, 0.0, [note]) for item in plan["functions"]]
    rows += [grade_threshold(options.submission, each) for each in plan["thresholds"]]
    if plan["submission"]:
        rows += grade_responses(options.submission, plan)
    return rows, beside if plan["imports"] != "ignore" else []


def _check_out(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {out}: the folder {out.parent} cannot be made ({error.strerror})") from None
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: name a file for --out")
    if not os.access(out.parent, os.W_OK):
        raise PermissionError(f"--out {out}: you may not write into {out.parent}")


def grade_functions(
    submission: Path, plan: dict[str, Any], problems: dict[str, str | None], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each function; `problems` is what each module imports that it should not."""
    allowed = plan["allowed_imports"] if plan["imports"] == "zero" else None
    runner = Runner(submission, HERE / "checking", plan["seconds"], allowed, options.user)
    rows = []
    try:
        for item in plan["functions"]:
            rows.append(_grade_function(runner, plan, item, problems[item["module"]], options.show_values))
    finally:
        runner.close()
    return rows


def _grade_function(
    runner: Runner, plan: dict[str, Any], item: dict[str, Any], imported: str | None, values: bool
) -> dict[str, Any]:
    cases = json.loads((HERE / item["cases"]).read_text(encoding="utf-8"))
    failures = []
    for number, case in enumerate(cases):
        outcome = runner.run(item["module"], item["name"], case, plan["classes"])
        try:
            problem = verdict(outcome, case, values=values)
        # An answer of another form than a worker gives.
        except Exception as error:
            problem = f"its outcome cannot be read ({type(error).__name__})"
        if problem is not None:
            failures.append(f"case {number} ({case['about']}): {problem}")
            kind = outcome.get("error", {}).get("kind") if isinstance(outcome, dict) else None
            if kind in (*OF_THE_RUN, "NotImplementedError"):
                # The others would say the same, and take as long.
                failures += [f"case {left}: not run" for left in range(number + 1, len(cases))]
                break
    share = 1 - len(failures) / len(cases)
    score = item["points"] * (share if plan["partial_credit"] else float(share == 1))
    notes = failures[:1] + ([f"{len(failures)} of {len(cases)} cases fail"] if len(failures) > 1 else [])
    if imported is not None and plan["imports"] != "ignore":
        notes = [imported, *notes]
        score = 0.0 if plan["imports"] == "zero" else score
    return _row(item, round(score, 4), notes)


def _row(item: dict[str, Any], score: float, notes: list[str]) -> dict[str, Any]:
    name = item.get("label", item["name"])
    return {"name": name, "score": score, "max_score": item["points"], "notes": notes}


def grade_threshold(submission: Path, threshold: dict[str, Any]) -> dict[str, Any]:
    """One row: a figure of a run's results.json, which the student's own run has written."""
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
    """All points from `at_least` on; below it none, or with `zero_at` in proportion from there."""
    share = float(value >= at_least) if zero_at is None else (value - zero_at) / (at_least - zero_at)
    return round(points * min(max(share, 0.0), 1.0), 4)


def grade_responses(submission: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each method: its responses in submission/, judged as the public evaluation judges them."""
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


def print_table(title: str, rows: list[dict[str, Any]], beside: list[str]) -> None:
    """The table of points with, below, what is wrong."""
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
    for note in beside:
        print(f"\n{UNUSED}: {note}")


def write_gradescope(path: Path, rows: list[dict[str, Any]], visibility: str, beside: list[str]) -> None:
    """Gradescope's results.json."""
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
    lines = [f"{total:g} of {sum(row['max_score'] for row in rows):g} points"]
    result = {
        "score": total,
        "output": "\n".join([*lines, *(f"{UNUSED}: {note}" for note in beside)]),
        "stdout_visibility": "hidden",
        "tests": tests,
    }
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    raise SystemExit(main())
