"""The READMEs of a starter and its grader."""

from __future__ import annotations

from trl_ext.assignment.builder.spec import AssignmentSpec
from trl_ext.assignment.catalog.catalog import task
from trl_ext.evaluation.command_line import markdown_table


def starter_readme(spec: AssignmentSpec, given: list[str]) -> str:
    """The README for students: functions, commands and thresholds."""
    parts = [f"# {spec.title}\n\nEvery function below raises `NotImplementedError` until you implement it."]
    for module, content in spec.modules.items():
        rows = [(f"`{x.name}`", task(x.function).summary, f"{x.points:g}") for x in content.functions]
        table = markdown_table(("function", "task", "points"), rows)
        parts.append(f"## {spec.package}/{module}.py\n\n{content.description}\n\n{table}")
    first_module, first = spec.functions()[0]
    parts.append(f"""## Tests

They need torch and pytest{_and_given(given)}. A failing test says what is likely wrong.

```bash
python -m pytest -q tests   # everything
python -m pytest -q tests -k {first.name}   # the functions whose names contain this one
```
""")
    if spec.recipes:
        commands = "\n".join(f"python train.py --recipe {name}" for name in spec.recipes)
        parts.append(f"""## Training on your functions

A small language model and its data come with `trl_ext`. Your course tells you how to install it.

```bash
{commands}
```

`--implementation {spec.package}.{first_module}` takes only the functions of that module from you, and
`--implementation library` takes none, for comparison. Every setting of the trainer is a flag, such as
`--learning_rate 1e-4`. Results are written to `runs/NAME/results.json`, and those of runs with `library` to
`runs/NAME-library/`: thresholds count runs on your own functions. The reward of online runs is the data's known
score, or `--reward_model FOLDER`.
""")
    goals = [(x.recipe, f"`{x.measure}`", x.at_least, x.zero_at, f"{x.points:g}") for x in spec.thresholds]
    for name, least in spec.submission.items():
        judged = (least, spec.submission_zero_at, f"{spec.submission_points:g}")
        goals.append((name, "responses in `submission/`, judged", *judged))
    if goals:
        table = markdown_table(("run", "figure", "all points from", "none at", "points"), goals)
        parts.append(f"## Thresholds\n\n{table}\nA lower figure earns points in proportion where `none at` is given.")
    if spec.tests.imports == "zero":
        parts.append("## Rules\n\n`trl_ext` holds the answers and cannot be imported when the functions are graded.")
    if given:
        parts.append(f"You may import {', '.join(f'`{name}`' for name in given)}.")
    parts.append("What a docstring lists under Raises is good to have and is not tested.")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _and_given(given: list[str]) -> str:
    return f", and `trl_ext` for what it gives ({', '.join(f'`{name}`' for name in given)})" if given else ""


def grader_readme(spec: AssignmentSpec, folder: str, given: list[str]) -> str:
    """The README for teachers."""
    responses = ", and `trl_ext` to judge responses" if spec.submission else ""
    total = sum(each.points for _, each in spec.functions())
    credit = "the share of its cases that pass" if spec.tests.partial_credit else "all of its points or none"
    return f"""# Grader of: {spec.title}

Keep this folder from students: it holds the hidden cases.

```bash
python grade.py ../{folder} --out results.json
```

prints a table and writes Gradescope's `results.json`. The functions have {total:g} points; each earns {credit}.
Students read why a case fails but not what it expects; `--show_values` shows that too.

The student's code runs in a separate process that gets the arguments of a case but not the expected result, few
environment variables, and {spec.tests.seconds:g} s for each case. A hang, an exit, or a missing file or function
earns 0 points, and the table says which. The process is not a sandbox: it can read every file that you can, this
folder included. Grade in a container. As root, `chmod 700` this folder and pass `--user NAME` to run the student's
code as that user.

The hidden cases differ from the visible ones. Without a `hidden_seed` in the specification, another run of the command
that wrote this folder draws others. The grader does not detect a solution that was copied, for example from the public
library.

Figures of training runs come from the results.json that the student's own run wrote. Reproduce those runs, or set
thresholds on responses (`submission`), which the grader judges itself.

The grader needs torch{_and_given(given)}{responses}. On Gradescope, `run_autograder` is
`python grade.py /autograder/submission --out /autograder/results/results.json`.
"""
