"""Checks 1 to 4 and 10: chips, versions, libraries, Python packages, visible devices."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable

from cluster.errors import ClusterError
from cluster.evidence import Evidence, Text
from cluster.needs import Needs
from cluster.npu_smi import NpuSmi, parse_npu_smi
from cluster.verdicts import Finding, fail, not_applicable, ok, warn
from cluster.versions import (
    CANN_FILES,
    DRIVER_FILE,
    documented_cann,
    minor_of,
    parse_cann_version,
    parse_driver_version,
    version_key,
)
from cluster.visible_devices import VARIABLE, parse_visible_devices

INSTALL_DRIVER = "install the NPU driver, or mount /usr/local/bin/npu-smi and the driver into the container"


def check_chips(evidence: Evidence, needs: Needs) -> list[Finding]:
    """1: every chip healthy, enough of them, their memory free, and nobody else on those that are to be used."""
    table = read_npu_smi(evidence)
    if isinstance(table, Finding):
        return [table]
    findings = []
    findings += [
        fail(f"device {chip.device} ({chip.name}) is {chip.health}", "npu-smi info -t health; repair or leave it out")
        for chip in table.chips
        if chip.health != "OK"
    ]
    wanted = wanted_devices(needs, table, read_environment(evidence))
    present = {chip.device: chip for chip in table.chips}
    if missing := [device for device in wanted if device not in present]:
        findings.append(
            fail(f"device {missing[0]} is needed and not there", "mount it into the container, or plan other devices")
        )
    if len(wanted) < needs.num_devices:
        findings.append(
            fail(
                f"{needs.num_devices} devices are needed, {len(wanted)} are there",
                "use fewer devices a replica, or another host",
            )
        )
    for device in wanted:
        if device in present and present[device].free_mb < needs.min_free_mb:
            chip = present[device]
            findings.append(
                fail(
                    f"device {device} has {chip.free_mb} of {chip.total_mb} MB free, {needs.min_free_mb} are needed",
                    "end what holds the memory",
                )
            )
    for process in table.processes:
        if process.device in wanted:
            name = f" ({process.name})" if process.name else ""
            findings.append(
                fail(
                    f"process {process.pid}{name} holds {process.memory_mb} MB of device {process.device}",
                    "end it, or plan other devices",
                )
            )
    if not findings:
        findings.append(ok(f"{len(table.chips)} chips are healthy, {len(wanted)} wanted ones are free"))
    return findings


def read_npu_smi(evidence: Evidence) -> NpuSmi | Finding:
    """The table, or the finding that says why there is none."""
    said = evidence.command("npu-smi", "info")
    if not said.is_there:
        return fail(str(said.problem), INSTALL_DRIVER)
    try:
        return parse_npu_smi(said.text)
    except ClusterError as error:
        return fail(str(error), "reboot after a driver update, check who holds the devices and the user's groups")


def read_environment(evidence: Evidence) -> dict[str, str]:
    """The runtime's variables; their names are case sensitive."""
    lines = (line.partition("=") for line in evidence.probe("environment").text.splitlines() if "=" in line)
    return {name: value for name, _, value in lines}


def wanted_devices(needs: Needs, table: NpuSmi, environment: dict[str, str]) -> tuple[int, ...]:
    """The physical ids that will be used: those planned, else those visible, else the first ones."""
    if needs.devices:
        return needs.devices
    present = tuple(sorted(chip.device for chip in table.chips))
    if VARIABLE in environment:
        with contextlib.suppress(ClusterError):  # a wrong list is check 10's to report
            return parse_visible_devices(environment[VARIABLE])[: needs.num_devices]
    return present[: needs.num_devices]


def check_versions(evidence: Evidence, needs: Needs) -> list[Finding]:
    """2: the driver is new enough, and CANN and torch_npu are a documented pair."""
    findings = []
    driver = _version_in(evidence, (DRIVER_FILE,), parse_driver_version)
    if driver is None:
        findings.append(
            fail(f"no driver version: {evidence.file(DRIVER_FILE).problem or 'the file names none'}", INSTALL_DRIVER)
        )
    elif needs.min_driver and version_key(driver) < version_key(needs.min_driver):
        findings.append(
            fail(f"driver {driver} is older than {needs.min_driver}", f"install driver {needs.min_driver} or newer")
        )
    else:
        findings.append(ok(f"driver {driver}"))
    arch = platform.machine()
    arches = dict.fromkeys((arch, "aarch64", "x86_64"))
    paths = tuple(dict.fromkeys(path.format(arch=one) for path in CANN_FILES for one in arches))
    cann = _version_in(evidence, paths, parse_cann_version)
    torch_npu = read_packages(evidence).get("torch_npu")
    if cann is None:
        findings.append(
            fail("CANN is not installed under /usr/local/Ascend", "install the CANN toolkit and source its set_env.sh")
        )
    elif torch_npu is None:
        findings.append(ok(f"CANN {cann}"))
    elif cann in documented_cann(torch_npu):
        findings.append(ok(f"CANN {cann} and torch_npu {torch_npu} are a documented pair"))
    else:
        known = documented_cann(torch_npu)
        change = f"documented: CANN {' or '.join(known)}" if known else "look the pair up in the vendor's table"
        findings.append(
            warn(f"CANN {cann} and torch_npu {torch_npu} are no pair in the table this script knows", change)
        )
    return findings


