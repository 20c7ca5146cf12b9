"""The CPU device: the default that runs anywhere. `device.py` opens it.

It computes in C++ that is compiled for this machine (`kernels/`), or in plain torch (`devices/torch_forms`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devices.base import KernelChoice
    from devices.cpu.device import CpuDevice


def open_device(name: str, kernels: KernelChoice = "auto") -> CpuDevice:
    from devices.cpu.device import CpuDevice

    return CpuDevice(kernels)
