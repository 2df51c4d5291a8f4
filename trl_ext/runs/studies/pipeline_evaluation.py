"""The pipeline's evaluation: base, SFT and every policy on held-out and adversarial prompts, by both reward models."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data import load_benchmark
from trl_ext.data.benchmark import known_score
from trl_ext.evaluation.judging.protocol import last_user_text
from trl_ext.evaluation.methods.reward_models import reward_mistakes
from trl_ext.evaluation.stages import compare_stages, mean_and_std
from trl_ext.evaluation.submissions.assets import load_prompts
from trl_ext.files import write_json, write_json_lines
from trl_ext.rewards import RewardModel
from trl_ext.runs.loading import optional_split
from trl_ext.runs.studies.compare_plan import find_shipped
from trl_ext.runs.studies.pipeline import REWARD_MODEL, SFT, Pipeline, RLHFArguments

FOLDER = "evaluation"
HELD_OUT, ADVERSARIAL = "held_out", "adversarial"
# Statistic -> its description in the report.
PATTERNS = {
    "length": "words of the response that the model prefers minus those of the other, mean",
    "longer": "share of the pairs of unequal length in which it prefers the longer",
    "overlap": "words in both responses / words in either (Jaccard), mean",
    "position": "words before the two part / words of the shorter, mean; 1 where one begins with the other",
    "label_wrong": "share of the pairs whose label contradicts the true order; ties of it left out",
}


def evaluate_pipeline(given: RLHFArguments, pipeline: Pipeline) -> dict[str, Any]:
    """Sample, score and measure; write the samples and evaluation.json.

    Returns:
        `prompts`: for each set of prompts, its `models` and, for the adversarial set, its `families`; and `mistakes`
        by reward model.

    Raises:
        FileNotFoundError: prompts or pairs do not exist.
        ValueError: prompts are malformed or have no family.
    """
    folder = Path(given.output_dir) / FOLDER
    benchmark = load_benchmark(given.dataset_name)
    # Some datasets have no file of prompts.
    prompts = list(load_benchmark(given.dataset_name, splits=given.prompt_split)[given.prompt_split])
    rows = [{"row_id": row["row_id"], "prompt": row["prompt"]} for row in prompts[: given.num_eval_prompts]]
    files = {HELD_OUT: folder / "prompts.jsonl"}
    write_json_lines(files[HELD_OUT], rows)
    if given.adversarial_prompts:
        files[ADVERSARIAL] = find_adversarial(given.adversarial_prompts)
    found = {name: _evaluate_prompts(given, pipeline, name, path, folder) for name, path in files.items()}
    summary: dict[str, Any] = {"prompts": found}
    if given.eval_split in benchmark:
        pairs, known = list(benchmark[given.eval_split]), known_score(given.dataset_name)
        summary["mistakes"] = {
            name: mistakes_of(pairs, Path(path) / "scores.jsonl", count=given.num_mistakes, true_score=known)
            for name, path in pipeline.reward_models.items()
        }
    write_json(folder / "evaluation.json", summary)
    return summary


def check_evaluation(given: RLHFArguments) -> None:
    """Check, before anything is trained, that the evaluation's data exists; nothing is sampled.

    Raises:
        FileNotFoundError: data or prompts do not exist.
        ValueError: the split does not exist, or prompts are malformed or have no family.
    """
    load_benchmark(given.dataset_name, splits=given.prompt_split)
    optional_split(load_benchmark(given.dataset_name), "eval_split", given, "no held-out pairs")
    if given.adversarial_prompts:
        find_adversarial(given.adversarial_prompts)


def find_adversarial(path: str) -> Path:
    """The file of adversarial prompts, relative to the working directory or to the repository.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a prompt is malformed or has no family.
    """
    found = find_shipped(path, f"no file --adversarial_prompts {path}")
    for row in load_prompts(found):
        if not isinstance(row.get("family"), str):
            raise ValueError(f"{found}, row_id {row['row_id']}: every adversarial prompt must say its family")
    return found


def _evaluate_prompts(given: RLHFArguments, pipeline: Pipeline, name: str, path: Path, folder: Path) -> dict[str, Any]:
    prompts = load_prompts(path)
    comparison = compare_stages(
        pipeline.policies,
        reward_model=pipeline.reward_models[REWARD_MODEL],
        reference=SFT,
        prompts_jsonl=path,
        max_prompt_tokens=given.max_prompt_tokens,
        max_new_tokens=given.max_new_tokens,
        batch_size=given.eval_batch_size,
        seed=given.seed,
        progress=True,
    )
    _score_samples(pipeline, prompts, comparison.samples, given.eval_batch_size, known_score(given.dataset_name))
    for model, samples in comparison.samples.items():
        write_json_lines(folder / f"samples_{name}_{model}.jsonl", samples)
    models = [
        {**{key: row[key] for key in ("name", "model", "n", "kl", "kl_note", "tokens", "finished")}, **_means(samples)}
        for row, samples in zip(comparison.rows, comparison.samples.values(), strict=True)
    ]
    families = {}
    for family in dict.fromkeys(row["family"] for row in prompts) if name == ADVERSARIAL else ():
        families[family] = [
            {"name": model, **_means([sample for sample in samples if sample["family"] == family])}
            for model, samples in comparison.samples.items()
        ]
    first = _one_of_each_family(prompts)[: given.num_samples]
    shown = {model: [samples[index] for index in first] for model, samples in comparison.samples.items()}
    return {"models": models, "families": families, "samples": shown}


def _one_of_each_family(prompts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the prompts: the first of every family, then the second of every family, and so on."""
    seen: Counter = Counter()
    ranks = []
    for index, row in enumerate(prompts):
        ranks.append((seen[row.get("family")], index))
        seen[row.get("family")] += 1
    return [index for _, index in sorted(ranks)]


