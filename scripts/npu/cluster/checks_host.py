"""Checks 8, 9, 14 and 15: both sides of a transfer agree, limits of the host, settings that exclude each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.checks_npu import read_environment
from cluster.environment import check_environment, check_launch_blocking
from cluster.evidence import Evidence
from cluster.needs import Needs
from cluster.verdicts import Finding, fail, not_applicable, ok, warn

GEOMETRY = ("model_hash", "page_size", "kv_dtype", "c128_page_size", "max_context")
"""What prefill and decode must have in common."""

SLOW_ABOVE = {"/proc/sys/kernel/numa_balancing": 0, "/proc/sys/vm/swappiness": 10}
GOVERNOR = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"


def check_geometry(_: Evidence, needs: Needs) -> list[Finding]:
    """8: prefill and decode agree on what a page of KV is."""
    if needs.prefill_geometry is None or needs.decode_geometry is None:
        return [not_applicable("prefill and decode are one server here (--prefill-geometry, --decode-geometry)")]
    sides = []
    for side, path in (("prefill", needs.prefill_geometry), ("decode", needs.decode_geometry)):
        geometry = _read_geometry(path)
        if isinstance(geometry, str):
            return [fail(f"{side}: {geometry}", f"give a JSON object with {', '.join(GEOMETRY)}")]
        sides.append(geometry)
    prefill, decode = sides
    findings = [
        fail(
            f"{name} is {prefill.get(name)!r} on prefill and {decode.get(name)!r} on decode",
            f"start both with one {name}",
        )
        for name in GEOMETRY
        if prefill.get(name) != decode.get(name)
    ]
    return findings or [ok("prefill and decode agree")]


def _read_geometry(path: Path) -> dict[str, Any] | str:
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        return f"{path} cannot be read: {error}"
    if not isinstance(found, dict):
        return f"{path} is no JSON object"
    missing = [name for name in GEOMETRY if name not in found and name != "c128_page_size"]
    return f"{path} lacks {', '.join(missing)}" if missing else found


def check_limits(evidence: Evidence, needs: Needs) -> list[Finding]:
    """9: shared memory, open files, locked memory, huge pages, and what slows the host."""
    said = evidence.probe("limits")
    if not said.is_there:
        return [not_applicable(f"not known: {said.problem}")]
    have = {name: int(value) for name, value in (line.split() for line in said.text.splitlines())}
    findings = []
    if (shm := have.get("shm_mb", 0)) < needs.min_shm_mb:
        findings.append(
            fail(
                f"/dev/shm has {shm} MB, {needs.min_shm_mb} are needed",
                f"--shm-size {needs.min_shm_mb}m, or a memory emptyDir",
            )
        )
    if have.get("nofile", 0) < needs.min_nofile:
        findings.append(warn(f"{have.get('nofile', 0)} open files are allowed", f"ulimit -n {needs.min_nofile}"))
    if have.get("memlock_kb", -1) != -1:
        findings.append(
            warn(f"{have['memlock_kb']} kB may be locked, which registering buffers needs", "ulimit -l unlimited")
        )
    findings += _check_tuning(evidence)
    if needs.uses_hugepages:
        pages = evidence.file("/proc/sys/vm/nr_hugepages")
        if pages.text.strip() in ("", "0"):
            findings.append(fail("no huge pages are reserved", "sysctl -w vm.nr_hugepages=N"))
    return findings or [ok(f"/dev/shm {shm} MB, {have['nofile']} open files, locked memory without limit")]


def _check_tuning(evidence: Evidence) -> list[Finding]:
    """Settings of the kernel that slow the host's side of a step; one that cannot be read says nothing."""
    findings = []
    for path, most in SLOW_ABOVE.items():
        value = evidence.file(path).text.strip()
        if value.isdigit() and int(value) > most:
            name = path.removeprefix("/proc/sys/").replace("/", ".")
            findings.append(warn(f"{name} is {value}, which slows the host", f"sysctl -w {name}={most}"))
    governor = evidence.file(GOVERNOR).text.strip()
    if governor and governor != "performance":
        findings.append(warn(f"the CPU governor is {governor}", "cpupower frequency-set -g performance"))
    return findings


def check_blocking(evidence: Evidence, _: Needs) -> list[Finding]:
    """14: ASCEND_LAUNCH_BLOCKING is unset."""
    return check_launch_blocking(read_environment(evidence)) or [ok("ASCEND_LAUNCH_BLOCKING is not set")]


def check_combinations(evidence: Evidence, needs: Needs) -> list[Finding]:
    """15: no two settings exclude each other."""
    environment = {name: value for name, value in read_environment(evidence).items() if "SOCKET_IFNAME" not in name}
    return check_environment(environment, needs.features) or [ok("no setting excludes another")]
