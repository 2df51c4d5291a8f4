"""Compares training stages, such as base, SFT and PPO, on the same prompts: reward, KL, length, samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from trl_ext.evaluation.command_line import CommandParser, at_least_one, format_table, one_line_errors, print_json
from trl_ext.evaluation.statistics.intervals import Estimate, mean_interval
from trl_ext.evaluation.submissions.assets import MAX_PROMPT_TOKENS, default_max_new_tokens, load_prompts
from trl_ext.files import write_json

DESCRIPTION = """\
The stages of a training, such as base, SFT and PPO, on the same prompts: mean and standard deviation of a reward
model's reward, approximate KL to one of them, and length; one response per prompt, sampled unless --temperature is 0.

cost    one generation per model and prompt, and one forward pass each under the model, the reference and the reward
        model. No network but for models on the hub. Two policies and the reward model are in memory at once.
writes  comparison.json and, for each model, responses_NAME.jsonl into --out, from which the same command resumes.
"""
HEADER = ("model", "n", "reward  95% interval", "std", "KL to reference (nats per response)", "tokens", "std", "ended")


class StageComparison(NamedTuple):
    """The result of a comparison of stages.

    Attributes:
        rows: one JSON-ready row for each model: `name`, `model`, `n`; `reward` and `tokens` as from `mean_and_std`;
            `kl` as from `approximate_kl`; and `finished`, the share of responses that were not truncated. `kl` is None
            for the reference, at a temperature other than 1, and for a model with another tokenizer.
        samples: for each model, the rows of `sample_responses` with `reward`.
    """

    rows: list[dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]]


def compare_stages(
    models: Mapping[str, str | Path],
    *,
    out: str | Path | None = None,
    reward_model: str | Path | None = None,
    reference: str | None = None,
    prompts_jsonl: str | Path | None = None,
    num_prompts: int | None = None,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = False,
) -> StageComparison:
    """Sample one response from each model to each prompt, and measure reward, KL from a reference, and length.

    Args:
        models: `toy`, a folder or a hub name, by stage.
        out: folder in which the responses are saved and a call resumes; None for none.
        reward_model: scores the responses; None for no rewards.
        reference: the stage from which the KL is measured; None for the first.
        prompts_jsonl, num_prompts: prompts, None for the embedded ones; and how many, None for all.
        max_prompt_tokens: longer prompts lose their beginning.
        max_new_tokens: maximum length of a response; None for 256, or 48 for the embedded prompts.
        temperature: sampling temperature. The KL can be estimated only at 1, and is omitted otherwise.
        batch_size, seed: prompts per batch, and sampling seed.
        progress: whether to show progress bars.

    Raises:
        FileNotFoundError: a model or the file of prompts does not exist.
        ValueError: the reference is not one of the models, or an argument is out of range.
    """
    from trl_ext.models.loading import find_policy, load_policy, model_sha256
    from trl_ext.rewards import RewardModel
    from trl_ext.rollouts import SamplingSettings, TransformersEngine, sample_responses

    reference = reference or next(iter(models))
    if reference not in models:
        raise ValueError(f"the reference {reference!r} is none of the models: {', '.join(models)}")
    limit = max_new_tokens or default_max_new_tokens(prompts_jsonl)
    limits = {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": limit, "batch_size": batch_size}
    sampling = SamplingSettings(temperature=temperature, stop=(), **limits)
    # Find errors here, before the first model samples.
    for source in models.values():
        find_policy(source)
    prompts = load_prompts(prompts_jsonl)[:num_prompts]
    settings = {
        "seed": seed,
        "reference_sha256": model_sha256(models[reference]),
        "reward_model": str(reward_model),
        "prompts": str(prompts_jsonl),
        **asdict(sampling),
    }
    scorer = None if reward_model is None else RewardModel(reward_model, batch_size=batch_size)
    # The reference and the model that is compared with it.
    load = lru_cache(maxsize=2)(load_policy)
    rows, samples = [], {}
    for name, source in models.items():

        def engine(messages: list, source=source, **options: Any) -> list:
            return TransformersEngine(*load(source), sampling)(messages, **options)

        def score(part: list, generations: list, name=name, source=source) -> list[dict[str, Any]]:
            rewards, ratios = [None] * len(part), [None] * len(part)
            if scorer is not None:
                texts, finished = [one.text for one in generations], [one.finished for one in generations]
                rewards = scorer.score([row["prompt"] for row in part], texts, finished=finished).tolist()
            if name != reference and temperature == 1:
                ratios = _log_ratios(load(source), load(models[reference]), generations, batch_size)
            return [{"reward": reward, "log_ratios": own} for reward, own in zip(rewards, ratios, strict=True)]

        found = samples[name] = sample_responses(
            prompts,
            [row["prompt"] for row in prompts],
            engine,
            score,
            path=None if out is None else Path(out) / f"responses_{name}.jsonl",
            settings={"model": str(source), "model_sha256": model_sha256(source), **settings},
            seed=seed,
            progress=f"{name}: responses" if progress else None,
        )
        ratios = [row.pop("log_ratios") for row in found]
        rows.append(
            {
                "name": name,
                "model": str(source),
                "n": len(found),
                "reward": None if scorer is None else mean_and_std([row["reward"] for row in found]),
                "kl": None if None in ratios else _divergence(ratios),
                "tokens": mean_and_std([row["generated_num_tokens"] for row in found]),
                "finished": statistics.fmean(row["finished"] for row in found),
            }
        )
    return StageComparison(rows, samples)


def _divergence(log_ratios: Sequence[list[float]]) -> dict[str, Any]:
    """The divergence as `approximate_kl` returns it, from each response's token log-ratios."""
    import torch

    from trl_ext.evaluation.comparing.preferences import approximate_kl

    own = [torch.tensor(ratio, dtype=torch.float64) for ratio in log_ratios]
    return approximate_kl(own, [torch.zeros_like(ratio) for ratio in own])


