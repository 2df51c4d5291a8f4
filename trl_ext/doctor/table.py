"""The table of checks. A check is one function; `@check` makes it a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from trl_ext.doctor.patient import Patient
from trl_ext.doctor.report import SEVERITIES, Finding, Found, Report
from trl_ext.files import brief


@dataclasses.dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        name: the name of the fault.
        severity: `error` if nothing useful can be learned, `warning` if something is probably not as intended.
        needs: `data`, `model`, `configuration`; `probe` for forward passes; `steps`; `responses`.
        kinds: the trainers that it concerns: `sft`, `preference`, `reward`, `policy`, `other`.
        function: returns what it found, or None.
    """

    name: str
    severity: str
    needs: str
    kinds: tuple[str, ...]
    function: Callable[[Patient], Found | None]


CHECKS: dict[str, Check] = {}
ALL_KINDS = ("sft", "preference", "reward", "policy", "other")


def check(name: str, severity: str, needs: str, kinds: str = " ".join(ALL_KINDS)):
    """Decorator that adds a function to the table."""
    assert severity in SEVERITIES and name not in CHECKS

    def add(function: Callable[[Patient], Found | None]) -> Callable[[Patient], Found | None]:
        CHECKS[name] = Check(name, severity, needs, tuple(kinds.split()), function)
        return function

    return add


def run_checks(patient: Patient, needs: Collection[str]) -> Report:
    """Run the checks that these needs suffice for. A check that fails itself is reported as skipped."""
    report = Report()
    for row in CHECKS.values():
        if row.needs not in needs or patient.kind not in row.kinds:
            continue
        try:
            found = row.function(patient)
        except Exception as error:  # A custom dataset or collator may hold anything; the other checks still count.
            report.skipped[row.name] = brief(f"{type(error).__name__}: {error}", 200)
            continue
        report.checked.append(row.name)
        if found is not None:
            severity = found.severity or row.severity
            report.findings.append(Finding(found.evidence, found.remedy, found.tokens, severity, row.name))
    report.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return report
