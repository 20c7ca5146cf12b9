"""The list of visible devices: parsed strictly, never silently shrunk, sorted or given another meaning (CASES B070).

Entries are physical ids as the driver counts them; inside the process they are 0, 1, 2, ... in the list's order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cluster.errors import ClusterError

VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"


def parse_visible_devices(text: str, present: Collection[int] | None = None) -> tuple[int, ...]:
    """The physical ids in a list such as `0,1,3`.

    Args:
        text: the variable's value; set but empty is an error, because the runtime then sees no device.
        present: physical ids that exist; None when it is not known.
    Raises:
        ClusterError: it is empty, has something that is no number, names a device twice, in descending order or one
            that is not there.
    """
    if not text.strip():
        raise ClusterError(
            f"{VARIABLE} is set but empty, so no device is visible; unset it or list devices: {VARIABLE}=0,1"
        )
    entries = [entry.strip() for entry in text.split(",")]
    if bad := [entry for entry in entries if not entry.isascii() or not entry.isdigit()]:
        raise ClusterError(
            f"{VARIABLE}={text} has {bad[0]!r}, which is no device number; write numbers with commas: 0,1"
        )
    devices = tuple(int(entry) for entry in entries)
    if len(set(devices)) != len(devices):
        raise ClusterError(f"{VARIABLE}={text} names a device twice; name each once")
    if list(devices) != sorted(devices):
        ordered = format_visible_devices(devices)
        raise ClusterError(
            f"{VARIABLE}={text} is not ascending, and the runtime stops at the first step back; write {ordered}"
        )
    if present is not None and (missing := [device for device in devices if device not in present]):
        have = format_visible_devices(tuple(present)) if present else "none"
        raise ClusterError(
            f"{VARIABLE}={text} names device {missing[0]}, which is not there (present: {have}); remove it"
        )
    return devices


def format_visible_devices(devices: Sequence[int]) -> str:
    """The variable's value, in numeric order (2 before 10)."""
    return ",".join(str(device) for device in sorted(devices))


def logical_id(devices: Sequence[int], physical: int) -> int:
    """The id inside the process of a physical device.

    Raises:
        ClusterError: the device is not in the list.
    """
    if physical not in devices:
        raise ClusterError(f"device {physical} is not visible; {VARIABLE}={format_visible_devices(devices)}")
    return list(devices).index(physical)
