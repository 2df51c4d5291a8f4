"""IFEval: the share of prompts and instructions that a model follows, strictly and loosely.

`python -m benchmarks.ifeval MODEL --data FOLDER --output_dir OUT` answers the prompts of
`FOLDER/ifeval/input_data.jsonl` greedily, checks the responses by `benchmarks/_ifeval_instructions.py`, prints a table
and writes `results.json`. MODEL is a folder of a model, an adapter or a run, a hub model, toy or smollm2. A prompt
counts as followed if all its instructions are. `--compare OUT` of an earlier call, as with the model before training,
adds the differences on the same prompts. Responses are saved in `responses.jsonl` as they come, so an interrupted run
goes on by the same command. Without the package langdetect, prompts that ask for a language are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks._ifeval_instructions import CHECKS, LANGUAGE, follow
from benchmarks._pretrained import DATA
from benchmarks.toy_seeds import figure, print_table
from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation import mean_with_interval
from trl_ext.evaluation.command_line import CommandParser, at_least_one, one_line_errors
from trl_ext.files import read_json, write_json

SOURCE = "ifeval/input_data.jsonl"
Row = dict[str, Any]
# Of each response by the prompt's key, for "strict" and "loose": whether it follows each instruction, or None.
Followed = dict[int, dict[str, list[bool | None]]]


def read_prompts(path: Path, limit: int | None) -> list[Row]:
    """The rows of the data, each with its key as `row_id`.

    Raises:
        ValueError: there is no such file, or an instruction in it is not known.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder that holds {SOURCE} as --data")
    rows = [{**row, "row_id": row["key"]} for _, row in read_jsonl(path).rows][:limit]
    unknown = {name for row in rows for name in row["instruction_id_list"]} - set(CHECKS)
    if unknown:
        raise ValueError(f"{path}: {min(unknown)} is no instruction of IFEval")
    return rows


def respond(model: str, rows: Sequence[Row], path: Path, max_new_tokens: int, batch_size: int) -> list[Row]:
    """A greedy response to each prompt; those in the file are kept."""
    from trl_ext.models.loading import load_policy
    from trl_ext.rollouts.generation import generate_responses
    from trl_ext.rollouts.saved_rows import sample_rows

    # A finished run needs no model.
    load = cache(lambda: load_policy(model))

    def engine(prompts: list[str], **options: Any) -> list:
        policy, tokenizer = load()
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        asked = messages if tokenizer.chat_template else prompts
        return generate_responses(
            policy, tokenizer, asked, max_new_tokens=max_new_tokens, batch_size=batch_size, **options
        )

    def finish(part: list, generations: list) -> list[Row]:
        return [
            {"row_id": row["row_id"], "sample": 0, "response_text": found.text, "finished": found.finished}
            for (row, _, _), found in zip(part, generations, strict=True)
        ]

    items = [(row, row["prompt"], 0) for row in rows]
    saved = {"path": path, "save_every": batch_size, "accelerator": None}
    return sample_rows(items, engine, finish, seed=0, progress="responses", **saved)


def check(rows: Sequence[Row], responses: Sequence[Row]) -> Followed:
    """Which instructions the responses follow."""
    by_id = {row["row_id"]: row for row in rows}
    return {
        given["row_id"]: {
            "strict": follow(by_id[given["row_id"]], given["response_text"]),
            "loose": follow(by_id[given["row_id"]], given["response_text"], loose=True),
        }
        for given in responses
        if given["row_id"] in by_id
    }


def outcomes(followed: Followed, kind: str) -> dict[str, list[bool]]:
    """Of each counted prompt, and of each of the instructions, whether it is followed."""
    marks = [row[kind] for row in followed.values()]
    return {
        "prompts": [all(row) for row in marks if None not in row],
        # Instructions of one prompt are not independent, so that their intervals are a little too narrow.
        "instructions": [mark for row in marks for mark in row if mark is not None],
    }


def summarize(rows: Sequence[Row], followed: Followed) -> dict[str, dict[str, Any]]:
    """Strict and loose accuracy of prompts, of instructions, and of each type of instruction, with intervals."""
    names = [name for row in rows for name in row["instruction_id_list"]]
    results: dict[str, dict[str, Any]] = {}
    for kind in ("strict", "loose"):
        groups = outcomes(followed, kind)
        marks = [mark for row in rows for mark in followed[row["row_id"]][kind]]
        for wanted in sorted(set(names)):
            groups[wanted] = [m for name, m in zip(names, marks, strict=True) if name == wanted and m is not None]
        for name, own in groups.items():
            if own:
                results.setdefault(name, {"n": len(own)})[kind] = mean_with_interval(own)
    return results


