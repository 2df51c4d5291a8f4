"""The pipeline's evaluation: base, SFT and every policy on held-out and adversarial prompts, by both reward models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data import load_benchmark
from trl_ext.data.benchmark import known_score
from trl_ext.evaluation.stages import compare_stages, mean_and_std
from trl_ext.evaluation.submissions.assets import load_prompts
from trl_ext.files import write_json, write_json_lines
from trl_ext.rewards import RewardModel
from trl_ext.runs.loading import optional_split
from trl_ext.runs.studies.pipeline import REWARD_MODEL, SFT, Pipeline, RLHFArguments
from trl_ext.studies.study import find_shipped

FOLDER = "evaluation"
HELD_OUT, ADVERSARIAL = "held_out", "adversarial"


def evaluate_pipeline(given: RLHFArguments, pipeline: Pipeline) -> dict[str, Any]:
    """Sample, score and measure; write the samples and evaluation.json.

    Returns:
        `prompts`: for each set of prompts, its `models` and, for the adversarial set, its `families`; and `mistakes`,
        the worst of each reward model on held-out pairs.

    Raises:
        FileNotFoundError: prompts do not exist.
        ValueError: prompts are malformed or have no family.
    """
    folder = Path(given.output_dir) / FOLDER
    # Some datasets have no file of prompts.
    prompts = list(load_benchmark(given.dataset_name, splits=given.prompt_split)[given.prompt_split])
    rows = [{"row_id": row["row_id"], "prompt": row["prompt"]} for row in prompts[: given.num_eval_prompts]]
    files = {HELD_OUT: folder / "prompts.jsonl"}
    write_json_lines(files[HELD_OUT], rows)
    if given.adversarial_prompts:
        files[ADVERSARIAL] = find_adversarial(given.adversarial_prompts)
    found = {name: _evaluate_prompts(given, pipeline, name, path, folder) for name, path in files.items()}
    mistakes = {name: _mistakes(Path(path), given.num_mistakes) for name, path in pipeline.reward_models.items()}
    summary = {"prompts": found, "mistakes": mistakes}
    write_json(folder / "evaluation.json", summary)
    return summary


def _mistakes(folder: Path, count: int) -> list[dict[str, Any]]:
    """The first rows of a reward model's reward_mistakes.jsonl, which it writes if there are held-out pairs."""
    path = folder / "reward_mistakes.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines[:count]]


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
