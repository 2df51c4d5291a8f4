"""What an examination found, and how it is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

SEVERITIES = ("error", "warning")
_GREEN, _DIM, _END = "\x1b[32m", "\x1b[2m", "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class Found:
    """What a check returns if it finds its fault.

    Attributes:
        evidence: the figures that the finding is based on, as one sentence.
        remedy: what to change.
        tokens: one row as the trainer sees it: each token's text, and whether the loss is taken on it.
        severity: None for the severity of the check.
    """

    evidence: str
    remedy: str
    tokens: list[tuple[str, bool]] | None = None
    severity: str | None = None


@dataclasses.dataclass(frozen=True)
class Finding(Found):
    """A fault, with the name of the check that found it."""

    name: str = ""


@dataclasses.dataclass
class Report:
    """The findings of an examination, errors first.

    Attributes:
        findings: the faults that were found.
        checked: names of the checks that ran.
        skipped: names of checks that could not read what they need, each with the reason.
        rows: up to two rows as the trainer sees them, as in `Found.tokens`.
        figures: `lengths` of the rows in tokens; after watched steps also `rewards` and `updates`, the logged metrics.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    checked: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    rows: list[list[tuple[str, bool]]] = dataclasses.field(default_factory=list)
    figures: dict[str, list] = dataclasses.field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        return not self.findings

    @property
    def names(self) -> list[str]:
        return [finding.name for finding in self.findings]

    @property
    def count(self) -> str:
        """The number of faults in words."""
        return f"{len(self.findings)} fault{'' if len(self.findings) == 1 else 's'}"

    def add(self, other: Report) -> None:
        """Add the findings of a later examination of the same run."""
        self.findings += [finding for finding in other.findings if finding.name not in self.names]
        self.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        self.checked += [name for name in other.checked if name not in self.checked]
        self.skipped |= other.skipped
        self.rows = other.rows or self.rows
        self.figures |= other.figures

    def to_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **dataclasses.asdict(self)}

    def text(self, *, color: bool = False, rows: bool = False) -> str:
        """The findings for a terminal; one line if there is none.

        Args:
            color: mark the tokens that are learned by color.
            rows: show two rows as the trainer sees them, too.
        """
        lines = [self._findings(color)]
        if rows and self.rows:
            lines += ["\nrows as the trainer sees them, what is learned in brackets:"]
            lines += [f"  {shown_tokens(row, color=color)}" for row in self.rows]
        return "\n".join(lines)

    def _findings(self, color: bool) -> str:
        by_error: dict[str, list[str]] = {}
        for name, error in self.skipped.items():
            by_error.setdefault(error, []).append(name)
        skipped = "".join(f"; not checked: {', '.join(names)} ({error})" for error, names in by_error.items())
        if self.healthy:
            return f"doctor: no fault found by {len(self.checked)} checks{skipped}"
        lines = [f"doctor: {self.count} found by {len(self.checked)} checks{skipped}"]
        for finding in self.findings:
            lines += [f"\n{finding.name} ({finding.severity})", f"  {finding.evidence}"]
            if finding.tokens:
                lines.append(f"  tokens: {shown_tokens(finding.tokens, color=color)}")
            lines.append(f"  remedy: {finding.remedy}")
        return "\n".join(lines)


def shown_tokens(tokens: Iterable[tuple[str, bool]], *, color: bool, limit: int = 60) -> str:
    """A row's last tokens, separated by |. Learned ones stand in brackets, and are green in color."""
    tokens = list(tokens)
    start = max(0, len(tokens) - limit)
    parts, was_learned = ["... " if start else ""], False
    for text, learned in tokens[start:]:
        if learned != was_learned:
            parts.append("[" if learned else "] ")
            was_learned = learned
        text = text.replace("\n", "\\n")
        parts.append(f"{_GREEN if learned else _DIM}{text}{_END}|" if color else f"{text}|")
    return "".join(parts).replace("|]", "]").removesuffix("|") + ("]" if was_learned else "")