def compare(before: Followed, after: Followed) -> dict[str, dict[str, Any]]:
    """The differences, after minus before, on the prompts that both answer."""
    shared = [key for key in after if key in before]
    results: dict[str, dict[str, Any]] = {}
    for kind in ("strict", "loose"):
        first, second = (outcomes({key: one[key] for key in shared}, kind) for one in (before, after))
        for name, own in second.items():
            gains = [float(a) - float(b) for a, b in zip(own, first[name], strict=True)]
            results.setdefault(name, {"n": len(gains)})[kind] = mean_with_interval(gains, gains=True)
    return results


def open_folder(folder: Path, settings: Mapping[str, Any], other: Path | None) -> None:
    """Keep the settings of a folder's responses, or check them, and check those of the run to compare with.

    Raises:
        ValueError: the folder holds another run, or the runs cannot be compared.
    """
    kept = folder / "settings.json"
    if kept.is_file() and read_json(kept) != settings:
        raise ValueError(f"{folder} holds responses of another model or length: give another --output_dir")
    if other:
        if not (other / "responses.jsonl").is_file():
            raise ValueError(f"{other} holds no responses.jsonl: --compare takes the --output_dir of an earlier call")
        limit = read_json(other / "settings.json")["max_new_tokens"]
        if limit != settings["max_new_tokens"]:
            raise ValueError(f"the responses of {other} have up to {limit} tokens: give --max_new_tokens {limit}")
    write_json(kept, settings)


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(prog="python -m benchmarks.ifeval", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--data", type=Path, default=DATA, help=f"the folder that holds {SOURCE}")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--compare", type=Path, metavar="OUT", help="the --output_dir of an earlier call")
    parser.add_argument("--limit", type=at_least_one, help="the number of prompts, from the first; all by default")
    parser.add_argument("--max_new_tokens", type=at_least_one, default=512, help="(default: %(default)s)")
    parser.add_argument("--batch_size", type=at_least_one, default=16, help="prompts at once (default: %(default)s)")
    with one_line_errors():
        run(parser.parse_args(argv))


def run(given: Any) -> None:
    """Sample, check and write the results.

    Raises:
        ValueError, OSError: an argument is wrong; nothing was sampled.
    """
    from trl_ext.models.loading import find_policy, model_sha256

    rows = read_prompts(given.data / SOURCE, given.limit)
    find_policy(given.model)
    # A model that is trained again into the same folder is another one.
    settings = {"model_sha256": model_sha256(given.model), "max_new_tokens": given.max_new_tokens}
    open_folder(given.output_dir, settings, given.compare)
    path = given.output_dir / "responses.jsonl"
    responses = respond(given.model, rows, path, given.max_new_tokens, given.batch_size)
    followed = check(rows, responses)
    results = {
        "model": given.model,
        **settings,
        "prompts": len(rows),
        "cut": sum(not row["finished"] for row in responses),
        "not_counted": sum(None in row["strict"] for row in followed.values()),
        "results": summarize(rows, followed),
    }
    if given.compare:
        earlier = [row for _, row in read_jsonl(given.compare / "responses.jsonl").rows]
        results["compared_with"] = str(given.compare)
        results["difference"] = compare(check(rows, earlier), followed)
    write_json(given.output_dir / "results.json", results)
    show(results)


def show(results: Row) -> None:
    """Print the tables."""
    for title, name in (("followed", "results"), (f"minus {results.get('compared_with')}", "difference")):
        if name in results:
            lines = [
                [key, own["n"], figure(own["strict"]), figure(own["loose"])] for key, own in results[name].items()
            ]
            print_table(f"{title} | n | strict | loose", lines)
            print()
    print(f"{results['cut']} of {results['prompts']} responses were cut at {results['max_new_tokens']} tokens")
    if results["not_counted"]:
        print(f"prompts with {LANGUAGE}, not counted without langdetect: {results['not_counted']}")


if __name__ == "__main__":
    main()
