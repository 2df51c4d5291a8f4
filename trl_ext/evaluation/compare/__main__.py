"""Compare the stages of a training on the same prompts."""

from __future__ import annotations

from pathlib import Path

from trl_ext.evaluation.command_line import (
    CommandParser,
    at_least_one,
    format_interval,
    format_table,
    markdown_table,
    one_line_errors,
    print_json,
)
from trl_ext.evaluation.stages import StageComparison, compare_stages
from trl_ext.files import write_json, write_json_lines, write_text

DESCRIPTION = """\
The stages of a training, such as base, SFT and PPO, on the same prompts: mean and standard deviation of a reward
model's reward, approximate KL to one of them, and length; one response per prompt, sampled unless --temperature is 0.

cost    one generation per model and prompt, and one forward pass each under the model, the reference and the reward
        model. No network but for models on the hub. Two policies and the reward model are in memory at once.
writes  comparison.json, comparison.md and, for each model, samples_NAME.jsonl into --out.
"""
HEADER = ("model", "n", "reward  95% interval", "std", "KL to the reference (nats)", "tokens", "std", "ended")


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, compare, write and print."""
    parser = CommandParser(prog="python -m trl_ext.evaluation.compare", description=DESCRIPTION)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL", help="toy, a folder, or a hub model, by stage")
    parser.add_argument("--reward_model", help="folder or hub name of a reward model; none: no rewards")
    parser.add_argument("--reference", help="the stage that KL is measured from (default: the first)")
    parser.add_argument("--out", default="stages", help="folder for the results (default: %(default)s)")
    parser.add_argument("--prompts_jsonl", help="prompts (default: the embedded ones)")
    parser.add_argument("--num_prompts", type=at_least_one, help="the first so many prompts (default: all)")
    parser.add_argument(
        "--num_samples", type=at_least_one, default=10, help="samples written per model (default: %(default)s)"
    )
    parser.add_argument("--max_prompt_tokens", type=at_least_one, default=700, help="(default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=at_least_one, help="(default: 256; 48 for the embedded prompts)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0 for greedy decoding; KL needs 1 (default: %(default)s)"
    )
    parser.add_argument("--batch_size", type=at_least_one, default=32, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of the policies' weights (default: as saved)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    with one_line_errors():
        options = vars(parser.parse_args(arguments))
        out, as_json = Path(options.pop("out")), options.pop("json")
        comparison = compare_stages(_named(options.pop("models")), **options, progress=True)
        rows = [_table_row(row) for row in comparison.rows]
        _write(out, comparison, rows)
    if as_json:
        print_json(comparison.to_dict())
        return
    print(format_table(HEADER, rows))
    for row in comparison.rows:
        if row["kl_note"] and row["name"] != comparison.settings["reference"]:
            print(f"{row['name']}: no KL: {row['kl_note']}")
    names = ", ".join(["comparison.json", "comparison.md", *(f"samples_{name}.jsonl" for name in comparison.samples)])
    print(f"{_how(comparison)}\nin {out}: {names}")


def _named(models: list[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for model in models:
        name, equals, source = model.partition("=")
        if not equals or not name or not source:
            raise ValueError(f"{model!r}: give each model as name=folder, such as base=toy")
        if name in named:
            raise ValueError(f"{name!r} is given twice: name each stage differently")
        if "/" in name or name.startswith("."):
            raise ValueError(f"{name!r}: a stage's name becomes part of a file's name and may hold no slash")
        named[name] = source
    return named


def _table_row(row: dict) -> tuple:
    reward, kl = row["reward"], row["kl"]
    return (
        row["name"],
        row["n"],
        "-" if reward is None else format_interval(reward["mean"], reward["low"], reward["high"]),
        None if reward is None else reward["std"],
        "-" if kl is None else format_interval(kl["mean"], kl["low"], kl["high"], digits=2),
        row["tokens"]["mean"],
        row["tokens"]["std"],
        row["finished"],
    )


def _how(comparison: StageComparison) -> str:
    """The reference, how responses were decoded, and how many of them the files of samples hold."""
    settings, rows = comparison.settings, comparison.rows
    held, n = len(comparison.samples[rows[0]["name"]]), rows[0]["n"]
    greedy = settings["temperature"] == 0
    decoding = "greedy" if greedy else f"sampled at temperature {settings['temperature']:g}, seed {settings['seed']}"
    which = f"all {n} prompts" if held == n else f"the first {held} of {n} prompts"
    return (
        f"Reference: {settings['reference']}. Decoding: {decoding}, one response per prompt, at most "
        f"{settings['max_new_tokens']} tokens. Samples: the files samples_*.jsonl hold {which}."
    )


def _write(out: Path, comparison: StageComparison, rows: list[tuple]) -> None:
    write_json(out / "comparison.json", comparison.to_dict())
    write_text(out / "comparison.md", f"{markdown_table(HEADER, rows)}\n{_how(comparison)}\n")
    for name, samples in comparison.samples.items():
        write_json_lines(out / f"samples_{name}.jsonl", samples)


if __name__ == "__main__":
    main()
