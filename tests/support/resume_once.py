"""Train tiny models of every trainer, end them by SIGKILL where a job says, resume, and write down what they end with.

`python -m tests.support.resume_once JOBS.json` imports the libraries once and forks a process for every life of every
run. A job is `{"kind", "folder", "kills"}`: a name of `KINDS`, where to write, and one kill point for each life that
ends early. A kill point is `[place, step]`, with a place of `PLACES`, or `[place, step, rank]`.
`folder/end.safetensors` then holds parameters, optimizer state and random state, and `folder/run` is the run's output.
One life in several processes:
`python -m torch.distributed.run ... -m tests.support.resume_once KIND MODELS FOLDER [KILL]`.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import REPOSITORY, train_once
from tests.support.faults_once import At
from tests.support.rollout_once import save_policy
from tests.support.tiny import pairs, save_tiny_model

# Lines of metrics are no multiple of save_steps, and no divisor: checkpoints lie in the middle of what one averages.
COMMON = {"optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "max_grad_norm": 1.0}
COMMON |= {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2, "logging_steps": 4, "disable_tqdm": True}
PAIRS = {**COMMON, "max_steps": 11, "gradient_accumulation_steps": 2, "train_sampling_strategy": "random"}
ROLLOUTS = {**COMMON, "max_steps": 14, "save_steps": 2, "logging_steps": 3, "num_iterations": 2}
ROLLOUTS |= {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "shuffle_dataset": True}
# Normalises over the batch.
BATCH = "reinforce_plus_plus_baseline"
# Two groups of four, of which those without a signal are replaced.
RESAMPLED = {"resample_groups": 8, "gradient_accumulation_steps": 1, "num_iterations": 1, "steps_per_generation": 1}
MOVING = {"loss": "dpo", "sync_ref_model": True, "ref_model_sync_steps": 2}
LORA = {"lora": True, "lora_dropout": 0.2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
# 8 pairs, 2 steps of 4: epochs end at steps 2, 4, ..., and 9 pairs end them with a short step.
KINDS: dict[str, dict[str, Any]] = {
    "preference": {"trainer": "PreferenceTrainer", "pairs": 16, "args": {**PAIRS, **EVALUATED, "loss": "dpo"}},
    "preference_lora": {"trainer": "PreferenceTrainer", "pairs": 9, **LORA, "args": {**PAIRS, "loss": "aot"}},
    "preference_moving": {"trainer": "PreferenceTrainer", "pairs": 8, "args": {**PAIRS, **MOVING}},
    "reward": {"trainer": "RewardTrainer", "pairs": 16, "args": {**PAIRS, **EVALUATED, **BEST, "save_total_limit": 1}},
    "policy": {
        "trainer": "PolicyTrainer",
        "args": {**ROLLOUTS, "algorithm": "grpo", "beta": 0.1, "gradient_accumulation_steps": 1, "save_steps": 4},
    },
    "policy_resampled": {
        **{"trainer": "PolicyTrainer", "prompts": 16, "rewards": ["at_odd_rows"]},
        "args": {**ROLLOUTS, **RESAMPLED},
    },
    "kto": {"trainer": "KTOTrainer", "pairs": 8, "args": {**PAIRS, "train_sampling_strategy": "sequential"}},
    "policy_batch": {"trainer": "PolicyTrainer", "prompts": 6, "args": {**ROLLOUTS, "algorithm": BATCH}},
    "sft": {
        "trainer": "SFTTrainer",
        "args": {**PAIRS, **EVALUATED, "load_best_model_at_end": True, "save_total_limit": 1},
    },
    "sft_by_length": {
        "trainer": "SFTTrainer",
        "args": {**PAIRS, "gradient_accumulation_steps": 1, "train_sampling_strategy": "group_by_length"},
    },
    "expert": {"trainer": "ExpertIterationTrainer", "args": {"logging_steps": 2, "save_total_limit": 1}},
}


def build(kind: str, models: Path, folder: Path):
    """The trainer of a kind with its callbacks, not yet trained."""
    from trl_ext.trainers.callbacks import MetricsFileCallback

    spec = {"pairs": 10, "dtype": "float32", **KINDS[kind]}
    output = str(folder / "run")
    if spec["trainer"] == "ExpertIterationTrainer":
        return _expert({"save_strategy": "no", **spec["args"]}, output)
    spec["model"] = str(models / ("policy" if spec["trainer"] == "PolicyTrainer" else "tiny"))
    if "eval_strategy" in spec["args"]:
        spec["held_out"] = pairs(4, seed=7)
    trainer = train_once.build(spec, output)
    # As the recipes do: first the file of metrics, then what logs.
    trainer.add_callback(MetricsFileCallback(folder / "run" / "metrics.jsonl"))
    return trainer


def _expert(arguments: dict, output: str):
    from trl_ext import ExpertIterationConfig, ExpertIterationTrainer
    from trl_ext.data.math import load_math, math_prompt
    from trl_ext.rewards.verified import VerifiedGrader
    from trl_ext.rollouts import SamplingSettings
    from trl_ext.toy import MODEL_DIR

    rows = load_math("toy", "train")[:60]
    rounds = {"n_steps": 3, "questions_per_step": 24, "rollouts_per_question": 2, "learning_rate": 5e-4, "seed": 3}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 1}
    args = ExpertIterationConfig(output_dir=output, **rounds, **quiet, **arguments)
    given = {"rows": rows, "prompts": [math_prompt(row, None) for row in rows], "grade": VerifiedGrader("r1_zero")}
    settings = SamplingSettings(max_new_tokens=48, batch_size=48)
    return ExpertIterationTrainer(str(MODEL_DIR), args, settings=settings, **given)


# ---- Where a life ends ----


def _at_event(event: str, number: int = signal.SIGKILL):
    return lambda trainer, step: trainer.add_callback(At(event, step, lambda: signal.raise_signal(number)))


def _within(owner: str, name: str):
    """Before a function runs for the checkpoint of a step."""

    def arrange(trainer, step: int) -> None:
        target = trainer if owner == "trainer" else importlib.import_module(owner)
        original = getattr(target, name)

        def killing(*args, **kwargs):
            if trainer.state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(target, name, killing)

    return arrange


CHECKPOINTS = "trl_ext.resilience.checkpoints"
PLACES = {
    "step_end": _at_event("on_step_end"),
    # After the checkpoint has its marker, and after what other callbacks do then.
    "saved": _at_event("on_save"),
    # With parameters and optimizer written, and no random state.
    "mid_save": _within("trainer", "_save_rng_state"),
    # Complete but for its marker.
    "before_mark": _within(CHECKPOINTS, "mark_complete"),
    # With its marker, and nothing yet deleted or scored.
    "marked": _within(CHECKPOINTS, "delete_old"),
    # No kill: the notice of a preemption, or Ctrl-C, in the middle of the step that follows.
    "notice": _at_event("on_step_begin", signal.SIGTERM),
    "interrupt": _at_event("on_step_begin", signal.SIGINT),
}


# ---- Lives ----


def live(kind: str, models: Path, folder: Path, kill: list | None = None) -> None:
    """Train from the last checkpoint, if there is one, to the end or to the kill point; in the process that calls."""
    import torch

    from trl_ext.resilience.checkpoints import last_checkpoint
    from trl_ext.resilience.preemption import Preemption

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "began").unlink(missing_ok=True)
    trainer = build(kind, models, folder)
    trainer.add_callback(Preemption(trainer))
    if kill is not None and trainer.accelerator.process_index in (kill[2:] or [0]):
        PLACES[kill[0]](trainer, kill[1])
    (folder / "began").touch()
    trainer.train(resume_from_checkpoint=last_checkpoint(folder / "run") is not None)
    if trainer.accelerator.is_main_process:
        write_end(trainer, folder / "end.safetensors")


def write_end(trainer, path: Path) -> None:
    """Parameters, optimizer state and the random state, as one file of tensors."""
    import torch
    from safetensors.torch import save_file

    model = trainer.accelerator.unwrap_model(trainer.model)
    tensors = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    # DeepSpeed's optimizer keeps its share of the state in other ways.
    optimizer = {} if trainer.is_deepspeed_enabled else trainer.optimizer.state_dict()["state"]
    for index, state in optimizer.items():
        tensors |= {f"optimizer/{index}/{name}": torch.as_tensor(value) for name, value in state.items()}
    tensors["random"] = torch.random.get_rng_state()
    tensors["learning_rate"] = torch.tensor(trainer.lr_scheduler.get_last_lr())
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)


def in_a_fork(function, *arguments, log: Path, until: Callable[[], bool] | None = None) -> int:
    """How a forked process ended that calls a function: its exit code, or minus the signal that ended it.

    It is killed as soon as `until()` is true, which is asked every few milliseconds.
    """
    process = multiprocessing.get_context("fork").Process(target=_logged, args=(log, function, *arguments))
    process.start()
    while process.is_alive():
        process.join(None if until is None else 0.004)
        if until is not None and until():
            process.kill()
    return process.exitcode


def _logged(log: Path, function, *arguments) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)


def save_models(folder: Path) -> None:
    save_tiny_model(folder / "tiny", dropout=0.1)
    save_policy(str(folder / "tiny"), folder / "policy")


def carry_out(job: dict, models: Path) -> None:
    """All lives of a job, each of which must end as it should."""
    # Expert iteration repeats an interrupted round, and does not listen.
    expected, folder = {"notice": 143, "interrupt": 130}, Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    for kill in [*job["kills"], None]:
        code = in_a_fork(live, job["kind"], models, folder, kill, log=log)
        if code != (0 if kill is None else expected.get(kill[0], -signal.SIGKILL)):
            raise RuntimeError(f"{job} with {kill} ended with {code}: {log.read_text()[-4000:]}")


def run_jobs(jobs: list[dict], folder: Path) -> None:
    """Carry out jobs in another Python, in which nothing else runs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.support.resume_once", str(folder / "jobs.json")]
    options = {"env": environment(), "capture_output": True, "text": True, "timeout": 2400}
    done = subprocess.run(command, cwd=REPOSITORY, **options)
    assert done.returncode == 0, done.stderr[-6000:]


