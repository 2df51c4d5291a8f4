"""Faults in what the first steps log: the logged rows, and the changes of weights."""

from __future__ import annotations

from types import SimpleNamespace

from trl_ext.doctor import Report
from trl_ext.doctor.patient import Patient
from trl_ext.doctor.table import run_checks

_ONLINE = {"reward": 0.4, "reward_std": 0.3, "frac_reward_zero_std": 0.25, "completions/clipped_ratio": 0.2}
_ONLINE |= {"clip_ratio/region_mean": 0.0}
HEALTHY_LOGS = {
    "policy": {**_ONLINE, "kl": 0.001},
    "preference": {"rewards/margins": 0.01},
    "reward": {"min_reward": -1.0, "max_reward": 1.0},
    "sft": {},
}
MOVED = {"policy": 1e-4, "reference": 0.0}
# Name -> the kind, what every row logs instead, and the changes of weights.
LOGGED_FAULTS = {
    "rewards-all-zero": ("policy", {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, {}),
    "rewards-all-one": ("policy", {"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, {}),
    "rewards-constant": ("policy", {"reward": 0.5, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, {}),
    "dead-groups": ("policy", {"frac_reward_zero_std": 0.95}, {}),
    "responses-all-cut": ("policy", {"completions/clipped_ratio": 1.0}, {}),
    "stop-texts-never-occur": ("policy", {"completions/clipped_ratio": 1.0}, {}),
    "kl-explodes": ("policy", {"kl": 40.0}, {}),
    "policy-equals-reference": ("preference", {"rewards/margins": 0.0}, {}),
    "ratio-not-one": ("policy", {"clip_ratio/region_mean": 0.1}, {}),
    "gradient-always-clipped": ("sft", {"grad_norm": 5000.0}, {}),
    "no-gradient": ("reward", {"grad_norm": 0.0}, {}),
    "weights-do-not-move": ("sft", {}, {"policy": 0.0}),
    "reference-moves": ("preference", {}, {"reference": 1e-4}),
    "scores-all-equal": ("reward", {"min_reward": 0.0, "max_reward": 0.0}, {}),
}


def logged(kind: str, changed: dict | None = None, moved: dict | None = None, **settings) -> Report:
    """The checks of three logged steps, and of a configuration."""

    row = {"grad_norm": 1.5, **HEALTHY_LOGS[kind], **(changed or {})}
    logs = [{"step": step, "learning_rate": 1e-4 * (step - 1), **row} for step in (1, 2, 3)]
    args = SimpleNamespace(max_grad_norm=1.0, num_generations=4, **settings)
    patient = Patient(args=args, kind=kind, logs=logs)
    patient.moved = {**MOVED, **(moved or {})}
    return run_checks(patient, ("steps",))
