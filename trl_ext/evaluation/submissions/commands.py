"""The flags, the judge and the printed results of the commands in `public_eval/`."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import CommandParser, at_least_one, format_table, print_json
from trl_ext.evaluation.judging.cost import estimate
from trl_ext.evaluation.judging.pairs import CallableJudge
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.submissions.assets import default_max_new_tokens, load_base, load_prompts, token_counter
from trl_ext.evaluation.submissions.candidates import both_systems, known_score_judge
from trl_ext.evaluation.submissions.rows import Response, read_responses, refuse_fatal
from trl_ext.evaluation.submissions.submission import REWARD_MODEL, submission_file
from trl_ext.names import check_choice, load_function, load_module

JUDGES = ("ground_truth", "openai", "reward_model")
CACHE = "judge_cache.sqlite"
DEFAULT = " (default: %(default)s)"


def make_parser(command: str, description: str) -> CommandParser:
    """A parser with the flag that all commands share."""
    parser = CommandParser(prog=f"python -m public_eval.{command}", description=description)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    return parser


def command(name: str) -> str:
    """How a user who started this command would start the named one."""
    return f"trl-ext {name}" if sys.argv[0].startswith("trl-ext ") else f"python -m public_eval.{name}"


def how_to_fill(folder: str | Path) -> str:
    """The commands that create the files of a submission."""
    policy, scores = (Path(folder) / submission_file(name) for name in ("METHOD", REWARD_MODEL))
    return (
        f"make a policy's file with `{command('generate')} --model RUN --out {policy}`, and the reward model's with "
        f"`{command('score')} --reward_model RUN --out {scores}`"
    )


def add_prompt_arguments(parser: argparse.ArgumentParser, *, base: bool = True) -> None:
    """Add flags for prompts, base responses and the token limit."""
    parser.add_argument("--prompts_jsonl", help="the course's prompts (default: the embedded ones)")
    if base:
        parser.add_argument("--base_jsonl", help="the base's responses to them (default: the embedded ones)")
    limit = "most tokens of a response (default: 256; 48 for the embedded prompts)"
    parser.add_argument("--max_new_tokens", type=at_least_one, help=limit)


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for what else a submission is checked against, both in packing and in grading."""
    parser.add_argument("--prefs_jsonl", help="the course's pairs (default: the embedded ones)")
    parser.add_argument(
        "--tokenizer",
        help="counts the responses' tokens (default: the embedded one's for the embedded prompts, else no check)",
    )