def environment() -> dict[str, str]:
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": "1"}


def preload() -> None:
    """Import what lives need, so that forks have it."""
    import trl_ext

    for spec in KINDS.values():
        getattr(trl_ext, spec["trainer"])


# ---- What two runs are compared by ----


def differences(one: Path, other: Path) -> dict[str, float]:
    """Largest absolute difference of the ends of two runs, by kind of tensor; infinite where names differ."""
    from safetensors.torch import load_file

    one, other = load_file(one / "end.safetensors"), load_file(other / "end.safetensors")
    kinds = sorted({name.split("/")[0] for name in [*one, *other]})
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return dict.fromkeys(kinds, float("inf"))
    apart = {name: (one[name].double() - other[name].double()).abs().max().item() for name in one}
    return {kind: max(apart[name] for name in one if name.split("/")[0] == kind) for kind in kinds}


def metrics(folder: Path) -> list[dict]:
    """The rows of a run's metrics without what is a time."""
    times = ("seconds", "step_time", "_runtime", "_per_second")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith(times)} for row in rows]


def main() -> None:
    if len(sys.argv) > 2:
        kind, models, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
        live(kind, models, folder, json.loads(sys.argv[4]) if len(sys.argv) > 4 else None)
        return
    path = Path(sys.argv[1])
    preload()
    models = path.parent / "models"
    if in_a_fork(save_models, models, log=path.parent / "models.txt"):
        raise RuntimeError((path.parent / "models.txt").read_text()[-4000:])
    for job in json.loads(path.read_text()):
        carry_out(job, models)


if __name__ == "__main__":
    main()