def _version_in(evidence: Evidence, paths: tuple[str, ...], parse: Callable[[str], str | None]) -> str | None:
    for path in paths:
        said = evidence.file(path)
        if said.is_there and (version := parse(said.text)):
            return version
    return None


def check_libraries(evidence: Evidence, _needs: Needs) -> list[Finding]:
    """3: the runtime's libraries load."""
    said = evidence.probe("libraries")
    if not said.is_there:
        return [_unknown(said)]
    findings = []
    for line in said.text.splitlines():
        name, _, reason = line.partition(" ")
        if reason == "ok":
            findings.append(ok(f"{name} loads"))
        elif name == "libatb.so":
            findings.append(
                warn(f"{name}: {reason}", "source the nnal/atb set_env.sh; without it ATB operators are missing")
            )
        else:
            findings.append(fail(f"{name}: {reason}", "source the CANN toolkit's set_env.sh before the start"))
    return findings or [fail("the probe of the libraries says nothing", "record it again")]


def read_packages(evidence: Evidence) -> dict[str, str]:
    """Versions of the installed packages; those that are missing are left out."""
    pairs = (line.split("==", 1) for line in evidence.probe("packages").text.splitlines() if "==" in line)
    return {name: version.strip() for name, version in pairs}


def check_packages(evidence: Evidence, _needs: Needs) -> list[Finding]:
    """4: Python, torch and torch_npu fit, and `triton` is triton-ascend."""
    said = evidence.probe("packages")
    if not said.is_there:
        return [_unknown(said)]
    have, findings = read_packages(evidence), []
    python, torch, torch_npu = have.get("python", "0"), have.get("torch"), have.get("torch_npu")
    if version_key(python) < version_key("3.11"):
        findings.append(fail(f"Python {python}", "Rung needs Python 3.11 or newer"))
    if torch is None:
        findings.append(fail("torch is not installed", "pip install rung"))
    if torch_npu is None:
        findings.append(fail("torch_npu is not installed", "install CANN first, then: pip install 'rung[npu]'"))
    elif torch is not None and minor_of(torch) != minor_of(torch_npu):
        findings.append(
            fail(
                f"torch {torch} and torch_npu {torch_npu} differ in their minor version",
                f"install torch {minor_of(torch_npu)}.*",
            )
        )
    if "triton" in have and "triton-ascend" in have:
        change = "pip uninstall triton triton-ascend, then pip install triton-ascend"
        findings.append(fail("triton and triton-ascend are both installed and share one import name", change))
    elif "triton" in have:
        findings.append(
            fail("triton is upstream's, which knows no NPU", "pip uninstall triton; pip install triton-ascend")
        )
    elif "triton-ascend" not in have:
        findings.append(
            warn("triton-ascend is not installed; the torch forms of its kernels are used", "pip install triton-ascend")
        )
    return findings or [
        ok(f"Python {python}, torch {torch}, torch_npu {torch_npu}, triton-ascend {have['triton-ascend']}")
    ]


def check_visible_devices(evidence: Evidence, needs: Needs) -> list[Finding]:
    """10: the list of visible devices is not empty, unique, ascending and inside what is there (CASES B070)."""
    environment = read_environment(evidence)
    if VARIABLE not in environment:
        return [ok(f"{VARIABLE} is not set: all devices are visible")]
    table = read_npu_smi(evidence)
    present = None if isinstance(table, Finding) else {chip.device for chip in table.chips}
    try:
        devices = parse_visible_devices(environment[VARIABLE], present)
    except ClusterError as error:
        what, _, change = str(error).rpartition("; ")
        return [fail(what or str(error), change)]
    if len(devices) < needs.num_devices:
        what = f"{VARIABLE}={environment[VARIABLE]} shows {len(devices)} devices, {needs.num_devices} are needed"
        return [fail(what, "list more devices, or use fewer a replica")]
    known = "" if present is not None else " (npu-smi does not answer, so whether they exist is not known)"
    return [ok(f"{VARIABLE}={environment[VARIABLE]}{known}")]


def _unknown(said: Text) -> Finding:
    return not_applicable(f"not known: {said.problem}")
