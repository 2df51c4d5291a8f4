"""Over-optimisation on the embedded benchmark: learned reward against true score as a policy moves away from its base.

GRPO without a KL penalty and with a high learning rate optimises a reward model until it exploits the model's errors.
`python -m benchmarks.overoptimization` compares, over several seeds, a single reward model that treats cut responses
as finished, one that scores them as cut, one with a penalty for a missing end, and pessimistic ensembles whose members
differ in the order of the data, in the data, or in their base model. It writes a row per evaluation to `curves.jsonl`
and a table to `table.md` in `--folder`. Existing results are kept, so an interrupted run can continue.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_ext.files import write_json, write_text

MEMBERS = 3
# Seeds of the pretraining recipe for further base models, in addition to the embedded one.
BASE_SEEDS = (101, 102)
# KL to the base, in nats per response, at which curves are compared.
TABLE_KL = (5, 10)

# Condition -> members, aggregation, whether cut responses are scored as cut, penalty for a missing end.
CONDITIONS: dict[str, tuple[str, str, bool, float]] = {
    "single, cut scored as finished": ("single", "mean", False, 0.0),
    "single": ("single", "mean", True, 0.0),
    "single, missing end costs 1": ("single", "mean", True, 1.0),
    "min over data orders": ("order", "min", True, 0.0),
    "min over data subsets": ("subset", "min", True, 0.0),
    "min over bases": ("base", "min", True, 0.0),
    "mean over bases": ("base", "mean", True, 0.0),
}


def train_member(kind: str, seed: int, index: int, folder: Path) -> Path:
    """The folder of a reward model of a condition, trained if it is missing."""
    from trl_ext import RewardConfig, RewardTrainer, load_benchmark
    from trl_ext.toy import MODEL_DIR

    # The first member of `order` and of `base` is the single model.
    kind = "order" if kind == "single" or kind == "base" and index == 0 else kind
    output = folder / "members" / f"{kind}-{seed}-{index}"
    if (output / "config.json").is_file():
        return output
    base = _base(BASE_SEEDS[index - 1], folder) if kind == "base" else MODEL_DIR
    pairs = load_benchmark("toy")["train_prefs"]
    if kind == "subset":
        # Two thirds of the data each, so that any two members share half of their data.
        pairs = pairs.select(sorted(random.Random(f"{seed} {index}").sample(range(len(pairs)), 2 * len(pairs) // 3)))
    args = RewardConfig(
        output_dir=str(output),
        # Seeds of members and of repetitions must not collide.
        seed=seed if kind == "subset" else seed + 100 * index,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=10,
        per_device_train_batch_size=32,
        num_train_epochs=3,
        select_best="none",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = RewardTrainer(str(base), args, train_dataset=pairs)
    trainer.train()
    trainer.save_model()
    return output


def _base(seed: int, folder: Path) -> Path:
    output = folder / f"base-{seed}"
    if not (output / "config.json").is_file():
        command = [sys.executable, "-m", "trl_ext.toy.build_model", "--seed", str(seed), "--output", str(output)]
        subprocess.run(command, check=True)
    return output


def reward_function(condition: str, seed: int, folder: Path) -> Callable[..., list[float]]:
    """The reward of a condition; ensemble members are centred and scaled on the base's responses."""
    from trl_ext import load_benchmark
    from trl_ext.rewards import RewardEnsemble, RewardModel

    kind, aggregate, _, _ = CONDITIONS[condition]
    members = [
        RewardModel(train_member(kind, seed, index, folder), name=f"{kind}{index}", batch_size=64)
        for index in range(1 if kind == "single" else MEMBERS)
    ]
    ensemble = RewardEnsemble(members, aggregate=aggregate)
    rows = load_benchmark("toy")["train_gen"].select(range(256))
    ensemble.calibrate(rows["prompt"], rows["reference_response_text"])
    return ensemble


