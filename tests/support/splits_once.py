"""One optimizer batch of eight, divided in several ways: train, evaluate and say what came of it.

`run` trains one case in this process. `run_in_processes` runs this file under torchrun, any number of cases to one
launch: `splits_once.py JOBS.json FOLDER`.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import rollout_once, train_once
from tests.support.float64 import precision
from tests.support.rollout_once import OWN_RECIPES, REPLAY

STEPS = 5
BATCH = 8
PER_LAUNCH = 20
# processes, rows of a micro-batch, accumulated micro-batches
SPLITS = {"1 x 8": (1, 8, 1), "1 x 2 x 4": (1, 2, 4), "2 x 4": (2, 4, 1), "2 x 2 x 2": (2, 2, 2)}
ALONE = [name for name, split in SPLITS.items() if split[0] == 1]
# A reference so far from the policy that which pairs are sorted together matters.
REFERENCE = {"reference_seed": 1, "reference_scale": 0.3, "data_seed": 6}
OPTIMIZERS = {"sgd": {"optim": "sgd"}, "adamw": {"optim": "adamw_torch", "learning_rate": 1e-3}}
# Logged values that are of a run's speed, or of the configuration.
NOT_COMPARED = ("epoch", "step", "step_time", "runtime", "per_second", "learning_rate", "total_flos")


def _preference(trainer: str, learning_rate: float = 0.02, **args: Any) -> dict:
    return {"kind": "preference", "trainer": trainer, **REFERENCE, "args": {"learning_rate": learning_rate, **args}}


def _policy(algorithm: str, learning_rate: float = 0.05, **args: Any) -> dict:
    return {"kind": "policy", "args": {"algorithm": algorithm, "learning_rate": learning_rate, **args}}


def _ppo(value_model: str) -> dict:
    args = {"num_generations": 1, "num_iterations": 2, "learning_rate": 0.01, "value_learning_rate": 0.5}
    args |= {"value_model": value_model, "value_clip": 0.001, "kl_target": 0.5, "kl_horizon": 50}
    return {"kind": "policy", "trainer": "PPOTrainer", "args": args}


def _online(**args: Any) -> dict:
    """Pairs made of 16 responses, 4 to a prompt, whose rewards have many ties."""
    case = {"kind": "policy", "trainer": "OnlinePreferenceTrainer", "rewards": ["evens"], "scale": 2}
    return {**case, "args": {"learning_rate": 0.02, **args}}


def _reward(learning_rate: float = 0.02, **args: Any) -> dict:
    return {"kind": "reward", "args": {"learning_rate": learning_rate, **args}}


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
    "reward": _reward(),
    "reward, centred": _reward(center_rewards_coefficient=0.01),
    "reward, margins": _reward(margin_column="avg_confidence"),
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
        "scale": 1.5,
    },
    "ppo, shared": _ppo("shared"),
    "ppo, separate": _ppo("separate"),
    "online": _online(),
    "online, all pairs": _online(pairs="all", loss="ipo"),
    "online, aot": _online(pairs="all", loss="aot", beta=0.2),
    "online, replay": _online(loss="ipo", **REPLAY),
    "online, replay weights": _online(**REPLAY, replay_weights="sequence", pairs="all"),
    "online, replay, temperature": _online(**REPLAY, replay_weights="sequence", temperature=0.5),
    "online, replay, aot": _online(**REPLAY, replay_weights="length_normalized", loss="aot", beta=0.2),
    "sft": {"kind": "sft", "args": {"learning_rate": 0.02}},
    "sft, whole texts": {"kind": "sft", "args": {"learning_rate": 0.02, "completion_only_loss": False}},
}
# TRL's own trainers where what they do depends on the split, by which the measure is seen to measure something.
STOCK: dict[str, dict] = {
    "trl: dpo": _preference("trl.DPOTrainer", beta=0.1),
    "trl: aot_unpaired": _preference("trl.DPOTrainer", beta=0.2, loss_type=["aot_unpaired"]),
    "trl: grpo, bnpo": {
        "kind": "policy",
        "trainer": "trl.GRPOTrainer",
        "args": {"loss_type": "bnpo", "learning_rate": 0.05, "num_iterations": 2, "epsilon": 0.01},
    },
}
CASES |= STOCK


@dataclass
class Outcome:
    """What a run leaves.

    Attributes:
        update: change of all trained parameters, [P], float64.
        size: norm of the parameters before it.
        logs: what was logged at each step.
        evaluation: held-out figures at the end, those of generated responses included where the case asks for them.
    """

    update: Any
    size: float
    logs: list[dict]
    evaluation: dict


def build(name: str, folder: Path, rows: int, accumulation: int, optimizer: str, output_dir: str, dtype: str):
    """The trainer of a case, not yet trained; `folder` holds the models that `save_models` wrote."""
    import torch

    torch.set_num_threads(1)
    case = CASES[name]
    processes = BATCH // (rows * accumulation)
    scale = case.get("scale", 1)
    rows = int(rows * scale)
    args = {
        **case["args"],
        **OPTIMIZERS[optimizer],
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "per_device_eval_batch_size": rows,
        "max_steps": STEPS,
    }
    spec = {**case, "model": str(folder / "model"), "args": args, "dtype": dtype}
    if case["kind"] == "policy":
        # A group must fit into an evaluation batch.
        args["per_device_eval_batch_size"] = int(BATCH * scale) // processes
        if args.get("value_model") == "separate":
            args["value_model_name_or_path"] = str(folder / "policy")
        spec |= {"model": str(folder / "policy"), "fixed": True, "perturb": 1, "prompts": 16}
        # Four prompts or more, of which whole batches are made.
        groups = int(BATCH * scale) // args.get("num_generations", 4)
        held_out = rollout_once.prompts(8)[-math.ceil(4 / groups) * groups :]
        return rollout_once.build(spec, output_dir, eval_dataset=_dataset(held_out))
    if case["kind"] == "preference":
        return train_once.build({**spec, "pairs": STEPS * BATCH}, output_dir, eval_dataset=_held_out())
    return _build_on_rows(spec, output_dir)


def _build_on_rows(spec: dict, output_dir: str):
    """A reward model's trainer, or one of demonstrations, whose completions differ fourfold in length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from tests.support.tiny import pairs

    dtype, tokenizer = getattr(torch, spec["dtype"]), AutoTokenizer.from_pretrained(spec["model"])
    if spec["kind"] == "reward":
        torch.manual_seed(0)  # The head of the scores is new.
        model = AutoModelForSequenceClassification.from_pretrained(spec["model"], num_labels=1, dtype=dtype)
        trainer, held_out = "RewardTrainer", _held_out()
    else:
        model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype)
        trainer, held_out = "SFTTrainer", _dataset(train_once.demonstrations(pairs(BATCH, seed=99)))
    rows = pairs(STEPS * BATCH, seed=REFERENCE["data_seed"])
    spec = {**spec, "trainer": trainer, "model": model, "rows": rows}
    return train_once.build_plain(spec, output_dir, eval_dataset=held_out, processing_class=tokenizer)