def data_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `PublicData.load` from the flags."""
    names = ("prompts_jsonl", "prefs_jsonl", "max_new_tokens")
    count_tokens = token_counter(options.tokenizer) if options.tokenizer else None
    return {name: getattr(options, name) for name in names} | {"count_tokens": count_tokens}


def add_judge_arguments(parser: argparse.ArgumentParser, *, rule: bool = True) -> None:
    """Add flags that select the judge and its settings."""
    group = parser.add_argument_group("judge")
    group.add_argument(
        "--judge",
        default="ground_truth",
        metavar="JUDGE",
        help="ground_truth, which knows the embedded task's scores; reward_model; openai, which is paid for; or your "
        "own f(prompt, response_a, response_b) as file.py:function" + DEFAULT,
    )
    group.add_argument("--model", help="of openai: a model's name; of reward_model: a folder or hub name")
    group.add_argument("--base_url", help="an OpenAI-compatible server of your own, such as vLLM's")
    group.add_argument("--api", choices=("responses", "chat"), default="responses", help="of that server" + DEFAULT)
    group.add_argument("--instructions", type=Path, help="a rubric in the place of the one that comes along")
    group.add_argument("--reasoning_effort", help="of openai: none, low, ... (default: the model's own)")
    group.add_argument(
        "--max_output_tokens",
        type=at_least_one,
        help="of openai: most tokens of an answer, reasoning included; a longer one gives no verdict (default: 2048)",
    )
    group.add_argument("--cache", default=CACHE, help="where verdicts that cost something are kept" + DEFAULT)
    group.add_argument("--max_concurrency", type=at_least_one, default=8, help="questions open at once" + DEFAULT)
    group.add_argument(
        "--max_error_fraction", type=float, default=0.1, help="share of rows that may stay unjudged" + DEFAULT
    )
    group.add_argument("--estimate", action="store_true", help="say what it would cost, and send nothing")
    for tokens in ("in", "out"):
        group.add_argument(
            f"--price_{tokens}", type=_dollars, help=f"of --estimate: dollars per million tokens of {tokens}put"
        )
    if rule:
        group.add_argument(
            "--rule",
            choices=("agreed", "half"),
            default="agreed",
            help="what counts first: rows on which both orders agree, or ties as half" + DEFAULT,
        )


def check_judge_arguments(options: argparse.Namespace) -> None:
    """Check everything that can be checked from the flags alone, before anything is loaded.

    Raises:
        ValueError: a flag is missing, or belongs to another judge.
        FileNotFoundError: a flag names a file or a model folder that does not exist.
    """
    if ":" not in options.judge:
        check_choice("judge", options.judge, JUDGES)
    needed = {"openai": "such as gpt-5.4", "reward_model": "the reward model's folder"}
    if options.judge in needed and not options.model:
        raise ValueError(f"--judge {options.judge} needs --model, {needed[options.judge]}")
    if options.judge not in needed and options.model:
        raise ValueError("--model is for --judge openai or reward_model: give one of them")
    names = ("base_url", "instructions", "reasoning_effort", "max_output_tokens", "price_in", "price_out")
    of_openai = {**dict.fromkeys(names), "api": "responses"}
    for name, default in of_openai.items():
        if options.judge != "openai" and getattr(options, name) != default:
            raise ValueError(f"--{name} is for --judge openai alone: give that, or leave it out")
    if options.judge == "reward_model":
        from trl_ext.models import resolve_model_path

        resolve_model_path(options.model)
    if options.instructions is not None and not options.instructions.is_file():
        raise FileNotFoundError(f"--instructions: no file {options.instructions}")
    has_key = os.environ.get("OPENAI_API_KEY", "").strip()
    needs_none = options.base_url or os.environ.get("OPENAI_BASE_URL") or options.estimate
    # If all verdicts are cached, there is nothing to ask; otherwise the judge itself raises an error.
    if options.judge == "openai" and not (has_key or needs_none or Path(options.cache).is_file()):
        raise ValueError("OPENAI_API_KEY is not set: export the key, or give the --base_url of your own server")


def make_judge(options: argparse.Namespace, prompts: list[dict[str, Any]]) -> Any:
    """The judge that the flags select, after `check_judge_arguments`.

    Raises:
        ValueError, FileNotFoundError: the judge does not know the prompts, or its function does not exist.
    """
    if options.judge == "openai":
        from trl_ext.evaluation.judging.openai_judge import OpenAIJudge
        from trl_ext.evaluation.judging.openai_model import MAX_OUTPUT_TOKENS

        return OpenAIJudge(
            options.model,
            base_url=options.base_url,
            api=options.api,
            instructions=options.instructions,
            reasoning_effort=options.reasoning_effort,
            max_output_tokens=options.max_output_tokens or MAX_OUTPUT_TOKENS,
        )
    if options.judge == "reward_model":
        from trl_ext.evaluation.judging.score_judges import RewardModelJudge

        return RewardModelJudge(options.model)
    if options.judge == "ground_truth":
        return known_score_judge(prompts)
    own = CallableJudge(load_function(options.judge, "judge"))
    if not hasattr(own, "identity"):
        # An edited file is asked again.
        source, _, name = options.judge.rpartition(":")
        content = Path(load_module(source).__file__).read_bytes()
        own.identity = {"kind": name, "sha256": hashlib.sha256(content).hexdigest()}
    return own


def judge_settings(options: argparse.Namespace, judge: Any) -> dict[str, Any]:
    """The judge's settings, recorded in the results: figures under different settings are not comparable."""
    settings = {"kind": options.judge, "model": options.model}
    if options.judge == "openai":
        settings["instructions"] = options.instructions and str(options.instructions)
        settings |= {name: getattr(judge, name) for name in ("reasoning_effort", "max_output_tokens")}
    return settings