def _log_ratios(policy: tuple, reference: tuple, generations: list, batch_size: int) -> Sequence[list[float] | None]:
    """Each response's token log-ratios to the reference; None if the two have different tokenizers."""
    from trl_ext.models import score_responses
    from trl_ext.rollouts.generation import recorded_log_probs

    (model, tokenizer), (base, base_tokenizer) = policy, reference
    if tokenizer.get_vocab() != base_tokenizer.get_vocab():
        return [None] * len(generations)
    ids = [one.prompt_ids for one in generations], [one.response_ids for one in generations]
    options = {"batch_size": batch_size, "pad_token_id": tokenizer.pad_token_id or 0}
    own = recorded_log_probs(generations) or score_responses(model, *ids, **options)
    pairs = zip(own, score_responses(base, *ids, **options), strict=True)
    return [(mine.double() - other.double()).tolist() for mine, other in pairs]


def mean_and_std(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation of the sample (0 for one value), and the mean's 95% interval."""
    low, high = mean_interval(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": deviation, "low": low, "high": high}


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, compare, write and print."""
    parser = CommandParser(prog="python -m trl_ext.evaluation.stages", description=DESCRIPTION)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL", help="toy, a folder, or a hub model, by stage")
    parser.add_argument("--reward_model", help="folder or hub name of a reward model; none: no rewards")
    parser.add_argument("--reference", help="the stage that KL is measured from (default: the first)")
    parser.add_argument("--out", default="stages", help="folder for the results (default: %(default)s)")
    parser.add_argument("--prompts_jsonl", help="prompts (default: the embedded ones)")
    parser.add_argument("--num_prompts", type=at_least_one, help="use only the first N prompts (default: all)")
    parser.add_argument("--max_new_tokens", type=at_least_one, help="(default: 256; 48 for the embedded prompts)")
    parser.add_argument("--temperature", type=float, default=1.0, help="KL needs 1 (default: %(default)s)")
    parser.add_argument("--batch_size", type=at_least_one, default=32, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    with one_line_errors():
        options = vars(parser.parse_args(arguments))
        as_json, models = options.pop("json"), {}
        for given in options.pop("models"):
            name, equals, source = given.partition("=")
            if not equals or name in models:
                raise ValueError(f"{given!r}: give each model once as name=folder, such as base=toy")
            models[name] = source
        comparison = compare_stages(models, **options, progress=True)
        found = {"models": comparison.rows, "settings": options}
        write_json(Path(options["out"]) / "comparison.json", found)
    if as_json:
        print_json(found)
        return
    table = []
    for row in comparison.rows:
        reward, kl, tokens = row["reward"] or {}, row["kl"] or {}, row["tokens"]
        shown, divergence = (Estimate(*(one.get(key) for key in ("mean", "low", "high"))) for one in (reward, kl))
        own = row["name"], row["n"], f"{shown:.3f}", reward.get("std"), f"{divergence:.2f}"
        table.append((*own, tokens["mean"], tokens["std"], row["finished"]))
    print(format_table(HEADER, table))


if __name__ == "__main__":
    main()