def _dataset(rows: list[dict]):
    from datasets import Dataset

    return Dataset.from_list(rows)


def _held_out():
    from tests.support.tiny import pairs

    return _dataset(pairs(BATCH, seed=99))


def run(*case: Any, dtype: str) -> Outcome:
    """Train a case, given as the arguments of `build`, and evaluate it, in float64 throughout or in float32."""
    with precision(dtype):
        return _run(*case, dtype=dtype)


def _run(name: str, *case: Any, dtype: str) -> Outcome:
    import torch

    from trl_ext.trainers.policies import remember_base

    trainer = build(name, *case, dtype)
    if CASES[name].get("win_rate"):
        remember_base(trainer)
    before = train_once.parameters(trainer)
    trainer.train()
    after = train_once.parameters(trainer)
    names = sorted(before)
    update = torch.cat([(after[n].double() - before[n].double()).flatten() for n in names])
    size = math.sqrt(sum(before[n].double().square().sum().item() for n in names))
    evaluation = dict(trainer.evaluate())
    if CASES[name].get("win_rate"):
        evaluation |= _win_rate(trainer)
    return Outcome(update, size, train_once.result(trainer).logs, _figures(evaluation))


def _win_rate(trainer) -> dict[str, float]:
    """Greedy responses of the trained policy against its base's, judged by the sum of their characters."""
    from tests.support.tiny import pairs
    from trl_ext.evaluation import GroundTruthJudge
    from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings

    prompts = [{"row_id": row["row_id"], "prompt": row["prompt"]} for row in pairs(BATCH, seed=99)]
    settings = GenerationSettings(max_prompt_tokens=None, max_new_tokens=8)
    judge = GroundTruthJudge(lambda prompt, response, **_: sum(map(ord, response)))
    summary = GenerationEvaluation(trainer, prompts, settings, judge=judge).compare().summary
    return {
        "win_rate": summary["win_rate"]["half"]["rate"],
        "mean_tokens": summary["generations"]["policy"]["mean_tokens"],
    }


