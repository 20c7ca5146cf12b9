"""Ascend NPUs. Not in this version: `open_device` says why an NPU cannot open, and what to use instead.

`torch_npu` is looked for, never imported: without CANN its import would break `import torch`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from devices.base import KernelChoice


def open_device(name: str, kernels: KernelChoice = "auto") -> NoReturn:
    """Raises DeviceUnavailable, always: first what the machine lacks, else what this version lacks."""
    from devices.registry import DeviceUnavailable

    if name == "npu-sim":
        raise DeviceUnavailable("this version of Rung has no NPU emulator yet; use --device cpu")
    if find_spec("torch_npu") is None:
        raise DeviceUnavailable("torch_npu is not installed (pip install 'rung[npu]' on a machine with CANN)")
    raise DeviceUnavailable("this version of Rung has no NPU kernels yet; use --device cpu")
