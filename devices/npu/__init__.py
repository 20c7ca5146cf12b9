"""Ascend NPUs, and their emulation ("npu-sim") where there is none. Importing this package imports neither torch nor
torch_npu.

`probe.py` finds the NPU or says what is missing, `device.py` opens it, `attention.py`, `operators.py` and `graphs.py`
run on it, and every call of a torch_npu operator goes through a checked builder in `arguments/`. `emulator/` runs all
of this on the CPU, with the operators' real schemas and stricter than hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devices.base import Device, KernelChoice


def open_device(name: str, kernels: KernelChoice = "auto") -> Device:
    """Raises DeviceUnavailable; `kernels` "torch" runs norms, gates and turns in plain torch."""
    from devices.npu.probe import find_emulated, find_npu
    from devices.registry import NOT_DETERMINISTIC, DeviceUnavailable

    if kernels == "deterministic":
        raise DeviceUnavailable(NOT_DETERMINISTIC)

    found = find_emulated() if name == "npu-sim" else find_npu()
    from devices.npu.device import NpuDevice

    return NpuDevice(name, found, kernels)
