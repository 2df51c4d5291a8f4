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
            f"They need torch and pytest{_and_given(given)}. A test that fails says what is likely wrong.",
            "",
            "```bash",
        ),
        "python -m pytest -q tests   # everything",
        f"python -m pytest -q tests -k {first}   # one function",
        "```",
    ]
    within = _name_within_another([each.known_as for _, each in spec.functions()])
    if within:
        lines += ["", f'`-k` takes every name that holds the word: `-k "{within[0]} and not {within[1]}"` for one.']
    if spec.recipes:
        lines += [
            *("", "## Training on your functions", ""),
            "A small language model and its data come with `trl_ext`, which your course tells you how to install.",
            "",
            *("```bash", *(f"python train.py --recipe {name}" for name in spec.recipes), "```", ""),
            f"`--implementation {spec.package}.{spec.functions()[0][0]}` takes only that module's functions as yours, "
            "and `--implementation library` none of them, to compare with. Every setting of the trainer is a flag, as "
            "`--learning_rate 1e-4`. Results go to `runs/NAME/results.json`, and of runs with `library` to "
            "`runs/NAME-library/`: a threshold counts runs on functions of your own.",
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
        zeros = {f"`{x.recipe}`'s `{x.measure}`": x.zero_at for x in spec.thresholds}
        zeros["judged responses"] = spec.submission_zero_at if spec.submission else None
        zeros = {name: zero for name, zero in zeros.items() if zero is not None}
        if zeros:
            told = ", ".join(f"{zero:g} of {name}" for name, zero in zeros.items())
            lines += ["", f"Points are in proportion, up from {told}; other figures earn all or nothing."]
    how = {
        "zero": "Functions of a file that imports them, itself or by another file of yours, earn nothing.",
        "report": "The grader reports imports of them.",
        "ignore": "",
    }[spec.tests.imports]
    lines += ["", "## Rules", "", f"`trl_ext` holds the answers. {how}".strip()]
    if given:
        lines += [f"Given, and free to import, are {', '.join(f'`{name}`' for name in given)}."]
    lines += ["What a docstring lists under Raises is good to have and is not tested.", ""]
    return "\n".join(lines)


def _and_given(given: list[str]) -> str:
    return f", and `trl_ext` for what it gives ({', '.join(f'`{name}`' for name in given)})" if given else ""


def _name_within_another(names: list[str]) -> tuple[str, str] | None:
    pairs = ((name, other) for name in names for other in names if name in other and name != other)
    return next(pairs, None)


def grader_readme(spec: AssignmentSpec, folder: str, given: list[str]) -> str:
    """What a teacher reads."""
    responses = ", and `trl_ext` to judge responses" if spec.submission else ""
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
        "Students read why a case fails and not what it expects; `--show_values` shows that too.",
        "",
        "The student's code runs in a process of its own, with a copy of what it needs from here, few variables of "
        "the environment, arguments and not what is expected, and "
        f"{spec.tests.seconds:g} s for each case. A hang, an exit, a "
        "missing file or function is 0 points, with the reason. It is no sandbox: that process can read every file "
        "that you can, this folder among them. Grade in a container; as root, `chmod 700` this folder and give "
        "`--user NAME`, and the student's code runs as that user.",
        "",
        "The hidden cases differ from the visible ones. Where the specification has no `hidden_seed`, they are of "
        "this folder alone: written anew, it has others. A solution that was copied is not seen, and the library's "
        "own text, which is public, passes.",
        "",
        "Figures of trained runs are read from the results.json that the student's own run wrote: have them "
        "reproduced, or set thresholds on responses (`submission`), which the grader judges itself.",
        "",
        f"It needs torch{_and_given(given)}{responses}. On Gradescope, `run_autograder` is `python grade.py "
        "/autograder/submission --out /autograder/results/results.json`.",
        "",
    ]
    return "\n".join(lines)
