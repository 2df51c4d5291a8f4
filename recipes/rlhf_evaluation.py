"""The pipeline's evaluation: base, SFT and every policy on held-out and adversarial prompts, by both reward models."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_mistakes import mistakes_of
from rlhf_plan import REPOSITORY, REWARD_MODEL, SFT, Pipeline, RLHFArguments

from trl_ext.data import load_benchmark
from trl_ext.evaluation.stages import compare_stages, mean_and_std
from trl_ext.evaluation.submissions.assets import load_prompts
from trl_ext.files import read_json, write_json, write_json_lines

FOLDER, SUMMARY_NAME = "evaluation", "evaluation.json"
HELD_OUT, ADVERSARIAL = "held_out", "adversarial"


def evaluate_pipeline(given: RLHFArguments, pipeline: Pipeline) -> dict[str, Any]:
    """Sample, score and measure; write the samples and evaluation.json. One that is done of the same is read instead.

    Returns:
        `prompts`, by set of prompts its `models` and, of the adversarial ones, its `families`; `mistakes` by reward
        model; and `settings`, what the evaluation was made with and digests of what it was made of.

    Raises:
        FileNotFoundError: no such prompts or pairs.
        ValueError: bad prompts, or prompts without a family.
    """
    folder = Path(given.output_dir) / FOLDER
    files, benchmark = _prompt_files(given, folder), load_benchmark(given.dataset_name)
    pairs = list(benchmark[given.eval_split]) if given.eval_split in benchmark else []
    settings = _settings(given, pipeline) | {"digests": _digests(pipeline, files, pairs)}
    if (folder / SUMMARY_NAME).is_file():
        done = read_json(folder / SUMMARY_NAME)
        if isinstance(done, dict) and done.get("settings") == settings:
            return done
    summary: dict[str, Any] = {"prompts": {}, "settings": settings}
    for name, path in files.items():
        summary["prompts"][name] = _evaluate_prompts(given, pipeline, name, path, folder)
    if pairs:
        known = _known_score(given)
        summary["mistakes"] = {
            name: mistakes_of(pairs, Path(path) / "scores.jsonl", count=given.num_mistakes, true_score=known)
            for name, path in pipeline.reward_models.items()
        }
    write_json(folder / SUMMARY_NAME, summary)
    return summary


def check_evaluation(given: RLHFArguments) -> None:
    """Refuse, before anything is trained, what the evaluation could not be made of; nothing is sampled.

    Raises:
        FileNotFoundError: no such data or prompts.
        ValueError: no such split, bad prompts, or prompts without a family.
    """
    benchmark = load_benchmark(given.dataset_name)
    if given.prompt_split not in benchmark:
        raise ValueError(
            f"{given.dataset_name} has no split {given.prompt_split!r}: it has {', '.join(benchmark)}; name one with "
            "--prompt_split"
        )
    if given.adversarial_prompts:
        find_adversarial(given.adversarial_prompts)


def _settings(given: RLHFArguments, pipeline: Pipeline) -> dict[str, Any]:
    """What the figures depend on, as JSON gives it back."""
    names = ("dataset_name", "prompt_split", "eval_split", "adversarial_prompts", "num_eval_prompts", "num_mistakes")
    names += ("max_prompt_tokens", "max_new_tokens", "eval_batch_size", "seed", "num_samples")
    stages = {stage.name: stage.record() for stage in pipeline.stages}
    return json.loads(json.dumps({**{name: getattr(given, name) for name in names}, "stages": stages}))


def _digests(pipeline: Pipeline, files: Mapping[str, Path], pairs: list[dict[str, Any]]) -> dict[str, str]:
    """SHA-256 of each set of prompts, of the pairs, and of what each stage came to, which another training changes."""
    contents = {name: path.read_bytes() for name, path in files.items()}
    contents |= {stage.name: (stage.folder / "results.json").read_bytes() for stage in pipeline.stages}
    contents["pairs"] = json.dumps(pairs, sort_keys=True, default=str).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _prompt_files(given: RLHFArguments, folder: Path) -> dict[str, Path]:
    """Files of prompts by set; the held-out ones are written out, as some data sets have no file."""
    rows = list(load_benchmark(given.dataset_name)[given.prompt_split])[: given.num_eval_prompts]
    path = folder / "prompts.jsonl"
    write_json_lines(path, ({"row_id": row["row_id"], "prompt": row["prompt"]} for row in rows))
    files = {HELD_OUT: path}
    if given.adversarial_prompts:
        files[ADVERSARIAL] = find_adversarial(given.adversarial_prompts)
    return files


def find_adversarial(path: str) -> Path:
    """The file of adversarial prompts, from here or from the repository's folder.

    Raises:
        FileNotFoundError: no such file.
        ValueError: bad prompts, or one without a family.
    """
    found = next((place for place in (Path(path), REPOSITORY / path) if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no file --adversarial_prompts {path}")
    for row in load_prompts(found):
        if not isinstance(row.get("family"), str):
            raise ValueError(f"{found}, row_id {row['row_id']}: every adversarial prompt must say its family")
    return found


def _known_score(given: RLHFArguments) -> Callable[..., float] | None:
    """The score that only the embedded benchmark has."""
    if given.dataset_name != "toy":
        return None
    from trl_ext.toy import score

    return score


def _evaluate_prompts(given: RLHFArguments, pipeline: Pipeline, name: str, path: Path, folder: Path) -> dict[str, Any]:
    prompts = load_prompts(path)
    comparison = compare_stages(
        pipeline.policies,
        reward_model=pipeline.reward_models[REWARD_MODEL],
        reference=SFT,
        prompts_jsonl=path,
        num_samples=len(prompts),
        max_prompt_tokens=given.max_prompt_tokens,
        max_new_tokens=given.max_new_tokens,
        batch_size=given.eval_batch_size,
        seed=given.seed,
        progress=True,
    )
    _score_samples(pipeline, prompts, comparison.samples, given.eval_batch_size, _known_score(given))
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
    """Places of the prompts: the first of every family, the second of every family, and so on."""
    seen: Counter = Counter()
    ranks = []
    for index, row in enumerate(prompts):
        ranks.append((seen[row.get("family")], index))
        seen[row.get("family")] += 1
    return [index for _, index in sorted(ranks)]


def _score_samples(pipeline, prompts, samples: Mapping[str, list], batch_size: int, known: Callable | None) -> None:
    """Add to each sample its `rewards` by reward model, its `true_score` (None where there is none) and `family`."""
    from trl_ext.rewards import RewardModel

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
            # What an adversarial prompt asks for, where that is a prompt of the benchmark.
            graded_as = prompt.get("graded_as", prompt["prompt_text"])
            right = known is not None and bool(graded_as)
            row["true_score"] = known(graded_as, row["response_text"], finished=row["finished"]) if right else None
            row["family"] = prompt.get("family")


def _means(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean, standard deviation and interval of the rewards by model and of the true scores that there are."""
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
