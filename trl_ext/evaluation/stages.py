"""Compares training stages, such as base, SFT and PPO, on the same prompts: reward, KL, length, samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import (
    CommandParser,
    at_least_one,
    format_table,
    one_line_errors,
    print_json,
)
from trl_ext.evaluation.statistics.intervals import Estimate, mean_interval
from trl_ext.evaluation.submissions.assets import MAX_PROMPT_TOKENS, default_max_new_tokens, load_prompts
from trl_ext.files import write_json, write_json_lines

DESCRIPTION = """\
The stages of a training, such as base, SFT and PPO, on the same prompts: mean and standard deviation of a reward
model's reward, approximate KL to one of them, and length; one response per prompt, sampled unless --temperature is 0.

cost    one generation per model and prompt, and one forward pass each under the model, the reference and the reward
        model. No network but for models on the hub. Two policies and the reward model are in memory at once.
writes  comparison.json and, for each model, samples_NAME.jsonl into --out.
"""
HEADER = ("model", "n", "reward  95% interval", "std", "KL to reference (nats per response)", "tokens", "std", "ended")


@dataclass(frozen=True)
class StageComparison:
    """The result of a comparison of stages.

    Attributes:
        rows: one JSON-ready row for each model: `name`, `model`, `n`; `reward` with `mean`, `std` (of the sample) and
            the mean's 95% interval `low`, `high`, or None; `kl`, as `approximate_kl` returns it, or None with the
            reason in `kl_note`; `tokens` with `mean` and `std`; and `finished`, the share of responses that were not
            truncated.
        samples: for each model, a row for each prompt: prompt, response, length and reward.
    """

    rows: list[dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]]


def compare_stages(
    models: Mapping[str, str | Path],
    *,
    reward_model: str | Path | None = None,
    reference: str | None = None,
    prompts_jsonl: str | Path | None = None,
    num_prompts: int | None = None,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    batch_size: int = 32,
    seed: int = 0,
    dtype: str = "auto",
    progress: bool = False,
) -> StageComparison:
    """Sample one response from each model to each prompt, and measure reward, KL from a reference, and length.

    Args:
        models: `toy`, a folder or a hub name, by stage.
        reward_model: scores the responses; None for no rewards.
        reference: the stage from which the KL is measured; None for the first.
        prompts_jsonl: prompts; None for the embedded ones.
        num_prompts: number of prompts to use, from the first; None for all.
        max_prompt_tokens: longer prompts lose their beginning.
        max_new_tokens: maximum length of a response; None for 256, or 48 for the embedded prompts.
        temperature: sampling temperature. The KL can be estimated only at 1, and is omitted otherwise.
        batch_size, seed, dtype: prompts per batch, seed of the sampling, and type of the policies' weights.
        progress: whether to show progress bars.

    Raises:
        FileNotFoundError: a model or the file of prompts does not exist.
        ValueError: the reference is not one of the models, or an argument is out of range.
    """
    from trl_ext.models import resolve_model_path
    from trl_ext.models.loading import find_policy, load_policy, require_on_hub

    reference = next(iter(models), None) if reference is None else reference
    if reference not in models:
        raise ValueError(f"the reference {reference!r} is none of the models: {', '.join(models)}")
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}; 0 is greedy decoding")
    # Check the names before importing or loading anything for them, which takes seconds.
    for source in models.values():
        find_policy(source, dtype=dtype)
    if reward_model is not None and not Path(path := resolve_model_path(str(reward_model))).is_dir():
        require_on_hub(path)
    limit = default_max_new_tokens(prompts_jsonl) if max_new_tokens is None else max_new_tokens
    prompts = load_prompts(prompts_jsonl)[:num_prompts]

    from trl_ext.processes import warn_once_per_run
    from trl_ext.rollouts import generate_responses
    from trl_ext.rollouts.generation import without_template

    scorer = None
    if reward_model is not None:
        from trl_ext.rewards import RewardModel

        scorer = RewardModel(reward_model, batch_size=batch_size)
    messages = [row["prompt"] for row in prompts]
    reference_model = load_policy(models[reference], dtype=dtype)
    rows, samples = [], {}
    for name, source in models.items():
        policy, tokenizer = reference_model if name == reference else load_policy(source, dtype=dtype)
        if line := without_template(tokenizer, messages):
            warn_once_per_run(f"{name}: {line}")
        generations = generate_responses(
            policy,
            tokenizer,
            messages,
            max_new_tokens=limit,
            max_prompt_tokens=max_prompt_tokens,
            temperature=temperature,
            batch_size=batch_size,
            seed=seed,
            progress=f"{name}: responses" if progress else None,
        )
        kl, note = None, None
        if name == reference:
            note = "the reference itself"
        elif temperature != 1.0:
            note = f"samples at temperature {temperature} give no estimate; sample at 1"
        elif tokenizer.get_vocab() != reference_model[1].get_vocab():
            note = "its tokenizer is not the reference's"
        else:
            kl = _divergence(policy, reference_model[0], generations, batch_size, tokenizer.pad_token_id or 0)
        rewards = [None] * len(generations)
        if scorer is not None:
            texts, finished = [one.text for one in generations], [one.finished for one in generations]
            bar = f"{name}: rewards" if progress else None
            rewards = scorer.score(messages, texts, finished=finished, progress=bar).tolist()
        rows.append(
            {
                "name": name,
                "model": str(source),
                "n": len(generations),
                "reward": None if scorer is None else mean_and_std(rewards),
                "kl": kl,
                "kl_note": note,
                "tokens": mean_and_std([len(generation.response_ids) for generation in generations]),
                "finished": sum(generation.finished for generation in generations) / len(generations),
            }
        )
        samples[name] = [
            {
                "row_id": row["row_id"],
                "prompt_text": row["prompt_text"],
                "response_text": generation.text,
                "generated_num_tokens": len(generation.response_ids),
                "finished": generation.finished,
                "reward": reward,
            }
            for row, generation, reward in zip(prompts, generations, rewards, strict=True)
        ]
    return StageComparison(rows, samples)


def mean_and_std(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation of the sample (0 for one value), and the mean's 95% interval."""
    low, high = mean_interval(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": deviation, "low": low, "high": high}


def _divergence(policy, reference, generations, batch_size: int, pad_token_id: int) -> dict[str, Any]:
    """The KL of a model from the reference on its own samples."""
    from trl_ext.evaluation.comparing.preferences import approximate_kl
    from trl_ext.models import score_responses
    from trl_ext.rollouts.generation import recorded_log_probs

    rows = [one.prompt_ids for one in generations], [one.response_ids for one in generations]
    score = partial(score_responses, batch_size=batch_size, pad_token_id=pad_token_id)
    own = recorded_log_probs(generations)
    return approximate_kl(score(policy, *rows) if own is None else own, score(reference, *rows))


# ---- The command ----


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, compare, write and print."""
    parser = CommandParser(prog="python -m trl_ext.evaluation.stages", description=DESCRIPTION)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL", help="toy, a folder, or a hub model, by stage")
    parser.add_argument("--reward_model", help="folder or hub name of a reward model; none: no rewards")
    parser.add_argument("--reference", help="the stage that KL is measured from (default: the first)")
    parser.add_argument("--out", default="stages", help="folder for the results (default: %(default)s)")
    parser.add_argument("--prompts_jsonl", help="prompts (default: the embedded ones)")
    parser.add_argument("--num_prompts", type=at_least_one, help="the first so many prompts (default: all)")
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
        models = _named(options["models"])
        settings = {name: value for name, value in options.items() if name not in ("models", "out", "json")}
        settings["reference"] = settings["reference"] or next(iter(models))
        settings["max_new_tokens"] = settings["max_new_tokens"] or default_max_new_tokens(settings["prompts_jsonl"])
        comparison = compare_stages(models, **settings, progress=True)
        found, out = {"models": comparison.rows, "settings": settings}, Path(options["out"])
        write_json(out / "comparison.json", found)
        for name, samples in comparison.samples.items():
            write_json_lines(out / f"samples_{name}.jsonl", samples)
    if options["json"]:
        print_json(found)
        return
    print(format_table(HEADER, [_table_row(row) for row in comparison.rows]))
    for row in comparison.rows:
        if row["kl_note"]:
            print(f"{row['name']}: no KL: {row['kl_note']}")
    names = ", ".join(["comparison.json", *(f"samples_{name}.jsonl" for name in comparison.samples)])
    print(f"in {out}: {names}")


def _named(models: list[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for model in models:
        name, equals, source = model.partition("=")
        if not equals or not name or not source:
            raise ValueError(f"{model!r}: give each model as name=folder, such as base=toy")
        if name in named:
            raise ValueError(f"{name!r} is given twice: name each stage differently")
        named[name] = source
    return named


def _table_row(row: dict) -> tuple:
    reward, kl, tokens = row["reward"] or {}, row["kl"] or {}, row["tokens"]
    return (
        row["name"],
        row["n"],
        f"{Estimate(reward.get('mean'), reward.get('low'), reward.get('high')):.3f}",
        reward.get("std"),
        f"{Estimate(kl.get('mean'), kl.get('low'), kl.get('high')):.2f}",
        tokens["mean"],
        tokens["std"],
        row["finished"],
    )


if __name__ == "__main__":
    main()
