"""Pinned host memory, in name only: which host storages count as pinned, so that copies from them may be asynchronous.

There is nothing to pin for an emulated device, but code for a real one pins its staging buffers, and whether a copy
makes the host wait depends on it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_pinned: dict[int, int] = {}
"""Data pointers of pinned storages, with the number of live owners."""


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.untyped_storage().data_ptr() in _pinned


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy of a host tensor; itself where that is pinned."""
    if is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    pointer = copy.untyped_storage().data_ptr()
    _pinned[pointer] = 1
    # The storage, not the tensor: a view of pinned memory is pinned.
    weakref.finalize(copy.untyped_storage(), _pinned.pop, pointer, None)
    return copy


def install() -> None:
    """Let `Tensor.pin_memory` and `Tensor.is_pinned` know; torch's own ask an allocator that this device has not."""

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return pin(self)

    def tensor_is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return is_pinned(self)

    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment, method-assign]
    torch.Tensor.is_pinned = tensor_is_pinned  # type: ignore[assignment, method-assign]
