"""`trl-ext evaluate`: a model on a task, which is a row of YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trl_ext.evaluation.command_line import CommandParser, at_least_one, format_table, one_line_errors, print_json
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.tasks.task import task_names

DESCRIPTION = """\
Evaluates a model on a task: samples responses to its prompts, checks them, and prints each metric with its 95%
interval. A task is a name ({names}) or your own YAML file of one row.

writes  into --output_dir responses.jsonl, from which the same command resumes, and results.json, which the report
        reads.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, evaluate and print."""
    with one_line_errors():
        parser = CommandParser(
            prog="python -m trl_ext.evaluation.tasks", description=DESCRIPTION.format(names=", ".join(task_names()))
        )
        parser.add_argument("model", metavar="MODEL", help="a folder, a hub model, toy or smollm2")
        parser.add_argument("--task", required=True, metavar="TASK", help="a name, or a YAML file")
        parser.add_argument("--data", type=Path, metavar="FOLDER", help="the folder of data that does not come along")
        parser.add_argument("--output_dir", type=Path, help="(default: runs/evaluate-TASK)")
        parser.add_argument("--compare", type=Path, metavar="FOLDER", help="the --output_dir of an earlier call")
        parser.add_argument("--limit", type=at_least_one, help="the number of rows, from the first; all by default")
        parser.add_argument("--max_new_tokens", type=at_least_one, help="(default: the task's)")
        parser.add_argument("--batch_size", type=at_least_one, default=16, help="rows at once (default: %(default)s)")
        parser.add_argument("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")
        parser.add_argument("--dtype", default="auto", help="of the weights (default: as saved)")
        parser.add_argument("--use_vllm", action="store_true", help="sample with vLLM, which the extra vllm installs")
        parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
        given = vars(parser.parse_args(arguments))
        from trl_ext.evaluation.tasks.evaluate import evaluate

        model, task, folder, as_json = (given.pop(name) for name in ("model", "task", "output_dir", "json"))
        folder = folder or Path("runs") / f"evaluate-{Path(task).stem}"
        results = evaluate(model, task, folder, **given)
    if as_json:
        print_json(results)
        return
    [(name, metrics)] = results["tasks"].items()
    for title, found in ((name, metrics), (f"minus {given['compare']}", results.get("difference"))):
        if found:
            rows = [(key, f"{Estimate(m['mean'], m['low'], m['high']):.3f}", m["n"]) for key, m in found.items()]
            print(f"{format_table((title, 'mean', 'n'), rows)}\n")
    print(f"{folder}: {model} on {name}")
    if counts := results.get("reasoning", {}).get("categories"):
        print(", ".join(f"{category.replace('_', ' ')} {count}" for category, count in counts.items()))
    if truncated := results["generations"]["policy"]["truncated_fraction"]:
        print(f"{truncated:.1%} of the responses were truncated at the token limit")


if __name__ == "__main__":
    main()
