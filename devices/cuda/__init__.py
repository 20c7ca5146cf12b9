"""CUDA devices, from Ampere on: Triton kernels, or the plain torch forms with `--kernels torch`. `device.py` opens one.

`probe.py` says why one cannot open. `kernels/` has the kernels and the functions that launch them; nothing else imports
Triton. `runtime.py` is all that touches CUDA itself, so tests run the rest on a CPU, with interpreted kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devices.base import KernelChoice
    from devices.cuda.device import CudaDevice


def open_device(name: str, kernels: KernelChoice = "auto") -> CudaDevice:
    """Raises DeviceUnavailable with what this machine lacks, and the way out."""
    from devices.cuda.probe import refusal, this_machine
    from devices.registry import NOT_DETERMINISTIC, DeviceUnavailable

    if kernels == "deterministic":
        raise DeviceUnavailable(NOT_DETERMINISTIC)
    reason = refusal(this_machine(), kernels)
    if reason is not None:
        raise DeviceUnavailable(reason)
    from devices.cuda.device import CudaDevice
    from devices.cuda.runtime import CudaRuntime

    return CudaDevice(CudaRuntime(), kernels)