def _score_samples(pipeline, prompts, samples: Mapping[str, list], batch_size: int, known: Callable | None) -> None:
    """Add to each sample its `rewards` by reward model, its `true_score` (None if unknown) and its `family`."""
    others = {
        name: RewardModel(path, batch_size=batch_size)
        for name, path in pipeline.reward_models.items()
        if name != REWARD_MODEL
    }
    messages = [row["prompt"] for row in prompts]
    for rows in samples.values():
        texts, finished = [row["response_text"] for row in rows], [row["finished"] for row in rows]
        scored = {name: model.score(messages, texts, finished=finished).tolist() for name, model in others.items()}
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            row["rewards"] = {
                REWARD_MODEL: row.pop("reward"),
                **{name: values[index] for name, values in scored.items()},
            }
            # The request inside an adversarial prompt, if it is a prompt of the benchmark.
            graded_as = prompt.get("graded_as", prompt["prompt_text"])
            right = known is not None and bool(graded_as)
            row["true_score"] = known(graded_as, row["response_text"], finished=row["finished"]) if right else None
            row["family"] = prompt.get("family")


def _means(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean, standard deviation and interval of the rewards by model and of the known true scores."""
    scores = [sample["true_score"] for sample in samples if sample["true_score"] is not None]
    lengths = [sample["generated_num_tokens"] for sample in samples]
    return {
        "n": len(samples),
        "rewards": {
            name: mean_and_std([sample["rewards"][name] for sample in samples]) for name in samples[0]["rewards"]
        },
        "true_score": {**mean_and_std(scores), "n": len(scores)} if scores else None,
        "tokens": mean_and_std(lengths),
    }


# ---- Mistakes of the reward models ----


def mistakes_of(
    pairs: Sequence[Mapping[str, Any]],
    scores: str | Path,
    *,
    count: int,
    true_score: Callable[[str, str], float] | None = None,
) -> dict[str, Any]:
    """The worst mistakes of a reward model on held-out pairs, and how they differ from the other pairs.

    Args:
        pairs: rows with `row_id`, `prompt`, `chosen` and `rejected`.
        scores: scores.jsonl of the reward model's run, for these pairs.
        count: maximum number of mistakes to return.
        true_score: `f(prompt_text, response)`, a known quality; None for none.

    Returns:
        `n`, the number of pairs; `patterns`, statistics of the `wrong` and the `right` pairs from
        `pattern_statistics`; and `worst`, the worst mistakes from `reward_mistakes`, each with its own statistics.

    Raises:
        FileNotFoundError: the score file does not exist.
        ValueError: the scores belong to other pairs.
    """
    path = Path(scores)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: the reward model was not evaluated on held-out pairs")
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    found = {row["row_id"]: (row["chosen_score"], row["rejected_score"]) for row in rows}
    missing = next((row["row_id"] for row in pairs if row["row_id"] not in found), None)
    if missing is not None:
        raise ValueError(f"{scores}: no score of row_id {missing}: the reward model was evaluated on other pairs")
    chosen, rejected = zip(*(found[row["row_id"]] for row in pairs), strict=True)
    every = reward_mistakes(pairs, chosen, rejected)
    wrong_ids = {row["row_id"] for row in every}
    described = {
        row["row_id"]: describe_pair(
            last_user_text(row["prompt"]), _text(row["chosen"]), _text(row["rejected"]), c - r, true_score
        )
        for row, c, r in zip(pairs, chosen, rejected, strict=True)
    }
    groups: dict[str, list[dict[str, Any]]] = {"wrong": [], "right": []}
    for row_id, one in described.items():
        groups["wrong" if row_id in wrong_ids else "right"].append(one)
    return {
        "n": len(pairs),
        "patterns": {name: pattern_statistics(group) for name, group in groups.items()},
        "worst": [{**row, **described[row["row_id"]]} for row in every[:count]],
    }


def describe_pair(
    prompt: str, chosen: str, rejected: str, margin: float, true_score: Callable[[str, str], float] | None = None
) -> dict[str, Any]:
    """Properties of a pair: `length`, `overlap` and `position` as defined in `PATTERNS`, and `label_wrong`.

    At a `margin` (chosen score minus rejected score) of 0 the model prefers neither, and `length` is 0. Without a
    `true_score`, or if both responses are equally good, `label_wrong` is None.
    """
    one, other = (re.findall(r"\w+", text.lower()) for text in (chosen, rejected))
    sign = (margin > 0) - (margin < 0)
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    either = set(one) | set(other)
    truth = 0.0 if true_score is None else true_score(prompt, chosen) - true_score(prompt, rejected)
    return {
        "length": sign * (len(one) - len(other)),
        "overlap": len(set(one) & set(other)) / len(either) if either else 1.0,
        "position": shared / min(len(one), len(other)) if one and other else 0.0,
        "label_wrong": None if truth == 0 else truth < 0,
    }


def pattern_statistics(described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`n`, the number of pairs, and the statistics of `PATTERNS`; None for one that no pair has."""
    values = {name: [one[name] for one in described] for name in ("length", "overlap", "position", "label_wrong")}
    values["longer"] = [length > 0 for length in values["length"] if length]
    known = {name: [value for value in values[name] if value is not None] for name in PATTERNS}
    means = {name: math.fsum(own) / len(own) if own else None for name, own in known.items()}
    return {"n": len(described), **means}


def _text(response: Sequence[Mapping[str, Any]] | str) -> str:
    return response if isinstance(response, str) else response[-1]["content"]
