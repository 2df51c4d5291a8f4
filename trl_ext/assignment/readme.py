"""The README of a starter and that of its grader."""

from __future__ import annotations

from trl_ext.assignment.catalog import task
from trl_ext.assignment.spec import AssignmentSpec


def starter_readme(spec: AssignmentSpec, given: list[str]) -> str:
    """What a student reads: the functions, the commands, the thresholds."""
    lines = [f"# {spec.title}", "", "Every function below raises `NotImplementedError` until you implement it."]
    for module, content in spec.modules.items():
        lines += ["", f"## {spec.package}/{module}.py", "", content.description, "", "| function | task | points |"]
        lines += ["|---|---|---|"]
        lines += [f"| `{x.known_as}` | {task(x.function).summary} | {x.points:g} |" for x in content.functions]
    first = spec.functions()[0][1].known_as
    lines += [
        *(
            "",
            "## Tests",
            "",
            "They need torch and pytest. A test that fails says what is likely wrong.",
            "",
            "```bash",
        ),
        "python -m pytest -q tests   # everything",
        f"python -m pytest -q tests -k {first}   # one function",
        "```",
    ]
    if spec.recipes:
        lines += [
            *("", "## Training on your functions", "", "A small language model and its data come with `trl_ext`.", ""),
            *("```bash", *(f"python train.py --recipe {name}" for name in spec.recipes), "```", ""),
            f"`--implementation {spec.package}.{spec.functions()[0][0]}` takes only that module's functions as yours, "
            "and `--implementation library` none of them, to compare with. Every setting of the trainer is a flag, as "
            "`--learning_rate 1e-4`. Results go to `runs/NAME/results.json`.",
        ]
        if any(recipe.kind == "policy" for recipe in spec.recipes.values()):
            lines += ["Online runs are rewarded with the data's known score, or with `--reward_model FOLDER`."]
        if not any(recipe.kind.endswith("loop") for recipe in spec.recipes.values()):
            lines += ["On several processes: `accelerate launch train.py --recipe NAME`."]
    if spec.thresholds or spec.submission:
        lines += ["", "## Thresholds", "", "| run | figure | at least | points |", "|---|---|---|---|"]
        lines += [f"| {x.recipe} | `{x.measure}` | {x.at_least:g} | {x.points:g} |" for x in spec.thresholds]
        lines += [
            f"| {name} | responses in `submission/`, judged | {least:g} | {spec.submission_points:g} |"
            for name, least in spec.submission.items()
        ]
    how = {
        "zero": "A file that imports them earns nothing.",
        "report": "The grader reports imports of them.",
        "ignore": "",
    }[spec.tests.imports]
    lines += ["", "## Rules", "", f"`trl_ext` holds the answers. {how}".strip()]
    if given:
        lines += [f"Given, and free to import, are {', '.join(f'`{name}`' for name in given)}."]
    lines += ["What a docstring lists under Raises is good to have and is not tested.", ""]
    return "\n".join(lines)


def grader_readme(spec: AssignmentSpec, folder: str) -> str:
    """What a teacher reads."""
    total = sum(each.points for _, each in spec.functions())
    credit = "the share of its cases that pass" if spec.tests.partial_credit else "all of its cases or nothing"
    lines = [
        f"# Grader of: {spec.title}",
        "",
        "Keep this folder from students: it holds the hidden cases.",
        "",
        "```bash",
        f"python grade.py ../{folder} --out results.json",
        "```",
        "",
        f"prints a table and writes Gradescope's `results.json`. {total:g} points for functions; each earns {credit}.",
        "The student's code runs in a process of its own, which is given arguments and not what is expected, with "
        f"{spec.tests.seconds:g} s for each case; a hang, an exit, a missing file or function is 0 points, with the "
        "reason. It is no sandbox: that process can read every file that you can, so grade in a container, and as "
        "another user where students must not read this folder.",
        "",
        "Figures of trained runs are read from the results.json that the student's own run wrote: have them "
        "reproduced, or set thresholds on responses (`submission`), which the grader judges itself.",
        "",
        "On Gradescope: `run_autograder` is `python grade.py /autograder/submission --out "
        "/autograder/results/results.json`, with torch installed, and trl_ext for thresholds on responses.",
        "",
    ]
    return "\n".join(lines)
