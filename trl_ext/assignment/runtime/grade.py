"""Grade a submission: hidden cases of every function, thresholds of trained runs, a table and Gradescope's JSON."""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

from checking.running import Runner
from checking.verdicts import OF_THE_RUN, verdict

HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments, grade, print and write; 0 whatever the grades."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("submission", type=Path, help="the student's folder, which holds the package")
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="where Gradescope's JSON goes")
    parser.add_argument("--visibility", default="visible", help="of the tests: visible, hidden, after_published")
    options = parser.parse_args(arguments)
    plan = json.loads((HERE / "grading.json").read_text(encoding="utf-8"))
    if not options.submission.is_dir():
        print(f"error: no folder {options.submission}", file=sys.stderr)
        return 2
    rows = grade_functions(options.submission.resolve(), plan)
    rows += [grade_threshold(options.submission, each) for each in plan["thresholds"]]
    if plan["submission"]:
        rows += grade_responses(options.submission, plan)
    write_gradescope(options.out, rows, options.visibility)
    print_table(plan["title"], rows)
    return 0


def grade_functions(submission: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each function."""
    runner = Runner(submission, HERE, plan["seconds"])
    problems = imports_by_module(submission, plan)
    rows = []
    try:
        for item in plan["functions"]:
            rows.append(_grade_function(runner, plan, item, problems[item["module"]]))
    finally:
        runner.close()
    return rows


def _grade_function(
    runner: Runner, plan: dict[str, Any], item: dict[str, Any], imported: str | None
) -> dict[str, Any]:
    cases = json.loads((HERE / item["cases"]).read_text(encoding="utf-8"))
    failures = []
    for number, case in enumerate(cases):
        outcome = runner.run(item["module"], item["name"], case, plan["classes"])
        try:
            problem = verdict(outcome, case)
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
    name = item.get("label", item["name"])
    return {"name": name, "score": round(score, 4), "max_score": item["points"], "notes": notes}


def imports_by_module(submission: Path, plan: dict[str, Any]) -> dict[str, str | None]:
    """What each module imports of the answers; a file beside those that were asked for speaks for all modules."""
    allowed, files = plan["allowed_imports"], plan["files"]
    asked = {(submission / path).resolve() for path in files.values()}
    others = [path for path in sorted((submission / plan["package"]).rglob("*.py")) if path.resolve() not in asked]
    beside = next((found for path in others if (found := reference_imports(path, allowed))), None)
    return {module: reference_imports(submission / path, allowed) or beside for module, path in files.items()}


def reference_imports(path: Path, allowed: list[str]) -> str | None:
    """What a file imports of the library that the assignment does not give; None for nothing."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found = [str(part.value) for part in node.args if isinstance(part, ast.Constant)]
        for name in found:
            if name.partition(".")[0] == "trl_ext" and name not in allowed:
                return f"{path.name}, line {node.lineno}, imports {name}: the library holds the answers"
    return None


def grade_threshold(submission: Path, threshold: dict[str, Any]) -> dict[str, Any]:
    """One row: a figure of a run's results.json, which the student's own run has written."""
    name = f"{threshold['recipe']}: {threshold['measure']} >= {threshold['at_least']:g}"
    path = submission / "runs" / threshold["recipe"] / "results.json"
    row = {"name": name, "score": 0.0, "max_score": threshold["points"]}
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        for key in threshold["measure"].split("."):
            value = value[key]
        reached = float(value) >= threshold["at_least"]
    except FileNotFoundError:
        return {**row, "notes": [f"no file runs/{threshold['recipe']}/results.json"]}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return {**row, "notes": [f"runs/{threshold['recipe']}/results.json: {type(error).__name__}: {error}"]}
    return {**row, "score": threshold["points"] if reached else 0.0, "notes": [f"reached {float(value):.3f}"]}


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
        row.update(score=points if grade.passed else 0.0, notes=[f"{figure}, needed {grade.threshold:g}"])
    return rows


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """The table of points with, below, what is wrong."""
    width = max(len(row["name"]) for row in rows)
    print(f"{title}\n\n{'function':{width}}  points")
    print("-" * (width + 16))
    for row in rows:
        print(f"{row['name']:{width}}  {row['score']:5g} of {row['max_score']:g}")
    total, most = (sum(row[key] for row in rows) for key in ("score", "max_score"))
    print("-" * (width + 16))
    print(f"{'total':{width}}  {total:5g} of {most:g}")
    for row in rows:
        if row["score"] < row["max_score"]:
            print(f"\n{row['name']}: " + "\n  ".join(row["notes"]))


def write_gradescope(path: Path, rows: list[dict[str, Any]], visibility: str) -> None:
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
