"""The variables of the Ascend runtime: what a deployment sets, and which values and combinations cannot work.

`npu_environment` decides what a replica gets; `check_environment` judges any environment, planned or found.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.verdicts import Finding, fail, warn

LAUNCH_BLOCKING = "ASCEND_LAUNCH_BLOCKING"
ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
INTERFACE_NAMES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
DEFAULT_HCCL_CONNECT_TIMEOUT_S = 120
CONNECT_TIMEOUT_RANGE_S = (120, 7200)
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")

REMOVED = (LAUNCH_BLOCKING, *PROXIES, "ASCEND_VISIBLE_DEVICES")
"""Variables that a replica must not inherit: blocking launches stop graphs, proxies catch what goes between hosts, and
the container runtime's list of devices is done with when the container runs."""

ALLOCATOR_OPTIONS = frozenset(
    {
        "expandable_segments",
        "max_split_size_mb",
        "garbage_collection_threshold",
        "base_addr_aligned_kb",
        "page_size",
        "segment_size_mb",
        "pin_memory_expandable_segments",
        "pinned_mem_register",
        "multi_stream_lazy_reclaim",
        "per_process_memory_fraction",
        "release_lock_on_npumalloc",
        "roundup_power2_divisions",
    }
)


@dataclass(frozen=True)
class Features:
    """What the engine will be asked to do, as far as it excludes environment settings."""

    uses_graphs: bool = True
    uses_sleep_mode: bool = False


def npu_environment(
    interface: str, address: str | None, connect_timeout_s: int, exec_timeout_s: int, buffer_mb: int
) -> dict[str, str]:
    """The collective library's variables for one node.

    Args:
        interface: the network interface between hosts; the same name for HCCL, Gloo and tensor pipes.
        address: this host's address on it, or None where the platform fills it in.
        connect_timeout_s, exec_timeout_s: HCCL's, in seconds.
        buffer_mb: HCCL's buffer per communicator and direction, in MB.
    """
    values = dict.fromkeys(INTERFACE_NAMES, interface)
    if address is not None:
        values["HCCL_IF_IP"] = address
    return values | {
        "HCCL_CONNECT_TIMEOUT": str(connect_timeout_s),
        "HCCL_EXEC_TIMEOUT": str(exec_timeout_s),
        "HCCL_BUFFSIZE": str(buffer_mb),
        "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
        "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    }


def check_launch_blocking(environment: Mapping[str, str]) -> list[Finding]:
    """ASCEND_LAUNCH_BLOCKING must be unset: any value but 0 makes every launch wait and refuses graphs."""
    value = environment.get(LAUNCH_BLOCKING)
    if value is None:
        return []
    if value == "0":
        return [warn(f"{LAUNCH_BLOCKING}=0 is set", f"unset {LAUNCH_BLOCKING}")]
    return [fail(f"{LAUNCH_BLOCKING}={value} makes every launch wait and refuses graphs", f"unset {LAUNCH_BLOCKING}")]


def check_environment(environment: Mapping[str, str], features: Features = Features()) -> list[Finding]:
    """Values and combinations that cannot work; empty when there is none."""
    return [
        *_check_allocator(environment.get(ALLOCATOR), features),
        *_check_task_queue(environment.get("TASK_QUEUE_ENABLE")),
        *check_interface_names(environment),
    ]


def check_interface_names(environment: Mapping[str, str]) -> list[Finding]:
    """HCCL, Gloo and tensor pipes must name one interface, and it is not the loopback."""
    named = {name: environment[name] for name in INTERFACE_NAMES if environment.get(name)}
    wanted = "name the interface that owns the host's address in all three"
    findings = []
    if len(set(named.values())) > 1:
        shown = ", ".join(f"{name}={value}" for name, value in named.items())
        findings.append(fail(f"the interface names differ: {shown}", wanted))
    if named and (missing := [name for name in INTERFACE_NAMES if name not in named]):
        findings.append(warn(f"{' and '.join(missing)} not set, {' and '.join(named)} set", wanted))
    if any(value.lstrip("=^") == "lo" for value in named.values()):
        findings.append(fail("the interface is lo, over which no other host answers", wanted))
    return findings


def parse_allocator(text: str) -> dict[str, str]:
    """`a:1,b:2` as a mapping; an entry without a colon has the value ""."""
    entries = (entry.partition(":") for entry in text.split(",") if entry.strip())
    return {key.strip(): value.strip() for key, _, value in entries}


def _check_allocator(text: str | None, features: Features) -> list[Finding]:
    if text is None:
        return []
    options, findings = parse_allocator(text), []
    for name in options.keys() - ALLOCATOR_OPTIONS:
        near = difflib.get_close_matches(name, ALLOCATOR_OPTIONS, 1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        findings.append(fail(f"{ALLOCATOR} has an unknown option {name!r}", hint))
    expandable = _is_true(options.get("expandable_segments"))
    if expandable and _number(options.get("max_split_size_mb")) > 20:
        findings.append(_excluded("expandable_segments", "max_split_size_mb above 20"))
    if expandable and "garbage_collection_threshold" in options:
        findings.append(_excluded("expandable_segments", "garbage_collection_threshold"))
    if expandable and features.uses_sleep_mode:
        findings.append(_excluded("expandable_segments", "sleep mode (releasing memory while idle)"))
    if _is_true(options.get("pin_memory_expandable_segments")) and features.uses_graphs:
        findings.append(_excluded("pin_memory_expandable_segments", "graphs"))
    if not 0 <= _number(options.get("base_addr_aligned_kb")) <= 16:
        findings.append(fail("base_addr_aligned_kb is not in 0 to 16", f"give {ALLOCATOR} a value from 0 to 16"))
    return findings


def _excluded(one: str, other: str) -> Finding:
    return fail(f"{ALLOCATOR}: {one} excludes {other}", "give up one of the two")


def _check_task_queue(value: str | None) -> list[Finding]:
    if value in (None, "0", "1", "2"):
        return []
    return [fail(f"TASK_QUEUE_ENABLE={value} is not 0, 1 or 2", "set TASK_QUEUE_ENABLE=1 or unset it")]


def _is_true(value: str | None) -> bool:
    return (value or "").lower() in {"true", "1"}


def _number(value: str | None) -> float:
    try:
        return float(value or 0)
    except ValueError:
        return -1.0
