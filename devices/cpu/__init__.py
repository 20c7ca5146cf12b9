"""The CPU device: the default that runs anywhere. `device.py` opens it, `attention.py` computes paged attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devices.cpu.device import CpuDevice


def open_device(name: str) -> CpuDevice:
    from devices.cpu.device import CpuDevice

    return CpuDevice()