def _figures(values: dict) -> dict[str, float]:
    return {key: value for key, value in values.items() if isinstance(value, (int, float))}


def save_models(folder: Path) -> None:
    """The tiny model, and the policy made of it."""
    from tests.support.tiny import save_tiny_model

    save_tiny_model(folder / "model")
    rollout_once.save_policy(str(folder / "model"), folder / "policy")


def run_all(
    jobs: list[tuple[str, str, str]], folder: Path, models: Path, dtype: str = "float64"
) -> dict[tuple[str, str, str], Outcome]:
    """Outcomes of (case, optimizer, split): those of several processes in a launch of many, the others here."""
    from safetensors import safe_open

    folder.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    spread = dict(enumerate(job for job in jobs if job[2] not in ALONE))
    # A launch ends after ten minutes, done or not.
    for start in range(0, len(spread), PER_LAUNCH):
        part = {index: job for index, job in spread.items() if start <= index < start + PER_LAUNCH}
        (folder / "jobs.json").write_text(json.dumps({"models": str(models), "jobs": part, "dtype": dtype}))
        command = ("-m", "tests.support.splits_once", str(folder / "jobs.json"), str(folder))
        train_once.in_processes(2, *command)
    for index, job in spread.items():
        with safe_open(folder / f"{index}.safetensors", "pt") as file:
            rest = json.loads(file.metadata()["rest"])
            assert rest.pop("processes") == 2
            outcomes[job] = Outcome(file.get_tensor("update"), **rest)
    for index, (name, optimizer, split) in enumerate(job for job in jobs if job[2] in ALONE):
        _, rows, accumulation = SPLITS[split]
        outcomes[name, optimizer, split] = run(
            name, models, rows, accumulation, optimizer, str(folder / f"alone-{index}"), dtype=dtype
        )
    return outcomes


# ---- What two outcomes differ by ----


def update_difference(outcome: Outcome, expected: Outcome) -> float:
    """Norm of the difference of two updates over the norm of the expected one."""
    return train_once.relative_difference(outcome.update, expected.update)


def metric_differences(outcome: Outcome, expected: Outcome) -> dict[str, float]:
    """Largest difference of each logged and each held-out figure, relative to the larger of the two.

    Or to 0.01 where both are smaller: a policy's loss is a sum of much larger terms that cancel.
    """
    largest: dict[str, float] = {}
    for entry, other in zip([*outcome.logs, outcome.evaluation], [*expected.logs, expected.evaluation], strict=True):
        for key in entry.keys() | other.keys():
            if any(part in key for part in NOT_COMPARED):
                continue
            values = entry.get(key), other.get(key)
            difference = math.inf if None in values else abs(values[0] - values[1])
            scale = max(1e-2, *(abs(value) for value in values if value is not None))
            largest[key] = max(largest.get(key, 0.0), difference / scale)
    return largest


def main() -> None:
    from accelerate import Accelerator
    from safetensors.torch import save_file

    from trl_ext.rollouts import end_processes

    specification, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    accelerator = Accelerator(cpu=True)
    for index, (name, optimizer, split) in specification["jobs"].items():
        processes, rows, accumulation = SPLITS[split]
        assert processes == accelerator.num_processes
        models, output_dir = Path(specification["models"]), str(folder / f"{index}-run")
        outcome = run(name, models, rows, accumulation, optimizer, output_dir, dtype=specification["dtype"])
        if accelerator.is_main_process:
            rest = {"size": outcome.size, "logs": outcome.logs, "evaluation": outcome.evaluation}
            rest["processes"] = accelerator.num_processes
            metadata = {"rest": json.dumps(rest)}
            save_file({"update": outcome.update}, folder / f"{index}.safetensors", metadata=metadata)
    end_processes(accelerator)


if __name__ == "__main__":
    main()
