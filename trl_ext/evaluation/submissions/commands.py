"""The flags, the judge and the printed results of the commands in `public_eval/`."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import CommandParser, at_least_one
from trl_ext.evaluation.judging.openai_judge import MAX_OUTPUT_TOKENS, OpenAIJudge
from trl_ext.evaluation.judging.pairs import CallableJudge
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.submissions.assets import (
    Response,
    default_max_new_tokens,
    load_base,
    load_prompts,
    read_responses,
)
from trl_ext.evaluation.submissions.candidates import known_score_judge
from trl_ext.names import check_choice, load_function, load_module

JUDGES = ("ground_truth", "openai", "reward_model")
WITH_MODEL = ("openai", "reward_model")
# The settings of an `OpenAIJudge` that have a flag.
OF_OPENAI = ("base_url", "instructions", "reasoning_effort", "max_output_tokens")
CACHE = "judge_cache.sqlite"
DEFAULT = " (default: %(default)s)"


def make_parser(command: str, description: str) -> CommandParser:
    """A parser with the flag that all commands share."""
    parser = CommandParser(prog=f"python -m public_eval.{command}", description=description)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    return parser


def add_data_arguments(parser: argparse.ArgumentParser, *, base: bool = True, prefs: bool = True) -> None:
    """Add flags for the prompts and the token limit, and perhaps for the base responses and the pairs."""
    parser.add_argument("--prompts_jsonl", help="the course's prompts (default: the embedded ones)")
    if base:
        parser.add_argument("--base_jsonl", help="the base's responses to them (default: the embedded ones)")
    if prefs:
        parser.add_argument("--prefs_jsonl", help="the course's pairs (default: the embedded ones)")
    limit = "most tokens of a response (default: 256; 48 for the embedded prompts)"
    parser.add_argument("--max_new_tokens", type=at_least_one, help=limit)


def data_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `read_submission` from the flags."""
    return {name: getattr(options, name) for name in ("prompts_jsonl", "prefs_jsonl", "max_new_tokens")}


def add_judge_arguments(parser: argparse.ArgumentParser) -> None:
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
    group.add_argument("--base_url", help="of openai: a compatible server of your own, such as vLLM's")
    group.add_argument("--instructions", type=Path, help="of openai: a rubric instead of the default one")
    group.add_argument("--reasoning_effort", help="of openai: none, low, ... (default: the model's own)")
    longest = "of openai: most tokens of an answer, reasoning included; a longer one gives no verdict" + DEFAULT
    group.add_argument("--max_output_tokens", type=at_least_one, default=MAX_OUTPUT_TOKENS, help=longest)
    group.add_argument("--cache", default=CACHE, help="where verdicts that cost something are kept" + DEFAULT)
    group.add_argument("--max_concurrency", type=at_least_one, default=8, help="questions open at once" + DEFAULT)
    unjudged = "share of rows that may stay unjudged" + DEFAULT
    group.add_argument("--max_error_fraction", type=float, default=0.1, help=unjudged)


def make_judge(options: argparse.Namespace, prompts: list[dict[str, Any]]) -> Any:
    """The judge that the flags select; ValueError or FileNotFoundError if they select none for these prompts."""
    if bool(options.model) != (options.judge in WITH_MODEL):
        raise ValueError(f"--judge {options.judge}: --model is for {' and '.join(WITH_MODEL)}, which need it")
    if options.judge == "openai":
        return OpenAIJudge(options.model, **{name: getattr(options, name) for name in OF_OPENAI})
    if options.judge == "reward_model":
        from trl_ext.evaluation.judging.score_judges import RewardModelJudge

        return RewardModelJudge(options.model)
    if ":" not in options.judge:
        check_choice("judge", options.judge, JUDGES)
        return known_score_judge(prompts)
    own = CallableJudge(load_function(options.judge, "judge"))
    if not hasattr(own, "identity"):
        # An edited file is asked again.
        source, _, name = options.judge.rpartition(":")
        content = Path(load_module(source).__file__).read_bytes()
        own.identity = {"kind": name, "sha256": hashlib.sha256(content).hexdigest()}
    return own


def judge_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The judge's settings, recorded in the results: figures under different settings are not comparable."""
    settings = {"kind": options.judge, "model": options.model}
    if options.judge == "openai":
        settings["instructions"] = options.instructions and str(options.instructions)
        settings |= {name: getattr(options, name) for name in ("reasoning_effort", "max_output_tokens")}
    return settings


def judging_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `judge_pairs` from the flags."""
    names = ("cache", "max_concurrency", "max_error_fraction")
    return {name: getattr(options, name) for name in names} | {"progress": "verdicts"}


def load_systems(
    options: argparse.Namespace, files: Sequence[str | Path]
) -> tuple[list[dict[str, Any]], list[Response], dict[str, list[Response]]]:
    """Prompts, the base's responses, and each file's responses by the file's stem, which must differ."""
    prompts = load_prompts(options.prompts_jsonl)
    limit = options.max_new_tokens or default_max_new_tokens(options.prompts_jsonl)
    base = load_base(prompts, options.base_jsonl, max_new_tokens=limit)
    systems: dict[str, list[Response]] = {}
    for file in files:
        responses = read_responses(file, prompts, max_new_tokens=limit).of(file)
        if Path(file).stem in systems:
            raise ValueError(f"two files are called {Path(file).stem}: their names tell the candidates apart")
        systems[Path(file).stem] = responses
    return prompts, base, systems


def usage_line(usage: Mapping[str, Any]) -> str:
    """The usage of judging in one line."""
    return (
        f"{usage['calls']} calls, {usage['cached']} verdicts from the cache, "
        f"{usage['errors']} errors, {usage['input_tokens']} input and {usage['output_tokens']} output tokens"
    )


def interval_cell(interval: Mapping[str, Any] | None) -> str:
    """A rate with its interval and number of rows."""
    if interval is None or not interval["n"]:
        return "-"
    return f"{Estimate(interval['rate'], interval['low'], interval['high']):.3f}  n {interval['n']}"