def judging_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `judge_pairs` from the flags."""
    names = ("cache", "max_concurrency", "max_error_fraction")
    return {name: getattr(options, name) for name in names} | {"progress": "verdicts"}


def load_systems(
    options: argparse.Namespace, files: list[str]
) -> tuple[list[dict[str, Any]], list[Response], dict[str, list[Response]]]:
    """Prompts, the base's responses, and each file's responses by the file's stem.

    Raises:
        ValueError: rows cannot be judged, or two files have the same name.
        FileNotFoundError: a file does not exist.
    """
    names = [Path(file).stem for file in files]
    for file, name in zip(files, names, strict=True):
        if not Path(file).is_file():
            raise FileNotFoundError(f"no file {file}: make it with `{command('generate')} --model RUN --out {file}`")
        if names.count(name) > 1:
            raise ValueError(f"two files are called {name}: their names tell the candidates apart")
    prompts = load_prompts(options.prompts_jsonl)
    limit = options.max_new_tokens or default_max_new_tokens(options.prompts_jsonl)
    base = load_base(prompts, options.base_jsonl, max_new_tokens=limit)
    systems: dict[str, list[Response]] = {}
    for file in files:
        responses, problems = read_responses(file, prompts, max_new_tokens=limit)
        refuse_fatal(problems)
        systems[Path(file).stem] = responses
    return prompts, base, systems


def show_estimates(options: argparse.Namespace, judge: Any, prompts: list[dict[str, Any]], pairs: dict) -> None:
    """Print what `judge_responses` would cost for each named pair of systems."""
    given = {name: getattr(options, name) for name in ("cache", "price_in", "price_out")}
    estimates = {name: estimate(judge, prompts, **both_systems(*pair), **given) for name, pair in pairs.items()}
    columns = ("calls", "cached", "input_tokens", "output_tokens", "dollars")
    rows = {name: [getattr(one, column) for column in columns] for name, one in estimates.items()}
    total = [None if None in values else sum(values) for values in zip(*rows.values(), strict=True)]
    notes = list(dict.fromkeys(note for one in estimates.values() for note in one.notes))
    if options.json:
        listed = {name: one.to_dict() for name, one in estimates.items()}
        print_json({"estimates": listed, "total": dict(zip(columns, total, strict=True)), "notes": notes})
        return
    print(format_table(("", *columns), [(name, *values) for name, values in {**rows, "total": total}.items()]))
    print("\n".join([*notes, "nothing was sent"]))


def usage_line(usage: dict[str, Any], judge: str) -> str:
    """The usage of judging in one line; for a judge of this library that costs nothing, only what it decided."""
    if judge in ("ground_truth", "reward_model"):
        calls, errors = usage["calls"], usage["errors"]
        return f"{calls} verdicts (equal responses need none), {errors} errors; this judge costs nothing"
    return (
        f"{usage['calls']} calls, {usage['cached']} verdicts from the cache, {usage['errors']} errors, "
        f"{usage['input_tokens']} input and {usage['output_tokens']} output tokens"
    )


def interval_cell(interval: dict[str, Any] | None) -> str:
    """A rate with its interval and number of rows."""
    if interval is None or not interval["n"]:
        return "-"
    return f"{Estimate(interval['rate'], interval['low'], interval['high']):.3f}  n {interval['n']}"


def _dollars(text: str) -> float:
    """Type of a flag that takes a price."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value
