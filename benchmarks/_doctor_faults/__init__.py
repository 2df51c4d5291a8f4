"""Faults that `benchmarks.doctor` plants, by the kind of trainer that has them.

`policy` has those of online trainers, and `supervised` those of SFT, preferences and reward models; `logs` has faults
in logged metrics. `planting` says how a fault is planted.
"""

from __future__ import annotations

from benchmarks._doctor_faults import policy, supervised
from benchmarks._doctor_faults.logs import LOGGED_FAULTS, logged
from benchmarks._doctor_faults.planting import Fault, RunFault, examine_with
from benchmarks._doctor_faults.supervised import part_swapped
from benchmarks._doctor_runs import random_llama, stand_in

__all__ = ["FAULTS", "LOGGED_FAULTS", "RUN_FAULTS", "Fault", "RunFault"]
__all__ += ["examine_with", "logged", "part_swapped", "run_plants"]

FAULTS: list[Fault] = [*policy.BUILT, *supervised.BUILT]
# The order decides which model a fault is planted on, so new ones come last.
RUN_FAULTS: list[RunFault] = [*policy.RUNS, *supervised.RUNS, *policy.LATER_RUNS]


def run_plants() -> list[tuple[RunFault, bool, str]]:
    """Each fault twice, in TRL's trainer and in this library's, once on the embedded model and once on a stand-in."""
    plants = []
    for index, fault in enumerate(RUN_FAULTS):
        # An untrained model prefers nothing.
        trained = fault.kind == "policy" or fault.name == "preferences-satisfied"
        other = stand_in if trained else random_llama
        for own in (False, True):
            on_toy = own == bool(index % 2) if fault.only is None else index % 2 == 0
            if fault.only in (None, "trl_ext" if own else "trl"):
                plants.append((fault, own, "toy" if on_toy else other.__name__))
    return plants
