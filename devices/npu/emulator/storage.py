"""One memory, two faces: a host tensor and the `npu` tensor that aliases it.

torch lets Python own a device through its PrivateUse1 key, but gives it no memory. DLPack does: a capsule made from a
tensor says where its memory lies and who frees it. Changing the device written in the capsule before torch reads it
back gives a tensor over the same bytes, with the same shape, strides and owner, on the other device.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_CPU, _EXTENSION = 1, 12
"""Device types of DLPack (dlpack.h): kDLCPU, kDLExtDev; the latter is torch's PrivateUse1."""

_DEVICE_OFFSET = 8
"""Bytes from the start of a DLManagedTensor to its device: behind the data pointer, as two int32 (type, index)."""

_capsule_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_device_field = ctypes.c_uint64.from_address
_to_dlpack: Any = torch._C._to_dlpack
_from_dlpack: Any = torch._C._from_dlpack


def _alias(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """The same memory with `device` (low word: DLPack type, high word: index) written into the capsule."""
    capsule = _to_dlpack(tensor)
    _device_field(_capsule_pointer(capsule, b"dltensor") + _DEVICE_OFFSET).value = device
    aliased: torch.Tensor = _from_dlpack(capsule)
    return aliased


def on_npu(host: torch.Tensor, index: int = 0) -> torch.Tensor:
    """The `npu:index` face of a host tensor's memory."""
    return _alias(host, _EXTENSION | index << 32)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The host face of an npu tensor's memory."""
    return _alias(tensor, _CPU)


def is_npu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"
