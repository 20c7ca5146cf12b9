"""What a check says: how bad, why, what to change. The worst decides the exit status: 0 ok, 1 warnings, 2 failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class Severity(IntEnum):
    """Worse is larger. A check that does not apply here is no worse than one that is fine."""

    NOT_APPLICABLE = -1
    OK = 0
    WARN = 1
    FAIL = 2

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Finding:
    """One fact that a check found, and what to change when it is not fine."""

    severity: Severity
    what: str
    change: str = ""


@dataclass(frozen=True)
class Verdict:
    """What one of the numbered checks says."""

    number: int
    title: str
    findings: tuple[Finding, ...] = field(default=())

    @property
    def severity(self) -> Severity:
        return max((finding.severity for finding in self.findings), default=Severity.NOT_APPLICABLE)

    def as_json(self) -> dict[str, object]:
        return {
            "number": self.number,
            "title": self.title,
            "severity": self.severity.label,
            "findings": [
                {"severity": one.severity.label, "what": one.what, "change": one.change} for one in self.findings
            ],
        }


def ok(what: str) -> Finding:
    return Finding(Severity.OK, what)


def warn(what: str, change: str) -> Finding:
    return Finding(Severity.WARN, what, change)


def fail(what: str, change: str) -> Finding:
    return Finding(Severity.FAIL, what, change)


def not_applicable(what: str) -> Finding:
    return Finding(Severity.NOT_APPLICABLE, what)


def softened(findings: Iterable[Finding]) -> list[Finding]:
    """The findings with failures made warnings: true, but not in the way of this set-up."""
    return [Finding(min(one.severity, Severity.WARN), one.what, one.change) for one in findings]


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """0 when nothing is wrong, 1 with warnings, 2 with failures."""
    return max(0, *(int(verdict.severity) for verdict in verdicts), 0)