def run(condition: str, seed: int, folder: Path, steps: int, every: int) -> list[dict[str, Any]]:
    """Rows of one run: step, KL, learned reward, true score and length of sampled held-out responses."""
    from trl_ext import GRPOConfig, GRPOTrainer, load_benchmark, toy
    from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings
    from trl_ext.held_out.table import GenerationTableCallback
    from trl_ext.trainers.callbacks import MetricsFileCallback, read_metrics
    from trl_ext.trainers.policies import remember_base

    output = folder / "runs" / f"{condition.replace(' ', '-').replace(',', '')}-{seed}"
    done = output / "done.json"
    if not done.is_file():
        print(f"{condition}, seed {seed}", file=sys.stderr)
        benchmark = load_benchmark("toy")
        scored = reward_function(condition, seed, folder)
        _, _, cut_as_cut, penalty = CONDITIONS[condition]

        def learned(prompts, completions, finished, **columns):
            return scored(prompts, completions, finished=finished if cut_as_cut else None)

        def true_score(prompt: str, response: str, finished: bool = True) -> float:
            return toy.score(prompt, response, finished=finished)

        args = GRPOConfig(
            output_dir=str(output),
            seed=seed,
            beta=0.0,
            learning_rate=5e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            per_device_train_batch_size=64,
            max_steps=steps,
            max_completion_length=toy.MAX_NEW_TOKENS,
            missing_eos_penalty=penalty,
            logging_steps=every,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(str(toy.MODEL_DIR), learned, args, train_dataset=benchmark["train_gen"])
        remember_base(trainer)

        def columns(rows, responses, finished, completion_ids):
            prompts = [row["prompt"] for row in rows]
            return {"learned": learned(prompts, [[{"role": "assistant", "content": t}] for t in responses], finished)}

        settings = GenerationSettings(
            max_prompt_tokens=None, max_new_tokens=toy.MAX_NEW_TOKENS, temperature=1.0, batch_size=160, seed=seed
        )
        evaluation = GenerationEvaluation(
            trainer, benchmark["test_gen"], settings, score_function=true_score, reward_columns=columns
        )
        output.mkdir(parents=True, exist_ok=True)
        trainer.add_callback(MetricsFileCallback(output / "metrics.jsonl"))
        trainer.add_callback(GenerationTableCallback(evaluation, every=every, prompts=160, prefix="eval_"))
        trainer.train()
        rows = [
            {
                "condition": condition,
                "seed": seed,
                "step": row["step"],
                "kl": row["eval_kl"],
                "learned": row["eval_rewards/learned/mean"],
                "true": row["eval_score"],
                "length": row["eval_completions/mean_length"],
                "cut": row["eval_completions/clipped_ratio"],
            }
            for row in read_metrics(output / "metrics.jsonl")
            if "eval_kl" in row
        ]
        write_json(done, rows)
    return json.loads(done.read_text())


def table(rows: list[dict[str, Any]]) -> str:
    """Best and last true score by condition, averaged over seeds, and the true score at given values of KL."""
    at_kl = "".join(f"| true score at KL {kl} " for kl in TABLE_KL)
    lines = [
        f"| reward | best true score (each seed) | at KL {at_kl}| last true score (each seed) | at KL "
        "| learned, first to last | length | cut |",
        "|---" * (8 + len(TABLE_KL)) + "|",
    ]
    for condition in dict.fromkeys(row["condition"] for row in rows):
        own = [row for row in rows if row["condition"] == condition]
        by_seed = [[row for row in own if row["seed"] == seed] for seed in sorted({row["seed"] for row in own})]
        best = [max(seed_rows, key=lambda row: row["true"]) for seed_rows in by_seed]
        first, last = [seed_rows[0] for seed_rows in by_seed], [seed_rows[-1] for seed_rows in by_seed]
        passing = "".join(f"| {_at(by_seed, kl)} " for kl in TABLE_KL)
        lines.append(
            f"| {condition} | {_mean(best, 'true'):.3f} ({_each(best, 'true')}) | {_mean(best, 'kl'):.1f} {passing}"
            f"| {_mean(last, 'true'):.3f} ({_each(last, 'true')}) | {_mean(last, 'kl'):.1f} "
            f"| {_mean(first, 'learned'):.2f} to {_mean(last, 'learned'):.2f} | {_mean(last, 'length'):.0f} "
            f"| {_mean(last, 'cut'):.2f} |"
        )
    return "\n".join(lines) + "\n"


def _at(by_seed: list[list[dict[str, Any]]], kl: float) -> str:
    """The true score where each seed's curve first passes this KL, linearly interpolated; a dash if it does not."""
    scores = []
    for rows in by_seed:
        for before, after in itertools.pairwise(rows):
            if before["kl"] <= kl < after["kl"]:
                share = (kl - before["kl"]) / (after["kl"] - before["kl"])
                scores.append(before["true"] + share * (after["true"] - before["true"]))
                break
    each = ", ".join(f"{score:.2f}" for score in scores)
    return f"{math.fsum(scores) / len(scores):.3f} ({each})" if scores else "-"


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return math.fsum(row[name] for row in rows) / len(rows)


def _each(rows: list[dict[str, Any]], name: str) -> str:
    return ", ".join(f"{row[name]:.2f}" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--conditions", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--folder", type=Path, default=Path("runs/overoptimization"))
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    rows = [
        row
        for seed in arguments.seeds
        for condition in arguments.conditions
        for row in run(condition, seed, arguments.folder, arguments.steps, arguments.every)
    ]
    order = {condition: index for index, condition in enumerate(CONDITIONS)}
    rows.sort(key=lambda row: (order[row["condition"]], row["seed"], row["step"]))
    write_text(arguments.folder / "curves.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_text(arguments.folder / "table.md", table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
