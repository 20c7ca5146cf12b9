"""Brings all of a step's arrays to the GPU in one copy, which the host does not wait for.

    host, page-locked   | token ids | page tables | plan | draws | ...      `stage`: written by numpy, one after another
    GPU                 | token ids | page tables | plan | draws | ...      `send`: one copy; each array is a view of it

The views exist as soon as an array is staged, so whoever needs one can be told before anything is copied. A host buffer
may be written again once its copy is done: there are two, because a step is planned while the one before it runs. The
GPU's side is a fresh tensor each time, so a view keeps its values for as long as somebody holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from devices.cuda.runtime import Runtime

NUM_BUFFERS = 2
ALIGNMENT = 16
"""Arrays start at multiples of so many bytes, which kernels read at once."""

CAPACITY = 1 << 19
"""Bytes that a buffer has at first: a step of 8192 new tokens with the page tables of 64 rows of 32k."""

_DTYPES = {
    np.dtype(name): getattr(torch, name) for name in ("int8", "int32", "int64", "float32", "float64")
}  # fmt: skip


@dataclass(slots=True)
class _HostBuffer:
    elements: torch.Tensor
    wait: Callable[[], None]


class Uploader:
    """One for a device.

    Attributes:
        num_copies: from the host to the GPU, since it was made.
    """

    def __init__(self, runtime: Runtime, capacity: int = CAPACITY) -> None:
        self.num_copies = 0
        self._runtime = runtime
        self._capacity = capacity
        self._buffers = [_HostBuffer(runtime.host_buffer(0), _no_wait) for _ in range(NUM_BUFFERS)]
        self._next = 0
        self._used = 0
        self._host: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._on_device = torch.empty(0, dtype=torch.uint8, device=runtime.torch_device)
        self._afterwards: list[Callable[[], object]] = []

    def stage(self, array: npt.NDArray[Any], into: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor on the GPU that has the array's values for what is launched after the next `send`.

        Args:
            array: of int8, int32, int64, float32 or float64; it may change as soon as this returns.
            into: a tensor on the GPU of the array's shape that takes the values over, and is returned.
        """
        size = array.nbytes
        if self._used + size > len(self._host):
            self._open(size)
        start, end = self._used, self._used + size
        np.copyto(self._host[start:end].view(array.dtype).reshape(array.shape), array)
        staged = self._on_device[start:end].view(_DTYPES[array.dtype])
        if array.ndim != 1:
            staged = staged.view(array.shape)
        self._used = end + -end % ALIGNMENT
        if into is None:
            return staged
        self.afterwards(lambda: into.copy_(staged))
        return into

    def afterwards(self, act: Callable[[], object]) -> None:
        """Call `act` at the end of the next `send`: a launch that reads what was staged."""
        self._afterwards.append(act)

    def send(self) -> None:
        """Copy what was staged, behind what was launched before; nothing when nothing was."""
        if self._used:
            buffer = self._buffers[self._next - 1]
            used = min(self._used, len(self._host))  # the last array needs no padding behind it
            self._on_device[:used].copy_(buffer.elements.view(torch.uint8)[:used], non_blocking=True)
            buffer.wait = self._runtime.mark()
            self.num_copies += 1
            self._used, self._host = 0, self._host[:0]
        while self._afterwards:
            self._afterwards.pop(0)()

    def _open(self, size: int) -> None:
        """Take the next host buffer. Where this one is too small for a step the step takes two copies, and the buffers
        grow for those to come."""
        if self._used:
            self._capacity = 2 * max(self._capacity, size)
            self.send()
        self._capacity = max(self._capacity, 2 * size)
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        buffer.wait()
        if buffer.elements.nbytes < self._capacity:
            buffer.elements = self._runtime.host_buffer(-(-self._capacity // 4))
        self._host = buffer.elements.numpy().view(np.uint8)
        self._on_device = torch.empty(len(self._host), dtype=torch.uint8, device=self._runtime.torch_device)


def _no_wait() -> None: ...
