"""One optimizer batch of eight, divided in several ways: the cases, and what their runs differ by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tests.support import rollout_once, train_once
from tests.support.rollout_once import OWN_RECIPES, REPLAY
from tests.support.tiny import pairs, save_tiny_model
from tests.support.train_once import Run

STEPS = 5
BATCH = 8
PER_LAUNCH = 20
# processes, rows of a micro-batch, accumulated micro-batches, tokens of a pass
SPLITS = {"1 x 8": (1, 8, 1), "1 x 2 x 4": (1, 2, 4), "2 x 4": (2, 4, 1), "2 x 2 x 2": (2, 2, 2)}
SPLITS = {name: (*split, "off") for name, split in SPLITS.items()}
SPLITS |= {"1 x 2 x 4 in passes": (1, 2, 4, "160"), "2 x 1 x 4 in passes": (2, 1, 4, "110")}
# A reference so far from the policy that which pairs are sorted together matters.
REFERENCE = {"reference_seed": 1, "reference_scale": 0.3, "data_seed": 6}
OPTIMIZERS = {"sgd": {"optim": "sgd"}, "adamw": {"optim": "adamw_torch", "learning_rate": 1e-3}}
# Logged values that are of a run's speed, or of the configuration.
NOT_COMPARED = ("epoch", "step", "step_time", "runtime", "per_second", "learning_rate", "total_flos")


def _preference(trainer: str, learning_rate: float = 0.02, **args: Any) -> dict:
    return {"trainer": trainer, **REFERENCE, "args": {"learning_rate": learning_rate, **args}}


def _policy(algorithm: str, learning_rate: float = 0.05, **args: Any) -> dict:
    return {"trainer": "PolicyTrainer", "args": {"algorithm": algorithm, "learning_rate": learning_rate, **args}}


def _ppo(value_model: str) -> dict:
    args = {"num_generations": 1, "num_iterations": 2, "learning_rate": 0.01, "value_learning_rate": 0.5}
    args |= {"value_model": value_model, "value_clip": 0.001, "kl_target": 0.5, "kl_horizon": 50}
    return {"trainer": "PPOTrainer", "args": args}


def _online(**args: Any) -> dict:
    """Pairs made of 16 responses, 4 to a prompt, whose rewards have many ties."""
    case = {"trainer": "OnlinePreferenceTrainer", "rewards": ["evens"], "scale": 2}
    return {**case, "args": {"learning_rate": 0.02, **args}}


def _on_pairs(trainer: str, **args: Any) -> dict:
    return {"trainer": trainer, "data_seed": REFERENCE["data_seed"], "args": {"learning_rate": 0.02, **args}}


_OFF_POLICY = {"num_iterations": 2, "epsilon": 0.01}
CASES: dict[str, dict] = {
    "dpo": {**_preference("DPOTrainer", beta=0.1), "win_rate": True},
    "dpo, shuffled": _preference("DPOTrainer", beta=0.1, train_sampling_strategy="random"),
    "dpo, wpo weights": _preference("DPOTrainer", beta=0.1, weighting=["wpo"]),
    "dpo, confidence": _preference(
        "DPOTrainer", beta=0.1, weighting=["confidence"], weighting_kwargs={"power": 4.0, "floor": 0.05}
    ),
    "ipo": _preference("IPOTrainer", 1e-5, beta=0.1),
    "ipo, per token": _preference("IPOTrainer", 1e-3, beta=0.5, length_normalized=True),
    "aot": _preference("AOTTrainer", beta=0.2),
    "aot_paired": _preference("AOTPairedTrainer", beta=0.2),
    "simpo": {**_preference("SimPOTrainer"), "reference_seed": None},
    "orpo": {**_preference("ORPOTrainer"), "reference_seed": None},
    "reward": _on_pairs("RewardTrainer"),
    "reward, centred": _on_pairs("RewardTrainer", center_rewards_coefficient=0.01),
    "reward, margins": _on_pairs("RewardTrainer", margin_column="avg_confidence"),
    "grpo": _policy("grpo", 0.01, **_OFF_POLICY),
    "grpo, kl in the loss": _policy("grpo", 0.002, beta=0.1),
    "dr_grpo": _policy("dr_grpo", 0.2, **_OFF_POLICY),
    "dapo": _policy("dapo", **_OFF_POLICY, epsilon_high=0.02),
    "gspo": _policy("gspo", num_iterations=2, epsilon=1e-3, epsilon_high=2e-3),
    "reinforce++ baseline": _policy("reinforce_plus_plus_baseline", 0.01, **_OFF_POLICY),
    "rloo, kl in the reward": _policy("rloo", 0.005, beta=0.1),
    "dr_grpo, kl in the loss": _policy("dr_grpo", 0.1, **_OFF_POLICY, beta=0.1),
    "grpo, kl over tokens": _policy("grpo", 0.002, **_OFF_POLICY, beta=0.2, kl_aggregation="token_mean"),
    "opo": _policy("opo", 0.01),
    "vespo": _policy(f"{OWN_RECIPES}/vespo.py:vespo", 0.01, num_iterations=2),
    "sapo": _policy("sapo", 0.01, num_iterations=2),
    "remax": _policy("remax", 0.002, num_generations=2),
    # With two processes of four, the group of eight straddles them.
    "grpo, one group": _policy("grpo", 0.01, **_OFF_POLICY, num_generations=8, aggregation="token_mean"),
    # Three groups, the second of which lies on both processes.
    "dapo, resampled": {
        **_policy("dapo", 0.01, beta=0.1, num_iterations=2, overlong_share=0.5, resample_groups=8),
        "rewards": ["at_odd_rows"],
        "scale": 2,
    },
    # All rewards of row2, in the second rollout, are NaN: its update is skipped.
    "grpo, a reward not finite": {**_policy("grpo", 0.01, **_OFF_POLICY), "rewards": ["not_a_number"]},
    "ppo, shared": _ppo("shared"),
    "ppo, separate": _ppo("separate"),
    "online": _online(),
    "online, all pairs": _online(pairs="all", loss="ipo"),
    "online, aot": _online(pairs="all", loss="aot", beta=0.2),
    "online, replay": _online(loss="ipo", **REPLAY),
    "online, replay weights": _online(**REPLAY, replay_weights="sequence", pairs="all"),
    "online, replay, temperature": _online(**REPLAY, replay_weights="sequence", temperature=0.5),
    "online, replay, aot": _online(**REPLAY, replay_weights="length_normalized", loss="aot", beta=0.2),
    "sft": _on_pairs("SFTTrainer"),
    "sft, whole texts": _on_pairs("SFTTrainer", completion_only_loss=False),
}
# TRL's own trainers where what they do depends on the split, by which the measure is seen to measure something.
STOCK: dict[str, dict] = {
    "trl: aot_unpaired": _preference("trl.DPOTrainer", beta=0.2, loss_type=["aot_unpaired"]),
    "trl: grpo, bnpo": {
        "trainer": "trl.GRPOTrainer",
        "args": {"loss_type": "bnpo", "learning_rate": 0.05, "num_iterations": 2, "epsilon": 0.01},
    },
}
CASES |= STOCK


def specification(name: str, optimizer: str, split: str, models: Path, dtype: str) -> dict:
    """Of a case for `train_once.complete`; `models` holds what `save_models` wrote."""
    processes, rows, accumulation, budget = SPLITS[split]
    case = dict(CASES[name])
    batch = int(BATCH * case.pop("scale", 1))
    args = {**case["args"], **OPTIMIZERS[optimizer], "max_steps": STEPS, "gradient_accumulation_steps": accumulation}
    args["per_device_train_batch_size"] = args["per_device_eval_batch_size"] = batch // processes // accumulation
    if budget != "off":
        args["tokens_per_pass"] = budget
    spec = {**case, "model": str(models / "model"), "args": args, "dtype": dtype}
    if {"GRPOTrainer", "PolicyTrainer", "PPOTrainer", "OnlinePreferenceTrainer"} & {case["trainer"].split(".")[-1]}:
        # A group must fit into an evaluation batch.
        args["per_device_eval_batch_size"] = batch // processes
        if args.get("value_model") == "separate":
            args["value_model_name_or_path"] = str(models / "policy")
        # Four prompts or more, of which whole batches are made.
        groups = batch // args.get("num_generations", 4)
        held_out = rollout_once.prompts(8)[-math.ceil(4 / groups) * groups :]
        policy = {"model": str(models / "policy"), "fixed": True, "perturb": 1, "prompts": 16}
        return {**spec, **policy, "held_out": held_out}
    return {**spec, "pairs": STEPS * BATCH, "held_out": pairs(BATCH, seed=99)}


def save_models(folder: Path) -> None:
    """The tiny model, and the policy made of it."""
    save_tiny_model(folder / "model")
    rollout_once.save_policy(str(folder / "model"), folder / "policy")


def run_all(
    jobs: list[tuple[str, str, str]], folder: Path, models: Path, dtype: str = "float64"
) -> dict[tuple[str, str, str], Run]:
    """Runs of (case, optimizer, split): those of two processes in launches of many, the others here."""
    specs = {job: specification(*job, models, dtype) for job in jobs}
    spread = [job for job in jobs if SPLITS[job[2]][0] == 2]
    runs = {}
    # A launch ends after ten minutes, done or not.
    for start in range(0, len(spread), PER_LAUNCH):
        part = spread[start : start + PER_LAUNCH]
        found = train_once.train_in_processes([specs[job] for job in part], 2, folder / f"spread-{start}")
        runs |= dict(zip(part, found, strict=True))
    for index, job in enumerate(jobs):
        if job not in runs:
            runs[job] = train_once.complete(specs[job], folder / f"alone-{index}")
    return runs


# ---- What two runs differ by ----


def update_difference(run: Run, expected: Run) -> float:
    """Norm of the difference of two updates over the norm of the expected one."""
    return train_once.relative_difference(run.change, expected.change)


def metric_differences(run: Run, expected: Run) -> dict[str, float]:
    """Largest difference of each logged and each held-out figure, relative to the larger of the two.

    Or to 0.01 where both are smaller: a policy's loss is a sum of much larger terms that cancel.
    """
    largest: dict[str, float] = {}
    for entry, other in zip([*run.logs, run.evaluation], [*expected.logs, expected.evaluation], strict=True):
        for key in entry.keys() | other.keys():
            if any(part in key for part in NOT_COMPARED):
                continue
            values = entry.get(key), other.get(key)
            difference = math.inf if None in values else abs(values[0] - values[1])
            scale = max(1e-2, *(abs(value) for value in values if value is not None))
            largest[key] = max(largest.get(key, 0.0), difference / scale)
    return largest
