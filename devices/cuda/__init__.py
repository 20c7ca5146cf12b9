"""CUDA devices. Not in this version: `open_device` says why a CUDA device cannot open, and what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from devices.base import KernelChoice


def open_device(name: str, kernels: KernelChoice = "auto") -> NoReturn:
    """Raises DeviceUnavailable, always: first what the machine lacks, else what this version lacks."""
    import torch

    from devices.registry import DeviceUnavailable

    if torch.version.cuda is None:
        raise DeviceUnavailable(f"torch {torch.__version__} has no CUDA")
    if not torch.cuda.is_available():
        raise DeviceUnavailable(f"torch {torch.__version__} is built for CUDA but finds no usable GPU or driver")
    raise DeviceUnavailable("this version of Rung has no CUDA kernels yet; use --device cpu")
