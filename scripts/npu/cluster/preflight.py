"""The fifteen checks in their order. A check is evidence and needs in, findings out; none raises for what it finds."""

from __future__ import annotations

from collections.abc import Callable

from cluster import checks_host, checks_network, checks_npu
from cluster.evidence import Evidence
from cluster.needs import Needs
from cluster.verdicts import Finding, Verdict, fail, not_applicable

Check = Callable[[Evidence, Needs], list[Finding]]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("chips", checks_npu.check_chips),
    ("versions", checks_npu.check_versions),
    ("libraries", checks_npu.check_libraries),
    ("packages", checks_npu.check_packages),
    ("device network", checks_network.check_device_network),
    ("host interface", checks_network.check_interface),
    ("ports", checks_network.check_ports),
    ("prefill = decode", checks_host.check_geometry),
    ("limits", checks_host.check_limits),
    ("visible devices", checks_npu.check_visible_devices),
    ("timeouts", checks_network.check_timeouts),
    ("socket queues", checks_network.check_queues),
    ("rank table", checks_network.check_table),
    ("launch blocking", checks_host.check_blocking),
    ("combinations", checks_host.check_combinations),
)


NEEDS_ENVIRONMENT = frozenset({6, 10, 11, 14, 15})
"""Checks that say nothing when a recording lacks the runtime's variables."""


def run_checks(evidence: Evidence, needs: Needs) -> list[Verdict]:
    """All verdicts, in the order of their numbers. A text that cannot be read is a failure and no traceback."""
    environment = evidence.probe("environment")
    verdicts = []
    for number, (title, check) in enumerate(CHECKS, start=1):
        if number in NEEDS_ENVIRONMENT and not environment.is_there:
            findings = [not_applicable(f"not known: {environment.problem}")]
        else:
            try:
                findings = check(evidence, needs)
            except ValueError as error:
                findings = [fail(f"what was said cannot be read: {error}", "record it again, or report the text")]
        verdicts.append(Verdict(number, title, tuple(findings)))
    return verdicts
